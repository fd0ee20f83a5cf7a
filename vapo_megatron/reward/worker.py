"""The process that judges: math-verify and nothing else of ours, torch's or megatron's.

Run as a script by `pool.py`, with a time limit in seconds and a memory limit in bytes. Messages are
a 4-byte length and a JSON object, on stdin and stdout. It says {"status": "ready"} once, and then
answers each {"gold": ..., "answer": ...} with {"status": ...}: "correct", "wrong", "unparsable",
"bad_gold" or "out_of_memory" (after which it ends). With an answer of null it judges the gold
alone, which is "correct" when it can be parsed.

Whoever started it kills it when an answer takes too long. It kills itself a while later, should
that process be gone.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import resource
import signal
import struct
import sys
from typing import Any, BinaryIO

HEADER = struct.Struct(">I")


def main() -> None:
    """Judge until stdin ends."""
    timeout_seconds, memory_limit_bytes = float(sys.argv[1]), int(sys.argv[2])
    # An interrupt is for the process that started this one; it closes the pipe.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.disable(logging.CRITICAL)
    # Libraries print; what they print must not stand between the messages.
    with os.fdopen(os.dup(1), "wb") as output, os.fdopen(os.dup(0), "rb") as requests:
        os.dup2(2, 1)
        # Imports everything, simplification too, and fills the parser's tables.
        judge(r"\sqrt{x + 1}", r"\frac{x}{2}")
        _silence()
        resource.setrlimit(resource.RLIMIT_AS, (memory_limit_bytes, memory_limit_bytes))
        send(output, {"status": "ready"})
        while True:
            request = receive(requests)
            if request is None:
                return
            signal.setitimer(signal.ITIMER_REAL, 2 * timeout_seconds + 1)
            try:
                status = judge(request["gold"], request["answer"])
            except MemoryError:
                send(output, {"status": "out_of_memory"})
                return
            signal.setitimer(signal.ITIMER_REAL, 0)
            send(output, {"status": status})


def _silence() -> None:
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)


def send(stream: BinaryIO, message: dict[str, Any]) -> None:
    """Write one message."""
    data = json.dumps(message).encode()
    stream.write(HEADER.pack(len(data)) + data)
    stream.flush()


def receive(stream: BinaryIO) -> dict[str, Any] | None:
    """Read one message; None at the end of the stream."""
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    return json.loads(stream.read(HEADER.unpack(header)[0]))


def judge(gold: str, answer: str | None) -> str:
    """Compare a final answer with the ground truth, both without their markers."""
    from math_verify import verify

    expected = _parse_gold(gold)
    if not expected:
        return "bad_gold"
    if answer is None:
        return "correct"
    found = _parse(answer)
    if not found:
        return "unparsable"
    # Its own limits use signals and count in whole seconds; the limit here is this process's life.
    return "correct" if verify(expected, found, timeout_seconds=None) else "wrong"


@functools.lru_cache(maxsize=4096)
def _parse_gold(gold: str) -> list[Any]:
    return _parse(gold)


def _parse(text: str) -> list[Any]:
    """The expressions that a text stands for: one, or none when it cannot be parsed.

    The whole text is one formula: a list is a list, and none of its members counts for itself.
    """
    from math_verify import LatexExtractionConfig, parse

    found = parse(
        f"${text}$", [LatexExtractionConfig()], fallback_mode="no_fallback", parsing_timeout=None
    )
    return [expression for expression in found if not isinstance(expression, str)]


if __name__ == "__main__":
    main()
