"""One try has a limit of time for all of it, and closing and exiting wait for no server.

Not exercised: names that are resolved by a real, silent server (a resolver of our own hangs).
"""

import socket
import subprocess
import sys
import threading
import time

import pytest

from tests.reward.raw_server import RawServer, completion, http
from vapo_megatron.reward.judge import Judge
from vapo_megatron.reward.verifier import Problem

PROBLEM = Problem("p", "a")
LONG = 30.0
"""Seconds that no test takes unless something is waited for that should not be."""


def drips(data):
    """Send a byte every 50 ms, so that each single read succeeds."""

    def reply(_, __, connection):
        while True:
            for byte in data:
                connection.sendall(bytes([byte]))
                time.sleep(0.05)

    return reply


def drips_its_body(body, head, connection):
    connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
    drips(b" ")(body, head, connection)


def drips_errors(body, head, connection):
    connection.sendall(b"HTTP/1.1 400 Bad\r\n\r\n")
    drips(b"x")(body, head, connection)


@pytest.mark.parametrize(
    "reply",
    [
        drips_its_body,
        drips_errors,
        drips(b"HTTP/1.1 200 OK\r\n" + b"X-More: x\r\n" * 1000),
        drips(b"HTTP/1.1 100 Continue\r\n\r\n"),
    ],
    ids=["body", "error's body", "headers", "informational replies"],
)
def test_a_reply_that_drips_costs_one_limit(reply):
    with RawServer(reply) as server:
        judge = Judge(base_url=server.url, model="m", timeout_seconds=0.5, outage_seconds=0.0)
        began = time.monotonic()
        (found,) = judge.score(["x"], [PROBLEM])
        assert time.monotonic() - began < LONG
        judge.close()
    assert found.status == "failed"
    assert found.note == "no answer for 0 s: no whole answer within 0.5 s"


def judge_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("judge")]


@pytest.mark.parametrize("reply", [None, drips_its_body], ids=["silent", "drips"])
def test_closing_ends_what_hangs_at_once(reply):
    arrived = threading.Semaphore(0)

    def answer(*args):
        arrived.release()
        return reply(*args) if reply else server.hold()

    server = RawServer(answer)
    with server:
        judge = Judge(base_url=server.url, model="m", timeout_seconds=600.0, concurrency=8)
        verdicts = judge.score(["x"] * 50, [PROBLEM] * 50)
        found = []
        waiting = threading.Thread(target=lambda: found.extend(verdicts))
        waiting.start()
        for _ in range(8):
            assert arrived.acquire(timeout=LONG)
        began = time.monotonic()
        judge.close()
        waiting.join(LONG)
        assert time.monotonic() - began < LONG / 2
        assert not judge_threads()
    # Who waits for them has verdicts, also those whose requests had not begun.
    assert [(v.status, v.note) for v in found] == [("failed", "closed before it answered")] * 50


def test_a_pause_is_no_reason_to_wait():
    with RawServer(lambda *_: http(status=503, Retry_After="500")) as server:
        judge = Judge(base_url=server.url, model="m")
        verdicts = judge.score(["x"], [PROBLEM])
        deadline = time.monotonic() + LONG
        while not server.asked and time.monotonic() < deadline:
            time.sleep(0.01)
        began = time.monotonic()
        judge.close()
        (found,) = verdicts
        assert time.monotonic() - began < LONG / 2 and not judge_threads()
    assert found.note == "closed before it answered" and len(server.asked) == 1


def test_after_closing_it_can_be_asked_again():
    with RawServer(lambda *_: http(completion())) as server:
        judge = Judge(base_url=server.url, model="m")
        for _ in range(2):
            assert [v.status for v in judge.score(["x"], [PROBLEM])] == ["correct"]
            judge.close()
            judge.close()


EXITS = """
import socket, sys, threading
from vapo_megatron.reward.judge import Judge
from vapo_megatron.reward.verifier import Problem
if sys.argv[2] == "name":
    resolving = threading.Event()
    def hang(*_, **__):
        resolving.set()
        threading.Event().wait()
    socket.getaddrinfo = hang
judge = Judge(base_url=sys.argv[1], model="m", timeout_seconds=600.0)
verdicts = judge.score(["x"] * 3, [Problem("p", "a")] * 3)
if sys.argv[2] == "name":
    resolving.wait()
else:
    sys.stdin.readline()
if sys.argv[3] == "closed":
    judge.close()
    assert [v.status for v in verdicts] == ["failed"] * 3
print("ends", flush=True)
"""


@pytest.mark.parametrize("closed", ["closed", "left open"])
@pytest.mark.parametrize("hangs", ["answer", "name"])
def test_the_interpreter_ends_while_requests_hang(hangs, closed):
    arrived = threading.Event()

    def answer(*_):
        arrived.set()
        server.hold()

    server = RawServer(answer)
    with server:
        url = server.url if hangs == "answer" else "http://no-such-name.invalid/v1"
        process = subprocess.Popen(
            [sys.executable, "-c", EXITS, url, hangs, closed],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            if hangs == "answer":
                assert arrived.wait(4 * LONG)
            output, errors = process.communicate("\n", timeout=4 * LONG)
        finally:
            process.kill()
    assert (process.returncode, output) == (0, "ends\n"), errors
    assert "Traceback" not in errors


def test_other_names_are_still_resolved(monkeypatch):
    asked = []
    real = socket.getaddrinfo

    def look_up(host, *args, **options):
        host = host.decode() if isinstance(host, bytes) else host
        asked.append(host)
        if host == "judge-node":
            return real("127.0.0.1", *args, **options)
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    with RawServer(lambda *_: http(completion())) as server:
        monkeypatch.setattr(socket, "getaddrinfo", look_up)
        for host, status in (("judge-node", "correct"), ("nowhere", "failed")):
            url = server.url.replace("127.0.0.1", host)
            judge = Judge(base_url=url, model="m", outage_seconds=0.0)
            (found,) = judge.score(["x"], [PROBLEM])
            judge.close()
            assert found.status == status
    assert "not known" in found.note and {"judge-node", "nowhere"} <= set(asked)
