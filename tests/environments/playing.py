"""Episodes as the tests beside this play them."""

import time

from vapo_megatron.environments.play import Play


def play(environment, options=(), *, at_once=8, memory_bytes=4 * 10**8, full_score=None):
    return Play(
        "own", environment, dict(options), at_once=at_once, timeout_seconds=60.0,
        memory_bytes=memory_bytes, max_characters=1000, full_score=full_score,
    )  # fmt: skip


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
