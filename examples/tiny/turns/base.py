"""Make the base model of turns with luck: `python examples/tiny/turns/base.py --out DIR --seed 0`.

DIR becomes a Hugging Face directory: Qwen2 architecture, 112 thousand parameters, made from whole
episodes whose actions are right in everything, with preferences that are good in half of the
situations.
"""

from __future__ import annotations

import dataclasses
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import make_tokenizer
import making
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase, Qwen2ForCausalLM

from turns import luck

USUALLY = 0.7
"""How often the base model takes the choice that it prefers. Without preferences it would not tell
situations apart, and the first hundred updates would go into that."""


@dataclasses.dataclass(frozen=True)
class Recipe(making.Architecture):
    """Model size and training."""

    iterations: int = 800
    batch_size: int = 16
    least_right: float = 0.998
    """Of the actions' form."""
    filler_weight: float = 0.2
    """Weight of filler tokens in the loss. They are random, and most of its gradient's noise."""
    count_weight: float = 0.3
    """Weight of the counts in observations, so that the model knows of them, as one that has read
    much knows of what it reads; a critic then learns from fewer episodes."""


def write_action(rng: random.Random, situation: int) -> str:
    """Write an action as the base model should, whose preferences have nothing to do with luck."""
    usual = luck.usual_choice(situation)
    other = luck.CHOICES.replace(usual, "")
    choice = usual if rng.random() < USUALLY else other
    return choice + "".join(rng.choices(luck.FILLER, k=luck.NUM_FILLERS))


def write_episode(rng: random.Random) -> tuple[str, str]:
    """Write a whole episode: the prompt with the first observation, and the rest.

    What stands last has no stop token, which whoever encodes it adds.
    """
    episode = luck.Episode(rng.random())
    first, text = luck.PROMPT + episode.observation(), ""
    while True:
        action = write_action(rng, episode.situation)
        episode.choose(action)
        text += action
        if not episode.left:
            return first, text
        text += make_tokenizer.STOP + episode.observation()


def weigh(
    ids: Tensor, labels: Tensor, recipe: Recipe, tokenizer: PreTrainedTokenizerBase
) -> Tensor:
    """Return the weights of labels, float32 [b, s]: of observations, situations have none."""

    def among(characters: list[str]) -> Tensor:
        return torch.isin(labels, torch.tensor(tokenizer.convert_tokens_to_ids(characters)))

    weights = torch.where(among(list(luck.FILLER)), recipe.filler_weight, 1.0)
    weights = torch.where(among(list(luck.COUNTS)), recipe.count_weight, weights)
    return weights.masked_fill(among(list(luck.SITUATIONS)), 0.0)


@torch.no_grad()
def formed(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerBase) -> float:
    """Return the mean probability that an action has its form, of held-out episodes."""
    rng, found = random.Random("turns, quality"), []
    kinds = [
        tokenizer.convert_tokens_to_ids(list(some))
        for some in (luck.CHOICES, *[luck.FILLER] * luck.NUM_FILLERS)
    ]
    kinds.append([tokenizer.eos_token_id])
    for _ in range(16):
        (pair,) = making.encode(tokenizer, [write_episode(rng)])
        ids = torch.tensor([[*pair[0], *pair[1]]])
        chances = model(ids).logits[0].double().softmax(-1)
        at = len(pair[0]) - 1
        for _ in range(luck.TURNS):
            right = 1.0
            for kind in kinds:
                right *= float(chances[at, kind].sum())
                at += 1
            at += 3  # The observation.
            found.append(right)
    return sum(found) / len(found)


def make(directory: Path, recipe: Recipe) -> bool:
    """Make the HF directory unless it already holds this recipe's model; True: it was made."""
    text = making.Text(
        "base model",
        "turns, base model",
        "its actions",
        save_tokenizer=lambda out: make_tokenizer.save_tokenizer(
            out, recipe.max_position_embeddings, luck.CHARACTERS, ()
        ),
        draw=lambda rng, *_: [write_episode(rng)],
        measure=formed,
        weigh=weigh,
    )
    sources = [sys.modules[__name__], making, luck, make_tokenizer]
    return making.make_from_text(directory, recipe, text, sources)


def main() -> None:
    """Make the base model."""
    parser = making.options("Make the base model of turns with luck.")
    parser.add_argument("--form", default="luck", help="without meaning here")
    args = parser.parse_args()
    torch.set_num_threads(1)
    making.tell("base model", args.out, made=make(args.out, Recipe(seed=args.seed)))


if __name__ == "__main__":
    main()
