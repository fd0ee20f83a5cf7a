"""What a rank reads before a run: one file, or several sources with columns and verifiers of their
own, through a real tokenizer; and chat messages.

Not exercised: models (tests/models), the messages themselves (tests/data/test_chat.py).
"""

import json

import pytest

from tests.weights.tiny_hf import write_tiny_model
from vapo_megatron.config import load_config
from vapo_megatron.data.mixture import Mixture
from vapo_megatron.data.problems import load_problems
from vapo_megatron.data.prompts import PromptDataset
from vapo_megatron.errors import DataError
from vapo_megatron.models.hf_config import read_model_shape
from vapo_megatron.rollout.inputs import read_inputs
from vapo_megatron.rollout.tokenizer import ChatTemplate, load_tokenizer

SYSTEM = {"role": "system", "content": "w7"}
USER = {"role": "user", "content": "w5 w6"}
TEMPLATE = (
    "{% for m in messages %}{% if m['content'] == 'w9' %}{{ raise_exception('no w9') }}{% endif %}"
    "{{ m['content'] }} {% endfor %}{% if add_generation_prompt %}w8{% endif %}"
)


@pytest.fixture(scope="module")
def hf(tmp_path_factory):
    sizes = dict(num_layers=1, hidden=32, ffn=32, vocab=64)
    return write_tiny_model(tmp_path_factory.mktemp("hf"), **sizes)


@pytest.fixture
def read(hf, tmp_path, monkeypatch):
    """read(**files, data=..., evaluation=...) -> Inputs; a file's rows are written beforehand."""
    monkeypatch.chdir(tmp_path)

    def run(*overrides, **files):
        for name, rows in files.items():
            lines = "".join(json.dumps(row) + "\n" for row in rows)
            (tmp_path / f"{name}.jsonl").write_text(lines)
        c = load_config([], [f"model.hf_path={hf}", "rollout.max_prompt_tokens=8", *overrides])
        shape = read_model_shape(str(hf))
        return read_inputs(shape, str(hf), c.data, c.rollout, c.evaluation, seed=c.seed)

    return run


def numbered(count, first=3, prompt="prompt", answer="answer", **more):
    return [{prompt: f"w{i}", answer: i, **more} for i in range(first, first + count)]


def test_the_critics_column_is_of_training_alone(read):
    rows = [{"prompt": "w3", "answer": 3, "hint": "w7 w5 w6"}]
    held_out = "evaluation.path=plain.jsonl"
    files = {"one": rows, "plain": numbered(1)}
    one = read("data.train_path=one.jsonl", "data.critic_prompt_column=hint", held_out, **files)
    (prompt,) = one.dataset.problems
    assert prompt.critic_token_ids == (7, 5, 6) and prompt.token_ids == (3,)
    assert [p.critic_token_ids for p in one.held_out.problems] == [None]
    sources = ["data.sources.a.path=one.jsonl", "data.sources.a.critic_prompt_column=hint"]
    several = read(*sources, "data.sources.b.path=plain.jsonl", **files).dataset.problems
    assert [p.critic_token_ids for p in several] == [(7, 5, 6), None]
    with pytest.raises(DataError, match="set data.sources.b.critic_prompt_column to one of those"):
        read("data.sources.b.path=plain.jsonl", "data.sources.b.critic_prompt_column=hint", **files)


def test_one_file_is_read_as_by_itself(read, hf):
    """Bit for bit: prompts, their order over epochs, and what is saved to resume it."""
    inputs = read("data.train_path=one.jsonl", "seed=4", one=numbered(9))
    tokenizer = load_tokenizer(hf)
    alone = PromptDataset(
        load_problems("one.jsonl"), tokenizer.encode,
        path="one.jsonl", seed=4, shuffle=True, max_prompt_tokens=8,
    )  # fmt: skip
    assert type(inputs.dataset) is PromptDataset
    assert [inputs.dataset.next(5, step) for step in range(4)] == [alone.next(5) for _ in range(4)]
    assert inputs.dataset.state_dict() == alone.state_dict()
    assert set(alone.state_dict()) == {
        "epoch", "position", "seed", "shuffle", "count", "fingerprint"
    }  # fmt: skip
    # Golden, from before there were sources: stored runs resume in this order.
    alone.load_state_dict({**alone.state_dict(), "epoch": 0, "position": 0})
    order = [5, 0, 1, 2, 7, 6, 4, 3, 8, 7, 0, 6, 8, 1, 3, 4, 5, 2]
    assert [p.index for p in alone.next(18)] == order


def test_sources_have_columns_and_verifiers_of_their_own(read):
    inputs = read(
        "data.sources.math.path=one.jsonl",
        "data.sources.math.weight=3",
        "data.sources.code.path=two.jsonl",
        "data.sources.code.prompt_column=question",
        "data.sources.code.answer_column=null",
        "data.sources.code.verifier=code",
        "data.sources.code.schedule=[[0,0],[1,1]]",
        "evaluation.path=one.jsonl",
        one=numbered(6),
        two=[*numbered(3, 20, "question"), {"question": "w30", "verifier": "exact"}],
    )
    mixed = inputs.dataset
    assert isinstance(mixed, Mixture) and len(mixed) == 10
    assert {(p.source, p.verifier) for p in mixed.rows} == {
        ("math", None), ("code", "code"), ("code", "exact")
    }  # fmt: skip
    assert [p.source for p in mixed.next(8, 0)] == ["math"] * 8
    drawn = mixed.next(8, 1)
    assert sorted(p.source for p in drawn) == ["code"] * 2 + ["math"] * 6
    for prompt in drawn:
        number = int(prompt.text[1:])
        assert prompt.token_ids == (number,)
        assert prompt.answer == ("" if prompt.source == "code" else str(number))
        assert prompt.problem == mixed.rows[prompt.index]
    assert inputs.held_out.path == "one.jsonl" and inputs.held_out.rows[0].source is None


def test_the_order_of_sources_in_the_file_does_not_matter(read):
    files = {"one": numbered(6), "two": numbered(3)}
    names = [f"data.sources.{name}.path={path}.jsonl" for name, path in zip("ab", files)]
    first, second = read(*names, **files).dataset, read(*reversed(names)).dataset
    assert [first.next(7, s) for s in range(3)] == [second.next(7, s) for s in range(3)]


def test_chat_messages_are_templated_for_training_and_evaluation(read, hf, monkeypatch):
    rows = [{"prompt": [SYSTEM, USER], "answer": 1}, {"prompt": "w3", "answer": 2}]
    with pytest.raises(
        DataError, match="one.jsonl, line 1: prompt has chat messages, but the tokenizer has no"
    ):
        read("data.train_path=one.jsonl", one=rows)
    tokenizer = load_tokenizer(hf)
    tokenizer.chat_template = TEMPLATE
    monkeypatch.setattr("vapo_megatron.rollout.inputs.load_tokenizer", lambda _: tokenizer)
    inputs = read("data.train_path=one.jsonl", "evaluation.path=one.jsonl")
    for dataset in (inputs.dataset, inputs.held_out):
        assert [p.text for p in dataset.problems] == ["w7 w5 w6 w8", "w3"]
        assert [p.token_ids for p in dataset.problems] == [(7, 5, 6, 8), (3,)]
    refused = [{"role": "user", "content": "w9"}]
    with pytest.raises(
        DataError, match="line 1: prompt has chat messages, but .* template refuses them: no w9; c"
    ):
        read("data.train_path=two.jsonl", two=[{"prompt": refused, "answer": 1}])


def test_a_template_is_asked_once_whether_it_fits_the_tokenizer(hf):
    asked = []
    tokenizer = load_tokenizer(hf)
    tokenizer.chat_template = TEMPLATE
    template, written = ChatTemplate(tokenizer), ChatTemplate.written
    template.written = lambda messages: (asked.append(messages), written(template, messages))[1]
    assert [template([USER]), template([SYSTEM, USER])] == ["w5 w6 w8", "w7 w5 w6 w8"]
    assert len(asked) == 5, "once for the tokenizer, twice for each prompt"


def test_held_out_sources_are_evaluated_together_each_by_its_name(read):
    inputs = read(
        "data.train_path=one.jsonl",
        "evaluation.sources.late.path=two.jsonl",
        "evaluation.sources.late.prompt_column=q",
        "evaluation.sources.early.path=one.jsonl",
        "evaluation.sources.early.verifier=exact",
        one=numbered(2),
        two=numbered(3, 7, "q"),
    )
    found = [(p.index, p.text, p.source, p.problem.verifier) for p in inputs.held_out.problems]
    assert found == [
        (0, "w3", "early", "exact"), (1, "w4", "early", "exact"),
        (2, "w7", "late", None), (3, "w8", "late", None), (4, "w9", "late", None),
    ]  # fmt: skip
    assert [row.prompt for row in inputs.held_out.rows] == [text for _, text, *_ in found]
    assert inputs.held_out.row(3) == ("two.jsonl", 1) and len(inputs.held_out) == 5
    with pytest.raises(DataError, match="evaluation.sources.late.prompt_column to one of those"):
        read(
            "data.train_path=one.jsonl", "evaluation.sources.late.path=one.jsonl",
            "evaluation.sources.late.prompt_column=q", one=numbered(2),
        )  # fmt: skip
