"""A user's class or function in a process of its own: how it gets there, and what its failures say.

sendable, loading and failure are for the trainer, load for the process.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vapo_megatron.errors import ConfigError
from vapo_megatron.sandbox.channel import DIED, OUT_OF_MEMORY, OVER_TIME, Reply
from vapo_megatron.sandbox.process import HandlerRefused

_PACKAGE = str(Path(__file__).parents[1])


def sendable(what: str, given: object, whither: str) -> str | bytes:
    """Return a name as it is, and any other object by value where it is not importable.

    Args:
        what: in messages: what it is given as.
        given: "package.module:NAME" or "path/to/file.py:NAME", or the object itself.
        whither: the processes, in words.

    Raises:
        ConfigError: it cannot be pickled.
    """
    if isinstance(given, str):
        return given
    import cloudpickle

    try:
        return cloudpickle.dumps(given)
    except Exception as error:
        raise ConfigError(
            f"{what}={given!r} cannot be sent to the processes that {whither}: {error}; "
            "open files, locks and connections in a method, when first needed"
        ) from None


def load(given: str | bytes) -> Any:
    """Return what `sendable` was given. Raises whatever importing it raises."""
    # A class beside the user's own files, also where an installed command was started.
    sys.path.insert(0, os.getcwd())
    if isinstance(given, bytes):
        return pickle.loads(given)
    place, _, attribute = given.rpartition(":")
    if not place.endswith(".py"):
        return getattr(importlib.import_module(place), attribute)
    file = Path(place).resolve(strict=True)
    # What lies beside the file can be imported by it, as where it is run as a script.
    sys.path.insert(0, str(file.parent))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None, "the name ends in .py"
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    return getattr(module, attribute)


@contextlib.contextmanager
def loading(what: str, remedy: str) -> Iterator[None]:
    """Turn what does not load into the user's mistake.

    Args:
        what: for example "the verifier NAME".
        remedy: what to do beside correcting it.

    Raises:
        ConfigError: its processes refuse it.
    """
    try:
        yield
    except HandlerRefused as error:
        last, place = last_line(str(error))
        message = f"{what} cannot be loaded: {last}{place}; correct it, or {remedy}"
        raise ConfigError(message) from None


def failure(reply: Reply, timeout_seconds: float, memory_bytes: int) -> str:
    """Return in one line why a reply has no result."""
    if reply == OVER_TIME:
        return f"more than {timeout_seconds:g} seconds"
    if reply == OUT_OF_MEMORY:
        return f"more than {memory_bytes / 1e9:.3g} GB of memory"
    if reply == DIED:
        return "its process died"
    if "returned" in reply:
        return reply["returned"]
    return last_line(reply["error"])[0]


def last_line(trace: str) -> tuple[str, str]:
    """Return a traceback's last line, and in parentheses where in the user's code it was raised.

    An error whose message has several lines is one line here.
    """
    lines = trace.rstrip().splitlines()
    in_frames = max((i for i, line in enumerate(lines) if line.startswith("  File ")), default=0)
    after = lines[in_frames:]
    start = next((i for i, line in enumerate(after) if line[:1].strip()), len(after) - 1)
    last = " ".join(" ".join(after[start:]).split())
    files = (line.strip() for line in reversed(lines) if line.startswith("  File "))
    place = next((f for f in files if _PACKAGE not in f and "<frozen" not in f), "")
    return last, f" ({place})" if place else ""
