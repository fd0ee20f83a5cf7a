"""A task of reasoning_gym whose scorer misbehaves as an answer says; loaded in workers alone."""

import dataclasses
import pathlib
import time

import numpy

from vapo_megatron.cli.prepare import gym_worker
from vapo_megatron.reward import gym
from vapo_megatron.reward.gym_verifier import ReasoningGymVerifier

gym.load()  # Its packages that only some tasks need may be missing.
from reasoning_gym.dataset import ProceduralDataset  # noqa: E402
from reasoning_gym.factory import register_dataset  # noqa: E402

TASK = "stand_in"


@dataclasses.dataclass
class Config:
    """Which problems there are."""

    distinct: int = 1000
    every_wrong: int = 0
    """Every so many problems one has an answer that its scorer refuses; 0: none has."""
    kind: str = ""
    """fails: no problem can be made; loose: any answer is right; odd: JSON changes a score."""
    seed: int = 0
    size: int = 500


class StandIn(ProceduralDataset):
    """Asks for n, and takes n."""

    def __init__(self, config):
        super().__init__(config, config.seed, config.size)

    def __getitem__(self, index):
        if self.config.kind == "fails":
            raise ValueError("Failed to generate")
        n = (self.seed + index) % self.config.distinct
        is_wrong = self.config.every_wrong and n % self.config.every_wrong == 0
        return {
            "question": f"w{n}",
            "answer": "nobody" if is_wrong else str(n),
            "metadata": {"n": (n,), "kind": pathlib.PurePosixPath("odd")},
        }

    def score_answer(self, answer, entry):
        """Misbehave, or score."""
        if answer == "hang":
            time.sleep(10_000)
        if answer == "raise":
            raise RuntimeError("no such answer")
        if self.config.kind == "loose":
            return 1.0
        if self.config.kind == "odd" and answer == "A B":
            return float(entry["metadata"]["kind"] == pathlib.PurePosixPath("odd"))
        odd = {"nan": float("nan"), "text": "1.0", "none": None, "numpy": numpy.float64(1.0),
               "half": 0.5, "true": True}  # fmt: skip
        return odd[answer] if answer in odd else float(answer == str(entry["metadata"]["n"][0]))


register_dataset(TASK, StandIn, Config)
gym.load.cache_clear()
make_handler = gym_worker.make_handler
Verifier = ReasoningGymVerifier
