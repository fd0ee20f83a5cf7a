"""Responses that a data file gives: what becomes their tokens, which rows are refused, and shares.

Through real tokenizers. Not exercised: training on them (tests/test_given_run.py).
"""

import json
from types import SimpleNamespace

import pytest

from tests.rollout.chat_tokenizer import write_chat_tokenizer
from tests.rollout.tiny_tokenizer import write_tiny_tokenizer
from tests.weights.tiny_hf import EOS, write_tiny_hf
from vapo_megatron.config import load_config
from vapo_megatron.data.parquet import write_table
from vapo_megatron.data.rollout import PER_TOKEN, SAMPLED
from vapo_megatron.errors import ConfigError, DataError
from vapo_megatron.models.hf_config import read_model_shape
from vapo_megatron.rollout.given import GivenSource, count_responses
from vapo_megatron.rollout.inputs import read_inputs
from vapo_megatron.rollout.source import StepRequest

SFT = [
    "algorithm.policy_loss=none", "algorithm.advantage_estimator=none", "algorithm.group_size=1",
    "algorithm.value_pretraining_steps=0", "data.answer_column=null",
    "data.response_column=response", "rollout.max_prompt_tokens=20",
    "rollout.max_response_tokens=6", "algorithm.responses_per_step=3",
    "algorithm.mini_batch_size=3",
]  # fmt: skip
CHAT = [{"role": "user", "content": "1 + 1"}]
TURN, TEXT_END = 2, 0
"""Of the chat tokenizer: what ends a turn, and a text."""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A model with a tokenizer of words, and one with a chat template."""
    tmp = tmp_path_factory.mktemp("models")
    sizes = dict(num_layers=1, hidden=32, ffn=32, vocab=300)
    plain, chat = (write_tiny_hf(tmp / name, **sizes) for name in ("plain", "chat"))
    write_tiny_tokenizer(plain, 64)
    write_chat_tokenizer(chat)
    (chat / "generation_config.json").write_text(json.dumps({"eos_token_id": [TEXT_END, TURN]}))
    return {"plain": plain, "chat": chat}


@pytest.fixture
def read(models, tmp_path, monkeypatch):
    """read(rows, overrides, model=..., held_out=...) -> (configuration, Inputs)."""
    monkeypatch.chdir(tmp_path)

    def run(rows, *overrides, model="plain", held_out=None):
        files = {"train": rows} | ({} if held_out is None else {"test": held_out})
        for name, some in files.items():
            (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in some))
        paths = [f"model.hf_path={models[model]}"]
        if not any(o.startswith("data.sources") for o in overrides):
            paths.append("data.train_path=train.jsonl")
        paths += [] if held_out is None else ["evaluation.path=test.jsonl"]
        c = load_config([], [*SFT, *paths, *overrides])
        shape = read_model_shape(str(models[model]))
        given = shape, str(models[model]), c.data, c.rollout, c.evaluation
        return c, read_inputs(*given, seed=c.seed)

    return run


def row(response, prompt="w3"):
    return {"prompt": prompt, "response": response}


def responses(inputs):
    return [inputs.dataset.response(p).tolist() for p in inputs.dataset.problems]


def test_a_text_gets_the_stop_token_and_ids_are_taken_as_they_are(read):
    _, inputs = read([row("w5 w6"), row([9, 8]), row([7, EOS]), row("w5 </s>")])
    assert responses(inputs) == [[5, 6, EOS], [9, 8], [7, EOS], [5, EOS]]
    assert "response" not in inputs.dataset.rows[0].metadata
    told = "train.jsonl, 4 rows: responses given, 9 tokens, the longest 3"
    assert count_responses(inputs) == [told]


def test_the_column_may_be_the_answers(read):
    rows = [{"prompt": "w3", "answer": "w9"}]
    for answer in ("null", "answer"):
        columns = ("data.response_column=answer", f"data.answer_column={answer}")
        _, inputs = read(rows, *columns)
        assert responses(inputs) == [[9, EOS]]
    assert inputs.dataset.problems[0].answer == "w9"


def test_a_chats_response_ends_its_turn_and_another_ends_the_text(read, models):
    from vapo_megatron.rollout.tokenizer import load_tokenizer

    (i,) = load_tokenizer(models["chat"]).encode("2")
    text = "<|im_start|>user\n1 + 1<|im_end|>\n<|im_start|>assistant\n"
    rows = [row("2", CHAT), row("2", "1 + 1 = "), row("2", text), row([i], CHAT)]
    _, inputs = read(rows, "rollout.max_prompt_tokens=60", model="chat")
    assert inputs.stop_token_ids == (TEXT_END, TURN)
    assert responses(inputs) == [[i, TURN], [i, TEXT_END], [i, TURN], [i]]


def test_a_run_whose_stop_token_is_another(read):
    _, inputs = read([row("w5")], "rollout.stop_token_ids=[11]")
    assert responses(inputs) == [[5, 11]]
    with pytest.raises(ConfigError, match="of the stop tokens 11, 12 none is the tokenizer's end"):
        read([row("w5")], "rollout.stop_token_ids=[11,12]")
    _, inputs = read([row([5])], "rollout.stop_token_ids=[11,12]")
    assert responses(inputs) == [[5]]


def test_the_limit_of_the_length_counts_the_stop_token(read):
    assert responses(read([row("w4 w5 w6 w7 w8"), row([4] * 6)])[1])[0][-1] == EOS
    for long in ("w4 w5 w6 w7 w8 w9", [4] * 7):
        with pytest.raises(DataError) as error:
            read([row("w4"), row(long)])
        assert str(error.value) == (
            "train.jsonl: problem 1 (from 0): its response has 7 tokens, more than "
            "rollout.max_response_tokens=6; raise the limit or remove the problem"
        )


REFUSED = {
    "null": (None, "train.jsonl, line 2: response=None must be a response, a non-empty text or a"),
    "an empty text": ("", "train.jsonl, line 2: response='' must be"),
    "an empty list": ([], "train.jsonl, line 2: response=[] must be"),
    "a number": (7, "train.jsonl, line 2: response=7 must be"),
    "a number with a fraction": ([4, 5.0], "train.jsonl, line 2: response=[4, 5.0] must be"),
    "a truth": ([4, True], "train.jsonl, line 2: response=[4, True] must be"),
    "words": (["w4"], "train.jsonl, line 2: response=['w4'] must be"),
    "a message": ({"role": "user"}, "train.jsonl, line 2: response={'role': 'user'} must be"),
    "half of a pair": ("\ud800", "train.jsonl, line 2: response contains half of a surrogate pair"),
    "blanks": (" ", "train.jsonl: problem 1 (from 0): its response has no tokens: ' '; remove it"),
    "an id too large": ([4, 300], "problem 1 (from 0): its response has token id 300, outside the"),
    "an id below 0": ([-1, 4], "problem 1 (from 0): its response has token id -1, outside the"),
    "a huge id": ([2**40], "train.jsonl, line 2: response=[1099511627776] must be"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_row_that_gives_no_response_is_refused(read, name):
    value, told = REFUSED[name]
    # Also where rows without a readable answer are left out.
    for more in ("data.skip_unusable=false", "data.skip_unusable=true"):
        with pytest.raises(DataError) as error:
            read([row("w4"), row(value)], more)
        assert told in str(error.value) and "\n" not in str(error.value)


def test_a_row_and_a_file_without_the_column_are_refused(read):
    with pytest.raises(DataError) as error:
        read([row("w4"), {"prompt": "w3"}])
    assert str(error.value) == (
        "train.jsonl, line 2 has no column 'response'; set data.response_column to one of those it "
        "has: prompt"
    )
    with pytest.raises(DataError, match="test.jsonl, line 1 has no column 'response'"):
        read([row("w4")], held_out=[{"prompt": "w3"}])


def test_parquet_holds_both_kinds(read, tmp_path):
    import pyarrow

    for name, values in {"texts": ["w5 w6", "w7"], "ids": [[5, 6], [7]]}.items():
        table = pyarrow.table({"prompt": ["w3", "w4"], "response": values})
        write_table(tmp_path / f"{name}.parquet", table, b"made", {})
        _, inputs = read([], f"data.train_path={name}.parquet")
        stop = [EOS] if name == "texts" else []
        assert responses(inputs) == [[5, 6, *stop], [7, *stop]]
    table = pyarrow.table({"prompt": ["w3"], "response": pyarrow.array([[5.5]])})
    write_table(tmp_path / "floats.parquet", table, b"made", {})
    with pytest.raises(DataError, match=r"floats.parquet, row 0: response=\[5.5\] must be"):
        read([], "data.train_path=floats.parquet")


def test_another_response_is_other_data(read):
    states = [
        read(rows)[1].dataset.state_dict()["fingerprint"]
        for rows in ([row("w4")], [row("w5")], [row([4, EOS])], [row([5, EOS])], [row("w4")])
    ]
    assert len(set(states)) == 4 and states[0] == states[-1]


def source(c, inputs, rank, world_size):
    place = SimpleNamespace(rank=rank, world_size=world_size)
    return GivenSource(
        inputs, place, rollout=c.rollout, algorithm=c.algorithm, logging=c.logging
    )  # fmt: skip


def shares(read, world_size):
    """What two steps and the held-out rows give all ranks: position -> ids, each from one rank."""
    found = [{}, {}, {}]
    for rank in range(world_size):
        rows, held_out = ([row([i]) for i in some] for some in (range(10, 15), (50, 51, 52)))
        one = source(*read(rows, held_out=held_out), rank, world_size)
        assert one.num_held_out == 3
        steps = [one.rollouts(StepRequest(step, 0, None))[0] for step in range(2)]
        for merged, scored in zip(found, [*steps, one.held_out()], strict=True):
            own = {s.rollout.position: s.rollout.token_ids.tolist() for s in scored}
            assert not merged.keys() & own.keys() and sorted(own) == list(own)
            merged |= own
    return found


def test_the_ranks_have_disjoint_shares_of_the_same_rows(read):
    first, second, held_out = alone = shares(read, 1)
    # In an order of the seed, over the end of the file.
    drawn = [*first.values(), *second.values()]
    assert sorted(drawn[:5]) == [[i] for i in range(10, 15)] != drawn[:5]
    assert [*held_out.values()] == [[50], [51], [52]]
    for world_size in (2, 4):
        assert shares(read, world_size) == alone


def test_a_mixture_gives_each_rows_own_response(read, tmp_path):
    for name, first in (("a", 10), ("b", 20)):
        rows = [row([first + i], f"w{first + i}") for i in range(2)]
        text = "".join(json.dumps(r) + "\n" for r in rows)
        (tmp_path / f"{name}.jsonl").write_text(text)
    files = [f"data.sources.{name}.path={name}.jsonl" for name in "ab"]
    files += [f"data.sources.{name}.answer_column=null" for name in "ab"]
    c, inputs = read([], *files)
    (scored, metrics) = source(c, inputs, 0, 1).rollouts(StepRequest(0, 0, None))
    assert metrics == {}
    # A response is its prompt's only token.
    assert [list(s.rollout.prompt.token_ids) for s in scored] == [
        s.rollout.token_ids.tolist() for s in scored
    ]
    assert {s.rollout.prompt.source for s in scored} == {"a", "b"}


def test_all_count_as_correct_and_none_has_logprobs(read):
    c, inputs = read([row("w5 w6")])
    (one, *_), _ = source(c, inputs, 0, 1).rollouts(StepRequest(0, 0, None))
    assert one.is_correct and one.text == "w5w6" and not one.rollout.truncated
    assert one.rollout.logprobs is None and "logprobs" not in one.own_columns
    # No zeros in their place.
    with pytest.raises(AssertionError, match="nothing has sampled"):
        one.column("logprobs")
    assert PER_TOKEN[SAMPLED["logprobs"]].dtype == "float32"
