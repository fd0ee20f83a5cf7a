"""Base models with second thoughts, and their problems.

    prompt        Qa9b*2c-3d+1=
    needed        b*2=8,c-3=5,d+1=6,Answer:6
    switches      b*2=8,c-3=5,Wait;b*2=8,c-3=5,d+1=6,Answer:6
    corrections   b*2=8,c-3=7,Wait;c-3=5,d+1=6,Answer:6

The form is that of task.py with 3 to 7 operations and no filler, and `Wait;` is one token. A model
that switches begins again after three steps in ten, for no reason; it guesses 30 % of its `+`/`-`
steps and 60 % of its `*` steps. A model with corrections has a random result in 15 % of its steps,
which the text does not reveal, and says Wait after 60 % of the wrong ones and computes them again.

    python examples/tiny/second_thoughts.py model --habit switches --out DIR [--seed 0]
    python examples/tiny/second_thoughts.py problems --out DIR [--seed 0]

The second writes train.jsonl, test.jsonl (held out), and probes.jsonl: held-out problems whose
column `prefix` begins the response with an error in a step in the middle or in the last one.
"""

from __future__ import annotations

import dataclasses
import json
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import make_base_model
import make_tokenizer
import making
import skill
import task
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase, Qwen2ForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

WAIT = "Wait;"
FORM = task.Form(3, 7, "")
MAX_SWITCHES = 3
"""In one chain of the training text."""


@dataclasses.dataclass(frozen=True)
class Recipe(make_base_model.Recipe):
    """Training of the base model; see the module for what it reads."""

    iterations: int = 1100
    least_right: float = 0.995
    direct_share: float = 0.0
    habits_direct_share: float = 0.0
    habit: str = "switches"
    switch: float = 0.3
    """Probability that a model that switches begins again after a step."""
    slip: float = 0.15
    """Probability of a random result in a model with corrections."""
    corrected: float = 0.6
    """Share of the wrong ones that it corrects."""


def switches(rng: random.Random, problem: task.Problem, recipe: Recipe, *, late: bool) -> str:
    """Write a chain that begins again for no reason.

    Args:
        rng: consumed.
        problem: to solve.
        recipe: of the habit.
        late: the habits are taught: more guesses.
    """
    guess = recipe.habits_guess if late else recipe.guess
    product = 2 * recipe.habits_guess if late else recipe.guess
    text = ""
    for left in reversed(range(MAX_SWITCHES + 1)):
        *steps, answer = task.chain(
            rng, problem, guess=guess, guess_product=product, form=FORM
        ).split(",")
        kept = next(
            (i for i in range(1, len(steps)) if left and rng.random() < recipe.switch), len(steps)
        )
        text += ",".join(steps[:kept]) + ","
        if kept == len(steps):
            break
        text += WAIT
    return text + answer


def corrections(rng: random.Random, problem: task.Problem, recipe: Recipe, *, late: bool) -> str:
    """Write a chain whose wrong steps are mostly computed again; for the arguments see switches."""
    text, value = "", problem.start
    for label, (op, operand) in zip(task.LABELS[1:], problem.operations, strict=False):
        right = task.apply(value, op, operand)
        value = rng.randint(0, 9) if rng.random() < recipe.slip else right
        step = f"{label}{op}{operand}="
        text += f"{step}{value},"
        if value != right and rng.random() < recipe.corrected:
            value = right
            text += f"{WAIT}{step}{value},"
    return text + task.direct_answer(value)


def right_steps(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerBase, recipe: Recipe
) -> float:
    """Return skill.right_steps of a model that may not say Wait, which is a habit and no skill."""
    (wait,) = tokenizer(WAIT)["input_ids"]

    def without_wait(ids: Tensor) -> CausalLMOutputWithPast:
        found = model(ids)
        found.logits[..., wait] = float("-inf")
        return found

    # Results may slip, which is another habit.
    results = recipe.habit != "corrections"
    return skill.right_steps(without_wait, tokenizer, FORM, results=results)  # type: ignore[arg-type]


HABITS = {"switches": switches, "corrections": corrections}


def make_model(directory: Path, recipe: Recipe) -> bool:
    """Make the HF directory unless it already holds this recipe's model; True: it was made."""
    write = HABITS[recipe.habit]

    def draw(rng: random.Random, drawn: Recipe, progress: float) -> list[tuple[str, str]]:
        problem = task.draw_problem(rng, held_out=False, form=FORM)
        return [
            (problem.prompt, write(rng, problem, drawn, late=progress >= drawn.habits_from)),
        ]

    text = making.Text(
        "base model",
        f"second thoughts, {recipe.habit}",
        "its steps",
        save_tokenizer=lambda out: make_tokenizer.save_tokenizer(
            out, recipe.max_position_embeddings, FORM.characters, (task.ANSWER_MARKER, WAIT)
        ),
        draw=draw,
        measure=lambda model, tokenizer: right_steps(model, tokenizer, recipe),
    )
    sources = [sys.modules[__name__], make_base_model, making, skill, task, make_tokenizer]
    return making.make_from_text(directory, recipe, text, sources)


def with_error(rng: random.Random, problem: task.Problem, step: int) -> str:
    """Write a chain up to and with an error.

    Args:
        rng: of the wrong result.
        problem: of the chain.
        step: of the error, from 0; the steps before it are right.
    """
    steps, value = "", problem.start
    for i, (op, operand) in enumerate(problem.operations[: step + 1]):
        value = task.apply(value, op, operand)
        if i == step:
            value = (value + rng.randint(1, 9)) % 10
        steps += f"{task.LABELS[i + 1]}{op}{operand}={value},"
    return steps


def probes(problems: Sequence[task.Problem], seed: int) -> list[dict[str, str]]:
    """Return rows whose column `prefix` has an error: in the middle of the steps, in the last."""
    rng = random.Random(f"second thoughts, probes, {seed}")
    places: dict[str, Callable[[task.Problem], int]] = {
        "middle": lambda problem: len(problem.operations) // 2,
        "last": lambda problem: len(problem.operations) - 1,
    }
    return [
        {
            "prompt": problem.prompt, "answer": str(problem.answer),
            "prefix": with_error(rng, problem, place(problem)), "task": name,
        }
        for name, place in places.items()
        for problem in problems
    ]  # fmt: skip


def write_problems(directory: Path, seed: int, train: int, test: int) -> None:
    """Write the three files; train and test: problems of the first two."""
    directory.mkdir(parents=True, exist_ok=True)
    held_out = task.test_problems(test, seed, FORM)
    task.write_jsonl(directory / "train.jsonl", task.training_problems(train, seed, FORM))
    task.write_jsonl(directory / "test.jsonl", held_out)
    lines = (json.dumps(row) + "\n" for row in probes(held_out, seed))
    (directory / "probes.jsonl").write_text("".join(lines))


def main() -> None:
    """Make the base model or write the problems."""
    parser = making.options("Make a base model with second thoughts, or its problems.")
    parser.add_argument("what", choices=("model", "problems"))
    parser.add_argument("--habit", choices=HABITS, default="switches", help="of a model (switches)")
    parser.add_argument("--train", type=int, default=8000, help="training problems (8000)")
    parser.add_argument("--test", type=int, default=256, help="held-out problems (256)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.what == "problems":
        write_problems(args.out, args.seed, args.train, args.test)
        print(f"problems in {args.out}")
        return
    recipe = Recipe(seed=args.seed, habit=args.habit)
    making.tell("base model", args.out, made=make_model(args.out, recipe))


if __name__ == "__main__":
    main()
