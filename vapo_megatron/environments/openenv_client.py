"""The environment `openenv`: an episode on an OpenEnv server, over its WebSocket.

Written here, because the package `openenv` cannot stand beside vLLM: its client imports fastmcp,
which needs mcp below 2 where vLLM needs 2. Messages are JSON:

    {"type": "reset", "data": {"seed": 0, ...}}        {"type": "observation", "data":
    {"type": "step", "data": {the action's fields}}     {"observation": {...}, "reward": 0.0 or
    {"type": "close"}                                   null, "done": false}}, or {"type": "error",
                                                        "data": {"message": ..., "code": ...}}
"""

from __future__ import annotations

import contextlib
import json
import urllib.parse
from collections.abc import Mapping
from typing import Any

from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from vapo_megatron.environments.step import Step, seed_of

MAX_MESSAGE_BYTES = 100 << 20


class OpenEnv:
    """An environment; see step.py. Each episode has a connection, and so a session, of its own.

    Rewards are the server's, null is 0; so there is no verdict.

    Args:
        url: of the server: http://host:port, or https.
        action: the field of an action that is given the policy's text; the others are `fields`.
        observation: the field of an observation that is what the policy sees; None: all of it, as
            JSON, without the metadata.
        fields: further fields of every action.
        reset: what reset is given beside the seed.
        columns: of the row, which reset is given too; `prompt` and `answer` are two.
        connect_seconds: for making the connection; the run's own limit holds for each call.
    """

    def __init__(
        self,
        url: str,
        action: str = "message",
        observation: str | None = None,
        fields: Mapping[str, Any] | None = None,
        reset: Mapping[str, Any] | None = None,
        columns: list[str] | None = None,
        connect_seconds: float = 30.0,
    ) -> None:
        scheme, separator, place = url.partition("://")
        if not separator or scheme not in ("http", "https", "ws", "wss"):
            raise ValueError(f"url={url} must begin with http:// or https://")
        self._url = f"{scheme.replace('http', 'ws')}://{place.rstrip('/')}/ws"
        self._action, self._observation = action, observation
        self._fields, self._reset, self._columns = fields or {}, reset or {}, columns or []
        self._connect_seconds = connect_seconds
        self._connection: ClientConnection | None = None

    def reset(self, problem: Any, seed: int) -> str:
        """Begin -> the first observation, which follows the prompt.

        Raises:
            OSError: the server cannot be reached.
            RuntimeError: it refuses; the message says why.
        """
        row = {**problem.metadata, "prompt": problem.prompt, "answer": problem.answer}
        is_local = urllib.parse.urlsplit(self._url).hostname in ("localhost", "127.0.0.1", "::1")
        self._connection = connect(
            self._url, open_timeout=self._connect_seconds, max_size=MAX_MESSAGE_BYTES,
            proxy=None if is_local else True,
        )  # fmt: skip
        more = {name: row[name] for name in self._columns}
        return self._seen(
            self._ask("reset", {"seed": seed_of(problem, seed), **self._reset, **more})
        )

    def step(self, action: str) -> Step:
        """Act. Raises as reset does."""
        found = self._ask("step", {**self._fields, self._action: action})
        return Step(self._seen(found), found.get("reward") or 0.0, bool(found.get("done")))

    def close(self) -> None:
        """End the session."""
        if self._connection is not None:
            with contextlib.suppress(ConnectionClosed):
                self._connection.send(json.dumps({"type": "close"}))
            self._connection.close()

    def _ask(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        assert self._connection is not None, "reset comes first"
        # A server that is full says so and closes, perhaps before this is sent.
        with contextlib.suppress(ConnectionClosed):
            self._connection.send(json.dumps({"type": kind, "data": data}))
        reply = json.loads(self._connection.recv())
        if reply.get("type") == "error":
            error = reply.get("data", {})
            details = f": {error['errors']}"[:200] if "errors" in error else ""
            raise RuntimeError(
                f"the server refuses {kind}: {error.get('message')} ({error.get('code')}){details}"
            )
        return reply["data"]

    def _seen(self, data: Mapping[str, Any]) -> str:
        observation = data["observation"]
        if self._observation is None:
            shown = {name: value for name, value in observation.items() if name != "metadata"}
            return json.dumps(shown, ensure_ascii=False)
        if self._observation not in observation:
            raise RuntimeError(
                f"the server's observation has no field {self._observation}; it has "
                f"{', '.join(observation)}"
            )
        value = observation[self._observation]
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
