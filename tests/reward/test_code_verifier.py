"""Honest programs against tests of every shape, in the sandbox, and through the processes.

Not exercised: a container whose root may not change its user; hostile programs
(test_hostile_programs.py); how data sets have their tests (test_code_tests.py).
"""

import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from vapo_megatron.config import RewardConfig
from vapo_megatron.errors import ConfigError
from vapo_megatron.reward.code_verifier import CodeVerifier
from vapo_megatron.reward.verifier import Problem
from vapo_megatron.reward.verifiers import Verifiers

ROOT = Path(__file__).parents[2]
SUM = {"input_output": {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]}}
PLUS_ONE = {"test_list": ["assert f(1) == 2", "assert f(f(1)) == 3", "assert not f(-1)"]}


@pytest.fixture(scope="module")
def verifier():
    made = CodeVerifier(20.0, 60.0)
    yield made
    made._sandbox.close()


def fenced(program):
    return f"So:\n```python\n{textwrap.dedent(program)}\n```\nDone."


def judged(verifier, program, columns):
    (verdict,) = verifier.score([fenced(program)], [Problem("", "", columns)])
    return verdict


def echo(output, text=""):
    return {"input_output": {"inputs": [text], "outputs": [output]}}


SCRIPTS = {
    "input": ("print(int(input()) + int(input()))", "1\n2\n", "3"),
    "open_0": ("print(sum(map(int, open(0).read().split())))", "1\n2\n", "3"),
    "read_at_once": ("import os; print(os.read(0, os.fstat(0).st_size).split()[1])", "1 2", "b'2'"),
    "buffered": ("import sys; sys.stdout.buffer.write(sys.stdin.buffer.read())", "\xe9\n", "\xe9"),
    "mapped": ("import mmap; print(mmap.mmap(0, 0, access=mmap.ACCESS_READ)[:2])", "ab", "b'ab'"),
    "closed_input": ("import sys; sys.stdin.close(); print(1)", "", "1"),
    "main": ("def main():\n    print(1)\nif __name__ == '__main__':\n    main()", "", "1"),
    "exits": ("print(1)\nexit()", "", "1"),
    "exits_with_0": ("import sys\nprint(1)\nsys.exit(0)", "", "1"),
    "at_exit": ("import atexit, io\nb = ['1']\natexit.register(lambda: print(*b))", "", "1"),
    "thread": (
        "import sys, threading\nsys.setrecursionlimit(10**6)\nthreading.stack_size(1 << 27)\n"
        "def f(n): return n and 1 + f(n - 1)\n"
        "threading.Thread(target=lambda: print(f(10**5))).start()",
        "",
        "100000",
    ),
    "recursion": (
        "import functools, resource, sys\nsys.setrecursionlimit(10**6)\n"
        "resource.setrlimit(resource.RLIMIT_STACK, (resource.RLIM_INFINITY,) * 2)\n"
        "f = functools.cache(lambda n: n and 1 + f(n - 1))\n"
        # Python itself allows no more of this kind from 3.12 on.
        "depth = 50000 if sys.version_info < (3, 12) else 400\nprint(f(depth) == depth)",
        "",
        "True",
    ),
    "pool": (
        "from concurrent.futures import ThreadPoolExecutor as T\nprint(*T(4).map(abs, (-1, 2)))",
        "",
        "1 2",
    ),
    "numpy": ("import numpy as np\nprint(np.linalg.det(np.eye(2)), np.random.rand(3).shape)", "",
              "1.0 (3,)"),
    "decimal": ("from decimal import Decimal as D\nprint(D(1) / D(8))", "", "0.125"),
    "date": ("import datetime as d\nprint(d.datetime.strptime('1/2', '%d/%m').month)", "", "2"),
    "data_class": ("import dataclasses as d\n@d.dataclass\nclass A:\n    x: int\nprint(A(1))", "",
                   "A(x=1)"),
    "large_number": ("print(len(str(10**20000)))", "", "20001"),
    "large_output": ("print('\\n'.join(map(str, range(200000))))", "",
                     "\n".join(map(str, range(200000)))),
    "large_input": ("import sys; print(len(sys.stdin.read()))", "x" * 3_000_000, "3000000"),
    "random": ("import random, secrets\nrandom.seed(1)\nprint(secrets.randbelow(1))", "", "0"),
    "caught": ("try:\n    open('input.txt')\nexcept OSError:\n    print(1)", "", "1"),
    "stack_trace": ("import traceback\ntry: 1 / 0\nexcept ZeroDivisionError: "
                    "traceback.print_exc()\nprint(1)", "", "1"),
    "fraction": ("print(1 / 3)", "", "0.3333333333"),
}  # fmt: skip


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_in_the_ways_in_which_people_write_them(verifier, name):
    program, text, output = SCRIPTS[name]
    assert judged(verifier, program, echo(output, text)).note == ""


def test_a_right_and_a_wrong_program(verifier):
    right = judged(verifier, "a, b = map(int, input().split())\nprint(a + b)", SUM)
    assert (right.status, right.score, right.note) == ("correct", 1.0, "")
    wrong = judged(verifier, "a, b = map(int, input().split())\nprint(a * b + 1)", SUM)
    assert (wrong.status, wrong.score) == ("wrong", 0.5)
    assert wrong.note == "test 2 of 2: printed '13', not '7'"
    (none,) = verifier.score(["print(3)"], [Problem("", "", SUM)])
    assert (none.status, none.score) == ("unparsable", None)


@pytest.mark.parametrize(
    ("program", "note"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("print(", "SyntaxError: '(' was never closed"),
        ("import torch", "ModuleNotFoundError: No module named 'torch'"),
        ("print(3)\nraise SystemExit(2)", "exit code 2"),
        ("exit('out of luck')", "out of luck"),
        ("bytearray(10**10)", "MemoryError"),
        ("print('x' * 2_000_000)", "more than 1048578 bytes of output"),
        ("import ctypes; ctypes.string_at(0)", "killed by SIGSEGV"),
    ],
)
def test_what_went_wrong_is_said(verifier, program, note):
    assert judged(verifier, program, SUM).note == f"test 1 of 2: {note}"


def test_functions_are_called(verifier):
    columns = {
        "input_output": {"inputs": [[[3, 1], 2]], "outputs": [[[1, 3], 0.3]], "fn_name": "f"}
    }
    right = "def f(x, n): return (sorted(x), 0.1 * 3)"
    assert judged(verifier, right, columns).is_correct
    assert judged(verifier, "class Solution:\n    def f(self, x, n): return [[1, 3], 0.3]", columns
                  ).is_correct  # fmt: skip
    wrong = judged(verifier, "print(5)\ndef f(x, n): return [[3, 1], 0.3]", columns)
    assert wrong.note == "test 1 of 1: returned [[3, 1], 0.3], not [[1, 3], 0.3]"
    assert judged(verifier, "def g(): pass", columns).note.endswith("name 'f' is not defined")
    wrapped = {"input_output": {"inputs": [[1], [2]], "outputs": [[1], [2]], "fn_name": "f"}}
    assert judged(verifier, "def f(x): return x", wrapped).is_correct
    assert judged(verifier, "def f(x): return [x]", wrapped).is_correct


def test_asserts(verifier):
    assert judged(verifier, "def f(x): return x + 1", PLUS_ONE).is_correct
    wrong = judged(verifier, "def f(x): return 2 if x == 1 else 4", PLUS_ONE)
    assert (wrong.score, wrong.note) == (1 / 3, "test 2 of 3: AssertionError")


@pytest.mark.parametrize(
    "text",
    [
        "assert math.isclose(f(1), 1.5, rel_tol=1e-9)\nassert abs(f(2) - 2.5) < 1e-9",
        "assert sorted({f(x) for x in (2, 1)}) == [1.5, 2.5]\nassert set([f(1)]) == {1.5}",
        "for i in range(5):\n    assert f(i) == i + 0.5, f'at {i}'",
        "assert f(x=1) == 1.5 and isinstance(f(1), float)",
        "assert g((1, [2])) == (1, [2]) and g({1: {2}}) == {1: {2}} and type(g((1,))) is tuple",
        "try:\n    f('a')\nexcept TypeError:\n    pass\nelse:\n    assert False",
        "assert list(h(3)) == [0, 1, 2] and next(h(2)) == 0",
        "def test_f():\n    from solution import f as other\n    assert other(1) == 1.5",
        "def check(candidate):\n    assert candidate(1) == 1.5\n    assert g(None) is None",
    ],
)
def test_asserts_of_every_form(verifier, text):
    program = "def f(x): return x + 0.5\ndef g(x): return x\ndef h(n): return iter(range(n))"
    columns = {"test": text, "test_imports": ["import math"], "entry_point": "f"}
    assert judged(verifier, program, columns).note == ""
    changed = program.replace("0.5", "0.25").replace("return x\n", "return [x]\n")
    changed = changed.replace("range(n)", "range(5)").replace("def f(x)", "def f(x='a')")
    if "TypeError" not in text:
        assert judged(verifier, changed, columns).status == "wrong"


def test_an_entry_point_in_a_class(verifier):
    columns = {
        "test": "def check(candidate):\n    assert candidate(a=1, b=[2]) == [2, 1]\n",
        "entry_point": "Solution().f",
    }
    program = "class Solution:\n    def f(self, a, b): return b + [a]"
    assert judged(verifier, program, columns).is_correct


def test_limits_of_time_and_every_test():
    made = CodeVerifier(0.5, 60.0, every_test=True)
    try:
        columns = {"input_output": {"inputs": list("12345"), "outputs": list("1x345")}}
        found = judged(made, "print(input())", columns)
        assert (found.status, found.score) == ("wrong", 0.8)
        assert found.note == "test 2 of 5: printed '2', not 'x'"
        found = judged(made, "x = input()\nwhile x == '1': pass\nprint(x)", columns)
        assert found.score == 0.6 and found.note.startswith("test 1 of 5: more than ")
    finally:
        made._sandbox.close()


def test_the_limit_of_all_tests_together():
    made = CodeVerifier(30.0, 1.0, every_test=True)
    try:
        columns = {"input_output": {"inputs": ["1"] * 50, "outputs": ["1"] * 50}}
        began = time.monotonic()
        slow = judged(made, "import time\nprint(1)\ntime.sleep(1)", columns)
        asleep = judged(made, "import time\ntime.sleep(60)", columns)
        assert time.monotonic() - began < 30
    finally:
        made._sandbox.close()
    assert 0 < slow.score < 0.2 and slow.note.endswith("more than 1 seconds for all tests")
    assert (asleep.score, asleep.note) == (0.0, "test 1 of 50: more than 4 seconds")


def test_a_template_that_has_died_costs_a_verdict_at_most(verifier):
    psutil.Process(verifier._sandbox._process.pid).kill()
    verifier._sandbox._process.wait()
    assert judged(verifier, "def f(x): return x + 1", PLUS_ONE).is_correct


def test_through_the_processes_with_their_options(tmp_path):
    reward = RewardConfig(
        verifier="code", num_workers=1, timeout_seconds=0.001,
        verifiers={"short": {"use": "code", "program_seconds": 0.5, "modules": ["mailbox"]}},
    )  # fmt: skip
    problems = [Problem("", "", SUM), Problem("", "", SUM | {"verifier": "short"})]
    programs = [fenced("print(sum(map(int, input().split())))"), fenced("import mailbox\nprint(3)")]
    before = set(psutil.Process().children(recursive=True))
    with Verifiers(reward) as verifiers:
        found = list(verifiers.score(programs, problems))
        assert [(v.status, v.score) for v in found] == [("correct", 1.0), ("wrong", 0.5)]
        assert verifiers.unusable([*problems, Problem("", "5")]) == {
            2: "is refused by the verifier code: has tests in ground truth that cannot be read: "
            "a int is no list of tests"
        }
        running = set(psutil.Process().children(recursive=True)) - before
        assert len([p for p in running if "template.py" in str(p.cmdline())]) == 2
    assert psutil.wait_procs(running, 10)[1] == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"test_seconds": 0}, "ValueError: test_seconds=0 must be a number, 0.001 at least"),
        ({"program_seconds": "x"}, "program_seconds='x' must be a number"),
        ({"modules": ["no_such_module"]}, "SandboxUnavailable: ModuleNotFoundError: No module"),
        ({"kind": "text"}, "reward.verifiers.code.kind is no option of code, which has test_sec"),
    ],
)
def test_options_that_are_wrong(options, message):
    with Verifiers(RewardConfig(verifiers={"code": options}, num_workers=1)) as verifiers:
        with pytest.raises(ConfigError, match=message):
            verifiers.load()


# A user who is not root, or is root of a namespace in which there is no other user, as in some
# containers.
OTHER_USER = """
import ctypes, os, sys
user = os.geteuid()
if (user == 0 or "root" in sys.argv) and ctypes.CDLL(None).unshare(0x10000000):
    sys.exit("no user namespaces")
if "root" in sys.argv:
    open("/proc/self/setgroups", "w").write("deny")
    open("/proc/self/uid_map", "w").write(f"0 {user} 1")
from tests.reward.hostile_programs import *
from tests.reward.test_code_programs import BY_HAND
from vapo_megatron.reward.code_verifier import CodeVerifier
from vapo_megatron.reward.verifier import Problem
from vapo_megatron.sandbox.client import Budget
answer = MARK + "7123456789"
verifier = CodeVerifier(30.0, 60.0)
print(os.geteuid() == 0, verifier._sandbox.refusal)
looked = verifier._sandbox.run(BY_HAND, "", Budget(30.0, 1 << 30, 1 << 16))
print(*looked.output.decode().split())
for kind, shape, response in hostile_programs(answer, "/nowhere", "/nowhere"):
    if kind in list(ATTEMPTS)[::3] or kind == "fork_bomb":
        (verdict,) = verifier.score([response], [Problem("", "", columns(shape, answer))])
        if verdict.is_correct:
            print(kind)
right = fenced(f"import threading as t; t.Thread().start()\\ndef f(x): return {answer!r}")
(verdict,) = verifier.score([right], [Problem("", "", columns("call", answer))])
print(verdict.status)
"""


@pytest.mark.parametrize("user", ["root", "other"])
def test_other_users_programs_are_confined_too(user):
    done = subprocess.run(
        [sys.executable, "-c", OTHER_USER, user], cwd=ROOT, capture_output=True, text=True
    )
    if "no user namespaces" in done.stderr:
        pytest.skip("the kernel has no user namespaces for this user")
    assert done.returncode == 0, done.stderr
    first, seen, *others = done.stdout.splitlines()
    warning = "warning: the verifier code runs programs as this process's own user"
    if user == "root":
        assert first.startswith("True [Errno ") and done.stderr.startswith(warning)
    else:
        assert (first, done.stderr) == ("False ", "")
    # What these count is the machine's threads, and what threads may take in memory.
    assert set(others) - {"many_threads"} == {"correct"}
    # The filter alone does not keep a call made by hand from seeing that a file is there.
    assert (seen == "-1 -1 -1") == (user == "root")


def _tree_seconds(processes):
    times = [p.cpu_times() for p in processes]
    return sum(t.user + t.system + t.children_user + t.children_system for t in times)


@pytest.mark.slow
def test_fifty_programs_a_second_on_two_cores():
    """In CPU seconds of all processes, which a loaded machine does not stretch."""
    three = {"input_output": {"inputs": ["1 2", "3 4", "5 6"], "outputs": ["3", "7", "11"]}}
    call = {"input_output": {"inputs": [[1], [2], [3]], "outputs": [2, 3, 4], "fn_name": "f"}}
    kinds = [
        ("import sys\nprint(sum(map(int, sys.stdin.read().split())))", three),
        ("import heapq\ndef f(x): return heapq.nsmallest(1, [x + 1, 99])[0]", call),
        ("def f(x): return x + 1", PLUS_ONE),
        ("import numpy as np\nprint(np.array(input().split(), int).sum())", three),
    ]
    count = 400
    responses = [fenced(kinds[i % 4][0]) for i in range(count)]
    problems = [Problem("", "", kinds[i % 4][1]) for i in range(count)]
    with Verifiers(RewardConfig(verifier="code", num_workers=2)) as verifiers:
        before = psutil.Process().children(recursive=True)
        list(verifiers.score(responses[:8], problems[:8]))
        workers = [psutil.Process(), *psutil.Process().children(recursive=True)]
        workers = [process for process in workers if process not in before]
        began, cpu_began = time.monotonic(), _tree_seconds(workers)
        verdicts = list(verifiers.score(responses, problems))
        took, used = time.monotonic() - began, _tree_seconds(workers) - cpu_began
    assert [v for v in verdicts if not v.is_correct] == []
    print(
        f"{count} programs of three tests: {1e3 * used / count:.1f} ms of CPU each, so "
        f"{count / (used / 2):.0f} a second on two cores; {count / took:.0f} a second just now"
    )
    assert count / (used / 2) >= 50
