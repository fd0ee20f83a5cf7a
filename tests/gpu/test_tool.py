"""tools/gpu_smoke.py around its sections: what goes wrong in one is a row, and the rest goes on.

The sections themselves: test_sections.py. Not exercised: the time that all of them take on a GPU.
"""

import json
import subprocess
import sys

import pytest
import torch

from tools import gpu_smoke
from tools.smoke.report import Row, judged, markdown

BROKEN = "tests.gpu.broken_sections"


def test_each_failure_is_a_row(monkeypatch, tmp_path, capsys):
    sections = {
        "raises": gpu_smoke.Section(BROKEN, "raises", 60),
        "crashes": gpu_smoke.Section(BROKEN, "crashes", 60),
        "hangs": gpu_smoke.Section(BROKEN, "hangs", 3),
        "fine": gpu_smoke.Section(BROKEN, "fine", 60, ("a case",)),
    }
    monkeypatch.setattr(gpu_smoke, "SECTIONS", sections)
    assert gpu_smoke.main(["--device", "cpu", "--small", "--out", str(tmp_path / "out")]) == 1
    tree = json.loads((tmp_path / "out/gpu_smoke.json").read_text())
    found = {row["section"]: (row["measured"], row["passed"]) for row in tree["rows"]}
    assert found == {
        "raises": ("RuntimeError: CUDA error: out of | memory", False),
        "crashes": ("the process ended with code -9 and no rows", False),
        "hangs": ("longer than 3 s", False),
        "fine": ("6 responses", True),
    }
    assert tree["rows"][3]["figures"] == {"seconds": 1.5}
    assert tree["machine"]["torch"] == f"torch {torch.__version__}"
    assert "and a second line" in (tmp_path / "out/gpu_smoke.log").read_text()
    printed = capsys.readouterr().out
    assert "[1/4] raises ..." in printed and ", 1 FAILED\n" in printed
    assert (tmp_path / "out/gpu_smoke.md").read_text() in printed
    assert gpu_smoke.main(["--device", "cpu", "--small", "--sections", "fine"]) == 0


def test_a_spent_budget_is_a_row(monkeypatch, tmp_path):
    arguments = gpu_smoke._parser().parse_args(["--budget", "7"])
    (row,) = gpu_smoke.run_apart("x", gpu_smoke.Section("m", "f", 9), arguments, tmp_path, 0.0)
    assert (row.measured, row.passed) == ("not run: the 7 s of --budget are spent", False)


def test_the_budget_is_under_eight_minutes():
    """What the sections may take at most, with the few seconds that each needs to be ended."""
    assert gpu_smoke._parser().parse_args([]).budget + 10 < 480


@pytest.mark.parametrize(
    "argv,said",
    [
        ([], "finds no GPU here; --device cpu --small runs the same code"),
        (["--device", "cpu"], "--device=cpu needs --small"),
        (["--sections", "none"], "--sections=none: must be among attention,reference,parity"),
        (["--budget", "0"], "--budget=0 must be positive"),
    ],
)
def test_refusals(monkeypatch, capsys, argv, said):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_smoke.main(argv) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_missing_packages_are_named(monkeypatch, capsys):
    monkeypatch.setitem(gpu_smoke.NEEDED, "no_such_module", "no-such-package")
    monkeypatch.setitem(gpu_smoke.NEEDED, "no_such.module", "another")
    assert gpu_smoke.main(["--device", "cpu", "--small"]) == 2
    assert capsys.readouterr().err == (
        "gpu_smoke: not installed here: no-such-package, another; install with pip\n"
    )


def test_the_tool_itself_needs_nothing():
    """It can say what is missing without torch, numpy or any other package."""
    code = "import tools.gpu_smoke, sys; print([m for m in ('torch', 'numpy', 'yaml', 'pydantic') "
    code += "if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_table():
    rows = [Row("a", "b | c", "two\nlines"), judged("s", "c", "error", float("nan"), 1.0)]
    assert markdown({"date": "2026-01-02", "device": "X"}, rows).splitlines() == [
        "2026-01-02, X",
        "",
        "| section | case  | measured  | limit | result |",
        "|---------|-------|-----------|-------|--------|",
        "| a       | b / c | two lines |       | ok     |",
        "| s       | c     | error nan | 1     | FAILED |",
    ]


@pytest.mark.parametrize("error,passed", [(0.9, True), (1.0, True), (1.1, False)])
def test_what_is_judged(error, passed):
    assert judged("s", "c", "error", error, 1.0).passed is passed


@pytest.mark.slow
def test_every_section_on_a_cpu(tmp_path):
    """The command that docs/gpu.md names."""
    command = [sys.executable, "tools/gpu_smoke.py", "--device", "cpu", "--small", "--out"]
    done = subprocess.run([*command, str(tmp_path), "--budget", "1000"], timeout=1100)
    assert done.returncode == 0
    rows = json.loads((tmp_path / "gpu_smoke.json").read_text())["rows"]
    assert {row["section"] for row in rows} == {
        "attention", "parity", "logprobs", "offload", "actor", "critic",
    }  # fmt: skip
