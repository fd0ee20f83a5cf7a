"""Shared by the scripts that make tiny models: training, and directories that are made once."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import TypeVar

import torch
from torch import Tensor

Item = TypeVar("Item")


@dataclasses.dataclass(frozen=True)
class Training:
    """AdamW with linear warm-up and cosine decay."""

    seed: int = 0
    iterations: int = 1400
    batch_size: int = 24
    batches_per_pool: int = 8
    """Batches drawn together and sorted by length, which keeps padding small."""
    learning_rate: float = 4e-3
    final_learning_rate: float = 2e-4
    warmup_iterations: int = 50
    betas: tuple[float, float] = (0.9, 0.98)
    weight_decay: float = 0.01
    clip_grad: float = 1.0

    def learning_rate_at(self, iteration: int) -> float:
        """Linear warm-up times a cosine decay from learning_rate to final_learning_rate."""
        warmup = min(1.0, iteration / self.warmup_iterations)
        cosine = 0.5 + 0.5 * math.cos(math.pi * iteration / self.iterations)
        peak, final = self.learning_rate, self.final_learning_rate
        return warmup * (final + (peak - final) * cosine)

    def pools(self) -> Iterator[tuple[int, int]]:
        """Yield (first iteration, sequences to draw) of each pool."""
        for first in range(0, self.iterations, self.batches_per_pool):
            yield first, self.batch_size * self.batches_per_pool

    def batches(
        self, first: int, pool: Sequence[Item], length: Callable[[Item], int], rng: random.Random
    ) -> Iterator[Sequence[Item]]:
        """Yield a pool's batches, each of similar lengths, in random order."""
        by_length = sorted(pool, key=length)
        starts = list(range(0, len(by_length), self.batch_size))
        rng.shuffle(starts)
        for start in starts[: self.iterations - first]:
            yield by_length[start : start + self.batch_size]

    def train(
        self,
        model: torch.nn.Module,
        losses: Iterable[tuple[Tensor, float]],
        show: Callable[[int, float], None],
    ) -> None:
        """Train in place.

        Args:
            model: updated.
            losses: yields each iteration's loss and the number to show, computed lazily.
            show: called after each iteration with (iterations done, number to show).
        """
        model.train()
        optimizer = torch.optim.AdamW(
            model.parameters(), betas=self.betas, weight_decay=self.weight_decay, foreach=True
        )
        for iteration, (loss, shown) in enumerate(losses):
            optimizer.param_groups[0]["lr"] = self.learning_rate_at(iteration)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), self.clip_grad, foreach=True)
            optimizer.step()
            show(iteration + 1, shown)


def digest(recipe: object, modules: Sequence[ModuleType]) -> str:
    """Hash a recipe (a dataclass) and the source of the modules that use it."""
    text = json.dumps(dataclasses.asdict(recipe))  # type: ignore[call-overload]
    text += "".join(Path(str(module.__file__)).read_text() for module in modules)
    return hashlib.sha256(text.encode()).hexdigest()


def make(
    directory: Path, recipe: object, made_by: str, kind: str, write: Callable[[Path], None]
) -> bool:
    """Make an HF directory unless it already holds this recipe's model; True: it was made.

    Args:
        directory: created atomically.
        recipe: a dataclass, written to recipe.json.
        made_by: digest of the recipe.
        kind: of model, for the error message.
        write: writes the model into a directory.

    Raises:
        SystemExit: the directory has other files.
    """
    marker = directory / "recipe.json"
    if marker.exists() and json.loads(marker.read_text())["digest"] == made_by:
        return False
    if directory.exists() and not marker.exists() and any(directory.iterdir()):
        sys.exit(f"--out={directory}: has files but no {kind}; choose another directory")
    directory.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    try:
        write(partial)
        content = {"digest": made_by, **dataclasses.asdict(recipe)}  # type: ignore[call-overload]
        (partial / "recipe.json").write_text(json.dumps(content, indent=2) + "\n")
        partial.chmod(0o755)
        if directory.exists():
            shutil.rmtree(directory)
        partial.rename(directory)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return True
