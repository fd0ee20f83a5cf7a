"""Moments at which a run is killed: for each a function of the package, and which call of it.

tests/e2e/killed_run.py meets them, tests/e2e/test_kill_matrix.py draws and orders them.
"""

from __future__ import annotations

import functools
import importlib
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

VALUE_STEPS, POLICY_STEPS, CHECKPOINT_EVERY, EVALUATION_EVERY = 2, 9, 2, 3
NUM_STEPS = VALUE_STEPS + POLICY_STEPS
AT_THE_END = NUM_STEPS + 1
"""After the last step."""
LATER = (VALUE_STEPS + 1, NUM_STEPS - 5)
"""First and last step: the actor learns. A moment of a checkpoint is met two to four steps later,
and what comes after that one needs steps too."""


class Kind(NamedTuple):
    """A sort of moment. What has two numbers is drawn from them and what lies between."""

    target: str
    """module:function or module:Class.method."""
    steps: tuple[int, int] = LATER
    """The moment is the first that comes in this step or after it."""
    when: str = "before"
    """The call, "after" it, or when "half" of it is done."""
    calls: tuple[int, int] = (1, 1)
    """Of the target, that are counted."""
    rank: int | None = None
    """On which it is met; None: drawn."""
    counts: Callable[..., bool] = lambda phase, *arguments: True
    """Is a call one of those? Given the phase and the call's arguments."""
    starts: bool = False
    """It is met before the first step is made again."""
    delay_seconds: float = 0.0
    """The longest time from then on; what passes is drawn."""


class Moment(NamedTuple):
    """What was drawn."""

    kind: str
    step: int
    call: int
    rank: int
    delay_seconds: float


def _is_named(name: str) -> Callable[..., bool]:
    return lambda phase, *given: any(isinstance(g, Path) and str(g).endswith(name) for g in given)


def _writes(*endings: str) -> Callable[..., bool]:
    return lambda phase, file, data: str(file._file.name).endswith(endings)


_SAMPLES = "vllm.v1.engine.llm_engine:LLMEngine.step"
_PHASE = "vapo_megatron.parallel.health.watchdog:Watchdog._enter"
_LATEST = "vapo_megatron.run.checkpoint.files:_set_latest"
_WRITE = "vapo_megatron.data.storage:HashedFile.write"

KINDS = {
    "the first evaluation": Kind(
        _SAMPLES, (0, 0), calls=(2, 8), counts=lambda phase, _: phase == "evaluation"
    ),
    "generation, value pretraining": Kind(
        _SAMPLES, (1, VALUE_STEPS), calls=(2, 8), counts=lambda phase, _: phase == "generation"
    ),
    "between two updates, value pretraining": Kind(
        "vapo_megatron.roles.trained:TrainedModel.update", (1, VALUE_STEPS), "after"
    ),
    "generation": Kind(_SAMPLES, calls=(2, 8), counts=lambda phase, _: phase == "generation"),
    "generation, a further round": Kind(
        "vapo_megatron.rollout.sampling:Sampling._round",
        (VALUE_STEPS + 1, VALUE_STEPS + 2),
        counts=lambda phase, self, asked, round, num_prompts: round > 0,
    ),
    "verification": Kind("vapo_megatron.rollout.sampling:score_rollouts"),
    "between critic's and actor's update": Kind("vapo_megatron.roles.actor:Actor.update"),
    # The critic has had two.
    "after an optimizer's step of the actor": Kind(
        "vapo_megatron.roles.trained:optimizer_step", when="after", calls=(3, 4)
    ),
    "sync, messages on their way": Kind(
        "vapo_megatron.weights.reshard.transfer:_post",
        when="after",
        counts=lambda phase, *_: phase == "sync",
    ),
    "evaluation": Kind(
        _SAMPLES,
        (EVALUATION_EVERY, NUM_STEPS - 5),
        calls=(2, 8),
        counts=lambda phase, _: phase == "evaluation",
    ),
    "a row half written": Kind(
        "vapo_megatron.run.metrics:MetricsWriter.write", when="half", rank=0
    ),
    "one of two models copied": Kind(
        "vapo_megatron.run.checkpoint.writer:CheckpointWriter._files_of", when="after"
    ),
    "a model's file half written": Kind(
        _WRITE, when="half", calls=(2, 12), counts=_writes(".distcp")
    ),
    "the checkpoint written, not sealed": Kind(
        "vapo_megatron.run.checkpoint.files:publish", rank=0
    ),
    "the first checkpoint named, no `latest` yet": Kind(
        _LATEST, (VALUE_STEPS, VALUE_STEPS), rank=0
    ),
    "what is to be `latest` half written": Kind(_LATEST, when="half", rank=0),
    "`latest` about to be replaced": Kind("os:replace", rank=0, counts=_is_named("/latest")),
    "`latest` replaced": Kind("os:replace", when="after", rank=0, counts=_is_named("/latest")),
    "an old checkpoint half deleted": Kind(
        "shutil:rmtree", when="half", rank=0, counts=_is_named(".old")
    ),
    "resuming, one of two models loaded": Kind(
        "vapo_megatron.run.checkpoint.load:load_sharded", when="after", starts=True
    ),
    "export, not in its place": Kind(
        "vapo_megatron.weights.hf_directory:replace_directory",
        (AT_THE_END, AT_THE_END),
        rank=0,
        starts=True,
    ),
    **{
        f"any moment, {name}": Kind(_PHASE, (VALUE_STEPS + 1, NUM_STEPS - 6), delay_seconds=2.0)
        for name in ("first", "second", "third")
    },
}  # fmt: skip


def find(target: str) -> tuple[Any, str]:
    """Return what has a target, a module or a class, and its name there."""
    module, _, path = target.partition(":")
    *owners, name = path.split(".")
    return functools.reduce(getattr, owners, importlib.import_module(module)), name


def draw(seed: int) -> list[Moment]:
    """Return a moment of each kind, in the order in which a run can meet them.

    Each is met by a run that goes on from the last checkpoint before the moment that killed it.
    """
    draws = random.Random(seed)
    moments = []
    for name, kind in KINDS.items():
        step, call = draws.randint(*kind.steps), draws.randint(*kind.calls)
        rank, delay = draws.randrange(2), draws.uniform(0, kind.delay_seconds)
        moments.append(Moment(name, step, call, rank if kind.rank is None else kind.rank, delay))
    return sorted(moments, key=lambda moment: moment.step)


def halves() -> dict[str, Callable[..., Any]]:
    """Return for a target what does half of it."""

    def write(original, file, data):
        original(file, memoryview(data)[: len(data) // 2])

    def write_latest(original, root, name):
        (root / f".latest.{os.getpid()}").write_text(name[: len(name) // 2])

    def write_row(original, writer, step, metrics):
        writer._file.write(f'{{"step": {step}, "rewa'.encode())
        writer._file.flush()

    def delete(original, directory):
        next(path for path in sorted(directory.rglob("*")) if path.is_file()).unlink()

    return {
        _WRITE: write,
        _LATEST: write_latest,
        "vapo_megatron.run.metrics:MetricsWriter.write": write_row,
        "shutil:rmtree": delete,
    }
