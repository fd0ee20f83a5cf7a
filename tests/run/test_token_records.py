"""What a run keeps of some responses, token by token; over real gloo processes.

Not exercised: NCCL, and vLLM's own text (tests/e2e compare whole runs).
"""

import math
from pathlib import Path

import pytest
import torch

from tests.cut import batch_of
from vapo_megatron.data.batch import StepSummary
from vapo_megatron.data.rollout import Prompt, Rollout, ScoredRollout
from vapo_megatron.run.token_records import gather_token_data, group_records, kept, token_pieces

ROOT = Path(__file__).resolve().parents[2]
NUM, SHOWN = 9, [1, 4, 6]
TRAINED = {1: [list(range(NUM))], 2: [[7, 1, 3, 0, 8], [6, 5, 4, 2]]}


def length(position: int) -> int:
    return 2000 if position == 6 else position % 4


def number(position: int, token: int, row: int) -> float:
    if (position, token, row) == (1, 0, 1):
        return math.nan
    return round(position - token / 1000 - row / 10, 3)


def gathered(tp_size: int, dp_size: int, has_critic: bool = True):
    from vapo_megatron.config import ParallelConfig
    from vapo_megatron.parallel import groups

    place = groups.initialize(
        ParallelConfig(world_size=tp_size * dp_size, tensor_model_parallel_size=tp_size)
    )
    mine = TRAINED[dp_size][place.dp_rank]
    lengths = torch.tensor([length(p) for p in mine])
    rows = torch.tensor(
        [[number(p, t, row) for p in mine for t in range(length(p))] for row in range(3)]
    )
    values = rows[0] if has_critic else None
    columns = {"positions": torch.tensor(mine), "values": values, "advantages": rows[1]}
    batch = batch_of(torch.zeros(0), lengths, lengths, **columns)
    everyone = torch.tensor([length(p) for p in range(NUM)])
    summary = StepSummary(*[everyone] * 8)
    return gather_token_data(batch, rows[2], SHOWN, summary, place)


@pytest.mark.parametrize("tp_size,dp_size", [(1, 1), (1, 2), (2, 2)])
def test_numbers_come_from_the_ranks_that_train_on_them(workers, tp_size, dp_size):
    for found in workers.run(tp_size * dp_size, gathered, tp_size, dp_size):
        assert list(found) == SHOWN
        for position, numbers in found.items():
            tokens = kept(length(position))
            for row, name in enumerate(("values", "advantages", "entropy")):
                expected = [number(position, t, row) for t in tokens]
                expected = [None if math.isnan(x) else x for x in expected]
                assert numbers[name] == expected, (position, name)
            assert len(tokens) <= 1024
        assert found[1]["advantages"] == [None] and found[4]["values"] == []


def test_without_a_critic_there_are_no_values(workers):
    (found,) = workers.run(1, gathered, 1, 1, False)
    assert found[4] == {"advantages": [], "entropy": []}
    assert found[6]["entropy"][0] == number(6, 0, 2) and set(found[6]) == {"advantages", "entropy"}


def test_both_ends_of_a_long_response_are_kept():
    assert kept(0) == [] and kept(1024) == list(range(1024))
    assert kept(1025) == [*range(512), *range(513, 1025)]
    assert len(kept(10**6)) == 1024 and kept(10**6)[-1] == 10**6 - 1


def by_bytes(ids) -> str:
    """A byte-level tokenizer: id = byte."""
    return bytes(ids).decode("utf-8", "replace")


def test_pieces_are_the_text():
    text = "x \u00e9\u4e2d\U0001f600</script>"
    ids = list(text.encode())
    pieces = token_pieces(ids, by_bytes)
    # Two bytes, three, four: all but the last of each are empty.
    assert pieces[:11] == ["x", " ", "", "\u00e9", "", "", "\u4e2d", "", "", "", "\U0001f600"]
    assert "".join(pieces) == text and len(pieces) == len(ids)
    # A response may end inside a character, or hold bytes that are none.
    assert token_pieces([120, 0xF0, 0x9F], by_bytes) == ["x", "", "\ufffd"]
    assert token_pieces([0xFF, 120], by_bytes) == ["", "\ufffdx"]


def test_a_space_before_a_word_stays_with_its_token():
    words = {1: "one", 2: "two", 3: "three"}
    pieces = token_pieces([1, 2, 3], lambda ids: " ".join(words[i] for i in ids))
    assert pieces == ["one", " two", " three"]


def test_pieces_of_a_tokenizer_of_the_tiny_example(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples" / "tiny")
    import make_tokenizer

    from vapo_megatron.rollout.tokenizer import load_tokenizer

    make_tokenizer.save_tokenizer(tmp_path, 64)
    tokenizer = load_tokenizer(tmp_path)
    ids = tokenizer.encode("b*2=4") + [tokenizer.eos_token_id]
    pieces = token_pieces(ids, tokenizer.decode)
    assert len(pieces) == len(ids) and "".join(pieces) == tokenizer.decode(ids)


def scored(position: int) -> ScoredRollout:
    prompt = Prompt(position // 2, "p", (1,), "2")
    ids = (97,) * length(position)
    rollout = Rollout(prompt, position % 2, position, ids, (0.0,) * len(ids), False, 0)
    return ScoredRollout(rollout, "a", "correct", 1.0)


def test_records_hold_the_tokens_where_they_are_known():
    group = [scored(2), scored(3)]
    tokens = {p: {"values": [0.5] * length(p)} for p in (2, 3)}
    (record,) = group_records(group, tokens, by_bytes)
    assert [r["tokens"] for r in record["responses"]] == [
        {"pieces": ["a"] * 2, "values": [0.5] * 2},
        {"pieces": ["a"] * 3, "values": [0.5] * 3},
    ]
    (plain,) = group_records(group, {}, None)
    assert not any("tokens" in response for response in plain["responses"])
    # Other ranks sampled the rest of two groups: what is there stays with its own prompt.
    parts = [scored(p) for p in (2, 4, 5)]
    prompts = [r["prompt_index"] for r in group_records(parts, {}, None)]
    assert prompts == [1, 2]
