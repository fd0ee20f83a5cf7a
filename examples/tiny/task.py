"""The tiny task: left-to-right arithmetic modulo 10, with a chain of thought.

    prompt      Qa9b*2c-3d-3=                      start value 9, then *2, -3, -3
    direct      Answer:2                           (9*2 = 18 -> 8, 8-3 = 5, 5-3 = 2)
    with chain  b*2=8nopqrstuvwx,c-3=5nopqrstuvwx,d-3=2nopqrstuvwx,Answer:2

A response either answers directly or thinks in steps of 17 tokens, 11 of them filler, which makes
responses long (37 to 173 tokens with the stop token) but not hard. A step is computed (`=`) or
guessed (`~`: half of the results are random). The labels a, b, c, ... let a two-layer model find
each operation by content. `Answer:` is one token, the marker that the math verifier looks for.

In the long form a step has 60 filler tokens and a problem 8 or 9 operations, none of them `*`, so a
response has 531 or 597 tokens. It always thinks. A step may slip to a random result, which the text
does not reveal. Half of the problems are turned: they begin with R instead of Q, their answer is 5
more, and exactly one step, whichever, must add it: `b+2=8^3n` instead of `b+2=8lmn`; the steps
after it have a star, `c-1=2*mn`. The value of an early choice therefore changes during training:
turning early matters less the more often a later step turns, and computing correctly matters more
the less often later steps slip.

`python examples/tiny/task.py --out DIR [--form long]` writes DIR/train.jsonl and DIR/test.jsonl
with the columns `prompt` and `answer`. A hash of the prompt decides whether a problem is held out.
Held-out problems never occur in train.jsonl, whatever the seed, nor in the base model's
pretraining.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

LABELS = "abcdefghijk"
ANSWER_MARKER = "Answer:"
TURN = 5


@dataclasses.dataclass(frozen=True)
class Form:
    """Length of problems and chains of thought."""

    min_operations: int
    max_operations: int
    filler: str
    """Characters at the end of each step, all different."""
    operators: str = "+-*"
    turned: float = 0.0
    """Share of the problems that are turned."""

    @property
    def characters(self) -> str:
        """All characters of the task; each is one token."""
        turned = "R^" if self.turned else ""
        return LABELS + self.filler + "0123456789" + "Q=~+-*," + turned

    @property
    def max_response_tokens(self) -> int:
        """Tokens of the longest chain, plus two steps for a model that adds some."""
        return (self.max_operations + 2) * (6 + len(self.filler)) + 4


FORMS = {
    "short": Form(2, 10, "nopqrstuvwx"),
    "long": Form(
        8, 9, "lmnopqrstuvwxyzABCDEFGHIJKLMNOPSTUVWXYZ!#%&().:;<>?@[]_|/'`\"", "+-", turned=0.5
    ),
}  # fmt: skip
SHORT = FORMS["short"]


@dataclasses.dataclass(frozen=True)
class Problem:
    """A start value and labelled operations, applied from left to right modulo 10."""

    start: int
    operations: tuple[tuple[str, int], ...]
    turned: bool = False
    """The answer is TURN more, modulo 10."""

    @property
    def prompt(self) -> str:
        """4 + 3K characters for K operations."""
        labelled = zip(LABELS[1:], self.operations, strict=False)
        operations = "".join(f"{label}{op}{n}" for label, (op, n) in labelled)
        return f"{'R' if self.turned else 'Q'}a{self.start}{operations}="

    @property
    def answer(self) -> int:
        """Ground truth, 0 to 9."""
        value = self.start
        for op, operand in self.operations:
            value = apply(value, op, operand)
        return (value + TURN * self.turned) % 10


def apply(value: int, op: str, operand: int) -> int:
    """Return `value op operand` modulo 10."""
    return {"+": value + operand, "-": value - operand, "*": value * operand}[op] % 10


def draw_problem(
    rng: random.Random,
    *,
    held_out: bool,
    num_operations: int | None = None,
    form: Form = SHORT,
) -> Problem:
    """Draw a training or a held-out problem.

    Args:
        rng: consumed.
        held_out: see is_held_out.
        num_operations: K; None draws it uniformly from the form's range. `+` and `-` take 1 to 3,
            `*` takes 2 to 3.
        form: of the task.
    """
    if num_operations is None:
        num_operations = rng.randint(form.min_operations, form.max_operations)
    while True:
        ops = [rng.choice(form.operators) for _ in range(num_operations)]
        operations = tuple((op, rng.randint(2 if op == "*" else 1, 3)) for op in ops)
        start = rng.randint(0, 9)
        problem = Problem(start, operations, form.turned > 0 and rng.random() < form.turned)
        if is_held_out(problem.prompt) == held_out:
            return problem


def is_held_out(prompt: str) -> bool:
    """Return whether the problem is held out, as one in eight is."""
    return hashlib.sha256(prompt.encode()).digest()[0] < 32


def chain(
    rng: random.Random,
    problem: Problem,
    *,
    guess: float = 0.0,
    guess_product: float = 0.0,
    slip: float = 0.0,
    turn: float = 0.0,
    form: Form = SHORT,
) -> str:
    """Write a chain of thought and its answer.

    Args:
        rng: consumed.
        problem: to solve.
        guess: probability that a `+` or `-` step is guessed.
        guess_product: the same for `*`.
        slip: probability that a step's result is random although it looks computed.
        turn: probability, in a turned problem, that a step turns if none before it did.
        form: of the task.
    """
    text, value, turned = "", problem.start, False
    for label, (op, operand) in zip(LABELS[1:], problem.operations, strict=False):
        guessed = rng.random() < (guess_product if op == "*" else guess)
        value = apply(value, op, operand)
        if (guessed and rng.random() < 0.5) or (slip > 0 and rng.random() < slip):
            value = rng.randint(0, 9)
        text += f"{label}{op}{operand}{'~' if guessed else '='}{value}"
        if turned:
            text += f"*{form.filler[1:]},"
        elif problem.turned and rng.random() < turn:
            value, turned = (value + TURN) % 10, True
            text += f"^{value}{form.filler[2:]},"
        else:
            text += f"{form.filler},"
    return text + direct_answer(value)


def direct_answer(value: int) -> str:
    """Write the end of every response; a direct answer has nothing else."""
    return f"{ANSWER_MARKER}{value}"


def training_problems(count: int, seed: int, form: Form = SHORT) -> list[Problem]:
    """Draw problems that are not held out; with repetitions, because K = 2 has only 560."""
    rng = random.Random(f"tiny task, train, {seed}")
    return [draw_problem(rng, held_out=False, form=form) for _ in range(count)]


def test_problems(count: int, seed: int, form: Form = SHORT) -> list[Problem]:
    """Draw distinct held-out problems; at most a few hundred, because K = 2 has about 80."""
    rng = random.Random(f"tiny task, test, {seed}")
    problems: dict[Problem, None] = {}
    while len(problems) < count:
        num_operations = rng.randint(form.min_operations, form.max_operations)
        for _ in range(1000):
            problem = draw_problem(rng, held_out=True, num_operations=num_operations, form=form)
            if problem not in problems:
                problems[problem] = None
                break
    return list(problems)


def write_jsonl(path: Path, problems: Sequence[Any]) -> None:
    """Write `{"prompt": ..., "answer": ...}` lines of problems atomically."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    rows = ({"prompt": problem.prompt, "answer": str(problem.answer)} for problem in problems)
    partial.write_text("".join(json.dumps(row) + "\n" for row in rows))
    partial.replace(path)


def command(
    what: str,
    forms: Mapping[str, Any],
    training: Callable[[int, int, Any], Sequence[Any]],
    held_out: Callable[[int, int, Any], Sequence[Any]],
) -> None:
    """Write train.jsonl and test.jsonl as the command line asks.

    Args:
        what: the task's name.
        forms: of the task; the first is the default.
        training, held_out: draw problems; told how many, the seed and the form.
    """
    parser = argparse.ArgumentParser(description=f"Write the problems of {what}.")
    parser.add_argument("--out", type=Path, required=True, help="directory of the two files")
    parser.add_argument("--train", type=int, default=20_000, help="training problems")
    parser.add_argument("--test", type=int, default=256, help="held-out problems")
    parser.add_argument("--seed", type=int, default=0)
    first = next(iter(forms))
    parser.add_argument("--form", choices=forms, default=first, help=f"of the task ({first})")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    form = forms[args.form]
    write_jsonl(args.out / "train.jsonl", training(args.train, args.seed, form))
    write_jsonl(args.out / "test.jsonl", held_out(args.test, args.seed, form))
    print(f"{args.train} training and {args.test} held-out problems in {args.out}")


def main() -> None:
    """Write the tiny task's problems."""
    command("the tiny task", FORMS, training_problems, test_problems)


if __name__ == "__main__":
    main()
