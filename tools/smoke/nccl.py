"""Section of tools/gpu_smoke.py: several processes, one per GPU; on a CPU two, with gloo.

Before: `reference` (parity.py) has left weights and what one process on a CPU makes of them.
First the collectives that the package uses, over all ranks and over parts of them, on small
integers, whose sums are exact in any order. Then every layout computes log-probabilities, values
and gradients, and makes an update; each data-parallel rank has its share of the responses. Then
weights are sent from every layout of the trainer to vLLM on 1 and 2 GPUs, verified by checksums,
and sampled from. What is judged is the largest error of any rank; rank 0 has the rows.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from tools.smoke.models import build_role, exact_float32, make_config, start_groups
from tools.smoke.network import all_reduce_rate, communicator, gathered
from tools.smoke.parity import (
    ROLES,
    UNIT_ROUNDOFF,
    compute,
    load_reference,
    output_error,
    rounding_bound,
    share,
    worst_gradient,
)
from tools.smoke.report import Row, judged, skipped
from tools.smoke.sampler import (
    against_trainer,
    build_engine,
    fill_weights_with_nan,
    missing_vllm,
    sample,
    sampling_config,
)
from tools.smoke.sizes import Sizes
from vapo_megatron.config.phases import Role
from vapo_megatron.parallel import backend, groups
from vapo_megatron.parallel.groups import Ranks
from vapo_megatron.roles.actor import Actor
from vapo_megatron.weights.reshard.sync import WeightSync

TP_SIZE = 2
"""The models of this section have two key-value heads."""


def nccl(sizes: Sizes, directory: Path) -> Iterator[Row]:
    """Check communication, every layout's update, and the weight sync between layouts."""
    exact_float32()
    if not dist.is_initialized():
        backend.initialize_distributed(timeout_seconds=60)
    if dist.get_world_size() == 1:
        yield skipped("nccl", "there is one GPU; this needs two")
        return
    for row in _rows(sizes, directory):
        if dist.get_rank() == 0:
            yield row


def _rows(sizes: Sizes, directory: Path) -> Iterator[Row]:
    """Every rank makes all rows, with the same figures."""
    yield from communication(sizes.all_reduce_elements)
    for layout in layouts(dist.get_world_size()):
        restart()
        ranks = start_groups(make_config("float32", parallel=layout))
        for dtype in UNIT_ROUNDOFF:
            for role in ROLES:
                yield from update(sizes, directory, role, dtype, layout, ranks)
    if missing_vllm():
        yield skipped("nccl", f"sync between layouts: {missing_vllm()}")
        return
    for rollout_tp in (1, TP_SIZE):
        restart()
        yield from synced(sizes, directory, rollout_tp)


def restart() -> None:
    """Leave all process groups and join again: each costs threads, and memory of the GPU."""
    groups.destroy()
    dist.destroy_process_group()
    # Models hold groups in reference cycles.
    gc.collect()
    backend.initialize_distributed(timeout_seconds=60)


def layouts(world_size: int) -> list[dict[str, Any]]:
    """Return `parallel` of each layout; data parallelism takes what TP and PP leave."""
    found = []
    for tp_size, pp_size in ((TP_SIZE, 1), (1, 2), (TP_SIZE, 2)):
        dp_size = world_size // (tp_size * pp_size)
        if dp_size:
            found.append(
                {
                    "world_size": world_size,
                    "tensor_model_parallel_size": tp_size,
                    "pipeline_model_parallel_size": pp_size,
                    "sequence_parallel": tp_size > 1,
                    "overlap_grad_reduce": dp_size > 1,
                    "overlap_param_gather": dp_size > 1,
                }
            )
    return found


def title(layout: dict[str, Any]) -> str:
    """Return such as "TP 2 PP 1 DP 1"."""
    tp_size = layout["tensor_model_parallel_size"]
    pp_size = layout["pipeline_model_parallel_size"]
    dp_size = layout["world_size"] // (tp_size * pp_size)
    return f"TP {tp_size} PP {pp_size} DP {dp_size}"


def communication(num_elements: int) -> Iterator[Row]:
    """Check each collective over the world, and over pairs; time an all-reduce of the world."""
    rank, size = dist.get_rank(), dist.get_world_size()
    starts = range(0, size, 2)
    pairs = [dist.new_group([first, first + 1]) for first in starts]
    cases: dict[str, ProcessGroup] = {f"{size} ranks": dist.group.WORLD}  # type: ignore[dict-item]
    if size > 2:
        cases["pairs"] = pairs[rank // 2]
    for name, group in cases.items():
        wrong = sum(gathered([w for w, ok in _checked(group).items() if not ok]), [])
        measured = f"wrong: {', '.join(sorted(set(wrong)))}" if wrong else "exact"
        case = f"{dist.get_backend()}, collectives of {name}"
        yield Row("nccl", case, measured, "exact", passed=not wrong)
    yield communicator("nccl", f"{size} ranks")
    rate, is_same = all_reduce_rate(num_elements)
    measured = f"{rate / 1e9:.3g} GB/s of bus bandwidth; {'the same' if is_same else 'other'} bits"
    figures = {"bus_bytes_per_second": rate, "same_bits": float(is_same)}
    case = f"all-reduce of {2 * num_elements / 1e6:.3g} MB in bfloat16, twice"
    yield Row("nccl", case, measured + " the second time", figures=figures)


def _checked(group: ProcessGroup) -> dict[str, bool]:
    """Return which collectives are right on this rank, in float32 and bfloat16."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    members = dist.get_process_group_ranks(group)
    found = {}
    for dtype in (torch.float32, torch.bfloat16):

        def numbers(of: int, dtype: torch.dtype = dtype) -> Tensor:
            # Sums of 8 ranks stay below 256, which bfloat16 holds exactly.
            return (torch.arange(4096) % 16 + of).to(backend.device(), dtype)

        everyone = torch.stack([numbers(r) for r in range(size)])
        total = everyone.sum(0)
        reduced = numbers(rank)
        dist.all_reduce(reduced, group=group)
        gathered = torch.empty_like(everyone.flatten())
        dist.all_gather_into_tensor(gathered, numbers(rank), group=group)
        scattered = numbers(rank).chunk(size)[0].clone()
        dist.reduce_scatter_tensor(scattered, numbers(rank), group=group)
        sent = numbers(rank)
        dist.broadcast(sent, src=members[-1], group=group)
        received = torch.empty_like(sent)
        following, previous = members[(rank + 1) % size], members[rank - 1]
        operations = [
            dist.P2POp(dist.isend, numbers(rank), following, group=group),
            dist.P2POp(dist.irecv, received, previous, group=group),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        backend.synchronize()
        name = str(dtype).removeprefix("torch.")
        found[f"all-reduce {name}"] = torch.equal(reduced, total)
        found[f"all-gather {name}"] = torch.equal(gathered.view_as(everyone), everyone)
        found[f"reduce-scatter {name}"] = torch.equal(scattered, total.chunk(size)[rank])
        found[f"broadcast {name}"] = torch.equal(sent, everyone[-1])
        found[f"send and receive {name}"] = torch.equal(received, everyone[rank - 1])
    return found


def update(
    sizes: Sizes, directory: Path, role: Role, dtype: str, layout: dict[str, Any], ranks: Ranks
) -> list[Row]:
    """Compare a layout's forward pass, gradients and update with one process's."""
    expected = load_reference(directory, role)
    config = make_config(dtype, hf_path=str(directory / role), parallel=layout)
    old = expected.outputs[:, 0].clone()
    found, model, mini_batch = compute(sizes, role, config, ranks, packed=True, old=old)
    first, count = share(len(sizes.parity_lengths), ranks.dp_size, ranks.dp_rank)
    bounds = torch.tensor([0, *(n for _, n in sizes.parity_lengths)]).cumsum(0)
    mine = expected.outputs[int(bounds[first]) : int(bounds[first + count])]
    norm = model.update([mini_batch])[f"{role}/grad_norm"]
    errors = {
        "forward": output_error(found.outputs, mine),
        "backward": worst_gradient(found, expected)[1],
        "update, gradient norm": abs(norm / expected.gradient_norm - 1),
    }
    bound = rounding_bound(sizes.parity_shape, dtype)
    case = f"{title(layout)}, {role} {dtype}"
    return [
        judged("nccl", f"{case}, {what}", "error", largest(error), bound)
        for what, error in errors.items()
    ]


def synced(sizes: Sizes, directory: Path, rollout_tp: int) -> Iterator[Row]:
    """Send the weights of every layout to vLLM, and sample from each."""
    load = sizes.sampler._replace(shape=sizes.parity_shape)
    world_size = dist.get_world_size()
    hf_path = directory / "actor"
    config = sampling_config(load, hf_path, world_size=world_size, rollout_tp=rollout_tp)
    # A graph that is captured takes as long as all else here.
    eager = config.rollout.model_copy(update={"enforce_eager": True})
    engine = build_engine(config.model_copy(update={"rollout": eager}), sizes.parity_shape)
    engine.sleep()
    for version, layout in enumerate(layouts(world_size)):
        fill_weights_with_nan(engine)
        config = sampling_config(load, hf_path, rollout_tp=rollout_tp, **layout)
        actor = build_role("actor", sizes.parity_shape, config)
        assert isinstance(actor, Actor)
        sync = WeightSync(actor.shape, groups.current(), config.model, config.rollout, engine)
        sync.publish(actor.placed.chunks, version)
        rollouts = sum(gathered(sample(engine, load, version)), [])
        rollouts = list({r.position: r for r in rollouts}.values())
        case = f"sync of {title(layout)} to {world_size // rollout_tp} x TP {rollout_tp}"
        yield against_trainer("nccl", case, actor, rollouts)
        engine.sleep()
    groups.destroy()
    engine.shutdown()
    dist.barrier()


def largest(error: float) -> float:
    """Return the largest error of any rank; NaN is larger than all."""
    return max(gathered(math.inf if math.isnan(error) else error))
