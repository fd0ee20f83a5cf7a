"""The tiny task: left-to-right arithmetic modulo 10, with a chain of thought.

    prompt      Qa9b*2c-3d-3=                      start value 9, then *2, -3, -3
    direct      Answer:2                           (9*2 = 18 -> 8, 8-3 = 5, 5-3 = 2)
    with chain  b*2=8nopqrstuvwx,c-3=5nopqrstuvwx,d-3=2nopqrstuvwx,Answer:2

A response either answers at once or thinks in steps of 17 tokens, 11 of them filler, so that
responses are long (37 to 173 tokens with the stop token) without being hard. A step is computed
(`=`) or guessed (`~`: half of such results are random). The labels a, b, c, ... let a model of two
layers find each operation by content. `Answer:` is one token, and what the math verifier reads.

The long form has 60 tokens of filler and 8 or 9 operations, no `*` among them, so that a response
has 531 or 597 tokens; it always thinks, and nothing in its text tells a step that slipped, to a
random result, from one that did not. Half of its problems are turned: asked with R for Q, their
answer is 5 more, and one step, no matter which, has to add it: `b+2=8^3n` for `b+2=8lmn`; the
steps after it have a star, `c-1=2*mn`. So each early step offers choices whose worth changes: the
turn's falls the more often a later step would still make it, that of a result that is computed
rises the less often a later step slips.

`python examples/tiny/task.py --out DIR [--form long]` writes DIR/train.jsonl and DIR/test.jsonl
with the columns `prompt` and `answer`. A hash of the prompt decides which problems are held out:
those never occur in train.jsonl, in any seed, nor in what the base model was pretrained on.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import random
from pathlib import Path

LABELS = "abcdefghijk"
ANSWER_MARKER = "Answer:"
TURN = 5


@dataclasses.dataclass(frozen=True)
class Form:
    """How long the problems and the thoughts are."""

    min_operations: int
    max_operations: int
    filler: str
    """Ends each step of a chain; no character occurs twice in it."""
    operators: str = "+-*"
    turned: float = 0.0
    """Share of the problems that are turned."""

    @property
    def characters(self) -> str:
        """Every character of the task, each of them one token."""
        turned = "R^" if self.turned else ""
        return LABELS + self.filler + "0123456789" + "Q=~+-*," + turned

    @property
    def max_response_tokens(self) -> int:
        """Tokens of the longest chain, and two steps' worth for a model that adds some."""
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
    """Whether the answer is TURN more."""

    @property
    def prompt(self) -> str:
        """The question as the model reads it: 4 + 3K characters for K operations."""
        labelled = zip(LABELS[1:], self.operations, strict=False)
        operations = "".join(f"{label}{op}{n}" for label, (op, n) in labelled)
        return f"{'R' if self.turned else 'Q'}a{self.start}{operations}="

    @property
    def answer(self) -> int:
        """The last value, 0..9."""
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
    """Draw a problem of one of the two disjoint parts.

    Args:
        rng: consumed.
        held_out: which part (see `is_held_out`).
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
    """Return whether the problem belongs to the held-out eighth."""
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
        problem: what is solved.
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
    """Write the end of every response, which may also stand alone."""
    return f"{ANSWER_MARKER}{value}"


def training_problems(count: int, seed: int, form: Form = SHORT) -> list[Problem]:
    """Draw problems that are not held out; short ones repeat, as only 560 of K = 2 exist."""
    rng = random.Random(f"tiny task, train, {seed}")
    return [draw_problem(rng, held_out=False, form=form) for _ in range(count)]


def test_problems(count: int, seed: int, form: Form = SHORT) -> list[Problem]:
    """Draw different held-out problems. count: at most a few hundred (about 80 of K = 2 exist)."""
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


def write_jsonl(path: Path, problems: list[Problem]) -> None:
    """Write one `{"prompt": ..., "answer": ...}` a line; the file appears when it is complete."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    rows = ({"prompt": problem.prompt, "answer": str(problem.answer)} for problem in problems)
    partial.write_text("".join(json.dumps(row) + "\n" for row in rows))
    partial.replace(path)


def main() -> None:
    """Write both files."""
    parser = argparse.ArgumentParser(description="Write the tiny task's problems.")
    parser.add_argument("--out", type=Path, required=True, help="directory of the two files")
    parser.add_argument("--train", type=int, default=20_000, help="training problems")
    parser.add_argument("--test", type=int, default=256, help="held-out problems")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--form", choices=FORMS, default="short", help="of the task (short)")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    form = FORMS[args.form]
    write_jsonl(args.out / "train.jsonl", training_problems(args.train, args.seed, form))
    write_jsonl(args.out / "test.jsonl", test_problems(args.test, args.seed, form))
    print(f"{args.train} training and {args.test} held-out problems in {args.out}")


if __name__ == "__main__":
    main()
