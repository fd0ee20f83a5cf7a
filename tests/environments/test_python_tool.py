"""The tool `python`: programs in the code sandbox, hostile ones among them.

Not exercised: all that a program may try (tests/reward/test_hostile_programs.py, of the same
sandbox); a container that lets root change to no other user.
"""

import contextlib
import os
import textwrap
import time

import psutil
import pytest

from tests.environments.playing import TOOLS, answers, closed, play, started
from tests.reward.hostile_programs import ATTEMPT, ATTEMPTS, SEARCH, SEARCHES
from tests.sandbox import limits
from vapo_megatron.environments.python_tool import PythonTool
from vapo_megatron.environments.tool_calls import Call
from vapo_megatron.reward.verifier import Problem
from vapo_megatron.sandbox import client

MARK = f"VAPO_TESTS_PYTHON_TOOL_{os.getpid()}"
ANSWER = "zebra-7123456789"
SAMPLE = (
    "socket", "connect", "fork", "subprocess", "fork_by_number", "read_passwd",
    "read_parents_environment", "read_parents_memory", "write_tmp", "open_by_library",
    "list_root", "many_threads",
)  # fmt: skip


SPINS = "while True: pass"


def programs(action):
    """A parser, in the process of the environment: the action is a program."""
    # A busy machine needs its time to give a program the CPU time that ends it.
    client.WALL_FACTOR = 300 if action == SPINS else 3
    if action:
        yield Call("python", {"code": action})


@pytest.fixture(scope="module")
def episode():
    """What an action's program prints, in an episode's process."""
    os.environ[MARK] = ANSWER
    options = {
        "tools": ["python"],
        "parser": f"{__name__}:programs",
        "python": {"seconds": 2.0, "memory_gb": 0.5, "max_output_characters": 1000},
    }
    patient = {"at_once": 1, "timeout_seconds": 120.0, "memory_bytes": 10**9}
    playing = play(TOOLS, options, name="tools", **patient)
    playing.begin("a", Problem("", ANSWER), 0)
    answers(playing, "a")

    def printed(program):
        playing.act("a", program)
        played = answers(playing, "a")["a"]
        assert not played.done, played.note
        (message,) = played.observation
        return message["content"]

    yield printed
    # Nothing runs of a program that has been shown, nor of its sandbox.
    left = sandboxes()
    playing.close()
    del os.environ[MARK]
    assert left == []


def sandboxes():
    """Return the sandboxes' processes below this one, and those that nobody waits for."""
    below = psutil.Process().children(recursive=True)
    found = []
    for process in (*below, *psutil.process_iter()):
        with contextlib.suppress(psutil.Error):  # It may have ended.
            is_one = any("sandbox/template.py" in part for part in process.cmdline())
            if is_one and (process in below or process.ppid() == 1):
                found.append(process)
    return found


def test_a_program_that_outlives_the_call_ends_with_its_episode(monkeypatch):
    limits.limit(monkeypatch, 3.0, "sleep")
    options = {"tools": ["python"], "parser": f"{__name__}:programs"}
    with started(TOOLS, options, name="tools", at_once=1, memory_bytes=10**9) as playing:
        playing.begin("a", Problem(""), 0)
        answers(playing, "a")
        playing.act("a", "import time; time.sleep(60)")
        seen = []
        while not (found := playing.answers(0.1)):
            seen += sandboxes()
        assert found[0][1].failed and found[0][1].note == "more than 60 seconds"
        assert seen
        assert closed(playing)
        end = time.monotonic() + 30
        while sandboxes() and time.monotonic() < end:
            time.sleep(0.1)
        assert sandboxes() == []


@pytest.mark.parametrize(
    ("program", "shown"),
    [
        ("print(1 + 1)", "2"),
        ("import numpy as np; print(np.arange(3).sum())", "3"),
        ("x = 1", "(the program printed nothing)"),
        ("print('a\\n\\nb  ')", "a\n\nb"),
        ("print(open('/dev/stdin').read() == '')", "True"),
        ("import sys; print('out'); print('err', file=sys.stderr)", "out\nerr"),
        ("import sys; sys.exit(3)", "error: exit code 3"),
        ("import sys; sys.exit('bad')", "bad"),
        (
            "def f():\n  return 1 / 0\nprint(5)\nf()",
            "5\nTraceback (most recent call last):\n"
            '  File "program.py", line 4, in <module>\n'
            '  File "program.py", line 2, in f\n'
            "ZeroDivisionError: division by zero",
        ),
        ("import requests", "ModuleNotFoundError: No module named 'requests'"),
        ("x = )", "SyntaxError: unmatched ')'"),
    ],
)
def test_what_a_program_prints(episode, program, shown):
    found = episode(program)
    assert found.endswith(shown) and "/vapo_megatron/" not in found


def test_nothing_is_kept_between_calls(episode):
    assert episode("x = 1; print(x)") == "1"
    assert "NameError: name 'x' is not defined" in episode("print(x)")


def test_output_is_cut(episode):
    shown = episode("import sys\nprint('a' * 5000)\nprint('b' * 5000, 'z', file=sys.stderr)")
    assert len(shown) == 2001 and shown.startswith("aaa") and " [cut]\nbb" in shown
    assert shown.endswith("b z")
    assert "error: more than 1048576 bytes of output" in episode("while True: print('x' * 1000)")


@pytest.mark.parametrize(
    ("program", "error"),
    [
        (SPINS, "error: more than 2 seconds of CPU time"),
        ("import time; time.sleep(60)", "error: more than 7 seconds"),
        ("x = bytearray(10**9)", "MemoryError"),
        ("import ctypes; ctypes.string_at(0)", "error: killed by SIGSEGV"),
    ],
)
def test_limits(episode, program, error):
    assert error in episode(program)
    assert episode("print(2)") == "2"


@pytest.mark.parametrize("kind", SAMPLE)
def test_hostile_programs_do_nothing(episode, kind, tmp_path):
    body = textwrap.indent(textwrap.dedent(ATTEMPTS[kind].strip("\n")), "    ")
    program = ATTEMPT.format(place=str(tmp_path), answer=ANSWER, body=body)
    assert episode(program).startswith("lost")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("kind", ["environment", "frames", "objects", "heap", "arenas", "modules"])
def test_searches_find_no_answer(episode, kind, tmp_path):
    body = textwrap.indent(textwrap.dedent(SEARCHES[kind].strip("\n")), "    ")
    program = SEARCH.format(place=str(tmp_path), data=str(tmp_path), body=body)
    assert ANSWER not in episode(program)


def test_a_machine_that_cannot_confine_is_refused(monkeypatch):
    from vapo_megatron.sandbox import client

    monkeypatch.setattr(client, "_PROBE", "print('free')")
    with pytest.raises(client.SandboxUnavailable, match="the kernel does not refuse"):
        PythonTool().check()
