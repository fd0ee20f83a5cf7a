"""A thread with an event loop and an HTTP client, which ends at once, whatever requests wait for.

It is a daemon, for which no exit of the interpreter waits.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import socket
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from vapo_megatron.errors import ConfigError

T = TypeVar("T")

CLOSING_SECONDS = 5.0
"""How long closing waits for the thread, which ends at once unless the machine is overloaded."""


class RequestLoop:
    """The thread, its loop, client and slots, until it is closed.

    Args:
        concurrency: slots, of which each request should take one.

    Raises:
        ConfigError: the environment has a proxy or certificates that cannot be used.
    """

    def __init__(self, concurrency: int) -> None:
        self.client = _client(concurrency)
        self.slots = asyncio.Semaphore(concurrency)
        self._stop = asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._loop.getaddrinfo = _looked_up  # type: ignore[method-assign]
        self._thread = threading.Thread(target=self._run, name="judge", daemon=True)
        self._thread.start()

    def begin(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Run a coroutine in the loop; another thread may wait for it."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def close(self) -> None:
        """Give everything up; no coroutine may begin any more."""
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(CLOSING_SECONDS)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._until_stopped())

    async def _until_stopped(self) -> None:
        async with self.client:
            await self._stop.wait()
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def _client(concurrency: int) -> Any:
    import httpx

    for name in ("httpx", "httpcore"):
        # At a lower level they log headers, in which a server may echo the key.
        logging.getLogger(name).setLevel(logging.WARNING)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=concurrency)
    try:
        return httpx.AsyncClient(timeout=None, limits=limits)
    except Exception as error:  # Not shown: a proxy's address may have a password.
        raise ConfigError(
            f"the judge's HTTP client cannot start ({type(error).__name__}); correct the "
            "environment variables HTTP_PROXY, HTTPS_PROXY, ALL_PROXY and SSL_CERT_FILE"
        ) from None


async def _looked_up(*args: Any, **options: Any) -> Any:
    """Resolve a name in a daemon thread: asyncio's own are waited for when a process exits."""
    found: concurrent.futures.Future[Any] = concurrent.futures.Future()
    found.set_running_or_notify_cancel()

    def look_up() -> None:
        try:
            found.set_result(socket.getaddrinfo(*args, **options))
        except Exception as error:
            found.set_exception(error)

    threading.Thread(target=look_up, name="judge-dns", daemon=True).start()
    return await asyncio.wrap_future(found)
