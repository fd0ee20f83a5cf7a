"""Responses that begin with a text of the data: its tokens, its header, what is refused.

Not exercised here: sampling their rest (tests/e2e/test_probes.py).
"""

import pytest

from tests.rollout.chat_tokenizer import write_chat_tokenizer
from vapo_megatron.cli.sampling.probes import Probe, has_word
from vapo_megatron.config import read_config
from vapo_megatron.data.problems import Problem
from vapo_megatron.data.prompts import PromptDataset
from vapo_megatron.errors import ConfigError, DataError
from vapo_megatron.reward.verifier import Verdict
from vapo_megatron.rollout.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(write_chat_tokenizer(tmp_path_factory.mktemp("chat")))


def problem(**columns):
    return Problem("Two and two?", "4", metadata=columns)


def test_a_responses_beginning_follows_the_prompt(tokenizer):
    probe = Probe("chain", " Wait,")
    rows = [problem(chain="It is 5."), problem(chain="Is it 3?")]
    made = PromptDataset(
        rows, tokenizer.encode, path="p.jsonl", seed=0, shuffle=False, max_prompt_tokens=200,
        begun=probe.begun(tokenizer, "p.jsonl"),
    )  # fmt: skip
    plain = tokenizer.encode("Two and two?")
    for prompt, text in zip(made.problems, ("It is 5. Wait,", "Is it 3? Wait,"), strict=True):
        assert list(prompt.token_ids[: len(plain)]) == plain
        assert tokenizer.decode(prompt.token_ids[len(plain) :]) == text
        assert prompt.text == "Two and two?", "what a judge is shown"


def test_it_counts_towards_the_limit(tokenizer):
    length = len(tokenizer.encode("Two and two?"))
    with pytest.raises(DataError, match=f"more than rollout.max_prompt_tokens={length}:"):
        PromptDataset(
            [problem(chain="It is 5.")], tokenizer.encode, path="p.jsonl", seed=0, shuffle=False,
            max_prompt_tokens=length, begun=Probe("chain").begun(tokenizer, "p.jsonl"),
        )  # fmt: skip


def test_special_tokens_in_it_are_text(tokenizer):
    (special, *_) = tokenizer.all_special_tokens
    tokens = Probe("chain").begun(tokenizer, "p.jsonl")(problem(chain=f"So {special} 5"))
    assert not set(tokens) & set(tokenizer.all_special_ids)
    assert special in tokenizer.decode(tokens)


@pytest.mark.parametrize("columns", [{}, {"chain": ""}, {"chain": 5}, {"chain": None}])
def test_a_row_without_it_is_refused(tokenizer, columns):
    with pytest.raises(DataError) as caught:
        Probe("chain").begun(tokenizer, "p.jsonl")(problem(**columns))
    message = str(caught.value)
    assert message.startswith("p.jsonl: the problem 'Two and two?' has chain=")
    assert "--prefix-column must name a column of texts" in message and "\n" not in message


def test_other_beginnings_are_another_evaluation():
    rows = [problem(chain="It is 5.")]
    one = Probe("chain", "Wait,", words=("wait",)).header(rows)
    assert one == Probe("chain", "Wait,", words=("wait",)).header(rows)
    others = (
        Probe("chain", "Wait,", words=("wait",)).header([problem(chain="It is 6.")]),
        Probe("chain", "But", words=("wait",)).header(rows),
        Probe("chain", "Wait,", words=("but",)).header(rows),
        Probe("chain", "Wait,", "mine").header(rows),
    )
    assert all(one != other for other in others)


@pytest.mark.parametrize(
    ("probe", "overrides", "names"),
    [
        (Probe("chain", verifier="judge", words=("but",)), [], "--reflects-words=but both say"),
        (Probe("chain", verifier="math"), ["reward.verifier=math"], "is also reward.verifier"),
        (
            Probe("chain"), ["environment.tools=[calculator]", "model.hf_path=x"],
            "are for responses of one turn",
        ),
    ],
)  # fmt: skip
def test_what_does_not_fit_together_is_refused(probe, overrides, names):
    with pytest.raises(ConfigError, match=names):
        probe.check(read_config([], overrides))


def test_words_are_whole_and_of_any_case():
    words = ("wait", "let me check")
    assert has_word("Wait, no", words) and has_word("so LET ME CHECK it", words)
    assert not has_word("Waiting, awaited, let me  check", words)
    assert has_word("5{3}4", ("{3}",)) and not has_word("5{3}4", ("3}4b", "{33}"))


class Says:
    """A verifier that has a verdict for each text."""

    def score(self, responses, problems):
        return [{"yes": Verdict("correct"), "no": Verdict("wrong")}.get(
            text, Verdict("unparsable", note="neither" * 100)) for text in responses]  # fmt: skip


def test_a_judge_that_says_neither_is_counted_apart():
    responses = [{"text": text} for text in ("yes", "no", "perhaps")]
    Probe("chain", verifier="mine").add_reflects([(_Prompt, responses)], Says())
    assert [r["reflects"] for r in responses] == [True, False, None]
    assert responses[2]["reflects_note"].startswith("neither")
    assert len(responses[2]["reflects_note"]) == 200


class _Prompt:
    problem = problem()
