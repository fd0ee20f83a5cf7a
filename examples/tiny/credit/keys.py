"""Locks and keys: a form of the tiny task in which many small decisions make one outcome.

    prompt     Q[12]1:L03 2:L55 ... 20:L17 =        (without the blanks) open 12 of 20 locks
    response   1:L03x03[11]!#$%&(,2:L55y55[11]<&!#)$,...    a step for each lock, 11 tokens each

A step is the lock's label, the lock, the key chosen, the distance left, six random filler tokens
and a comma; each of these is one token. There are 100 kinds of locks. Each kind has two keys of its
own, x03 and y03 for L03: x opens the lock and lowers the distance by 1, y does not. To a model they
are two unrelated tokens. The base model writes the distance correctly, so it knows what each key
does, but it chooses either with the same probability. A response is correct if it opens as many
locks as the prompt asks for: 10 to 17 of 20, of which the base model opens 10 on average.

`Judge` counts the locks that the keys written do open, in order; it does not read the distance,
which a model would learn to falsify. It is used as

    PYTHONPATH=examples/tiny/credit vapo train ... reward.verifier=keys:Judge

`python examples/tiny/credit/keys.py --out DIR [--form keys]` writes DIR/train.jsonl and
DIR/test.jsonl. A hash of the prompt decides whether a problem is held out, as in task.py.
"""

from __future__ import annotations

import dataclasses
import math
import random
import re
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from task import command, is_held_out

from vapo_megatron.data.problems import Problem as Row
from vapo_megatron.reward.verifier import Verdict

NUM_KINDS = 100
FILLER = "!#$%&()<"
NUM_FILLERS = 6
STEP_TOKENS = NUM_FILLERS + 5
CHARACTERS = "Q=," + FILLER
_LOCK = re.compile(r"L(\d\d)")


@dataclasses.dataclass(frozen=True)
class Form:
    """Length of problems, and what the base model does."""

    min_locks: int = 20
    max_locks: int = 20
    min_goal: float = 0.5
    max_goal: float = 0.85
    """The goal is between these shares of the locks."""
    num_kinds: int = NUM_KINDS
    """Kinds that problems have; each of fewer is met more often."""
    num_rare: int = 0
    """How many of these have a good key that the base model rarely chooses."""
    rare: float = 0.015
    """How often it does."""

    @property
    def added_tokens(self) -> list[str]:
        """Tokens of more than one character."""
        labels = [f"{i}:" for i in range(1, self.max_locks + 1)]
        distances = [distance_left(i) for i in range(self.goals(self.max_locks)[-1] + 1)]
        kinds = range(NUM_KINDS)
        return [*labels, *distances, *map(lock, kinds), *map(good_key, kinds), *map(bad_key, kinds)]

    @property
    def max_response_tokens(self) -> int:
        """Tokens of the longest response and its stop token, plus two steps for errors."""
        return (self.max_locks + 2) * STEP_TOKENS + 1

    def goals(self, num_locks: int) -> range:
        """Return the goals of problems with so many locks."""
        # The product of .85 and 20 is just below 17.
        low = max(1, math.ceil(self.min_goal * num_locks - 1e-9))
        return range(low, max(low, math.floor(self.max_goal * num_locks + 1e-9)) + 1)

    @property
    def rare_kinds(self) -> list[int]:
        """Kinds whose good key is rare at first."""
        return [
            k for k in range(self.num_kinds) if k * self.num_rare % self.num_kinds < self.num_rare
        ]

    def base_probability(self, kind: int) -> float:
        """Return the probability with which the base model chooses the kind's good key."""
        return self.rare if kind in self.rare_kinds else 0.5


FORMS = {
    "keys": Form(),
    "keys_mixed": Form(min_locks=5),
    "keys_rare": Form(min_locks=6, max_locks=6, num_kinds=5, num_rare=2),
}
"""20 locks; 5 to 20 locks; 6 locks of five kinds, two with a good key that is rare at first."""


def lock(kind: int) -> str:
    """Write a lock."""
    return f"L{kind:02}"


def good_key(kind: int) -> str:
    """Write the key that opens a kind's locks."""
    return f"x{kind:02}"


def bad_key(kind: int) -> str:
    """Write the key that does not."""
    return f"y{kind:02}"


def distance_left(count: int) -> str:
    """Write how many locks are still to be opened; the brackets keep it apart from a label."""
    return f"[{count}]"


@dataclasses.dataclass(frozen=True)
class Problem:
    """Locks in order, and how many of them to open."""

    goal: int
    kinds: tuple[int, ...]

    @property
    def prompt(self) -> str:
        """3 + 2K tokens for K locks."""
        locks = "".join(f"{i}:{lock(kind)}" for i, kind in enumerate(self.kinds, 1))
        return f"Q{distance_left(self.goal)}{locks}="

    @property
    def answer(self) -> int:
        """The goal, for people."""
        return self.goal


def read_problem(prompt: str) -> Problem:
    """Read a prompt.

    Raises:
        ValueError: the text is none.
    """
    goal, _, _ = prompt.removeprefix("Q[").partition("]")
    kinds = tuple(map(int, _LOCK.findall(prompt)))
    problem = Problem(int(goal) if goal.isdecimal() else -1, kinds)
    if problem.prompt != prompt:
        raise ValueError(f"{prompt[:40]!r} is no prompt of this task")
    return problem


def draw_problem(
    rng: random.Random, *, held_out: bool, form: Form, num_locks: int | None = None
) -> Problem:
    """Draw a training or a held-out problem.

    Args:
        rng: consumed.
        held_out: see task.is_held_out.
        form: of the task.
        num_locks: K; None draws it uniformly from the form's range.
    """
    if num_locks is None:
        num_locks = rng.randint(form.min_locks, form.max_locks)
    while True:
        goal = rng.choice(form.goals(num_locks))
        problem = Problem(goal, tuple(rng.randrange(form.num_kinds) for _ in range(num_locks)))
        if is_held_out(problem.prompt) == held_out:
            return problem


def write_response(
    rng: random.Random, problem: Problem, form: Form, num_fillers: int = NUM_FILLERS
) -> str:
    """Write a response as the base model should: keys by chance, all else right."""
    text, distance = "", problem.goal
    for i, kind in enumerate(problem.kinds, 1):
        is_good = rng.random() < form.base_probability(kind)
        distance = max(0, distance - is_good)
        key = good_key(kind) if is_good else bad_key(kind)
        filler = "".join(rng.choice(FILLER) for _ in range(num_fillers))
        text += f"{i}:{lock(kind)}{key}{distance_left(distance)}{filler},"
    return text


def count_open(problem: Problem, response: str) -> int:
    """Return how many locks a response opens; the i-th step can only open the i-th lock."""
    steps = response.split(",")
    return sum(
        step.startswith(f"{i}:{lock(kind)}{good_key(kind)}")
        for i, (kind, step) in enumerate(zip(problem.kinds, steps), 1)
    )


class Judge:
    """Accepts responses that open as many locks as the prompt asks for."""

    def check(self, problem: Row) -> str | None:
        """Say why a row is no problem of this task."""
        try:
            read_problem(problem.prompt)
        except ValueError as error:
            return str(error)
        return None

    def score(self, responses: Sequence[str], problems: Sequence[Row]) -> list[Verdict]:
        """Return a verdict for each response."""
        verdicts = []
        for response, row in zip(responses, problems, strict=True):
            problem = read_problem(row.prompt)
            opened = count_open(problem, response)
            status = "correct" if opened >= problem.goal else "wrong"
            note = f"{opened} open, {problem.goal} wanted"
            verdicts.append(Verdict(status, answer=str(opened), note=note))
        return verdicts


def training_problems(count: int, seed: int, form: Form) -> list[Problem]:
    """Draw problems that are not held out."""
    rng = random.Random(f"keys, train, {seed}")
    return [draw_problem(rng, held_out=False, form=form) for _ in range(count)]


def test_problems(count: int, seed: int, form: Form) -> list[Problem]:
    """Draw held-out problems, all different."""
    rng = random.Random(f"keys, test, {seed}")
    problems: dict[Problem, None] = {}
    while len(problems) < count:
        problems[draw_problem(rng, held_out=True, form=form)] = None
    return list(problems)


if __name__ == "__main__":
    command("locks and keys", FORMS, training_problems, test_problems)
