"""Episodes as the tests beside this play them."""

import contextlib
import time

from vapo_megatron.environments.play import Play

TOOLS = "vapo_megatron.environments.tools:Tools"


def play(environment, options=(), *, name="own", **more):
    """Up to eight episodes. name: of the environment, in messages; more: in place of limits."""
    limits = {"at_once": 8, "timeout_seconds": 60.0, "memory_bytes": 4 * 10**8}
    return Play(name, environment, dict(options), **{**limits, **more})


def started(environment, options=(), **more):
    """The same for a with statement, which closes it."""
    return contextlib.closing(play(environment, options, **more))


def answers(playing, *keys):
    """Wait for an answer of each."""
    found = {}
    while len(found) < len(keys):
        found |= playing.answers(60.0)
    assert found.keys() == set(keys)
    return found


def closed(playing):
    """Wait until no episode has a process any more -> whether that came true."""
    end = time.monotonic() + 60
    while len(playing._sessions.process_ids) > 1 and time.monotonic() < end:
        assert playing.answers(0.1) == []
    return len(playing._sessions.process_ids) <= 1
