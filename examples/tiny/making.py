"""Shared by the scripts that make tiny models: training, and directories that are made once.

A script has a recipe, and a `Text` that says what its language model learns and how that is
measured. What a model of this size has learned after a given number of iterations varies with the
seed and with the processor. `train` therefore measures it, and trains on from there if it is not
enough.

The result depends only on the seed, the recipe and the script's sources; recipe.json holds a hash
of them. A directory with the same hash is left unchanged. The directory is created atomically, so
it is never incomplete.
"""

from __future__ import annotations

import argparse
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
from typing import Any, Self, TypeVar

import architecture
import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import GenerationConfig, PreTrainedTokenizerBase, Qwen2ForCausalLM

IGNORED = -100
"""Label of a token that is not part of the loss."""

Pairs = list[tuple[list[int], list[int]]]
"""Token ids of prompts and responses."""
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

    def batches(
        self,
        rng: random.Random,
        draw: Callable[[float, int], list[Item]],
        length: Callable[[Item], int],
    ) -> Iterator[tuple[Sequence[Item], Sequence[Item]]]:
        """Yield each iteration's batch of similar lengths, and the pool that it is from.

        Args:
            rng: of the batches' order.
            draw: returns a pool; told the share of the iterations that are done, in [0, 1), and how
                many items are wanted.
            length: of an item.
        """
        for first in range(0, self.iterations, self.batches_per_pool):
            count = self.batch_size * self.batches_per_pool
            pool = sorted(draw(first / self.iterations, count), key=length)
            starts = list(range(0, count, self.batch_size))
            rng.shuffle(starts)
            for start in starts[: self.iterations - first]:
                yield pool[start : start + self.batch_size], pool

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


@dataclasses.dataclass(frozen=True)
class Architecture(Training):
    """Model size and training."""

    hidden_size: int = 64
    num_layers: int = 2
    head_dim: int = 32
    ffn_size: int = 176
    rope_theta: float = 1000.0
    max_position_embeddings: int = 512
    embedding_std: float = 0.5
    experts: int = 0
    """In place of the feed-forward network; 0: that."""
    experts_per_token: int = 2
    """Together as wide as ffn_size."""


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
    columns = BarColumn(), MofNCompleteColumn(), TextColumn("loss {task.fields[loss]:.3f}")
    total, shown = 0, math.nan
    with Progress(kind, *columns, TimeRemainingColumn()) as progress:
        bar = progress.add_task("", total=None, loss=shown)

        def show(done: int, loss: float) -> None:
            nonlocal shown
            shown = loss if math.isnan(shown) else shown + 0.05 * (loss - shown)
            completed = total - drawn.iterations + done
            progress.update(bar, completed=completed, loss=shown)
            if not progress.console.is_terminal and completed % 100 == 0:
                left = (time.monotonic() - started) / done * (total - completed)
                print(f"{kind} {completed}/{total} loss {shown:.3f} {left:.0f} s left", flush=True)

        for drawn in rounds:
            total, started = total + drawn.iterations, time.monotonic()
            progress.update(bar, total=total)
            drawn.train(model, losses(drawn), show)
            model.eval()
            right = measure() if recipe.least_right else 1.0
            if right >= recipe.least_right:
                return
            found = f"{right:.4f} of {what} right, and {recipe.least_right} is needed"
            if drawn is not rounds[-1]:
                print(f"{kind}: {found}: training on for {recipe.more_iterations} iterations")
    sys.exit(
        f"--seed {recipe.seed}: after {total} iterations the {kind} has {found}; "
        "give another --seed"
    )


@dataclasses.dataclass(frozen=True)
class Text:
    """What a language model learns, and what is asked of it; recipes are the script's own."""

    kind: str
    """Of model, for messages."""
    seed: str
    """What tells its random numbers from others' of the same --seed."""
    what: str
    """Of which `measure` returns the share that the model has right, for messages."""
    save_tokenizer: Callable[[Path], PreTrainedTokenizerBase]
    """Writes it into a directory and returns it."""
    draw: Callable[[random.Random, Any, float], list[tuple[str, str]]]
    """Returns one or more prompts and responses, by the recipe of a round and the share of its
    iterations that are done, in [0, 1)."""
    measure: Callable[[Qwen2ForCausalLM, PreTrainedTokenizerBase], float]
    weigh: Callable[[Tensor, Tensor, Any, PreTrainedTokenizerBase], Tensor] | None = None
    """Returns float32 [b, s], the weights of a batch's labels; see `pad`."""
    begin: Callable[[Qwen2ForCausalLM, PreTrainedTokenizerBase], None] | None = None
    """Changes the initial weights."""
    further: Callable[[Qwen2ForCausalLM, PreTrainedTokenizerBase, Any], Any] | None = None
    """Changes a further round's recipe by what the model can do."""
    finish: Callable[[Qwen2ForCausalLM, PreTrainedTokenizerBase, Path], None] | None = None
    """Changes the trained model, or adds files to its directory."""


def pad(pairs: Pairs, padding: int) -> tuple[Tensor, Tensor]:
    """Make right-padded input ids and shifted labels, both int64 [b, s], of (prompt, response)."""
    width = max(len(p) + len(r) for p, r in pairs) - 1
    ids = torch.full((len(pairs), width), padding)
    labels = torch.full((len(pairs), width), IGNORED)
    for row, (prompt, response) in enumerate(pairs):
        text = prompt + response
        ids[row, : len(text) - 1] = torch.tensor(text[:-1])
        labels[row, len(prompt) - 1 : len(text) - 1] = torch.tensor(response)
    return ids, labels


def encode(tokenizer: PreTrainedTokenizerBase, texts: Sequence[tuple[str, str]]) -> Pairs:
    """Return the token ids of prompts and responses; these with their stop token."""
    prompts, responses = (tokenizer(list(each))["input_ids"] for each in zip(*texts, strict=True))
    stop = tokenizer.eos_token_id
    return [(p, [*r, stop]) for p, r in zip(prompts, responses, strict=True)]


def response_loss(
    model: Qwen2ForCausalLM, ids: Tensor, labels: Tensor, weights: Tensor | None = None
) -> Tensor:
    """Sum the negative log-likelihood of the response tokens.

    Args:
        model: to train.
        ids, labels: as from `pad`.
        weights: float32 [b, s], of the labels; None: all 1.
    """
    # No attention mask: with padding on the right, causal attention needs none.
    hidden = model.model(ids, use_cache=False).last_hidden_state
    kept = labels != IGNORED
    losses = cross_entropy(model.lm_head(hidden[kept]), labels[kept], reduction="none")
    return (losses if weights is None else losses * weights[kept]).sum()


def losses(
    text: Text, recipe: Architecture, model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerBase
) -> Iterator[tuple[Tensor, float]]:
    """Yield each iteration's loss, and the loss of a response token.

    The loss is divided by the tokens of the pool's mean batch, so that a token weighs as much in a
    batch of short responses.
    """
    rng = random.Random(f"{text.seed}, {recipe.seed}")

    def draw(progress: float, count: int) -> Pairs:
        drawn: list[tuple[str, str]] = []
        while len(drawn) < count:
            drawn += text.draw(rng, recipe, progress)
        return encode(tokenizer, drawn)

    for batch, pool in recipe.batches(rng, draw, length=lambda pair: len(pair[0]) + len(pair[1])):
        ids, labels = pad(list(batch), tokenizer.eos_token_id)
        weights = text.weigh(ids, labels, recipe, tokenizer) if text.weigh else None
        loss = response_loss(model, ids, labels, weights)
        mean_tokens = sum(len(response) for _, response in pool) / recipe.batches_per_pool
        yield loss / mean_tokens, float(loss.detach()) / int((labels != IGNORED).sum())


def make_from_text(
    directory: Path, recipe: Architecture, text: Text, modules: Sequence[ModuleType]
) -> bool:
    """Make the HF directory of a language model unless it holds this recipe's; True: it was made.

    Args:
        directory: created atomically.
        recipe: of the first round.
        text: see `Text`.
        modules: see `digest`; architecture.py is added.

    Raises:
        SystemExit: see `make` and `train`.
    """

    def write(partial: Path) -> None:
        tokenizer = text.save_tokenizer(partial)
        stop = tokenizer.eos_token_id
        model = architecture.build_model(recipe, len(tokenizer), stop)
        if text.begin:
            text.begin(model, tokenizer)

        def losses_of(drawn: Architecture) -> Iterator[tuple[Tensor, float]]:
            if text.further and drawn is not recipe:
                drawn = text.further(model, tokenizer, drawn)
            return losses(text, drawn, model, tokenizer)

        def measure() -> float:
            return text.measure(model, tokenizer)

        train(text.kind, recipe, model, losses_of, measure, text.what)
        if text.finish:
            text.finish(model, tokenizer, partial)
        model.generation_config = GenerationConfig(eos_token_id=stop, pad_token_id=stop)
        model.save_pretrained(partial)

    return make(directory, recipe, [*modules, architecture], text.kind, write)


def digest(recipe: object, modules: Sequence[ModuleType]) -> str:
    """Hash a recipe (a dataclass) and the source of the modules that use it."""
    text = json.dumps(dataclasses.asdict(recipe))  # type: ignore[call-overload]
    text += "".join(Path(str(module.__file__)).read_text() for module in modules)
    return hashlib.sha256(text.encode()).hexdigest()


def make(
    directory: Path,
    recipe: object,
    modules: Sequence[ModuleType],
    kind: str,
    write: Callable[[Path], None],
) -> bool:
    """Make an HF directory unless it already holds this recipe's model; True: it was made.

    Args:
        directory: created atomically.
        recipe: a dataclass, written to recipe.json.
        modules: see `digest`.
        kind: of model, for the error message.
        write: writes the model into a directory.

    Raises:
        SystemExit: the directory has other files.
    """
    marker, made_by = directory / "recipe.json", digest(recipe, modules)
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


def options(description: str) -> argparse.ArgumentParser:
    """Return a parser with the options of all these scripts."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, required=True, help="HF directory to make")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def tell(kind: str, directory: Path, *, made: bool) -> None:
    """Say whether a model was made or was there."""
    print(f"{kind} {'made in' if made else 'found in'} {directory}")
