"""The only module that knows AdamW's state: megatron-core's optimizers, moments, step counts.

torch's Adam makes its state at the first step and keeps a step count per parameter, which
megatron-core 0.16 does not expect. So the state is made before saving and loading; the counts are
removed while sharded state is loaded; and after loading each parameter gets its own copy, because
the loaded tensor is shared and would advance once per parameter. The fused Adams of Transformer
Engine and apex count per group and need only the first; loading one kind's state into the other
moves and converts the count, and adds missing group settings.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from vapo_megatron.parallel import megatron_versions
from vapo_megatron.parallel.matrix_optimizer import OwnedOptimizer


def parts_of(optimizer: Any) -> list[Any]:
    """Return megatron-core's optimizers: one of the dense parameters, another of the experts."""
    return getattr(optimizer, "chained_optimizers", [optimizer])


def inner_optimizers(optimizer: Any) -> list[torch.optim.Optimizer]:
    """Return the torch optimizers that hold the state, one for each of megatron-core's parts."""
    return [part.optimizer for part in parts_of(optimizer)]


def make_optimizer_state(optimizer: Any) -> None:
    """Initialize Adam's state where there is none, to zero as its first step would."""
    for part in parts_of(optimizer):
        if not isinstance(part.optimizer, torch.optim.Adam):
            part.init_state_fn(part.optimizer, part.config)
            continue
        # megatron-core's init_state_fn leaves out the step count that torch's Adam needs.
        for group in part.optimizer.param_groups:
            for parameter in group["params"]:
                if not part.optimizer.state[parameter]:
                    part.optimizer.state[parameter] = {
                        "step": torch.tensor(0.0),
                        "exp_avg": torch.zeros_like(parameter),
                        "exp_avg_sq": torch.zeros_like(parameter),
                    }


def state_tensors(optimizer: Any) -> list[Tensor]:
    """List what the optimizer updates and its moments; step counts are left out."""
    found: list[Tensor] = []
    for inner in inner_optimizers(optimizer):
        for group in inner.param_groups:
            for main in group["params"]:
                found += [main, *(t for t in inner.state[main].values() if torch.is_tensor(t))]
    return [tensor for tensor in found if tensor.dim() > 0]


def load_optimizer_state(optimizer: Any, state: dict[Any, Any]) -> None:
    """Load groups and counts, then the distributed optimizer's sharded state.

    Args:
        optimizer: with its state made.
        state: what megatron-core has loaded for it, from a checkpoint of either kind of Adam;
            changed.
    """
    if isinstance(optimizer, OwnedOptimizer):
        optimizer.load_state_dict(state)
        return
    parts, inner = parts_of(optimizer), inner_optimizers(optimizer)
    _place_step(state, in_groups=not any(isinstance(one, torch.optim.Adam) for one in inner))
    # A single part's state has no number.
    states = [state] if len(parts) == 1 else [state[index] for index in range(len(parts))]
    sharded = [of_part.pop("param_state", None) for of_part in states]
    megatron_versions.adopt_group_settings(state, optimizer.param_groups)
    optimizer.load_state_dict(state)
    for one in inner:
        # Another Adam's groups lack settings of this one, such as a fused Adam's bias_correction.
        for group, (name, default) in itertools.product(one.param_groups, one.defaults.items()):
            group.setdefault(name, default)
    of_parameters = [s for one in inner for s in one.state.values()]
    # megatron-core copies every entry of Adam's state from the sharded one, which has no counts.
    steps = [s.pop("step", None) for s in of_parameters]
    for part, of_part in zip(parts, sharded, strict=True):
        if of_part is not None:
            part.load_parameter_state_from_fully_reshardable(of_part)
    for of_parameter, step in zip(of_parameters, steps, strict=True):
        if step is not None:
            of_parameter["step"] = step.clone()


def _place_step(state: dict[Any, Any], *, in_groups: bool) -> None:
    """Put the step count where this machine's Adam expects it, whichever wrote the checkpoint.

    A fused Adam has it in its groups, an int; torch's with each parameter, which megatron-core
    saves as one common_step. Both leave out a 0, before the first update. The distributed optimizer
    has no "state" here: it takes the count from the groups for either Adam.
    """
    of_parameters, groups = state.get("state"), state.get("param_groups")
    if groups is not None:
        steps = [float(group.pop("step")) for group in groups if "step" in group]
        step = max(steps, default=0.0)
        if isinstance(of_parameters, dict):
            step = of_parameters.pop("common_step", step)
        if in_groups or not isinstance(of_parameters, dict):
            for group in groups:
                group["step"] = int(step)
        else:
            of_parameters["common_step"] = torch.tensor(float(step))
    for part in state.values():
        if isinstance(part, dict) and part is not of_parameters:
            _place_step(part, in_groups=in_groups)
