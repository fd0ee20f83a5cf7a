"""The processes of sessions.py as the one that asks sees them: a template, and those it forks."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import resource
import socket
import subprocess
import time
from collections import deque
from collections.abc import Hashable
from typing import Any, NamedTuple

from vapo_megatron.sandbox.channel import Channel, Reply
from vapo_megatron.sandbox.process import Process, command, kill_group
from vapo_megatron.sandbox.session_template import MESSAGE_BYTES
from vapo_megatron.sandbox.watching import Watch

MAX_REPLY_BYTES = 1 << 26
MAX_FORKS = 16
"""That the template is asked for at a time; the kernel limits how many files are on their way."""
MAX_FILES = 1 << 16
END_SECONDS = 10.0
"""How long a template may take to end its sessions."""


class Answered(NamedTuple):
    """A reply to a request."""

    key: Hashable
    reply: Reply
    """After DIED, OVER_TIME or OUT_OF_MEMORY the session has ended."""
    seconds: float
    """From when it was sent until the reply was seen here."""


@dataclasses.dataclass(eq=False)
class Session:
    """One that may have no process yet."""

    key: Hashable
    request: bytes = b""
    """Empty: all have been answered."""
    channel: Channel | None = None
    """None: no process has been asked for."""
    its_files: tuple[int, ...] = ()
    """The other ends of the channel, until the template has them."""
    process: int | None = None
    """None: the template has not said."""
    sent: float = math.inf
    limit: float = math.inf
    deadline: float = math.inf
    replies: bool = False
    """A part of the reply has come."""
    is_over: bool = False

    def connect(self) -> Channel:
        """Make the pipes to a process that there shall be."""
        asks, asked = os.pipe()
        answered, answers = os.pipe()
        self.its_files = asks, answers
        self.channel = Channel(asked, answered, MAX_REPLY_BYTES)
        return self.channel

    def begin(self, timeout_seconds: float) -> None:
        """Let the time of a request begin."""
        self.sent = time.monotonic()
        self.limit = timeout_seconds
        self.deadline = self.sent + timeout_seconds

    def answered(self) -> None:
        """Forget the request."""
        self.request = b""
        self.sent = self.limit = self.deadline = math.inf
        self.replies = False

    def leave(self, watch: Watch[Any]) -> None:
        """Let the pipes be watched no more."""
        if self.channel is not None:
            watch.forget(self.channel.incoming, self.channel.outgoing)

    def disconnect(self, watch: Watch[Any]) -> None:
        """Close the pipes."""
        self.leave(watch)
        if self.channel is not None:
            os.close(self.channel.outgoing)
            os.close(self.channel.incoming)
            self.channel = None
        self.give_away()

    def give_away(self) -> None:
        """Close what the process has."""
        for file in self.its_files:
            os.close(file)
        self.its_files = ()


class Template(Process):
    """The process that forks sessions, and our end of its socket; see session_template.py."""

    def __init__(self, setup: bytes) -> None:
        _allow_many_files()
        self.socket, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its:
            args = [*command("session_template.py"), str(its.fileno())]
            super().__init__(args, setup, [its.fileno()])
        self.socket.setblocking(False)
        self.orders = deque[Session | int]()
        """Sessions to fork, and processes to end."""
        self._forking = deque[Session]()
        self.alive = set[int]()
        self.is_full = False
        """The socket takes no more just now."""

    def order(self) -> None:
        """Send what the socket takes."""
        self.is_full = False
        while self.orders:
            what = self.orders[0]
            order: dict[str, Any] = {"end": what}
            files: tuple[int, ...] = ()
            if isinstance(what, Session):
                if len(self._forking) >= MAX_FORKS:
                    return
                order, files = {"fork": True}, what.its_files
                if what.is_over:
                    self.orders.popleft()
                    continue
            try:
                socket.send_fds(self.socket, [json.dumps(order).encode()], files)
            except BlockingIOError:
                self.is_full = True
                return
            except ConnectionError:
                return  # It has died, as reading tells.
            self.orders.popleft()
            if isinstance(what, Session):
                self._forking.append(what)
                what.give_away()

    def forked(self) -> list[tuple[Session, dict[str, Any]]] | None:
        """Return what it says of sessions that it was to fork; None: it has died."""
        found: list[tuple[Session, dict[str, Any]]] = []
        while True:
            try:
                data = self.socket.recv(MESSAGE_BYTES)
            except BlockingIOError:
                return found
            except ConnectionError:
                return None
            if not data:
                return None
            found.append((self._forking.popleft(), json.loads(data)))

    def end(self, process: int) -> None:
        """Kill a session's process and what it has started."""
        kill_group(process)
        self.alive.discard(process)
        self.orders.append(process)
        self.order()

    def kill(self) -> None:
        """End it and its sessions."""
        for process in self.alive:
            kill_group(process)
        self.alive.clear()
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()
        if self.ready:
            # It also ends what has left a session's group.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(END_SECONDS)
        super().kill()


def kill_all(templates: list[Template], owner: int) -> None:
    """End all in a list, which becomes empty; owner: the process that has started them."""
    if os.getpid() == owner:  # A forked child must not kill its parent's sessions.
        for template in templates:
            template.kill()
    templates.clear()


def _allow_many_files() -> None:
    """Raise the limit that systems set by default: a session takes two files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
