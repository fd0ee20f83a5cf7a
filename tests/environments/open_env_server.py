"""An OpenEnv server with a small environment; run as a script, with its port."""

import random
import sys

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    """A guess, as text."""

    text: str


class Hint(Observation):
    """What is said of it."""

    text: str


class GuessTheNumber(Environment):
    """Says whether the number is higher."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, highest=10):
        """Draw the number."""
        self.number = random.Random(seed).randint(1, highest)
        return Hint(text=f"A number up to {highest}.")

    def step(self, action):
        """Compare."""
        if not action.text.isdigit():
            raise ValueError(f"{action.text} is no number")
        guess = int(action.text)
        if guess == self.number:
            return Hint(text="right", reward=1.0, done=True)
        return Hint(text="lower" if guess > self.number else "higher", reward=-0.1)

    @property
    def state(self):
        """Nothing."""
        return State()


if __name__ == "__main__":
    app = create_fastapi_app(GuessTheNumber, Guess, Hint, max_concurrent_envs=8)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
