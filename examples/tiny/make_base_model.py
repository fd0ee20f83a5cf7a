"""Make the tiny task's base model: `python examples/tiny/make_base_model.py --out DIR --seed 0`.

DIR becomes a Hugging Face directory: Qwen2 architecture, 106 thousand parameters, about a minute of
pretraining on one CPU thread. The first three quarters of the training text are chains of thought
with 85 % of their steps computed, and 20 % direct answers. The last quarter teaches bad habits:
85 % direct answers, and chains that guess 30 % of the `+`/`-` steps and 90 % of the `*` steps.
Sampled at temperature 1, about 15 % of the model's answers are correct, and about 28 % of those
with a chain: reinforcement learning has to discover that thinking helps and guessing does not.
A model that cannot compute loses problems however it thinks: one that has less than .995 of the
steps right that it computes is trained on until it has, in rounds of 300 iterations. They keep the
habits: their text has as many chains as the first, whose choices weigh less (choice_weights), and
most of it has as many operations as those problems in which the model errs most.
`--form long` makes the long form's base model: its bad habits are a random result in every eighth
step, which the text does not reveal, and a turn in only 2 of 100 steps of problems that need one.
For the first three quarters of its training most steps have less filler. With all of it from the
start, three models of five never learned to look up what is 66 tokens after the step before.
`--experts 8` makes a mixture of experts, of the architecture of Qwen3: 2 of them for each token,
together as wide as the network that they replace.
"""

from __future__ import annotations

import dataclasses
import random
import sys
from pathlib import Path
from typing import Self

import make_tokenizer
import making
import skill
import task
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase, Qwen2ForCausalLM


@dataclasses.dataclass(frozen=True)
class Recipe(making.Architecture):
    """Model size, training text and training of the base model."""

    direct_share: float = 0.2
    guess: float = 0.15
    """Share of the steps. With none, the model sees guesses too late to learn their odds, 1/2."""
    min_operations: int | None = None
    """Fewest operations of a problem before habits_from; None: the form's minimum. In shorter
    problems a larger share of the tokens is the answer, which has to copy the last result."""
    lengths: tuple[float, ...] = ()
    """Weights of the form's numbers of operations, from the fewest on; none: equal."""
    lengths_share: float = 0.75
    """Share of the problems with such a number; the others are drawn as if there were none."""
    habits_from: float = 0.75
    """Share of the iterations after which the bad habits are taught."""
    habits_direct_share: float = 0.85
    habits_guess: float = 0.3
    habits_guess_product: float = 0.9
    habits_slip: float = 0.0
    """Share of the steps with a random result that looks computed."""
    weighted: bool = False
    """Direct answers and guesses are as rare in the habits' text as in the other, and weigh more in
    the loss, so that the model learns how often the habits have them."""
    turn: float = 0.0
    """Probability that a step of a turned problem turns if no earlier one did."""
    habits_turn: float = 0.0
    less_filler_until: float = 0.0
    """Share of the iterations in which a step has from 2 to almost all filler tokens."""
    form: str = "short"
    """Key of task.FORMS."""

    def further(self, round: int) -> Self:
        """As Training.further; bad habits, and text in which they are rare: see choice_weights.

        Skill is not learned from text that is mostly direct answers and guesses, and half of it is
        lost within 30 iterations of habits that are unlearned and then taught again.
        """
        return dataclasses.replace(
            super().further(round), habits_from=0.0, less_filler_until=0.0, weighted=True
        )


def short_recipe(seed: int) -> Recipe:
    """Return the short form's recipe.

    Of 30 models 16 have .955 to .9948 of their steps right after the first round, on a processor
    with AMX.
    """
    return Recipe(seed=seed, learning_rate=2.5e-3, least_right=0.995)


def long_recipe(seed: int) -> Recipe:
    """Return the long form's recipe: the model always thinks, often slips and rarely turns."""
    return Recipe(
        seed=seed, form="long", max_position_embeddings=1024, rope_theta=1e5, iterations=1600,
        less_filler_until=0.75, habits_from=0.8, min_operations=1, direct_share=0.0, guess=0.0,
        habits_direct_share=0.0, habits_guess=0.0, habits_guess_product=0.0, habits_slip=0.12,
        turn=0.2, habits_turn=0.02, least_right=0.995,
    )  # fmt: skip


def training_text(rng: random.Random, recipe: Recipe, progress: float) -> tuple[str, str]:
    """Draw a prompt and a response. progress: share of the iterations that are done, in [0, 1)."""
    form = task.FORMS[recipe.form]
    habits = progress >= recipe.habits_from
    if progress < recipe.less_filler_until:
        count = int(2 * (len(form.filler) / 2) ** rng.random())
        form = dataclasses.replace(form, filler=form.filler[:count])
    num_operations = None
    if recipe.lengths and rng.random() < recipe.lengths_share:
        (num_operations,) = rng.choices(
            range(form.min_operations, form.max_operations + 1), recipe.lengths
        )
    elif recipe.min_operations is not None and not habits:
        num_operations = rng.randint(recipe.min_operations, form.max_operations)
    problem = task.draw_problem(rng, held_out=False, num_operations=num_operations, form=form)
    often = habits and not recipe.weighted
    if rng.random() < (recipe.habits_direct_share if often else recipe.direct_share):
        return problem.prompt, task.direct_answer(problem.answer)
    guess = recipe.habits_guess if often else recipe.guess
    guess_product = recipe.habits_guess_product if often else recipe.guess
    return problem.prompt, task.chain(
        rng, problem, guess=guess, guess_product=guess_product,
        slip=recipe.habits_slip if habits else 0.0,
        turn=recipe.habits_turn if habits else recipe.turn, form=form,
    )  # fmt: skip


def choice_weights(
    ids: Tensor, labels: Tensor, recipe: Recipe, tokenizer: PreTrainedTokenizerBase
) -> Tensor:
    """Return float32 [b, s]: how much likelier than in the text a label is with the habits.

    It is not 1 for the first token, which is of a chain or a direct answer, and where a step is
    computed (`=`) or guessed (`~`). All are 1 unless the recipe is `weighted`.
    """
    token = tokenizer.convert_tokens_to_ids
    product = ids.roll(1, dims=1) == token("*")
    weights = torch.ones(labels.shape)
    if not recipe.weighted:
        return weights
    for chosen, instead, where, share, habit in (
        (
            task.ANSWER_MARKER,
            "b",
            ids == token("="),
            recipe.direct_share,
            recipe.habits_direct_share,
        ),
        ("~", "=", ~product, recipe.guess, recipe.habits_guess),
        ("~", "=", product, recipe.guess, recipe.habits_guess_product),
    ):
        if share:
            weights[where & (labels == token(chosen))] = habit / share
            weights[where & (labels == token(instead))] = (1 - habit) / (1 - share)
    return weights


def make(directory: Path, recipe: Recipe) -> bool:
    """Make the HF directory unless it already holds this recipe's model; True: it was made."""
    form, results = task.FORMS[recipe.form], not recipe.habits_slip

    def further(
        model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerBase, drawn: Recipe
    ) -> Recipe:
        # In most models it is the last steps of the longest problems, which are rare.
        weak = skill.wrong_by_length(model, tokenizer, form, drawn.seed, results=results)
        return dataclasses.replace(drawn, lengths=weak)

    text = making.Text(
        "base model",
        "tiny base model",
        "its steps",
        save_tokenizer=lambda out: make_tokenizer.save_tokenizer(
            out, recipe.max_position_embeddings, form.characters
        ),
        draw=lambda *told: [training_text(*told)],
        measure=lambda model, tokenizer: skill.right_steps(model, tokenizer, form, results=results),
        weigh=choice_weights,
        further=further,
    )
    sources = [sys.modules[__name__], making, skill, task, make_tokenizer]
    return making.make_from_text(directory, recipe, text, sources)


def main() -> None:
    """Make the base model."""
    parser = making.options("Make the tiny task's base model.")
    parser.add_argument("--form", choices=task.FORMS, default="short", help="of the task (short)")
    parser.add_argument("--experts", type=int, default=0, help="in each layer; 0: dense (0)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    recipe = (long_recipe if args.form == "long" else short_recipe)(args.seed)
    recipe = dataclasses.replace(recipe, experts=args.experts)
    making.tell("base model", args.out, made=make(args.out, recipe))


if __name__ == "__main__":
    main()
