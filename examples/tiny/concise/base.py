"""Problems and base model of the concise example: chains of thought with checks that check nothing.

    prompt    Qa9b*2c-3d+1=
    needed    b*2=8,c-3=5,d+1=6,Answer:6
    checked   b*2=8;nopqrstuv,c-3=5,d+1=6;nopqrstuv,Answer:6

The form is that of task.py with 3 to 7 operations and no filler. The base model checks seven steps
of ten, in 10 tokens that say nothing: a chain is twice as long as it needs to be, and no likelier
to be right. It always thinks, and guesses 30 % of its `+`/`-` steps and 60 % of its `*` steps. A
quarter of the problems are turned (R in place of Q): their answer has two digits, of which the
model has never read, so that it never solves them.

    python examples/tiny/concise/base.py model --out DIR [--seed 0]
    python examples/tiny/concise/base.py problems --out DIR [--seed 0]

The second writes train.jsonl, a quarter of it turned; pool.jsonl, its first problems, from which
those of the second phase are chosen; and test.jsonl, held out and none of it turned.
"""

from __future__ import annotations

import dataclasses
import json
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import make_base_model
import make_tokenizer
import making
import skill
import task
import torch

CHECK = ";nopqrstuv"
FORM = task.Form(3, 7, "", turned=0.25)
PLAIN = dataclasses.replace(FORM, turned=0.0)
"""The same without turned problems."""
ALPHABET = dataclasses.replace(FORM, filler=CHECK)
"""A form with all characters."""


@dataclasses.dataclass(frozen=True)
class Recipe(make_base_model.Recipe):
    """Training of the base model; see the module for what it reads."""

    iterations: int = 1100
    least_right: float = 0.995
    direct_share: float = 0.0
    habits_direct_share: float = 0.0
    habits_guess_product: float = 0.6
    check: float = 0.7
    """Probability that a step is checked."""


def chain(rng: random.Random, problem: task.Problem, check: float, **guesses: float) -> str:
    """Write a chain with checks, and its answer.

    Args:
        rng: consumed.
        problem: to solve; a turned one is solved as if it were not.
        check: probability that a step is checked.
        guesses: of task.chain.
    """
    *steps, answer = task.chain(rng, problem, form=FORM, **guesses).split(",")
    checked = (step + (CHECK if rng.random() < check else "") for step in steps)
    return ",".join((*checked, answer))


def training_text(rng: random.Random, recipe: Recipe, progress: float) -> tuple[str, str]:
    """Draw a prompt and a response. progress: share of the iterations that are done, in [0, 1)."""
    habits = progress >= recipe.habits_from
    problem = task.draw_problem(rng, held_out=False, form=FORM)
    return problem.prompt, chain(
        rng, problem, recipe.check,
        guess=recipe.habits_guess if habits else recipe.guess,
        guess_product=recipe.habits_guess_product if habits else recipe.guess,
    )  # fmt: skip


def make_model(directory: Path, recipe: Recipe) -> bool:
    """Make the HF directory unless it already holds this recipe's model; True: it was made."""
    text = making.Text(
        "base model",
        "concise base model",
        "its steps",
        save_tokenizer=lambda out: make_tokenizer.save_tokenizer(
            out, recipe.max_position_embeddings, ALPHABET.characters
        ),
        draw=lambda *told: [training_text(*told)],
        measure=lambda model, tokenizer: skill.right_steps(
            model, tokenizer, FORM, lambda rng, problem: chain(rng, problem, recipe.check)
        ),
    )
    sources = [sys.modules[__name__], make_base_model, making, skill, task, make_tokenizer]
    return making.make_from_text(directory, recipe, text, sources)


def answer(problem: task.Problem) -> int:
    """Ground truth of a problem: of a turned one 10 to 19, which the base model never writes."""
    plain = dataclasses.replace(problem, turned=False).answer
    return plain + 10 * problem.turned


def write_problems(directory: Path, seed: int, pool: int, test: int) -> None:
    """Write the three files; pool and test: problems of pool.jsonl and test.jsonl."""
    train = task.training_problems(8000, seed, FORM)
    found = {"train": train, "pool": train[:pool], "test": task.test_problems(test, seed, PLAIN)}
    directory.mkdir(parents=True, exist_ok=True)
    for name, problems in found.items():
        rows = [{"prompt": p.prompt, "answer": str(answer(p))} for p in problems]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (directory / f"{name}.jsonl").write_text(text)


def main() -> None:
    """Make the base model or write the problems."""
    parser = making.options("Make the concise example's model or problems.")
    parser.add_argument("what", choices=("model", "problems"))
    parser.add_argument("--pool", type=int, default=256, help="problems to choose from (256)")
    parser.add_argument("--test", type=int, default=256, help="held-out problems (256)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.what == "problems":
        write_problems(args.out, args.seed, args.pool, args.test)
        print(f"problems in {args.out}")
        return
    making.tell("base model", args.out, made=make_model(args.out, Recipe(seed=args.seed)))


if __name__ == "__main__":
    main()
