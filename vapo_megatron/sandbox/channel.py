"""Messages to and from a process over two pipes, neither of which is ever waited for.

A message is a 4-byte length and its bytes: requests are pickled, replies are JSON, because who
replies may run code that is not trusted (worker.py).
"""

from __future__ import annotations

import json
import os
import pickle
from typing import Any

from vapo_megatron.sandbox.worker import HEADER

Reply = dict[str, Any]
"""What a process answered: its handler's dict, {"error": traceback}, or one of the three below."""
OVER_TIME: Reply = {"over_time": True}
DIED: Reply = {"died": True}
OUT_OF_MEMORY: Reply = {"out_of_memory": True}


class Channel:
    """Our ends of a process's pipes.

    Args:
        outgoing: file to write requests to; it becomes non-blocking.
        incoming: file to read replies from.
        max_reply_bytes: a process that sends more is taken for dead.
    """

    def __init__(self, outgoing: int, incoming: int, max_reply_bytes: int = 1 << 30) -> None:
        os.set_blocking(outgoing, False)
        self.outgoing, self.incoming = outgoing, incoming
        self.unsent = memoryview(b"")
        self._received = bytearray()
        self._max_reply_bytes = max_reply_bytes

    def send(self, message: bytes) -> None:
        """Begin to send a message, once the one before has been answered."""
        self.unsent = memoryview(message)
        self.write()

    def write(self) -> None:
        """Write as much as the pipe takes."""
        try:
            self.unsent = self.unsent[os.write(self.outgoing, self.unsent) :]
        except BlockingIOError:
            pass
        except BrokenPipeError:
            self.unsent = memoryview(b"")  # It has died, which `receive` reports.

    def receive(self) -> Reply | None:
        """Return the reply that has arrived, DIED, or None if the message is not complete yet."""
        data = os.read(self.incoming, 1 << 20)
        if not data:
            return DIED
        self._received += data
        if len(self._received) < HEADER.size:
            return None
        end = HEADER.size + HEADER.unpack_from(self._received)[0]
        if end > self._max_reply_bytes:
            return DIED
        if len(self._received) < end:
            return None
        reply = _read(self._received[HEADER.size : end])
        del self._received[:end]
        return reply


def _read(data: bytes | bytearray) -> Reply:
    """Return a reply, or DIED of one that is none: what runs there may write to the pipe."""
    try:
        reply = json.loads(data)
    except (ValueError, RecursionError):
        return DIED
    return reply if isinstance(reply, dict) else DIED


def message(request: Any) -> bytes:
    """Return a request's bytes."""
    data = pickle.dumps(request)
    return HEADER.pack(len(data)) + data
