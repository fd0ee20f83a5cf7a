"""What is asked again, and after how long: status codes and the header Retry-After.

Pauses are recorded by a clock of our own, which only they move.
"""

import asyncio
import email.utils
import random
import types

import pytest

from tests.reward.raw_server import RawServer, completion, http
from vapo_megatron.reward import endpoint
from vapo_megatron.reward.judge import Judge
from vapo_megatron.reward.replies import retry_after
from vapo_megatron.reward.verifier import Problem

NOW = 1_800_000_000.0


@pytest.fixture
def pauses(monkeypatch):
    """The seconds of each pause, in which nothing but a clock moves."""
    found, clock = [], [100.0]

    async def sleep(seconds):
        found.append(seconds)
        clock[0] += seconds

    faked = types.SimpleNamespace(**{**vars(asyncio), "sleep": sleep})
    monkeypatch.setattr(endpoint, "asyncio", faked)
    times = types.SimpleNamespace(monotonic=lambda: clock[0], time=lambda: NOW + clock[0])
    monkeypatch.setattr(endpoint, "time", times)
    monkeypatch.setattr(endpoint, "random", random.Random(0))
    return found


def asked(replies, **options):
    """Judge one response -> (its verdict, number of requests); the last reply is repeated."""
    left = list(replies)

    def reply(*_):
        return left.pop(0) if len(left) > 1 else left[0]

    with RawServer(reply) as server:
        judge = Judge(base_url=server.url, model="m", **options)
        (found,) = judge.score(["x"], [Problem("p", "a")])
        judge.close()
        return found, len(server.asked)


@pytest.mark.parametrize("status", [408, 409, 425, 429, 500, 502, 503, 504, 529])
def test_a_status_that_is_tried_again(status, pauses):
    found, count = asked([http(status=status), http(status=status), http(completion())])
    assert (found.status, count) == ("correct", 3)
    assert 0.25 <= pauses[0] <= 0.5 <= pauses[1] <= 1.0


@pytest.mark.parametrize("status", [301, 400, 401, 403, 404, 405, 410, 413, 422, 451])
def test_a_status_that_is_final(status, pauses):
    found, count = asked([http(status=status), http(completion())])
    assert (found.status, count, pauses) == ("failed", 1, [])
    assert found.note.startswith(f"HTTP {status}")


@pytest.mark.parametrize("status", [408, 425, 429, 503])
@pytest.mark.parametrize("date", [False, True])
def test_the_wait_is_as_long_as_the_server_asks(status, date, pauses):
    value = email.utils.formatdate(NOW + 100 + 120, usegmt=True) if date else "120"
    found, count = asked([http(status=status, Retry_After=value), http(completion())])
    assert (found.status, count) == ("correct", 2)
    assert len(pauses) == 1 and 120 <= pauses[0] <= 132  # Not all at the same moment.


def test_the_wait_is_bounded_by_the_outage(pauses):
    replies = [http(status=429, Retry_After="999999"), http(completion())]
    found, count = asked(replies, outage_seconds=50.0)
    assert (found.status, count, pauses) == ("correct", 2, [50.0])
    pauses.clear()
    found, count = asked(replies[:1], outage_seconds=50.0)
    assert (found.status, count, pauses) == ("failed", 2, [50.0])
    assert found.note == "no answer for 50 s: HTTP 429"


def test_a_header_that_asks_nothing_changes_nothing(pauses):
    for value in ("soon", "-5", "0", ""):
        pauses.clear()
        asked([http(status=503, Retry_After=value), http(completion())])
        assert len(pauses) == 1 and 0.25 <= pauses[0] <= 0.5


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("3", 3.0), (" 2.5 ", 2.5), ("0", 0.0), ("", 0.0), ("-3", 0.0), ("nan", 0.0), ("inf", 0.0),
        ("1e3", 0.0), ("9" * 5000, 0.0), ("soon", 0.0), ("\u0663", 0.0), ("3, 4", 0.0),
        ("Fri, 15 Jan 2027 08:00:30 GMT", 30.0), ("Friday, 15-Jan-27 08:00:30 GMT", 30.0),
        ("Fri, 15 Jan 2027 07:59:00 GMT", 0.0), ("Fri, 15 Jan 99999 08:00:30 GMT", 0.0),
        ("Fri, 99 Foo 2027 08:00:30 GMT", 0.0), ("Fri, 15 Jan 2027 88:00:30 GMT", 0.0),
        ("Fri, 15 Jan 2027 08:00:30 +99999", 0.0), (",", 0.0), ("\x00", 0.0),
    ],
)  # fmt: skip
def test_what_a_header_asks_to_wait(value, seconds):
    assert retry_after(value, NOW) == seconds
