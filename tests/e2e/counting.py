"""An environment for the word-level tokenizer of rollout/tiny_tokenizer.py."""

from __future__ import annotations

from vapo_megatron.environments import Step


class Counting:
    """Says how many words an action had; ends after three turns, or where one is long."""

    def __init__(self, turns: int = 3, fails_at: int = 0) -> None:
        self.turns, self.fails_at = turns, fails_at
        self.words = 0
        self.played = 0

    def reset(self, problem, seed):
        """Say something that depends on the seed."""
        return f"w{3 + seed % 5}"

    def step(self, action):
        """Count."""
        self.played += 1
        if self.played == self.fails_at:
            raise ValueError("as asked")
        words = action.count("w")  # One in each, and nothing between them.
        self.words += words
        if self.played == self.turns:
            return Step(reward=0.5, done=True, verdict=self.words % 2 == 0)
        said = " ".join(f"w{3 + i}" for i in range(words % 4))
        return Step(said, reward=0.25 * (words % 3), failed_calls=words % 2)
