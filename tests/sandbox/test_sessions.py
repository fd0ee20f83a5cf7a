"""Processes that keep their state: what one does costs itself alone, and nothing is left of it.

Not exercised: a kernel that does not tell a process its children (CONFIG_PROC_CHILDREN).
"""

import contextlib
import gc
import os
import resource
import select
import signal
import subprocess
import sys
import textwrap
import time

import psutil
import pytest

from tests.sandbox import limits
from tests.sandbox.marked import gone, marked
from vapo_megatron.sandbox.channel import DIED, OUT_OF_MEMORY, OVER_TIME
from vapo_megatron.sandbox.process import HandlerRefused
from vapo_megatron.sandbox.sessions import Sessions

HANDLERS = "tests.sandbox.handlers"
MARK = f"VAPO_TESTS_SESSIONS_{os.getpid()}"  # Others may test on this machine, too.


def make(handler="make_counter", options=(), *, at_once=4, timeout_seconds=60.0, memory=2 * 10**8):
    return Sessions(f"{HANDLERS}:{handler}", dict(options), at_once, timeout_seconds, memory)


@pytest.fixture
def sessions(monkeypatch):
    monkeypatch.setenv(MARK, "1")
    made = make()
    yield made
    made.close()
    assert gone(MARK), marked(MARK)


def ask(sessions, *requests):
    """Ask new sessions 0, 1, ... -> their replies."""
    for key, request in enumerate(requests):
        sessions.open(key)
        sessions.ask(key, request)
    return replies(sessions, len(requests))


def replies(sessions, count):
    found = {}
    while len(found) < count:
        answered = sessions.wait(60.0)
        assert answered, f"{count - len(found)} replies are missing"
        found |= {key: reply for key, reply, _ in answered}
    return [found[key] for key in sorted(found)]


def test_each_has_its_own_state_and_one_template_forks_all():
    with contextlib.closing(make(options={"start": 5})) as with_options:
        assert with_options.describe() == {"from": 5}
        first = ask(with_options, *["identify"] * 6)
        with_options.ask(3, "well")
        assert replies(with_options, 1) == [{"count": 7}]
        assert [reply["count"] for reply in first] == [6] * 6
        [template] = {reply["template"] for reply in first}
        own = {reply["process"] for reply in first}
        assert len(own) == 6 and set(with_options.process_ids) == {template, *own}
        assert all(os.getsid(process) == process for process in own)
        # The handler has loaded in the template: 200 MB more than it has there.
        [limit] = {psutil.Process(process).rlimit(psutil.RLIMIT_AS) for process in own}
        with open(f"/proc/{template}/statm") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        assert used + 199 * 10**6 < limit[0] < used + 201 * 10**6


def test_a_process_has_no_file_of_the_template_and_ignores_a_jobs_signals(sessions):
    had, ignored = ask(sessions, "files", "signals")
    assert had["files"].count("pipe") == 2 + _pipes_of_stderr()
    assert "socket" not in had["files"] and len(had["files"]) == 5
    assert ignored["ignored"] == [True] * 3


def _pipes_of_stderr():
    return 2 * os.readlink("/proc/self/fd/2").startswith("pipe")


def test_faults_cost_their_own_session(sessions, monkeypatch):
    limits.limit(monkeypatch, 1.0, "sleep", "loop", "stop_itself")
    junk, too_long = b"\x00\x00\x00\x03{1}", b"\xff" * 4
    asked = ["sleep", "loop", "stop_itself", "vanish", "fill"]
    asked += [("write_replies", data) for data in (junk, b"\x00\x00\x00\x02[]", too_long)]
    found = ask(sessions, *(request for name in asked for request in ("well", name)), "raises")
    ended = [OVER_TIME] * 3 + [DIED, OUT_OF_MEMORY] + [DIED] * 3
    assert found[0:-1:2] == [{"count": 1}] * len(asked) and found[1:-1:2] == ended
    assert "RuntimeError: no such test" in found[-1]["error"]
    for key in [*range(0, 16, 2), 16]:  # One that has raised goes on, too.
        sessions.ask(key, "well")
    assert replies(sessions, 9) == [{"count": 2}] * 9
    for key in range(17):
        sessions.end(key)
    assert gone(MARK, but=1), "more than the template is left"


def test_what_a_session_has_started_ends_with_it(sessions):
    ask(sessions, "leave_children", "leave_children", "well")
    assert len(marked(MARK)) == 1 + 2 * 4 + 1
    sessions.end(0)
    assert gone(MARK, but=1 + 4 + 1)
    sessions.ask(2, "well")
    assert replies(sessions, 1) == [{"count": 2}]
    sessions.close()
    assert gone(MARK)


def test_no_more_are_asked_at_once_than_allowed():
    with contextlib.closing(make(at_once=2)) as few:
        times = [reply["value"] for reply in ask(few, *[("nap", 0.2)] * 7)]
    assert max(sum(b <= start < e for b, e in times) for start, _ in times) <= 2


def test_time_counts_from_when_a_request_is_sent():
    with contextlib.closing(make(at_once=1, timeout_seconds=3.0)) as one:
        assert ask(one, "sleep", "well") == [OVER_TIME, {"count": 1}]


def test_a_reply_in_time_counts_however_late_it_is_read(sessions, monkeypatch):
    ask(sessions, "well")
    limits.limit(monkeypatch, 5.0, "well")
    began = time.monotonic()
    sessions.ask(0, "well")
    channel = sessions._sessions[0].channel
    assert select.select([channel.incoming], [], [], 4.0)[0]
    time.sleep(began + 5.2 - time.monotonic())
    assert replies(sessions, 1) == [{"count": 2}]


def test_long_messages_pass_while_nobody_waits(sessions):
    value = "y" * 3_000_000
    sessions.open("long")
    sessions.ask("long", ("echo", "x"))
    replies(sessions, 1)  # Loading takes its time on a busy machine.
    sessions.ask("long", ("echo", value))
    found = []
    looks = 0
    while not found:
        found = sessions.wait(0.0)
        looks += 1
        time.sleep(0.05)
    assert found[0].reply["value"] == value
    assert looks < 60, "a pipe's fill moved each time: 94 times"


def test_a_template_that_dies_takes_its_sessions_and_comes_again(sessions):
    first = ask(sessions, "identify", "well")
    sessions.open("kills")
    sessions.ask("kills", "kill_template")
    assert replies(sessions, 1) == [DIED]
    assert gone(MARK)
    sessions.ask(0, "well")
    assert replies(sessions, 1) == [DIED]
    sessions.end(1)
    for key in ("a", "b"):
        sessions.open(key)
        sessions.ask(key, "identify")
    again = replies(sessions, 2)
    assert {reply["template"] for reply in again}.isdisjoint({first[0]["template"]})


def test_requests_wait_for_the_next_template_where_one_dies_while_it_loads(sessions):
    sessions.start()
    [template] = sessions.process_ids
    sessions.open(0)
    sessions.ask(0, "well")
    os.kill(template, signal.SIGKILL)
    assert replies(sessions, 1) == [{"count": 1}]


def test_what_does_not_load_is_refused():
    refuses = make(options={"refuse": True})
    refuses.open(0)
    refuses.ask(0, "well")
    with pytest.raises(HandlerRefused, match="ValueError: no such number"):
        refuses.wait(60.0)
    assert refuses.process_ids == []
    broken = Sessions("tests.sandbox.exits:make", {}, 2, 60.0, 10**8)
    with pytest.raises(RuntimeError, match="did not start: exit code 7"):
        broken.describe()
    assert broken.process_ids == []


def test_a_process_ends_itself_where_nobody_looks(sessions, monkeypatch):
    limits.limit(monkeypatch, 1.0)  # Patient with all.
    with contextlib.closing(make(timeout_seconds=0.2)) as hasty:
        assert ask(hasty, "sleep") == [DIED]


def test_a_forked_child_ends_nothing(sessions):
    ask(sessions, "well")
    if (child := os.fork()) == 0:
        sessions.close()
        os._exit(0)
    os.waitpid(child, 0)
    sessions.ask(0, "well")
    assert replies(sessions, 1) == [{"count": 2}]


def test_two_hundred_answer_at_once_and_leave_no_file(sessions):
    sessions.describe()
    gc.collect()  # What other tests have left.
    files = len(os.listdir("/proc/self/fd"))
    found = ask(sessions, *["identify"] * 200)
    assert len({reply["process"] for reply in found}) == 200
    for key in range(200):
        sessions.end(key)
    assert len(os.listdir("/proc/self/fd")) == files
    assert gone(MARK, but=1)


@pytest.mark.slow
def test_a_thousand(sessions):
    for count in range(1, 4):
        for key in range(1000):
            if count == 1:
                sessions.open(key)
            sessions.ask(key, "well")
        assert replies(sessions, 1000) == [{"count": count}] * 1000


def test_nothing_outlives_who_asks_even_with_few_files_allowed(monkeypatch):
    monkeypatch.setenv(MARK, "1")
    program = """
        import resource, time
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(7)[1]))
        from tests.sandbox.test_sessions import ask, make
        ask(sessions := make(at_once=64), *["leave_children"] + ["well"] * 49)
        sessions.ask(0, "loop")
        print("begun", flush=True)
        time.sleep(600)
    """
    program = textwrap.dedent(program)
    line = [sys.executable, "-c", program]
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "begun\n"
            assert len(marked(MARK)) == 2 + 50 + 3
        finally:
            process.kill()
    assert gone(MARK), marked(MARK)
