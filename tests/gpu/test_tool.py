"""tools/gpu_smoke.py around its sections: what goes wrong in one is a row, and the rest goes on.

The sections themselves: test_sections.py. Not exercised: the time that all of them take on a GPU.
"""

import json
import subprocess
import sys
import time
from importlib import metadata

import pytest
import torch

from tests.alone import loaded_by
from tools import gpu_smoke
from tools.smoke.report import MEANINGS, Row, judged, markdown, write_report

BROKEN = "tests.gpu.broken_sections"


def test_each_failure_is_a_row(monkeypatch, tmp_path, capsys):
    sections = {
        "raises": gpu_smoke.Section(BROKEN, "raises", 60),
        "crashes": gpu_smoke.Section(BROKEN, "crashes", 60),
        "hangs": gpu_smoke.Section(BROKEN, "hangs", 2),
        "half": gpu_smoke.Section(BROKEN, "crashes_half_way", 60),
        "fine": gpu_smoke.Section(BROKEN, "fine", 60, ("a case",)),
    }
    monkeypatch.setattr(gpu_smoke, "SECTIONS", sections)
    assert gpu_smoke.main(["--device", "cpu", "--small", "--out", str(tmp_path / "out")]) == 1
    tree = json.loads((tmp_path / "out/gpu_smoke.json").read_text())
    found = [(row["section"], row["measured"], row["verdict"]) for row in tree["rows"]]
    assert found == [
        ("raises", "RuntimeError: CUDA error: out of | memory", "FAILED"),
        ("crashes", "the process ended with code -9 and no rows", "FAILED"),
        ("hangs", "longer than 8 s", "FAILED"),
        ("half", "done", "ok"),
        ("half", "the process ended with code -9 and no more rows", "FAILED"),
        ("fine", "6 responses", "ok"),
    ]
    assert tree["rows"][5]["figures"] == {"seconds": 1.5}
    assert tree["machine"]["torch"] == f"torch {metadata.version('torch')}"
    log = (tmp_path / "out/gpu_smoke.log").read_text()
    assert "and a second line" in log
    assert "in hangs\n" in log, "where it hangs"
    printed = capsys.readouterr().out
    assert "[1/5] raises ..." in printed and ", 1 FAILED\n" in printed
    assert (tmp_path / "out/gpu_smoke.md").read_text() in printed
    assert gpu_smoke.main(["--device", "cpu", "--small", "--sections", "fine"]) == 0


def test_a_rank_that_fails_ends_the_others(monkeypatch, tmp_path):
    monkeypatch.setattr(gpu_smoke, "_GRACE_SECONDS", 1)
    section = gpu_smoke.Section(BROKEN, "one_rank_raises", 300, on_all_gpus=True)
    arguments = gpu_smoke._parser().parse_args(["--device", "cpu", "--small"])
    started = time.monotonic()
    rows = gpu_smoke.run_apart("ranks", section, arguments, tmp_path, 1000.0)
    assert time.monotonic() - started < 200
    assert [(row.measured, row.verdict) for row in rows] == [
        ("2 ranks", "ok"),
        ("rank 0: stopped 1 s after another rank had failed", "FAILED"),
        ("rank 1: RuntimeError: NCCL error", "FAILED"),
    ]


def test_what_a_section_needs_runs_before(monkeypatch, capsys):
    sections = {
        "lacks": gpu_smoke.Section(BROKEN, "lacks", 60),
        "finds": gpu_smoke.Section(BROKEN, "finds", 60, needs="leaves"),
        "leaves": gpu_smoke.Section(BROKEN, "leaves", 60),
    }
    monkeypatch.setattr(gpu_smoke, "SECTIONS", sections)
    argv = ["--device", "cpu", "--small", "--sections", "lacks,finds"]
    assert gpu_smoke.main(argv) == 0, "what is skipped has not failed"
    printed = capsys.readouterr().out
    assert "[2/3] leaves ..." in printed and "| True " in printed
    assert "no such library" in printed and "Verdict: 1 ok, 0 FAILED, 1 skipped." in printed


def test_every_section_has_a_meaning():
    rows = {name.split("-")[0] for name in gpu_smoke.SECTIONS}
    assert rows | {"network"} == set(MEANINGS), "network is torchrun's"


def test_the_json_names_settings_and_no_secrets(monkeypatch, tmp_path):
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    monkeypatch.setenv("VLLM_API_KEY", "hidden")
    write_report(tmp_path, {}, [])
    text = (tmp_path / "gpu_smoke.json").read_text()
    assert json.loads(text)["environment"]["NCCL_NVLS_ENABLE"] == "0" and "hidden" not in text


def test_a_spent_budget_is_a_row(monkeypatch, tmp_path):
    arguments = gpu_smoke._parser().parse_args(["--budget", "7"])
    (row,) = gpu_smoke.run_apart("x", gpu_smoke.Section("m", "f", 9), arguments, tmp_path, 0.0)
    assert (row.measured, row.passed) == ("not run: the 7 s of --budget are spent", False)


def test_the_budget_is_under_ten_minutes():
    """What the sections may take at most, with the few seconds that each needs to be ended."""
    assert gpu_smoke._parser().parse_args([]).budget + 10 < 600


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
    assert loaded_by("import tools.gpu_smoke", ("torch", "numpy", "yaml", "pydantic")) == []


def test_the_table():
    rows = [Row("a", "b | c", "two\nlines"), judged("s", "c", "error", float("nan"), 1.0)]
    assert markdown({"date": "2026-01-02", "device": "X"}, rows).splitlines() == [
        "2026-01-02, X",
        "",
        "| section | case  | measured  | limit | result |",
        "|---------|-------|-----------|-------|--------|",
        "| a       | b / c | two lines |       | ok     |",
        "| s       | c     | error nan | 1     | FAILED |",
        "",
        "Verdict: 1 ok, 1 FAILED, 0 skipped.",
        "Report gpu_smoke.json and gpu_smoke.log of --out (docs/gpu.md), whatever they say.",
    ]
    failed = judged("nccl", "c", "error", 2.0, 1.0)
    assert "\n- nccl: GPUs do not communicate rightly: " in markdown({}, [failed, failed])


@pytest.mark.parametrize("error,passed", [(0.9, True), (1.0, True), (1.1, False)])
def test_what_is_judged(error, passed):
    assert judged("s", "c", "error", error, 1.0).passed is passed


@pytest.mark.slow
@pytest.mark.timeout(2000)
def test_every_section_on_a_cpu(tmp_path):
    """The command that docs/gpu.md names."""
    command = [sys.executable, "tools/gpu_smoke.py", "--device", "cpu", "--small", "--out"]
    done = subprocess.run([*command, str(tmp_path), "--budget", "1800"], timeout=1900)
    assert done.returncode == 0
    rows = json.loads((tmp_path / "gpu_smoke.json").read_text())["rows"]
    assert {row["section"] for row in rows} == {
        "attention", "parity", "te", "nccl", "sampler", "step", "logprobs", "offload", "actor",
        "critic",
    }  # fmt: skip
