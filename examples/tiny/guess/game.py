"""Guess the number, a game of GEM (the package gem-llm): its text in tokens, and problems.

The first observation gives the rules; then each says whether the number is higher or lower than the
guess. With 4 turns for 10 numbers, halving what is left always wins, and a policy that guesses by
chance wins one game in three.

`python examples/tiny/guess/game.py --out DIR` writes DIR/train.jsonl and DIR/test.jsonl, whose
prompts are all the same: the numbers come from the rows' seeds.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import types
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

PROMPT = "Q"
GAME = {"id": "game:GuessTheNumber-v0-easy"}
NUMBERS = 10
BEFORE, AFTER = "\\boxed{", "}"
"""Around a guess."""


def transcript(rng: random.Random, largest: int = NUMBERS) -> Iterator[str]:
    """Yield an episode with guesses by chance: observation and action in turn, up to an action."""
    # Not before: what plans the runs needs no game.
    from vapo_megatron.environments.gem_games import Gem

    game = Gem(**GAME)
    yield game.reset(types.SimpleNamespace(metadata={}), rng.randrange(2**31))
    while True:
        action = f"{BEFORE}{rng.randint(1, largest)}{AFTER}"
        yield action
        step = game.step(action)
        if step.done:
            return
        yield step.observation


def pieces() -> list[str]:
    """Return the game's text in pieces: digits, what is around a guess, hints, and the rest.

    Collected from games, so that the text is GEM's own.
    """
    rng, apart = random.Random("pieces"), re.compile(r"(\d|\\boxed\{|\}|higher|lower)")
    found = dict.fromkeys("0123456789")
    for _ in range(300):
        # Guesses above the largest number too, which are answered in other words.
        for text in transcript(rng, NUMBERS + 2):
            found |= dict.fromkeys(piece for piece in apart.split(text) if piece)
    return list(found)


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the problems."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="directory to make")
    parser.add_argument("--seed", type=int, default=0, help="of the numbers (0)")
    parser.add_argument("--form", default="guess", help="without meaning here")
    parser.add_argument("--train", type=int, default=800, help="training problems (800)")
    parser.add_argument("--test", type=int, default=256, help="held-out problems (256)")
    args = parser.parse_args(arguments)
    args.out.mkdir(parents=True, exist_ok=True)
    for name in ("train", "test"):
        rng = random.Random(f"guess, {name}, {args.seed}")
        rows = [
            {"prompt": PROMPT, "answer": "the number", "seed": rng.randrange(2**31)}
            for _ in range(getattr(args, name))
        ]
        (args.out / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"problems in {args.out}")


if __name__ == "__main__":
    main()
