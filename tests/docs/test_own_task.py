"""docs/reward.md as a user follows it: a function, then a class, in a file of one's own.

Not exercised: that anything is learned.
"""

import re

import pytest

from tests import jsonl
from tests.docs.commands import ROOT, commands
from tests.e2e.test_run import SMALL, TINY
from tests.weights.tiny_hf import write_tiny_model
from vapo_megatron.cli.train import main
from vapo_megatron.config import RewardConfig
from vapo_megatron.reward.verifier import Problem, Verdict
from vapo_megatron.reward.verifiers import Verifiers

PAGE = (ROOT / "docs/reward.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S)
FUNCTION, CODE, _, GROUP = BLOCKS
COMMAND = next(c for c in commands("docs/reward.md") if "near.py:near" in c.text).text
OPTIONS = [word for word in COMMAND.split() if "=" in word]


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A directory with near.py and near.jsonl, and the arguments of the page's command there."""
    write_tiny_model(tmp_path / "model", num_layers=2, hidden=128, ffn=32, vocab=64)
    (tmp_path / "near.py").write_text("\n".join([FUNCTION, CODE, GROUP]))
    rows = [{"prompt": f"w{i + 3}", "answer": str(9 - i), "tolerance": i % 3} for i in range(8)]
    jsonl.write(tmp_path / "near.jsonl", rows)
    monkeypatch.chdir(tmp_path)
    return ["--config", str(TINY), *SMALL, f"model.hf_path={tmp_path}/model", *OPTIONS]


def test_twenty_lines_are_enough():
    lines = [line for line in CODE.splitlines() if line.strip()]
    assert len(lines) <= 20


@pytest.mark.parametrize("options", [["--dry-run"], []])
def test_what_a_dry_run_and_a_launch_find_by_a_made_up_response(place, tmp_path, capfd, options):
    (tmp_path / "near.py").write_text("def near(response, answer):\n    return response + 1\n")
    assert main([*place, *options], worker=["-m", "nothing"]) == 2
    error = capfd.readouterr().err
    assert "error: reward.verifier=near.py:near: called once with a made-up response, it" in error
    assert "raised TypeError: can only concatenate str" in error and "near.py" in error
    assert error.count("\n") == 1


def test_a_dry_run_checks_the_verifier_and_every_problem(place, tmp_path, capsys):
    assert main([*place, "--dry-run"]) == 0
    with (tmp_path / "near.jsonl").open("a") as file:
        file.write('{"prompt": "b+1=9", "answer": "8"}\n')
    assert main([*place, "--dry-run"]) == 2
    assert "row 8 (from 0) is refused by the verifier near.py:near: has no column tolerance" in (
        capsys.readouterr().err
    )
    assert main([*place, "--dry-run", "reward.verifier=near:Near"]) == 2
    assert "row 8 (from 0) is refused by the verifier near:Near: has no column tolerance" in (
        capsys.readouterr().err
    )
    (tmp_path / "near.py").write_text("import torch_of_the_future\n" + CODE)
    assert main([*place, "--dry-run", "reward.verifier=near:Near"]) == 2
    error = capsys.readouterr().err
    assert "near:Near cannot be loaded: ModuleNotFoundError" in error and "near.py" in error
    assert "Traceback" not in error


def test_verdicts_of_the_class(place):
    config = RewardConfig(verifier="near:Near", num_workers=1, timeout_seconds=60)
    problems = [Problem("b+2=8", "6", {"tolerance": 1})] * 3
    with Verifiers(config) as verifiers:
        found = list(verifiers.score(["so. Answer: 5.", "Answer: 8", "Answer: six"], problems))
    assert found == [
        Verdict("correct", 0.5, "5", "1 off", {"off": 1}),
        Verdict("wrong", 1 / 3, "8", "2 off", {"off": 2}),
        Verdict("unparsable", note="no number behind the marker"),
    ]


def test_verdicts_of_the_functions(place):
    config = RewardConfig(
        verifier="near.py:near", verifiers={"short": {"use": "near.py:shortest"}}, num_workers=1,
        timeout_seconds=60,
    )  # fmt: skip
    one = Problem("b+2=8", "6", {"tolerance": 1})
    group = Problem("b+2=8", "6", {"verifier": "short"})
    texts = ["so. Answer: 5.", "Answer: 8", "Answer: six"] + ["is 6", "7", "6", "it is 6"]
    with Verifiers(config) as verifiers:
        found = [v.is_correct for v in verifiers.score(texts, [one] * 3 + [group] * 4)]
    assert found == [True, False, False] + [False, False, True, False]
