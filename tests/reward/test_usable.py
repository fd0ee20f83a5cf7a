"""Rows that their verifier refuses, and prose that math judges: refused, left out, or counted."""

import pytest

from tests import jsonl
from vapo_megatron.config import RewardConfig
from vapo_megatron.data.problems import load_problems
from vapo_megatron.data.prompts import PromptDataset
from vapo_megatron.errors import DataError
from vapo_megatron.reward.usable import settle

PROSE = "The answer depends on the initial velocity"


def dataset(path, *answers, **columns):
    rows = [{"prompt": f"p{i}", "answer": answer, **columns} for i, answer in enumerate(answers)]
    jsonl.write(path, rows)
    unreadable = {}
    return PromptDataset(
        load_problems(path, unreadable=unreadable), lambda text: [1], path=path.name, seed=0,
        shuffle=False, max_prompt_tokens=9, left_out=unreadable,
    )  # fmt: skip


def test_a_refused_row_is_named_with_the_option(tmp_path):
    data = dataset(tmp_path / "a.jsonl", "1", "x", "2")
    with pytest.raises(DataError, match="a.jsonl: row 1 .from 0. is bad; .*data.skip_unusable=tr"):
        settle(data, {0: "is too", 1: "is bad"}, RewardConfig(), skip=False)
    with pytest.raises(DataError, match="answer=True must .*, or set data.skip_unusable=true"):
        (tmp_path / "b.jsonl").write_text('{"prompt": "p", "answer": true}\n')
        load_problems(tmp_path / "b.jsonl")


def test_refused_rows_are_left_out_and_counted_with_one_of_them(tmp_path):
    data = dataset(tmp_path / "a.jsonl", "1", True, "x", "2")
    (line,) = settle(data, {1: "has no ground truth", 2: "is bad"}, RewardConfig(), skip=True)
    assert line.startswith("2 of 4 rows of a.jsonl are left out (data.skip_unusable=true), such as")
    assert "a.jsonl, row 1 (from 0), which cannot be read:" in line and "answer=True" in line
    assert [prompt.index for prompt in data.next(4)] == [0, 3, 0, 3]
    assert settle(dataset(tmp_path / "a.jsonl", "1"), {}, RewardConfig(), skip=True) == []


def test_prose_that_math_judges_is_counted_with_one_of_them(tmp_path):
    answers = ["1", PROSE, "\\sin x", "12 apples", "east", PROSE]
    data = dataset(tmp_path / "a.jsonl", *answers)
    (line,) = settle(data, {}, RewardConfig(), skip=False)
    assert line.startswith("3 of 6 ground truths of a.jsonl are prose, but math judges them, such")
    assert f"a.jsonl, row 1 (from 0): {PROSE!r}; math compares words" in line
    exact = RewardConfig(verifier="exact")
    assert settle(data, {}, exact, skip=False) == []
    assert settle(data, {}, RewardConfig(), skip=False, has_default=True) == []
    assert settle(dataset(tmp_path / "a.jsonl", PROSE, verifier="math"), {}, exact, skip=False)


def test_letters_that_nobody_chose_math_for_are_said(tmp_path):
    choices = "A", "(B)", "C.", "\\text{(D)}", "7", "x"
    data = dataset(tmp_path / "a.jsonl", *choices)
    (line,) = settle(data, {}, RewardConfig(num_workers=1), skip=False)
    assert line.startswith("4 of 6 ground truths of a.jsonl are letters, such as 'A', and reward.v")
    assert settle(data, {}, RewardConfig(verifier="math"), skip=False) == []
    assert settle(data, {}, RewardConfig(), skip=False, has_default=True) == []
    assert settle(dataset(tmp_path / "a.jsonl", "A", "1"), {}, RewardConfig(), skip=False) == []
    by_row = dataset(tmp_path / "a.jsonl", *choices, verifier="exact")
    assert settle(by_row, {}, RewardConfig(), skip=False) == []
