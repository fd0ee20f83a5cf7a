"""What programs may do as under the plain interpreter, and what they may not answer or see.

Not exercised: a root that may not change its root directory.
"""

import os
import sys
from pathlib import Path

import pytest

from tests.reward.code_attacks import ATTACKS, CHECKED
from tests.reward.test_code_verifier import verifier
from vapo_megatron.reward.code_verifier import MODULES, CodeVerifier
from vapo_megatron.reward.verifier import Problem
from vapo_megatron.sandbox.client import Budget, SandboxUnavailable
from vapo_megatron.sandbox.modules import STANDARD_MODULES

__all__ = ["verifier"]

ROOT = Path(__file__).parents[2]


def judged(verifier, program, columns):
    (verdict,) = verifier.score([f"```python\n{program}\n```"], [Problem("", "", columns)])
    return verdict


def printed(verifier, program, text=""):
    outcome = verifier._sandbox.run(program, text, Budget(20.0, 1 << 30, 1 << 20))
    assert outcome.failure == "", outcome
    return outcome.output.decode()


@pytest.mark.parametrize(
    "program",
    [
        "f = open(1, 'w')\nf.write('out')",
        "f = open(1, 'w', closefd=False)\nprint('out', file=f)",
        "with open(1, 'w') as f: f.write('out')",
        "open(1, 'w').write('out')",
        "import os\nf = os.fdopen(1, 'w')\nf.write('out')",
        "import os\nf = os.fdopen(1, 'wb')\nf.write(b'out')",
        "import os\nf = os.fdopen(os.dup(1), 'w')\nf.write('out')",
        "import os\nos.write(1, b'out')",
        "import sys\nsys.__stdout__.write('out')",
        "import sys, io\nsys.stdout = io.StringIO()\nsys.__stdout__.write('out')",
        "import sys\nsys.stdout = open(1, 'w')\nprint('out')",
        "import sys\nsys.stdout = open(1, 'w', buffering=1 << 20)\nprint('out')",
        "import sys\nsys.stdout = open(1, 'w', buffering=1)\nprint('out', end='')",
        "import sys\nsys.stdout = open(1, 'wb', buffering=0)\nsys.stdout.write(b'out')",
        "import sys\nsys.stdout.buffer.write(b'out')",
        "import sys\nout = sys.stdout.buffer\nsys.stdout = None\nout.write(b'out')",
        "import sys\nout = sys.stdout.detach()\nout.write(b'out')",
        "import io\nf = io.TextIOWrapper(io.FileIO(1, 'w'))\nf.write('out')",
        "import io\nf = io.TextIOWrapper(io.BufferedWriter(io.FileIO(1, 'w')))\nf.write('out')",
        "import io, sys\nsys.stdout = io.TextIOWrapper(sys.stdout.buffer, write_through=False)\n"
        "print('out')",
        "import sys\nprint('out')\nsys.stdout.close()",
        "import sys\nprint('out')\nsys.exit(0)",
        "import sys\nclass A:\n    def __init__(self):\n        self.me = self\n"
        "        self.f = open(1, 'w')\na = A()\na.f.write('out')\ndel a",
        "import threading as t\nf = open(1, 'w')\nt.Thread(target=f.write, args=['out']).start()",
        "import threading\nfor c in 'out':\n    t = threading.Thread(target=print, args=[c],"
        " kwargs={'end': ''})\n    t.start()\n    t.join()",
        "import threading, time\n"
        "def late():\n    time.sleep(.05)\n    print('out')\nthreading.Thread(target=late).start()",
        "import atexit, io, sys\nf = open(1, 'w')\natexit.register(f.write, 'out')",
        "import io, os\nclass Out(io.IOBase):\n    def __init__(self): self.b = b''\n"
        "    def write(self, t): self.b += t.encode()\n"
        "    def flush(self): os.write(1, self.b); self.b = b''\n"
        "import sys\nsys.stdout = Out()\nprint('out')",
        "f = open('/dev/stdout', 'w')\nf.write('out')",
        "import logging, sys\nlogging.basicConfig(stream=open(1, 'w'), format='%(message)s')\n"
        "logging.warning('out')",
        "def g():\n    f = open(1, 'w')\n    f.write('out')\n    yield f\nx = g()\nnext(x)",
    ],
)  # fmt: skip
def test_output_through_a_programs_own_files_is_kept(verifier, program):
    assert printed(verifier, program).strip() == "out"


@pytest.mark.parametrize(
    "read",
    [
        "open(0).read()", "open(0, 'rb').read().decode()", "os.read(0, 99).decode()",
        "os.fdopen(0).read()", "io.TextIOWrapper(io.FileIO(0)).read()", "sys.__stdin__.read()",
        "io.open(0, closefd=False).read()", "open(0, buffering=1 << 20).readline()",
        "io.TextIOWrapper(io.BufferedReader(io.FileIO(0))).read()", "open('/dev/stdin').read()",
        "sys.stdin.buffer.read().decode()", "os.fdopen(os.dup(0)).read()", "next(open(0))",
        "next(fileinput.input())", "input()",
    ],
)  # fmt: skip
def test_input_through_a_programs_own_files(verifier, read):
    program = f"import fileinput, io, os, sys\nprint({read})"
    assert printed(verifier, program, "in \xe9\n").strip() == "in \xe9"


def test_errors_through_a_programs_own_files_are_told(verifier):
    program = "f = open(2, 'w')\nf.write('the reason')\nraise SystemExit(3)"
    columns = {"input_output": {"inputs": [""], "outputs": ["1"]}}
    assert judged(verifier, program, columns).note == "test 1 of 1: the reason"


ENDS = [
    "StopIteration", "StopAsyncIteration", "GeneratorExit", "SystemExit", "SystemExit(0)",
    "KeyboardInterrupt", "BaseException", "AssertionError", "type('E', (BaseException,), {})",
    "type('E', (StopIteration,), {})", "type('StopIteration', (Exception,), {})",
]  # fmt: skip


@pytest.mark.parametrize("error", ENDS)
@pytest.mark.parametrize(
    "columns",
    [
        {"input_output": {"inputs": [[1]], "outputs": [2], "fn_name": "f"}},
        {"test_list": ["assert f(1) == 2"]},
        {"test": "assert all(map(lambda x: f(x) == 2, [1]))\nfor y in map(f, [1]): assert y == 2"},
        {"test": "def check(candidate):\n    assert list(map(candidate, [1])) in ([], [2])",
         "entry_point": "f"},
        {"test": "assert not [y for y in map(f, [1]) if y != 2]\nassert next(map(f, [1]), 2) == 2"},
    ],
)  # fmt: skip
def test_what_a_program_raises_passes_no_test(verifier, columns, error):
    assert judged(verifier, f"def f(x): raise {error}", columns).status == "wrong"
    assert judged(verifier, f"raise {error}", columns).status == "wrong"
    assert judged(verifier, "def f(x): return 2", columns).is_correct


def test_an_end_is_no_error_that_a_test_expects(verifier):
    text = "try:\n    f(1)\nexcept {}:\n    pass\nelse:\n    assert False"
    for error in ("SystemExit", "KeyboardInterrupt", "GeneratorExit"):
        for caught in ("Exception", "EOFError", "BaseException", error):
            columns = {"test": text.format(caught)}
            assert judged(verifier, f"def f(x): raise {error}", columns).status == "wrong"
    columns = {"test": text.format("KeyError")}
    assert judged(verifier, "def f(x): raise KeyError(x)", columns).is_correct


def test_a_program_that_ends_well_may_raise_in_a_script(verifier):
    columns = {"input_output": {"inputs": [""], "outputs": ["1"]}}
    for error in ENDS:
        is_right = error.startswith("SystemExit")
        found = judged(verifier, f"print(1)\nraise {error}", columns)
        assert found.is_correct == is_right, error


@pytest.mark.parametrize("name", ATTACKS)
def test_attacks(verifier, name):
    columns, program, honest = ATTACKS[name]
    assert judged(verifier, program, columns).status == "wrong"
    assert (verifier.check(Problem("", "", columns)) is None) == (name in CHECKED)
    if honest:
        assert judged(verifier, honest, columns).is_correct


def test_the_attacks_are_many():
    assert len({(str(c), p) for c, p, _ in ATTACKS.values()}) == len(ATTACKS) >= 30


# What is outside is the repository, which any user can see.
LOOKS = {
    "stat": "os.stat({path!r})",
    "root": "os.stat('/')",
    "here": "os.stat('.')",
    "lstat": "os.lstat({path!r})",
    "follow": "os.stat({path!r}, follow_symlinks=False)",
    "exists": "os.path.exists({path!r}) or None.x",
    "lexists": "os.path.lexists({path!r}) or None.x",
    "isdir": "os.path.isdir('/etc') or None.x",
    "size": "os.path.getsize({path!r})",
    "access": "os.access({path!r}, os.F_OK) or None.x",
    "list": "os.listdir('/')",
    "scan": "next(os.scandir('/'))",
    "walk": "next(os.walk('/'))",
    "link": "os.readlink('/proc/self/exe')",
    "pathlib": "pathlib.Path({path!r}).stat()",
    "pathlib_exists": "pathlib.Path({path!r}).exists() or None.x",
    "glob": "glob.glob('/*')[0]",
    "open": "open({path!r})",
    "above": "os.stat('../../../../..' + {path!r})",
    "statvfs": "os.statvfs('/')",
    "attributes": "os.listxattr({path!r})",
}
BY_HAND = """
import ctypes, os
libc, buffer = ctypes.CDLL(None), ctypes.create_string_buffer(256)
number = 262 if os.uname().machine == "x86_64" else 79
for path in (b"/etc/passwd", b"/proc/1/stat", b"../../../etc/passwd"):
    print(libc.syscall(number, -100, path, buffer, 0x1000))
"""


def test_programs_see_no_files(verifier):
    lines = ["import glob, os, pathlib, shutil"]
    for name, look in LOOKS.items():
        text = look.format(path="/etc/passwd")
        lines += ["try:", f"    {text}", f"    print({name!r})", "except Exception: pass"]
    assert printed(verifier, "\n".join(lines)) == ""
    assert (
        printed(verifier, "import os\nprint(os.fstat(0).st_size, os.stat(0).st_size)", "abc")
        == "3 3\n"
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="docs/reward.md: only root can hide files")
def test_under_root_programs_see_none_by_hand_either(verifier):
    assert printed(verifier, BY_HAND) == "-1\n" * 3


def test_modules_are_found_where_python_would_find_them(monkeypatch, tmp_path):
    Path(tmp_path, "on_the_path.py").write_text("import numpy\nvalue = 7")
    monkeypatch.chdir(tmp_path)
    for path in (f"/nowhere{os.pathsep}{tmp_path}", ".", f":{tmp_path}:"):
        monkeypatch.setenv("PYTHONPATH", path)
        found = CodeVerifier(modules=["on_the_path"])
        try:
            program = "import on_the_path, sys\nprint(on_the_path.value, sys.path)"
            assert printed(found, program) == "7 []\n"
        finally:
            found._sandbox.close()
    monkeypatch.delenv("PYTHONPATH")
    with pytest.raises(SandboxUnavailable, match="No module named 'on_the_path'"):
        CodeVerifier(modules=["on_the_path"])


def test_the_documented_modules_are_those_that_programs_can_import(verifier):
    page = (ROOT / "docs" / "reward.md").read_text()
    section = page.partition("### Modules that programs can import")[2].partition("\n### ")[0]
    listed = section.partition("```text\n")[2].partition("```")[0].split()
    assert listed == sorted(name for name in STANDARD_MODULES if name[0] != "_")
    others = set(section.partition("Not among them")[2].split("`")[1::2]) - {"modules"}
    assert len(others) > 5
    # "this" prints.
    standard = {n for n in sys.stdlib_module_names if n[0] != "_"} - {"this"}
    names = sorted({*standard, *others, *listed, *MODULES})
    program = f"import importlib\nfor name in {names}:\n"
    program += "    try: importlib.import_module(name)\n    except ImportError: print(name)"
    missing = set(printed(verifier, program).split())
    assert missing == (standard | others) - {name.partition(".")[0] for name in listed}
