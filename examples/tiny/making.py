"""Shared by the scripts that make tiny models: training, and directories that are made once.

What a model of this size has learned after a given number of iterations varies with the seed and
with the processor. `train` therefore measures it, and trains on from there if it is not enough.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Self, TypeVar

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

Item = TypeVar("Item")
AnyTraining = TypeVar("AnyTraining", bound="Training")


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
    least_right: float = 0.0
    """Share that the model has to have right, of what its script measures; 0: not measured."""
    more_iterations: int = 300
    """Of a further round, which a model that has less right is trained on for."""
    most_rounds: int = 10
    """Further rounds."""

    def further(self, round: int) -> Self:
        """Return a further round's recipe (1 or more): the whole schedule, shorter, on new text."""
        seed = self.seed + 1000 * round
        return dataclasses.replace(self, seed=seed, iterations=self.more_iterations)

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


class Display:
    """One progress display for all rounds of a model's training."""

    def __init__(self, kind: str) -> None:
        """Kind: of model, to show."""
        self.kind, self.before, self.total, self.loss = kind, 0, 0, math.nan
        columns = BarColumn(), MofNCompleteColumn(), TextColumn("loss {task.fields[loss]:.3f}")
        self._progress = Progress(kind, *columns, TimeRemainingColumn())
        self._bar = self._progress.add_task("", total=None, loss=self.loss)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def add(self, iterations: int) -> None:
        """Begin a round of so many iterations."""
        self.before, self.total = self.total, self.total + iterations
        self._started = time.monotonic()
        self._progress.update(self._bar, total=self.total)

    def show(self, done: int, loss: float) -> None:
        """Show the round's iterations that are done, and the mean of the last losses."""
        self.loss = loss if math.isnan(self.loss) else self.loss + 0.05 * (loss - self.loss)
        completed = self.before + done
        self._progress.update(self._bar, completed=completed, loss=self.loss)
        if not self._progress.console.is_terminal and completed % 100 == 0:
            left = (time.monotonic() - self._started) / done * (self.total - completed)
            shown = f"{completed}/{self.total} loss {self.loss:.3f} {left:.0f} s left"
            print(f"{self.kind} {shown}", flush=True)


def train(
    kind: str,
    recipe: AnyTraining,
    model: torch.nn.Module,
    losses: Callable[[AnyTraining], Iterable[tuple[Tensor, float]]],
    measure: Callable[[], float],
    what: str,
) -> None:
    """Train, showing progress, and train on from there until the model has enough right.

    A model that has enough right after the recipe's own iterations is what they alone make of it.

    Args:
        kind: of model, to show.
        recipe: of the first round; its `further` returns the others'.
        model: trained in place, and left in evaluation mode.
        losses: of a round, by its recipe; see Training.train.
        measure: returns the share that the model has right; not called if any is enough.
        what: of which this is the share, for messages.

    Raises:
        SystemExit: it has too little right after the last round.
    """
    rounds = [recipe, *(recipe.further(i + 1) for i in range(recipe.most_rounds))]
    with Display(kind) as display:
        for drawn in rounds:
            display.add(drawn.iterations)
            drawn.train(model, losses(drawn), display.show)
            model.eval()
            right = measure() if recipe.least_right else 1.0
            if right >= recipe.least_right:
                return
            found = f"{right:.4f} of {what} right, and {recipe.least_right} is needed"
            if drawn is not rounds[-1]:
                print(f"{kind}: {found}: training on for {recipe.more_iterations} iterations")
    sys.exit(
        f"--seed {recipe.seed}: after {display.total} iterations the {kind} has {found}; "
        "give another --seed"
    )


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
