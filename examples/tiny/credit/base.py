"""Make the base model of locks and keys: `python examples/tiny/credit/base.py --out DIR --seed 0`.

DIR becomes a Hugging Face directory: Qwen2 architecture, 150 thousand parameters, made from
responses that are right in everything but choose keys by chance. For the first 70 % of training
they are short, with up to one filler token a step. A model that copies wrongly loses locks whatever
its keys, and lost skill would pass for lost credit: one that copies label and lock right, and
chooses one of the lock's keys, in less than .999 of its steps is trained on until it does.

The result depends only on the seed, the source files and the recipe, as in make_base_model.py.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import random
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import make_base_model
import make_tokenizer
import making
import torch
from transformers import GenerationConfig, PreTrainedTokenizerBase, Qwen2ForCausalLM

from credit import keys


@dataclasses.dataclass(frozen=True)
class Recipe(make_base_model.Architecture):
    """Model size, training text and training of the base model."""

    iterations: int = 1600
    least_right: float = 0.999
    """Of Quality.copying."""
    short_until: float = 0.7
    """Share of the iterations with short problems and few filler tokens."""
    form: str = "keys"
    """Key of keys.FORMS."""
    filler_weight: float = 0.2
    """Weight of filler tokens in the loss. They are random, and most of its gradient's noise."""
    final_learning_rate: float = 1e-4
    sharpened: float = 1.2
    """Factor of all logits after training: what is certain becomes more so, as much longer training
    would make it, and even chances stay even."""
    max_position_embeddings: int = 1024


@dataclasses.dataclass(frozen=True)
class Quality:
    """Means over the steps of right responses, of probabilities given all that precedes."""

    copying: float
    """Of the right label, the right lock and one of its keys."""
    distance: float
    """Of the right distance."""
    good_key: float
    """Of the good key, among the two."""
    spread: float
    """Standard deviation of good_key over kinds, around what the form asks for."""

    def __str__(self) -> str:
        return "  ".join(f"{k} {v:.4f}" for k, v in dataclasses.asdict(self).items())


def training_text(rng: random.Random, recipe: Recipe, progress: float) -> tuple[str, str]:
    """Draw a prompt and a response. progress: share of the iterations that are done, in [0, 1)."""
    form = keys.FORMS[recipe.form]
    if progress >= recipe.short_until:
        problem = keys.draw_problem(rng, held_out=False, form=form)
        return problem.prompt, keys.write_response(rng, problem, form)
    num_locks = rng.randint(1, form.max_locks)
    # Goals beyond the locks, so that every distance is met often.
    most = min(num_locks + 3, form.goals(form.max_locks)[-1])
    while True:
        kinds = tuple(rng.randrange(keys.NUM_KINDS) for _ in range(num_locks))
        problem = keys.Problem(rng.randint(1, most), kinds)
        if not keys.is_held_out(problem.prompt):
            break
    return problem.prompt, keys.write_response(rng, problem, form, rng.randint(0, 1))


def losses(
    model: Qwen2ForCausalLM, recipe: Recipe, tokenizer: PreTrainedTokenizerBase
) -> Iterator[tuple[torch.Tensor, float]]:
    """Yield each iteration's loss, and its mean over the tokens' weights."""
    rng = random.Random(f"keys, base model, {recipe.seed}")
    stop = tokenizer.eos_token_id
    weights = torch.ones(len(tokenizer))
    weights[tokenizer.convert_tokens_to_ids(list(keys.FILLER))] = recipe.filler_weight
    for first, count in recipe.pools():
        drawn = [training_text(rng, recipe, first / recipe.iterations) for _ in range(count)]
        prompts = tokenizer([prompt for prompt, _ in drawn])["input_ids"]
        responses = tokenizer([response for _, response in drawn])["input_ids"]
        pool = [(p, r + [stop]) for p, r in zip(prompts, responses, strict=True)]
        mean_tokens = sum(len(r) for _, r in pool) / recipe.batches_per_pool
        for batch in recipe.batches(first, pool, lambda pair: len(pair[0]) + len(pair[1]), rng):
            ids, labels = make_base_model.pad(batch, stop)
            loss = make_base_model.response_loss(model, ids, labels, weights)
            kept = labels[labels != make_base_model.IGNORED]
            yield loss / mean_tokens, float(loss.detach() / weights[kept].sum())


@torch.no_grad()
def quality(
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    form: keys.Form,
    *,
    responses: int = 64,
    seed: int = 0,
) -> Quality:
    """Measure a base model on responses to held-out problems that the form's text writes."""
    rng = random.Random(f"keys, quality, {seed}")
    ids_of = tokenizer.convert_tokens_to_ids
    copying, distance = [], []
    good: dict[int, list[float]] = {}
    for _ in range(responses):
        problem = keys.draw_problem(rng, held_out=True, form=form)
        texts = [problem.prompt, keys.write_response(rng, problem, form)]
        prompt, response = tokenizer(texts)["input_ids"]
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        chances = logits.double().softmax(-1)
        for i, kind in enumerate(problem.kinds):
            at = i * keys.STEP_TOKENS
            right = float(chances[at, response[at]] * chances[at + 1, response[at + 1]])
            both = ids_of([keys.good_key(kind), keys.bad_key(kind)])
            x, y = (float(chances[at + 2, key]) for key in both)
            copying.append(right * (x + y))
            distance.append(float(chances[at + 3, response[at + 3]]))
            good.setdefault(kind, []).append(x / (x + y))
    mean = {kind: sum(found) / len(found) for kind, found in good.items()}
    errors = [(found - form.base_probability(kind)) ** 2 for kind, found in mean.items()]
    return Quality(
        copying=sum(copying) / len(copying),
        distance=sum(distance) / len(distance),
        good_key=sum(mean.values()) / len(mean),
        spread=(sum(errors) / len(errors)) ** 0.5,
    )


def sharpened(model: Qwen2ForCausalLM, factor: float) -> Qwen2ForCausalLM:
    """Return a copy of a model with all logits times a factor."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        model.lm_head.weight *= factor
    return model


def make(directory: Path, recipe: Recipe) -> bool:
    """Make the HF directory unless it already holds this recipe's model; True: it was made.

    Raises:
        SystemExit: the model copies wrongly too often.
    """
    sources = [sys.modules[__name__], make_base_model, making, keys, make_tokenizer]
    made_by = making.digest(recipe, sources)
    return making.make(directory, recipe, made_by, "base model", lambda out: write(out, recipe))


def write(directory: Path, recipe: Recipe) -> None:
    """Train, check, and write weights, configs and tokenizer."""
    form = keys.FORMS[recipe.form]
    tokenizer = make_tokenizer.save_tokenizer(
        directory, recipe.max_position_embeddings, keys.CHARACTERS, form.added_tokens
    )
    stop = tokenizer.eos_token_id

    model = make_base_model.build_model(recipe, len(tokenizer), stop)

    def copying() -> float:
        found = quality(sharpened(model, recipe.sharpened), tokenizer, form)
        print(found)
        return found.copying

    making.train(
        "base model", recipe, model, losses=lambda drawn: losses(model, drawn, tokenizer),
        measure=copying, what="its copies",
    )  # fmt: skip
    model = sharpened(model, recipe.sharpened)
    model.generation_config = GenerationConfig(eos_token_id=stop, pad_token_id=stop)
    model.save_pretrained(directory)


def main() -> None:
    """Make the base model."""
    parser = argparse.ArgumentParser(description="Make the base model of locks and keys.")
    parser.add_argument("--out", type=Path, required=True, help="HF directory to make")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--form", choices=keys.FORMS, default="keys", help="of the task (keys)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    made = make(args.out, Recipe(seed=args.seed, form=args.form))
    print(f"base model {'made in' if made else 'found in'} {args.out}")


if __name__ == "__main__":
    main()
