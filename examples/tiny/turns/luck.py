"""Turns with luck: an environment in which small choices and luck over many turns make one outcome.

    prompt        Q
    observation   A3b        10 turns left after this one, 3 successes so far, a situation
    action        x!#$       a choice and three tokens that decide nothing, then the stop token

There are 60 situations. In each of them one of the choices x and y succeeds with probability .85,
the other with .15; which one, only experience tells. An episode has 16 turns, and is correct with
10 successes. The rewards of a group of responses differ by luck above all, which a group's mean
cannot know; V of turn and successes can.

`python examples/tiny/turns/luck.py --out DIR` writes DIR/train.jsonl and DIR/test.jsonl, whose
prompts are all the same: the episodes differ by their seeds.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from vapo_megatron.environments import Step

TURNS, GOAL = 16, 10
GOOD, BAD = 0.85, 0.15
"""Probabilities of a success."""
CHOICES = "xy"
FILLER = "!#$%&()<"
NUM_FILLERS = 3
PROMPT = "Q"
COUNTS = "0123456789ABCDEFG"
"""0 to 16, in a character each: the tokenizer has bytes."""
SITUATIONS = "abcdefghijklmnopqrstuvwzHIJKLMNOPRSTUVWXYZ*+,-./:;=>?@[]^_{|"
FILE = "credit.jsonl"
"""Of a run; train.py writes it."""
CHARACTERS = PROMPT + COUNTS + SITUATIONS + CHOICES + FILLER


def good_choice(situation: int) -> str:
    """Return the choice that mostly succeeds: x in half of the situations, by no rule."""
    return CHOICES[_SHUFFLED[situation] % 2]


def usual_choice(situation: int) -> str:
    """Return the choice that the base model prefers: the good one in half of the situations."""
    return CHOICES[_SHUFFLED[situation] // 2 % 2]


_SHUFFLED = random.Random("turns with luck").sample(range(len(SITUATIONS)), len(SITUATIONS))


class Episode:
    """The state of one, for the environment and for whoever writes episodes."""

    def __init__(self, seed: object, turns: int = TURNS) -> None:
        self._random = random.Random(f"turns with luck, {seed}")
        self.left, self.successes, self.situation = turns, 0, 0

    def observation(self) -> str:
        """Draw the next situation and write the state."""
        self.left -= 1
        self.situation = self._random.randrange(len(SITUATIONS))
        return COUNTS[self.left] + COUNTS[self.successes] + SITUATIONS[self.situation]

    def choose(self, action: str) -> None:
        """Draw whether an action succeeds; what is no choice succeeds as a bad one does."""
        is_good = action[:1] == good_choice(self.situation)
        self.successes += self._random.random() < (GOOD if is_good else BAD)


class TurnsWithLuck:
    """The environment."""

    def reset(self, problem: object, seed: int) -> str:
        """Begin."""
        self._episode = Episode(seed)
        return self._episode.observation()

    def step(self, action: str) -> Step:
        """Take an action's first character for the choice."""
        episode = self._episode
        episode.choose(action)
        if episode.left:
            return Step(episode.observation())
        note = f"{episode.successes} successes"
        return Step(done=True, verdict=episode.successes >= GOAL, note=note)


def chance_of_goal(chance: float) -> list[list[float]]:
    """Return P[left][successes] of reaching the goal, if a turn succeeds with a chance.

    Binomial tails, left and successes from 0 to TURNS; more successes than that are never asked.
    """
    rows = [[float(s >= GOAL) for s in range(TURNS + 2)]]
    for _ in range(TURNS):
        last = rows[-1]
        rows.append(
            [chance * last[s + 1] + (1 - chance) * last[s] for s in range(TURNS + 1)] + [1.0]
        )
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the problems."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="directory to make")
    parser.add_argument("--seed", type=int, default=0, help="without meaning here")
    parser.add_argument("--form", default="luck", help="without meaning here")
    parser.add_argument("--train", type=int, default=800, help="training problems (800)")
    parser.add_argument("--test", type=int, default=256, help="held-out problems (256)")
    args = parser.parse_args(arguments)
    args.out.mkdir(parents=True, exist_ok=True)
    for name in ("train", "test"):
        row = json.dumps({"prompt": PROMPT, "answer": f"{GOAL} successes"}) + "\n"
        (args.out / f"{name}.jsonl").write_text(row * getattr(args, name))
    print(f"problems in {args.out}")


if __name__ == "__main__":
    main()
