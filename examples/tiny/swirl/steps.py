"""The tiny task step by step: an environment, and who judges a step.

    prompt    Qa9b*2c-3=
    action    b*2=8nopqrstuvwx,
    action    c-3=5nopqrstuvwx,
    action    Answer:5

An action is a step of a chain of thought with its comma, which is one token, or the answer. Nothing
is observed, so that an episode is a chain of thought in pieces.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import task

from vapo_megatron.environments import Step


class Steps:
    """The environment."""

    def reset(self, problem: object, seed: int) -> str:
        """Begin; an episode depends on nothing but the policy."""
        self._answer = problem.answer  # type: ignore[attr-defined]
        return ""

    def step(self, action: str) -> Step:
        """Go on after a step; anything else ends the episode, and is right if it is the answer."""
        if action.endswith(","):
            return Step("")
        return Step(done=True, verdict=action == f"{task.ANSWER_MARKER}{self._answer}")


def expected(prompt: str) -> str:
    """Return the action that is reasonable in a state: a step that computes, or the answer.

    The step before may be wrong; the state goes on from its result.
    """
    question, _, written = prompt.partition("=")
    steps = written.split(",")[:-1]
    operations = [question[i : i + 3] for i in range(3, len(question), 3)]
    value = int(steps[-1][4]) if steps else int(question[2])
    if len(steps) == len(operations):
        return task.direct_answer(value)
    label, op, operand = operations[len(steps)]
    result = task.apply(value, op, int(operand))
    return f"{label}{op}{operand}={result}{task.SHORT.filler},"


def reasonable(response: str, prompt: str) -> bool:
    """Judge an action by the state alone, without the ground truth: the process filter's judge.

    A guess (`~`) that is right is reasonable, too: nobody sees that it was one.
    """
    try:
        return response.removesuffix("<|endoftext|>").replace("~", "=") == expected(prompt)
    except (IndexError, ValueError, KeyError):
        return False  # The steps before are none that anything follows from.
