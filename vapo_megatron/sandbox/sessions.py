"""Processes that keep their state from one request to the next, each with a time limit.

Where pool.py's workers are alike, a session is a process of its own, which a template forks
(session_template.py): that takes milliseconds, however long the handler took to load. What one
does costs itself alone: it is killed, with all that it has started.

Nothing here blocks on a pipe, and no call goes through all sessions. There is no thread: requests
are sent and replies read while a method runs, so `wait` is to be called often.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Hashable, Iterator, Mapping
from typing import Any

from vapo_megatron.sandbox.channel import DIED, OUT_OF_MEMORY, OVER_TIME, Reply, message
from vapo_megatron.sandbox.process import MAX_FAILED_STARTS, HandlerRefused, setup_message
from vapo_megatron.sandbox.session_processes import Answered, Session, Template, kill_all
from vapo_megatron.sandbox.watching import READ, WRITE, Watch

MOVING_SECONDS = 0.02
"""How much longer than asked `wait` may stay while a long message moves through a pipe."""


class Sessions:
    """Processes of one handler, each of which answers one request after another.

    Args:
        handler: "module:function"; see worker.py. What it returns is copied into each session.
        options: the function's arguments.
        at_once: requests that are being answered at a time; further ones wait.
        timeout_seconds: limit for one request, counted from when a process receives it.
        memory_bytes: address space that a session may take beyond what its handler took to load.
    """

    def __init__(
        self,
        handler: str,
        options: Mapping[str, Any],
        at_once: int,
        timeout_seconds: float,
        memory_bytes: int,
    ) -> None:
        self._setup = setup_message(handler, options, timeout_seconds, memory_bytes)
        self._at_once, self._timeout_seconds = at_once, timeout_seconds
        self._templates: list[Template] = []
        """At most one."""
        self.about: dict[str, Any] | None = None
        """What the handler said of itself; None: it has not loaded yet."""
        self._failed_starts = 0
        self._lock = threading.RLock()
        self._owner = os.getpid()
        weakref.finalize(self, kill_all, self._templates, self._owner)
        self._clear()

    def _clear(self) -> None:
        self._watch = Watch[Session | Template]()
        self._sessions: dict[Hashable, Session] = {}
        self._queue = deque[Session]()
        self._busy = set[Session]()
        self._found: list[Answered] = []
        self._is_moving = False

    @property
    def process_ids(self) -> list[int]:
        """Ids of the template and of the sessions' processes."""
        return [id for t in self._templates for id in (t.process.pid, *t.alive)]

    def start(self) -> None:
        """Start the template; returns immediately, while it loads in the background."""
        with self._lock:
            if self._templates:
                return
            template = Template(self._setup)
            self._templates.append(template)
            on_setup = functools.partial(self._on_setup, template)
            self._watch.react(template.incoming, READ, on_setup)
            self._watch.react(template.outgoing, WRITE, on_setup)
            self._watch.note(template.deadline, template)

    def describe(self) -> dict[str, Any]:
        """Return what the handler says of itself, once it has loaded. Raises as `wait` does."""
        with self._locked():
            while self.about is None:
                self.start()
                self._look(math.inf)
            return self.about

    def open(self, key: Hashable) -> None:
        """Begin a session; its process starts with its first request."""
        with self._lock:
            assert key not in self._sessions, f"{key} is open"
            self._sessions[key] = Session(key)

    def ask(self, key: Hashable, request: Any) -> None:
        """Send a request, once there is room, to a session that has answered the one before."""
        with self._locked():
            session = self._sessions[key]
            assert not session.request, f"{key} has a request"
            session.request = message(request)
            if session.is_over:
                self._finish(session, DIED)
            else:
                self._queue.append(session)
                self._advance()

    def wait(self, seconds: float) -> list[Answered]:
        """Return the replies that have come; wait for the first so long at most.

        Returns at once if nothing has been asked for.

        Raises:
            HandlerRefused: the handler does not load.
            RuntimeError: the template cannot start.
        """
        with self._locked():
            until = time.monotonic() + seconds
            pause = 0.0 if self._found else seconds
            while self._busy or self._queue:
                self._is_moving = False
                self._look(pause)
                now = time.monotonic()
                if self._is_moving and now < until + MOVING_SECONDS:
                    pause = 0.001 if self._found else max(until - now, 0.001)
                elif self._found or now >= until:
                    break
                else:
                    pause = until - now
            found, self._found = self._found, []
            return found

    def end(self, key: Hashable) -> None:
        """Kill a session's process and those that it has started; nothing if there is none."""
        with self._locked():
            session = self._sessions.pop(key, None)
            if session is not None:
                self._end(session)
                self._advance()

    def close(self) -> None:
        """Kill every process; the next use starts new ones, without the sessions of before."""
        with self._lock:
            kill_all(self._templates, self._owner)
            for session in self._sessions.values():
                session.disconnect(self._watch)
            self._watch.close()
            self._clear()

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with self._lock:
            try:
                yield
            except BaseException:
                self.close()
                raise

    def _look(self, seconds: float) -> None:
        """Wait for a message, a deadline or room in a pipe, and do what there is to do."""
        self._watch.look(seconds)
        # After what has come: whoever waits may have had other things to do.
        for deadline, what in self._watch.overdue():
            if isinstance(what, Template):
                if what in self._templates and not what.ready:
                    self._failed_start(what, OVER_TIME)
            elif what in self._busy and what.deadline == deadline:
                self._finish(what, OVER_TIME)
        self._advance()

    def _advance(self) -> None:
        """Send the requests that there is room for."""
        while self._queue and len(self._busy) < self._at_once:
            self.start()
            session = self._queue.popleft()
            if session.is_over:
                continue
            self._busy.add(session)
            channel = session.channel
            if channel is None:
                channel = session.connect()
                self._templates[0].orders.append(session)
            session.sent = time.monotonic()
            channel.send(session.request)
            self._watch.react(channel.incoming, READ, functools.partial(self._on_reply, session))
            if channel.unsent:
                on_room = functools.partial(self._on_room, session)
                self._watch.react(channel.outgoing, WRITE, on_room)
            if session.process is not None:
                self._begin(session)
        for template in self._templates:
            if template.ready:  # Before, its pipe tells of its end, and why.
                template.order()
                events = READ | WRITE if template.is_full else READ
                self._watch.react(template.socket.fileno(), events, self._on_orders)

    def _begin(self, session: Session) -> None:
        session.begin(self._timeout_seconds)
        self._watch.note(session.deadline, session)

    def _on_setup(self, template: Template, mask: int) -> None:
        if template not in self._templates:
            return
        if mask & WRITE:
            template.write()
            if not template.unsent:
                self._watch.forget(template.outgoing)
            return
        reply = template.receive()
        if reply is None:
            return
        if "refused" in reply:
            raise HandlerRefused(reply["refused"])
        if "ready" not in reply:
            self._failed_start(template, reply)
            return
        self._watch.forget(template.incoming)
        template.ready = True
        self.about = reply["ready"]
        self._failed_starts = 0

    def _failed_start(self, template: Template, reply: Reply) -> None:
        self._remove(template)
        template.kill_after(reply)
        # None has a process: the next template has all to fork.
        self._queue.extendleft(self._busy)
        for session in self._busy:
            session.disconnect(self._watch)
        self._busy.clear()
        self._failed_starts += 1
        if self._failed_starts >= MAX_FAILED_STARTS:
            self._failed_starts = 0
            raise template.broken()

    def _remove(self, template: Template) -> None:
        self._watch.forget(template.incoming, template.outgoing, template.socket.fileno())
        self._templates.remove(template)

    def _on_orders(self, mask: int) -> None:
        """Note which sessions have a process."""
        for template in self._templates.copy():
            forked = template.forked()
            if forked is None:
                self._remove(template)
                template.kill()
                self._lose_all()
                return
            for session, reply in forked:
                self._note_process(template, session, reply)

    def _note_process(self, template: Template, session: Session, reply: Reply) -> None:
        if "process" in reply:
            session.process = reply["process"]
            template.alive.add(session.process)
            if session.is_over:
                template.end(session.process)
            elif session in self._busy:
                self._begin(session)
        elif session in self._busy:
            self._finish(session, reply)
            self._end(session)  # Further requests find it dead.

    def _lose_all(self) -> None:
        """Give up the sessions of a template that has died."""
        for session in list(self._sessions.values()):
            session.process = None
            if session.channel is None:
                continue  # The next template forks it.
            if session.request:
                self._finish(session, DIED)
            else:
                session.is_over = True
                session.disconnect(self._watch)

    def _on_room(self, session: Session, mask: int) -> None:
        channel = session.channel
        if session not in self._busy or channel is None:
            return
        channel.write()
        self._move(session)
        if not channel.unsent:
            self._watch.forget(channel.outgoing)

    def _on_reply(self, session: Session, mask: int) -> None:
        if session not in self._busy or session.channel is None:
            return
        reply = session.channel.receive()
        if reply is not None:
            self._finish(session, reply)
        elif session.replies:
            self._is_moving = True
        else:
            session.replies = True
            self._move(session)

    def _move(self, session: Session) -> None:
        """Restart a request's time limit: how long a message takes is not the handler's fault."""
        self._is_moving = True
        if session.deadline < math.inf:
            session.deadline = time.monotonic() + session.limit
            self._watch.note(session.deadline, session)

    def _finish(self, session: Session, reply: Reply) -> None:
        self._busy.discard(session)
        seconds = max(time.monotonic() - session.sent, 0.0)
        self._found.append(Answered(session.key, reply, seconds))
        session.answered()
        session.leave(self._watch)
        if reply in (DIED, OVER_TIME, OUT_OF_MEMORY):
            del self._sessions[session.key]
            self._end(session)

    def _end(self, session: Session) -> None:
        session.is_over = True
        self._busy.discard(session)
        session.disconnect(self._watch)
        if session.process is not None:
            self._templates[0].end(session.process)
            session.process = None
