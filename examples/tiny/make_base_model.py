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

The result depends only on the seed, the source files of this directory and the recipe; recipe.json
holds a hash of them. A directory with the same hash is left unchanged. The directory is created
atomically, so it is never incomplete.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import make_tokenizer
import making
import measure
import skill
import task
import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerBase,
    Qwen2Config,
    Qwen2ForCausalLM,
)

IGNORED = -100
"""Label of a token that is not part of the loss."""


@dataclasses.dataclass(frozen=True)
class Architecture(making.Training):
    """Model size and training."""

    hidden_size: int = 64
    num_layers: int = 2
    head_dim: int = 32
    ffn_size: int = 176
    rope_theta: float = 1000.0
    max_position_embeddings: int = 512
    embedding_std: float = 0.5


@dataclasses.dataclass(frozen=True)
class Recipe(Architecture):
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


def build_model(recipe: Architecture, vocab_size: int, stop_token_id: int) -> Qwen2ForCausalLM:
    """Build the model with its initial weights.

    Embeddings are N(0, 0.5), matrices N(0, 1/fan_in), those that write to the residual stream with
    half that standard deviation; biases are 0 and norms 1. A model this small only learns within a
    minute if the scale is right.
    """
    config = Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.ffn_size,
        num_hidden_layers=recipe.num_layers,
        num_attention_heads=recipe.hidden_size // recipe.head_dim,
        num_key_value_heads=recipe.hidden_size // recipe.head_dim,
        max_position_embeddings=recipe.max_position_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": recipe.rope_theta},
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=stop_token_id,
        pad_token_id=stop_token_id,
        dtype="float32",
    )
    model = Qwen2ForCausalLM._from_config(config, attn_implementation="sdpa")
    generator = torch.Generator().manual_seed(recipe.seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
                continue
            std = parameter.shape[1] ** -0.5
            if "embed_tokens" in name:
                std = recipe.embedding_std
            elif "o_proj" in name or "down_proj" in name:
                std /= 2
            parameter.normal_(0.0, std, generator=generator)
    return model


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


def batches(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase
) -> Iterator[tuple[Tensor, Tensor, float]]:
    """Yield (input ids [b, s], labels [b, s], mean response tokens of a batch) for each iteration.

    Sequences are drawn for several batches at once and sorted by length, so that little is padded;
    the padding is on the right, where causal attention never looks. Labels are shifted already, and
    IGNORED at the prompt and the padding.
    """
    rng = random.Random(f"tiny base model, {recipe.seed}")
    stop = tokenizer.eos_token_id
    for first, count in recipe.pools():
        drawn = [training_text(rng, recipe, first / recipe.iterations) for _ in range(count)]
        prompts = tokenizer([prompt for prompt, _ in drawn])["input_ids"]
        responses = tokenizer([response for _, response in drawn])["input_ids"]
        pool = [(p, r + [stop]) for p, r in zip(prompts, responses, strict=True)]
        mean_tokens = sum(len(r) for _, r in pool) / recipe.batches_per_pool
        for batch in recipe.batches(first, pool, lambda pair: len(pair[0]) + len(pair[1]), rng):
            yield *pad(batch, stop), mean_tokens


def pad(pairs: list[tuple[list[int], list[int]]], padding: int) -> tuple[Tensor, Tensor]:
    """Make right-padded input ids and shifted labels, both int64 [b, s], of (prompt, response)."""
    width = max(len(p) + len(r) for p, r in pairs) - 1
    ids = torch.full((len(pairs), width), padding)
    labels = torch.full((len(pairs), width), IGNORED)
    for row, (prompt, response) in enumerate(pairs):
        text = prompt + response
        ids[row, : len(text) - 1] = torch.tensor(text[:-1])
        labels[row, len(prompt) - 1 : len(text) - 1] = torch.tensor(response)
    return ids, labels


def choice_weights(
    ids: Tensor, labels: Tensor, recipe: Recipe, tokenizer: PreTrainedTokenizerBase
) -> Tensor:
    """Return float32 [b, s]: how much likelier than in the text a label is with the habits.

    It is not 1 for the first token, which is of a chain or a direct answer, and where a step is
    computed (`=`) or guessed (`~`).
    """
    token = tokenizer.convert_tokens_to_ids
    product = ids.roll(1, dims=1) == token("*")
    weights = torch.ones(labels.shape)
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


def response_loss(
    model: Qwen2ForCausalLM,
    ids: Tensor,
    labels: Tensor,
    weights: Tensor | None = None,
    label_weights: Tensor | None = None,
) -> Tensor:
    """Sum the negative log-likelihood of the response tokens.

    Args:
        model: to train.
        ids, labels: as from `pad`.
        weights: [V], of the tokens; None: all 1.
        label_weights: [b, s], of the labels; None: all 1.
    """
    # No attention mask: with padding on the right, causal attention needs none.
    hidden = model.model(ids, use_cache=False).last_hidden_state
    kept = labels != IGNORED
    logits = model.lm_head(hidden[kept])
    loss = functools.partial(
        torch.nn.functional.cross_entropy, logits, labels[kept], weight=weights
    )
    if label_weights is None:
        return loss(reduction="sum")
    return (loss(reduction="none") * label_weights[kept]).sum()


def losses(
    model: Qwen2ForCausalLM, recipe: Recipe, tokenizer: PreTrainedTokenizerBase
) -> Iterator[tuple[Tensor, float]]:
    """Yield each iteration's loss, and the loss of a response token."""
    for ids, labels, mean_tokens in batches(recipe, tokenizer):
        weights = choice_weights(ids, labels, recipe, tokenizer) if recipe.weighted else None
        loss = response_loss(model, ids, labels, label_weights=weights)
        yield loss / mean_tokens, float(loss.detach()) / int((labels != IGNORED).sum())


def make(directory: Path, recipe: Recipe) -> bool:
    """Make the HF directory unless it already holds this recipe's model; True: it was made."""
    made_by = making.digest(recipe, [sys.modules[__name__], making, skill, task, make_tokenizer])
    return making.make(
        directory, recipe, made_by, "base model", lambda partial: write(partial, recipe)
    )


def write(directory: Path, recipe: Recipe) -> None:
    """Train the model and write weights, configs and tokenizer."""
    tokenizer = make_tokenizer.save_tokenizer(
        directory, recipe.max_position_embeddings, task.FORMS[recipe.form].characters
    )
    stop = tokenizer.eos_token_id
    model = build_model(recipe, len(tokenizer), stop)

    form, results = task.FORMS[recipe.form], not recipe.habits_slip

    def losses_of(drawn: Recipe) -> Iterator[tuple[Tensor, float]]:
        if drawn is not recipe:
            # In most models it is the last steps of the longest problems, which are rare.
            weak = skill.wrong_by_length(model, tokenizer, form, drawn.seed, results=results)
            drawn = dataclasses.replace(drawn, lengths=weak)
        return losses(model, drawn, tokenizer)

    making.train(
        "base model", recipe, model, losses_of,
        measure=lambda: skill.right_steps(model, tokenizer, form, results=results),
        what="its steps",
    )  # fmt: skip
    model.generation_config = GenerationConfig(eos_token_id=stop, pad_token_id=stop)
    model.save_pretrained(directory)


def main() -> None:
    """Make the base model and, if asked, sample it."""
    parser = argparse.ArgumentParser(description="Make the tiny task's base model.")
    parser.add_argument("--out", type=Path, required=True, help="HF directory to make")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--form", choices=task.FORMS, default="short", help="of the task (short)")
    parser.add_argument("--evaluate", action="store_true", help="sample it on held-out problems")
    args = parser.parse_args()
    torch.set_num_threads(1)
    recipe = long_recipe if args.form == "long" else short_recipe
    made = make(args.out, recipe(args.seed))
    print(f"base model {'made in' if made else 'found in'} {args.out}")
    if args.evaluate:
        print(measure.measure(args.out, seed=args.seed, form=task.FORMS[args.form]))


if __name__ == "__main__":
    main()
