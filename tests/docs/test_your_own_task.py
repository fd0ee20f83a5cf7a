"""docs/your-own-task.md as it is followed, with a tiny model for SmolLM2.

Not exercised: what a pretrained model learns, which the page measured.
"""

import json
import os
import re
import runpy
import shlex
import subprocess
import sys

import pytest

from tests.docs.commands import ROOT, commands
from tests.rollout.chat_tokenizer import SIZE, write_chat_tokenizer
from tests.weights.tiny_hf import write_tiny_hf
from vapo_megatron.cli.main import main

PAGE = (ROOT / "docs/your-own-task.md").read_text()
((CODE,), (OWN,)) = (
    re.findall(rf"^```{kind}\n(.*?)^```$", PAGE, re.M | re.S) for kind in ("python", "yaml")
)
COMMANDS = [command.text for command in commands("docs/your-own-task.md")]
FEW = (
    "algorithm.value_pretraining_steps=1", "algorithm.policy_steps=1", "evaluation.samples=1",
    "evaluation.every_steps=0", "rollout.kv_cache_bytes=67108864", "reward.num_workers=1",
)  # fmt: skip


@pytest.fixture
def place(tmp_path, monkeypatch):
    """The page's files below models/base and mine/."""
    write_tiny_hf(tmp_path / "models/base", num_layers=2, hidden=128, ffn=32, vocab=SIZE)
    write_chat_tokenizer(tmp_path / "models/base")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/largest.py").write_text(CODE)
    (tmp_path / "mine/own.yaml").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def command(start):
    """The page's command that begins so, without `vapo`."""
    (found,) = [text for text in COMMANDS if text.startswith(start) and "--dry-run" not in text]
    return shlex.split(found)[1:]


def test_the_page_is_short():
    lines = [line for line in PAGE.splitlines() if line.strip()]
    assert len(lines) <= 70 and len([line for line in CODE.splitlines() if line.strip()]) <= 25


def test_its_verifier_judges_as_it_says(place):
    score = runpy.run_path("mine/largest.py")["score"]
    given = {"74": 1.0, "It is 74.": 1.0, "31": 0.2, "31 or 74": 0.0, "none": 0.0}
    assert {text: score(text, "74") for text in given} == given


def test_from_the_problems_to_a_configuration_that_passes(place, capsys):
    subprocess.run([sys.executable, *command("python mine/largest.py")], check=True)
    rows = [json.loads(line) for line in (place / "mine/train.jsonl").open()]
    assert len(rows) == 300 and all(row["answer"] in row["prompt"][0]["content"] for row in rows)
    assert main(command("vapo init")) == 0
    train = command("vapo train")
    assert main([*train, "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "mine/largest.py:score" in shown and "max_response_tokens: 24" in shown


@pytest.mark.slow
def test_the_whole_page(place):
    subprocess.run([sys.executable, *command("python mine/largest.py")], check=True)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    for start, more in (("vapo init", ()), ("vapo train", FEW), ("vapo sample", ())):
        done = subprocess.run(
            [sys.executable, "-m", "vapo_megatron", *command(start), *more],
            env=environment, capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-2000:]
    assert (place / "runs/largest/report.html").exists()
