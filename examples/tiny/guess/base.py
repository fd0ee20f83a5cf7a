"""Make the base model of GEM's game: `python examples/tiny/guess/base.py --out DIR --seed 0`.

DIR becomes a Hugging Face directory: Qwen2 architecture, made from games with guesses by chance.
Only actions are in the loss.
"""

from __future__ import annotations

import dataclasses
import random
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import making
import torch
from make_tokenizer import STOP, UNKNOWN
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from torch import Tensor
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast, Qwen2ForCausalLM

from guess import game


@dataclasses.dataclass(frozen=True)
class Recipe(making.Architecture):
    """Model size and training."""

    iterations: int = 600
    batch_size: int = 32
    least_right: float = 0.999
    """Of the actions' form."""


def save_tokenizer(directory: Path, max_tokens: int) -> PreTrainedTokenizerFast:
    """Write and return a tokenizer whose tokens are the game's pieces.

    They are its vocabulary, not tokens added to one: in observations those are read as text.
    """
    texts = [UNKNOWN, STOP, *dict.fromkeys([game.PROMPT, *game.pieces()])]
    model = WordLevel({text: i for i, text in enumerate(texts)}, unk_token=UNKNOWN)
    tokenizer = Tokenizer(model)
    longest_first = sorted(texts[2:], key=len, reverse=True)
    tokenizer.pre_tokenizer = Split(Regex("|".join(map(re.escape, longest_first))), "isolated")
    tokenizer.decoder = Fuse()
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token=UNKNOWN, eos_token=STOP, pad_token=STOP,
        model_max_length=max_tokens,
    )  # fmt: skip
    assert len(made) == len(texts), "transformers added ids that are no pieces"
    directory.mkdir(parents=True, exist_ok=True)
    made.save_pretrained(directory)
    return made


def write_game(rng: random.Random) -> tuple[str, str]:
    """Write a game: the prompt with the rules, and the rest, without the last stop token."""
    first, *rest = game.transcript(rng)
    text = "".join(each + (STOP if i % 2 == 0 else "") for i, each in enumerate(rest))
    return game.PROMPT + first, text.removesuffix(STOP)


def weigh(
    ids: Tensor, labels: Tensor, recipe: Recipe, tokenizer: PreTrainedTokenizerBase
) -> Tensor:
    """Return the weights of labels, float32 [b, s]: 1 for the tokens of actions."""
    begins = labels == tokenizer.convert_tokens_to_ids(game.BEFORE)
    ends = labels == tokenizer.eos_token_id
    ended_before = ends.cumsum(1) - ends.long()
    return (begins.cumsum(1) > ended_before).float()


@torch.no_grad()
def formed(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerBase) -> float:
    """Return the mean probability that an action has its form, of held-out games."""
    rng, found = random.Random("guess, quality"), []
    guess = [*"0123456789", game.AFTER]
    kinds = [tokenizer.convert_tokens_to_ids(k) for k in ([game.BEFORE], guess, [STOP])]
    kind_of = {token: kind for kind in kinds for token in kind}
    for _ in range(16):
        ids, labels = making.pad(
            making.encode(tokenizer, [write_game(rng)]), tokenizer.eos_token_id
        )
        chances = model(ids).logits[0].double().softmax(-1)
        right = 1.0
        for at in weigh(ids, labels, Recipe(), tokenizer)[0].nonzero().flatten().tolist():
            right *= float(chances[at, kind_of[int(labels[0, at])]].sum())
            if int(labels[0, at]) == tokenizer.eos_token_id:
                found.append(right)
                right = 1.0
    return sum(found) / len(found)


def make(directory: Path, recipe: Recipe) -> bool:
    """Make the HF directory unless it already holds this recipe's model; True: it was made."""
    text = making.Text(
        "base model",
        "guess, base model",
        "its actions",
        save_tokenizer=lambda out: save_tokenizer(out, recipe.max_position_embeddings),
        draw=lambda rng, *_: [write_game(rng)],
        measure=formed,
        weigh=weigh,
    )
    return making.make_from_text(directory, recipe, text, [sys.modules[__name__], making, game])


def main() -> None:
    """Make the base model."""
    parser = making.options("Make the base model of GEM's game.")
    parser.add_argument("--form", default="guess", help="without meaning here")
    args = parser.parse_args()
    torch.set_num_threads(1)
    making.tell("base model", args.out, made=make(args.out, Recipe(seed=args.seed)))


if __name__ == "__main__":
    main()
