"""Collects a layout's gradients on dumped rollouts, and compares those of two layouts.

    OUT/actor.safetensors, OUT/critic.safetensors    gradients by HF name, float32, before clipping
                                                     (of the roles that the run trains)
    OUT/actor_update.safetensors, ...                on request what the first update adds to the
                                                     weights, at a learning rate of 1

The step runs as in training: this layout computes its own values, log-probabilities and advantages,
mini-batches, microbatches and losses. Further updates are left out.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from vapo_megatron.config import VapoConfig
from vapo_megatron.data.storage import replacing
from vapo_megatron.errors import DataError
from vapo_megatron.models.hf_config import read_model_shape
from vapo_megatron.parallel.gradient_buffers import wait_for_parameters
from vapo_megatron.parallel.optimizer import optimizer_step, set_learning_rate
from vapo_megatron.rollout.inputs import Inputs
from vapo_megatron.rollout.replay import check_dump
from vapo_megatron.weights.adapter_table import adapter_tensors
from vapo_megatron.weights.gather import full_gradients
from vapo_megatron.weights.table import VALUE_HEAD, hf_tensors

if TYPE_CHECKING:
    from vapo_megatron.roles.placed import PlacedModel
    from vapo_megatron.training.step import StepTrainer

ROLES = ("critic", "actor")
UPDATE = "_update"
"""Ends the name of a role's file with its update."""


class Difference(NamedTuple):
    """One parameter's gradients, a and b."""

    name: str
    """Role and HF name."""
    norm: float
    """|a|, Euclidean."""
    relative: float
    """|a - b| / |a|; 0 where both are 0, infinite where only a is."""


def collect_gradients(
    config: VapoConfig, replay: Path, step: int, out: Path, *, update: bool = False
) -> None:
    """Write the gradients of both losses on the first mini-batch of a step. Collective.

    The weights are a new run's initial ones. The actor's, from model.hf_path, sampled every step up
    to its first update.

    Args:
        config: layout, algorithm and weights.
        replay: run directory with dumped steps.
        step: from 1.
        out: directory, made if missing; rank 0 writes, one tensor at a time.
        update: also write what the optimizer's first update adds.

    Raises:
        UserError: the dump, the paths or the number of processes do not fit.
    """
    from vapo_megatron.training.step import StepTrainer

    changes: dict[str, dict[str, Any]] = {
        "algorithm": {"value_pretraining_steps": 0, "stage": "all"},
        # A wrong layout must reach its gradients.
        "rollout": {"max_logprob_difference": None},
        # A new run's models: nothing is loaded after they are built.
        "logging": {"run_dir": str(out)},
        "model": {"critic_checkpoint_optimizer": False},
    }
    config = config.model_copy(
        update={name: getattr(config, name).model_copy(update=c) for name, c in changes.items()}
    )
    inputs = check(config, replay, step)
    with StepTrainer(config, replay, inputs) as trainer:
        data = trainer.prepare(step - 1)
        firsts = {"actor": data.mini_batches[0], "critic": data.critic_mini_batches[0]}
        for role in config.algorithm.trained_roles:
            with trainer.phase(f"{role}_update"):
                loss = float(getattr(trainer, role).compute_gradients(firsts[role])["loss"])
                _write(trainer, role, out / f"{role}.safetensors", step, loss)
                if update:
                    _make_update(getattr(trainer, role).placed)
                    _write(trainer, role, out / f"{role}{UPDATE}.safetensors", step, loss)


def check(config: VapoConfig, replay: Path, step: int) -> Inputs:
    """Return the model's sizes, once the dump of a step is known to fit them.

    Raises:
        UserError: the model's config.json or the dump cannot be used.
    """
    inputs = Inputs(read_model_shape(str(config.model.hf_path)))
    steps = range(step - 1, step)
    check_dump(replay, config.algorithm, config.rollout, inputs.shape, steps)
    return inputs


def compare_gradients(a: Path, b: Path) -> list[Difference]:
    """Return the difference of every parameter, the largest first.

    Args:
        a, b: directories that collect_gradients wrote.

    Raises:
        DataError: a file is missing or damaged, or the models differ.
    """
    found = []
    for role in _roles(a, b):
        file_a, file_b = a / f"{role}.safetensors", b / f"{role}.safetensors"
        try:
            with safe_open(file_a, "pt") as in_a, safe_open(file_b, "pt") as in_b:
                names = list(in_a.keys())
                if sorted(names) != sorted(in_b.keys()):
                    odd = sorted(set(names) ^ set(in_b.keys()))
                    raise DataError(
                        f"{file_a} and {file_b} hold different parameters, for example {odd[0]}; "
                        "collect both from the same model"
                    )
                found += [
                    _difference(f"{role} {name}", in_a.get_tensor(name), in_b.get_tensor(name))
                    for name in names
                ]
        except (OSError, SafetensorError) as error:
            raise DataError(
                f"{file_a} and {file_b} cannot both be read ({error}); collect them again"
            ) from None
    return sorted(found, key=lambda d: -math.inf if math.isnan(d.relative) else -d.relative)


def describe_gradients(directory: Path) -> str:
    """Return layout, step and losses of what collect_gradients wrote, as a line."""
    parts: list[str] = []
    for role in _roles(directory):
        with safe_open(directory / f"{role}.safetensors", "pt") as file:
            written = file.metadata() or {}
        if not parts:
            parts.append(f"{directory}: {written.get('layout')}, step {written.get('step')}")
        if role in ROLES:
            parts.append(f"{role} loss {written.get('loss')}")
    return ", ".join(parts)


def _roles(*directories: Path) -> list[str]:
    """Return the names of the files in any of the directories; both roles' if there are none."""
    found = {path.stem for directory in directories for path in directory.glob("*.safetensors")}
    return [n for role in ROLES for n in (role, role + UPDATE) if n in found] or list(ROLES)


def _make_update(placed: PlacedModel) -> None:
    """Make an update, and leave in the gradients' place what it has added to the parameters."""
    parameters = [p for chunk in placed.chunks for p in chunk.parameters() if p.requires_grad]
    before = [parameter.detach().clone() for parameter in parameters]
    # At a peak of 1e-6 the weights' rounding would be as large.
    set_learning_rate(placed.optimizer, 1.0)
    optimizer_step(placed.optimizer)
    wait_for_parameters(placed.chunks)
    for parameter, old in zip(parameters, before, strict=True):
        parameter.main_grad.copy_(parameter.detach().float() - old.float())  # type: ignore


def _write(trainer: StepTrainer, role: str, path: Path, step: int, loss: float) -> None:
    """Write a role's gradients, whose loss over a mini-batch is given."""
    ranks = trainer.ranks
    chunks, shape = getattr(trainer, role).placed.chunks, trainer.shape
    lora = trainer.config.model.lora
    gradients = full_gradients(chunks, shape, ranks, role)
    written = hf_tensors(shape, role)
    if lora.of(role):
        # What is frozen has no gradient: of that a critic's value head alone is left.
        written = {n: size for n, size in written.items() if n == VALUE_HEAD}
        head = (pair for pair in gradients if pair[0] in written)
        written |= adapter_tensors(shape, lora)
        gradients = itertools.chain(head, full_gradients(chunks, shape, ranks, role, lora=lora))
    if ranks.rank == 0:
        layout = f"TP{ranks.tp_size} PP{ranks.pp_size} VPP{ranks.vpp_size} DP{ranks.dp_size}"
        layout += f" CP{ranks.cp_size}" * (ranks.cp_size > 1)
        metadata = {"layout": layout, "step": str(step), "loss": f"{loss:.9g}"}
        path.parent.mkdir(parents=True, exist_ok=True)
        _write_streamed(path, written, gradients, metadata)
    for _ in gradients:  # every rank takes all of them
        pass


def _write_streamed(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    tensors: Iterable[tuple[str, Tensor]],
    metadata: Mapping[str, str],
) -> None:
    """Write float32 tensors as safetensors, each to its place as it comes."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with replacing(path) as out:
        out.write(len(text).to_bytes(8, "little") + text)
        start = out.tell()
        for name, tensor in tensors:
            assert (tensor.dtype, tuple(tensor.shape)) == (torch.float32, shapes[name]), name
            out.seek(start + header[name]["data_offsets"][0])
            out.write(tensor.cpu().contiguous().numpy().data)


def _difference(name: str, a: Tensor, b: Tensor) -> Difference:
    if a.shape != b.shape:
        raise DataError(
            f"{name} is {tuple(a.shape)} in one and {tuple(b.shape)} in the other; collect both "
            "from the same model"
        )
    norm = float(torch.linalg.vector_norm(a, dtype=torch.float64))
    difference = float(torch.linalg.vector_norm(a - b, dtype=torch.float64))
    return Difference(name, norm, difference / norm if norm else (math.inf if difference else 0.0))
