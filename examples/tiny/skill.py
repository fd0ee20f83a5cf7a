"""What a tiny base model can do if it thinks and computes: how many of its steps are right.

Whether there is a first step, and whether a step is computed (`=`) or guessed (`~`), are habits and
not skill. So are the results of a model that slips.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import task
import torch
from transformers import PreTrainedTokenizerBase, Qwen2ForCausalLM


@torch.no_grad()
def step_chances(
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    problem: str,
    chain: str,
    *,
    results: bool = True,
) -> list[float]:
    """Return each step's probability: of its label, operator, operand and result.

    Args:
        model: in evaluation mode.
        tokenizer: of one token a character, but for the answer's marker.
        problem: prompt.
        chain: right, and without guesses.
        results: False leaves them out.
    """
    prompt, response = tokenizer([problem, chain])["input_ids"]
    logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    chances = logits.double().softmax(-1)[range(len(response)), response]
    *steps, _ = chain.split(",")
    found = []
    for first in itertools.accumulate((len(step) + 1 for step in steps[:-1]), initial=0):
        copied = float(chances[first + (first == 0) : first + 3].prod())
        found.append(copied * float(chances[first + 4]) if results else copied)
    return found


def right_steps(
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    form: task.Form,
    chain: Callable[[random.Random, task.Problem], str] | None = None,
    *,
    results: bool = True,
    responses: int = 64,
    rng: random.Random | None = None,
    **problems: Any,
) -> float:
    """Return the mean of step_chances.

    Args:
        model, tokenizer, results: of step_chances.
        form: of the problems.
        chain: writes a right chain; None: task.chain.
        responses: to write.
        rng: consumed; None: always the same.
        problems: of task.draw_problem; none: held-out ones.
    """
    rng, found = rng or random.Random("tiny task, skill"), list[float]()
    for _ in range(responses):
        problem = task.draw_problem(rng, form=form, **(problems or {"held_out": True}))
        text = chain(rng, problem) if chain else task.chain(rng, problem, form=form)
        found += step_chances(model, tokenizer, problem.prompt, text, results=results)
    return sum(found) / len(found)


def wrong_by_length(
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    form: task.Form,
    seed: int,
    *,
    results: bool = True,
    responses: int = 40,
) -> tuple[float, ...]:
    """Return 1 - right_steps by number of operations, from the form's fewest on.

    Args:
        model, tokenizer, form, results: of right_steps.
        seed: of the problems, which are not held out.
        responses: to write for each number.
    """
    rng, wrong = random.Random(f"tiny task, weak, {seed}"), []
    for count in range(form.min_operations, form.max_operations + 1):
        right = right_steps(
            model, tokenizer, form, results=results, responses=responses, rng=rng,
            held_out=False, num_operations=count,
        )  # fmt: skip
        wrong.append(max(1e-6, 1 - right))  # Also if it is NaN.
    return tuple(wrong)
