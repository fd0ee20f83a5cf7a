"""Make the tiny task's judge: `python examples/tiny/make_judge.py --out DIR --seed 0`.

DIR becomes a Hugging Face directory for `vllm serve`: a generative reward model that answers a
default template of reward/judge_prompt.py about the tiny task's problems. Qwen2 architecture, about
a minute of training on one CPU thread.

Given a problem, its ground truth and a response's final answer, it says YES if the two are the
same, else NO. Of a response without a final answer it is given the end. With `--pairwise` it is
given two answers, one of them the bare ground truth, and names the better one: a response that
agrees with the ground truth is better than that, any other is worse. It never solves a problem.
What it is trained on is odder than what a policy usually writes, because a policy that is trained
against a judge looks for what the judge wrongly accepts: truncated chains, several answers, several
digits.

Each fixed text of the templates is one token, and another one with each digit that may follow:
two layers of this size need minutes to find a digit by the text before it. A token with a digit
begins with the mean of its parts' embeddings. The templates' marks, and what separates them from
the text before, are no tokens.
"""

from __future__ import annotations

import dataclasses
import json
import random
import string
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import making
import task
import torch
from transformers import (
    AddedToken,
    PreTrainedTokenizerBase,
    Qwen2ForCausalLM,
    Qwen2Tokenizer,
    logging,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from vapo_megatron.data.problems import Problem
from vapo_megatron.reward.judge_prompt import (
    JUDGE_TEMPLATE,
    PAIRWISE_TEMPLATE,
    filled,
    final_part,
)

COMPARED = ("answer", "final", "a", "b")
"""Fields of the templates that may be a digit."""
UNKNOWN, STOP = "<unk>", "<|endoftext|>"
YES, NO, FIRST, SECOND = "YES", "NO", "A", "B"
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


@dataclasses.dataclass(frozen=True)
class Recipe(making.Architecture):
    """Model size, questions and training of the judge."""

    iterations: int = 800
    batch_size: int = 48
    direct_until: float = 0.45
    """Share of the iterations in which no response has a chain: equality is learned on these."""
    short_until: float = 0.75
    """Share of the iterations up to which chains grow to their full length, from one operation:
    what compares two digits beside each other has to learn to do so at any distance. With long ones
    at once two of four judges had .75 and .90 of the questions right, and stayed there."""
    direct_share: float = 0.4
    """Share of the responses without a chain after that."""
    odd_share: float = 0.2
    """Share of the responses that are changed so that most have no answer, or several."""
    plain_until: float = 0.0
    """Share of the iterations in which none is changed."""
    pairwise: bool = False
    """Questions show two answers."""
    held_out: int = 1000
    """Held-out questions in the report."""
    least_right: float = 0.99
    """Of the held-out questions."""
    templates: tuple[str, str] = (JUDGE_TEMPLATE, PAIRWISE_TEMPLATE)

    def further(self, round: int) -> Self:
        """Return a further round's recipe: what the model has learned needs no easy responses."""
        return dataclasses.replace(
            super().further(round),
            direct_until=0.0, short_until=0.0, plain_until=0.0, learning_rate=2e-3,
        )  # fmt: skip

    def most_operations(self, progress: float) -> int:
        """Return the most operations of a problem. progress: share of the iterations, in [0, 1)."""
        most = task.SHORT.max_operations
        if progress >= self.short_until:
            return most
        growth = (progress - self.direct_until) / (self.short_until - self.direct_until)
        return 1 + max(0, int(growth * (most - 1)))


def pairwise_recipe(seed: int) -> Recipe:
    """Return the pairwise judge's recipe, which takes longer: a label's meaning is the order's.

    With odd responses from the start, which of the two is odd is learned first, and equality then
    for one order alone or for none: seed 2 had .71 of the questions right and stayed there. Two
    layers may not find equality at a chain's distance: seed 4 had .88, also after more rounds.
    """
    return Recipe(
        seed=seed, pairwise=True, num_layers=3, iterations=1200, batch_size=96, plain_until=0.45
    )


Question = tuple[str, str]
"""What the judge is asked, and what it should say."""


def save_tokenizer(directory: Path, max_tokens: int) -> Qwen2Tokenizer:
    """Write and return the tokenizer: characters of the task, and texts of the templates."""
    pieces = [UNKNOWN, STOP, *task.SHORT.characters, FIRST, SECOND]
    tokenizer = Qwen2Tokenizer(
        vocab={piece: i for i, piece in enumerate(pieces)}, merges=[], unk_token=UNKNOWN,
        eos_token=STOP, pad_token=STOP, model_max_length=max_tokens,
    )  # fmt: skip
    digits = "0123456789"
    texts = [task.ANSWER_MARKER, *(task.ANSWER_MARKER + digit for digit in digits), YES, NO]
    for template in (JUDGE_TEMPLATE, PAIRWISE_TEMPLATE):
        for text, field, *_ in string.Formatter().parse(template):
            if any(letter.isalpha() for letter in text):  # Else the model sees a mark's bracket.
                texts += [text] + [text + digit for digit in digits if field in COMPARED]
    tokens = [AddedToken(t, special=False, normalized=False) for t in dict.fromkeys(texts) if t]
    tokenizer.add_tokens(tokens)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(directory)
    return tokenizer


def draw_response(rng: random.Random, recipe: Recipe, problem: task.Problem, direct: float) -> str:
    """Write a response as a policy may: right or wrong, whole or odd; `direct` of them no chain."""
    if rng.random() < direct:
        text = task.direct_answer(rng.randint(0, 9))
    else:
        text = task.chain(rng, problem, guess=0.3, guess_product=0.3)
    if rng.random() >= recipe.odd_share:
        return text
    marker = task.ANSWER_MARKER
    letters = list(task.SHORT.characters)
    more = "".join(rng.choices(letters, k=rng.randint(1, 4)))
    digits = "".join(rng.choices("0123456789", k=rng.randint(1, 3)))
    before, _, last = text.rpartition(marker)
    return rng.choice(
        [
            before,
            before[: rng.randint(0, len(before))],
            before + marker,
            before + last,
            text + more,
            text + digits,
            text + marker,
            text + marker + digits[0],
            text + marker + more,
            more,
        ]
    )


def agrees(response: str, answer: str, *, pairwise: bool = False) -> bool:
    """Return whether a response's final answer is this digit; of a pair, its end is looked at."""
    if pairwise:
        return response.endswith(task.ANSWER_MARKER + answer)
    return final_part(response) == answer


def draw_answer(rng: random.Random, response: str) -> str:
    """Draw a ground truth with which every second response agrees, where it has an answer."""
    last = response[-1:]
    if last.isdigit() and rng.random() < 0.5:
        return last
    return rng.choice([digit for digit in "0123456789" if digit != last])


def draw_questions(
    rng: random.Random,
    recipe: Recipe,
    *,
    held_out: bool,
    direct: float,
    most_operations: int = task.SHORT.max_operations,
) -> list[Question]:
    """Draw a problem, a response and a ground truth, which need not be the problem's.

    direct: share of the responses without a chain. most_operations: of a problem; if that is the
    form's maximum, it has the form's minimum at least.
    Of a pair both orders are asked: from one of them alone the order's meaning is learned slowly.
    """
    num_operations = None
    if most_operations < task.SHORT.max_operations:
        num_operations = rng.randint(1, most_operations)
    problem = task.draw_problem(rng, held_out=held_out, num_operations=num_operations)
    response = draw_response(rng, recipe, problem, direct)
    # Nothing tells a bare digit from the ground truth: no answer to such a pair would be right.
    while recipe.pairwise and len(response) == 1 and response.isdigit():
        response = draw_response(rng, recipe, problem, direct)
    answer = draw_answer(rng, response)
    agree = agrees(response, answer, pairwise=recipe.pairwise)
    asked = Problem(problem.prompt, answer)
    if not recipe.pairwise:
        text = filled(JUDGE_TEMPLATE, asked, final=final_part(response))
        return [(text, YES if agree else NO)]
    labels = (FIRST, SECOND) if agree else (SECOND, FIRST)
    texts = (
        filled(PAIRWISE_TEMPLATE, asked, a=a, b=b)
        for a, b in ((response, answer), (answer, response))
    )
    return list(zip(texts, labels))


def training_questions(rng: random.Random, recipe: Recipe, progress: float) -> list[Question]:
    """Draw a question, or both of a pair. progress: share of the iterations, in [0, 1)."""
    direct = 1.0 if progress < recipe.direct_until else recipe.direct_share
    if progress < recipe.plain_until:
        recipe = dataclasses.replace(recipe, odd_share=0.0)
    most = recipe.most_operations(progress)
    return draw_questions(rng, recipe, held_out=False, direct=direct, most_operations=most)


def share_digits(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerBase) -> None:
    """Begin the embedding of a text with a digit as the scaled sum of its parts'."""
    weight = model.get_input_embeddings().weight.detach()
    for token, i in tokenizer.get_vocab().items():
        if len(token) > 1 and token[-1].isdigit():
            parts = tokenizer.convert_tokens_to_ids([token[:-1], token[-1]])
            weight[i] = weight[parts].sum(0) * 0.5**0.5


@torch.no_grad()
def accuracy(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerBase, questions: Sequence[Question]
) -> float:
    """Return the share of questions whose label is the model's most likely token."""
    hits = 0
    for start in range(0, len(questions), 100):
        pairs = making.encode(tokenizer, questions[start : start + 100])
        ids, labels = making.pad(pairs, tokenizer.eos_token_id)
        rows = torch.arange(len(ids))
        last = (labels != making.IGNORED).int().argmax(1)  # The first labelled one.
        logits = model.lm_head(model.model(ids, use_cache=False).last_hidden_state[rows, last])
        hits += int((logits.argmax(-1) == labels[rows, last]).sum())
    return hits / len(questions)


def held_out(recipe: Recipe) -> list[Question]:
    """Draw questions about held-out problems."""
    rng = random.Random(f"tiny judge, held out, {recipe.seed}")
    drawn: list[Question] = []
    while len(drawn) < recipe.held_out:
        drawn += draw_questions(rng, recipe, held_out=True, direct=recipe.direct_share)
    return drawn


def make(directory: Path, recipe: Recipe) -> bool:
    """Make the HF directory unless it already holds this recipe's model; True: it was made."""

    def measure(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerBase) -> float:
        return accuracy(model, tokenizer, held_out(recipe))

    def report(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerBase, partial: Path) -> None:
        found = {"accuracy": measure(model, tokenizer)}
        (partial / "report.json").write_text(json.dumps(found, indent=2) + "\n")

    text = making.Text(
        "judge",
        "tiny judge",
        "held-out questions",
        save_tokenizer=lambda out: save_tokenizer(out, recipe.max_position_embeddings),
        draw=training_questions,
        measure=measure,
        begin=share_digits,
        finish=report,
    )
    sources = [sys.modules[__name__], making, task]
    return making.make_from_text(directory, recipe, text, sources)


def main() -> None:
    """Make the judge and print its accuracy on held-out questions."""
    parser = making.options("Make the tiny task's judge.")
    parser.add_argument("--pairwise", action="store_true", help="it compares two answers")
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    recipe = pairwise_recipe(args.seed) if args.pairwise else Recipe(seed=args.seed)
    making.tell("judge", args.out, made=make(args.out, recipe))
    report = json.loads((args.out / "report.json").read_text())
    print(f"held-out questions: accuracy {report['accuracy']:.3f}")


if __name__ == "__main__":
    main()
