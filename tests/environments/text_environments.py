"""Environments of Gymnasium's API for the tests beside this; importing it registers one."""

import random
import string

import gymnasium


class Warmer(gymnasium.Env):
    """Says whether a guess is above or below a number drawn from the seed."""

    observation_space = gymnasium.spaces.Text(100, charset=string.printable)
    action_space = gymnasium.spaces.Text(100, charset=string.printable)

    def __init__(self, highest=10):
        self.highest = highest

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.number = int(self.np_random.integers(1, self.highest + 1))
        return f"A number up to {self.highest}. {options or ''}", {}

    def step(self, action):
        guess = int(action)
        if guess == self.number:
            return "right", 1.0, True, False, {}
        return "lower" if guess > self.number else "higher", -0.1, False, False, {}

    def close(self):
        print("closed", self.number)


gymnasium.register("Warmer-v0", f"{__name__}:Warmer", max_episode_steps=3)


class Framed:
    """An environment of the same API that frames what it says, and has no close."""

    def reset(self, seed=None):
        return "begin", {"suffix": "Go on."}

    def step(self, action):
        if action == "number":
            return 5, 0.0, False, False, {}
        return f"{action}\n", 0, False, action == "end", {"prefix": "> ", "suffix": "Go on."}


class Drawn(Framed):
    """Draws from a generator that nobody seeds by itself."""

    def reset(self, seed=None):
        return f"{seed} {random.random()}", {}
