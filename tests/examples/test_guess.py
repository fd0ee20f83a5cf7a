"""GEM's game: what plans its runs. Training on it is slow: the package comes from an index."""

import subprocess
import sys

import pytest

from tests.examples.tiny import ROOT

# isort: split
from guess import base, game, main
from runner import tables

from vapo_megatron.rollout.tokenizer import load_tokenizer
from vapo_megatron.rollout.turn_tokens import TurnTokens


def test_returns_are_read_by_step():
    rows = [{"step": 0, main.RETURN: 0.7}, {"step": 1}, {"step": 10, main.RETURN: 0.9}]
    assert main.returns(rows) == [(0, 0.7), (10, 0.9)]
    other = [{"step": 0, main.RETURN: 0.7}, {"step": 5, main.RETURN: 0.8}]
    runs = {"vapo": {0: rows}, "grpo": {0: other}}
    found = tables.by_step(runs, main.returns)
    cells = {name: cell(runs, "grpo") for name, cell in found.items()}
    assert cells == {
        "before": "0.700", "in the end": "0.800", "each seed": "0.800",
        "less the first arm": "-0.100, below in 1 of 1",
    }  # fmt: skip


def test_what_starts_the_runs_loads_no_torch():
    """Their processes are forked from it, and would inherit its threads."""
    code = "import sys, guess.main; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT / "examples/tiny", check=True)


def test_what_the_game_says_is_read_as_it_was_in_training(tmp_path, monkeypatch):
    """Observations are encoded as text, in which added tokens would not be found."""
    said = "At turn 1, you guessed 4, and the target number is higher than 4."
    pieces = ["At turn ", ", you guessed ", ", and the target number is ", "higher", " than ", "."]
    monkeypatch.setattr(game, "pieces", lambda: [*"0123456789", *pieces, "\\boxed{", "}"])
    base.save_tokenizer(tmp_path, 64)
    tokenizer = load_tokenizer(tmp_path)
    turns = TurnTokens(tokenizer, (tokenizer.eos_token_id,), None)
    found = turns.after_action(said)
    assert found == tokenizer(said)["input_ids"] and len(found) == 9
    assert tokenizer.decode(found) == said and tokenizer.unk_token_id not in found


@pytest.mark.slow
def test_the_quick_form(tmp_path):
    subprocess.run(
        ["bash", "examples/run_guess_tiny.sh", "--quick", "--out", str(tmp_path)], cwd=ROOT,
        check=True, timeout=900,
    )  # fmt: skip
    table = (tmp_path / "table.md").read_text()
    assert "| VAPO |" in table and "| GRPO |" in table and "after 5 steps" in table
