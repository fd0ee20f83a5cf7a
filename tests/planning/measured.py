"""What a tiny model's allocations really come to, in a gloo process: a worker's functions."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile

from tests.cut import batch_of
from vapo_megatron.config import VapoConfig
from vapo_megatron.data.batch import RolloutBatch
from vapo_megatron.data.microbatch import make_microbatch
from vapo_megatron.models.hf_config import ModelShape

PROMPT_TOKENS = 2
PAUSE_SECONDS = 0.02


class Measured(NamedTuple):
    """Bytes that torch's allocator gave out on one rank."""

    pp_rank: int
    parameters: int
    gradients: int
    optimizer: int
    training: int
    """Peak of a forward and backward pass over all microbatches, above what was there before."""
    inference: int
    """Peak of a forward pass without gradients."""


class Allocations:
    """Counts every allocation and release of torch's CPU allocator in a with block, by profiler.

    But for gloo's copies of what it sums: another thread holds them for as long as it likes, and
    NCCL makes none. That thread holds the tensors themselves, too, until shortly after they have
    been sent, and the profiler does not see what it releases: a pause follows.
    """

    def __enter__(self) -> Allocations:
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self._profile.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._profile.__exit__(*error)
        tree = self._profile.profiler.kineto_results.experimental_event_tree()
        self.kept = self.peak = 0
        counted: dict[int, int] = {}
        for _, pointer, size, is_copy in sorted(_allocations(tree, False), key=lambda a: a[0]):
            if size < 0:
                self.kept -= counted.pop(pointer, -size)
                continue
            # What lay at this address has been released, seen or not.
            self.kept -= counted.pop(pointer, 0)
            counted[pointer] = 0 if is_copy else size
            self.kept += counted[pointer]
            self.peak = max(self.peak, self.kept)


def _allocations(events: Any, in_gloo: bool) -> Iterator[tuple[int, int, int, bool]]:
    """Yield (nanoseconds, address, bytes, made by gloo) of each; releases have negative bytes."""
    for event in events:
        if event.tag == _EventType.Allocation:
            fields = event.extra_fields
            yield event.start_time_ns, fields.ptr, fields.alloc_size, in_gloo
        yield from _allocations(event.children, in_gloo or event.name.startswith("c10d::"))


class _Paused(NamedTuple):
    """A collective's work, which rests after it is done."""

    work: Any

    def wait(self) -> None:
        self.work.wait()
        time.sleep(PAUSE_SECONDS)


@contextlib.contextmanager
def pausing() -> Iterator[None]:
    """Let gloo's thread forget the tensors of each collective before this thread goes on."""
    from megatron.core.tensor_parallel import layers, mappings

    def then_pause(collective: Any) -> Any:
        def communicate(*args: Any, **keywords: Any) -> Any:
            work = collective(*args, **keywords)
            time.sleep(PAUSE_SECONDS)
            return work if work is None else _Paused(work)

        return communicate

    with contextlib.ExitStack() as stack:
        for module, names in (
            (dist, ("all_reduce", "all_gather_into_tensor")),
            (layers, ("dist_all_gather_func", "dist_reduce_scatter_func")),
            (mappings, ("dist_all_gather_func", "dist_reduce_scatter_func")),
        ):
            for name in names:
                paused = then_pause(getattr(module, name))
                stack.enter_context(mock.patch.object(module, name, paused))
        yield


def measure(shape: ModelShape, config: VapoConfig, role: str, responses: int) -> Measured:
    """Build one role, train it once on `responses` microbatches, each of one response.

    Each is as long as planning's microbatch_tokens says. A base that the role shares is there
    before, and not counted.
    """
    from vapo_megatron.parallel import groups
    from vapo_megatron.parallel.gradient_buffers import gradient_buffers
    from vapo_megatron.parallel.optimizer import optimizer_step
    from vapo_megatron.parallel.schedule import forward_backward, forward_only
    from vapo_megatron.roles.placed import load_model
    from vapo_megatron.roles.trained import optimizer_of, wrap

    here = groups.initialize(config.parallel)
    size = config.parallel.max_tokens_per_microbatch
    microbatches = [make_microbatch(_response(size, shape.vocab_size)) for _ in range(responses)]
    shared = None
    if config.model.lora.shares(role):
        shared = load_model(shape, config, here, "actor", None).base
    with Allocations() as built:
        model = load_model(shape, config, here, role, None, shared).model
        chunks = wrap(model, config, role)
    gradients = sum(b.grad_data.untyped_storage().nbytes() for b in gradient_buffers(chunks))
    with Allocations() as optimized:
        optimizer = optimizer_of(chunks, model, shape, config, here, role)
    head = _head(shape, config, role, model, here)
    with Allocations() as trained, pausing():
        forward_backward(
            chunks, microbatches, lambda o, m: (head(o, m, with_entropy=False).sum(), {})
        )
    with Allocations() as stepped, pausing():
        optimizer_step(optimizer)
    with Allocations() as inferred, pausing():
        forward_only(chunks, microbatches, head)
    return Measured(
        pp_rank=here.pp_rank,
        parameters=built.kept - gradients,
        gradients=gradients,
        optimizer=optimized.kept + stepped.kept,
        training=trained.peak,
        inference=inferred.peak,
    )


class MeasuredHost(NamedTuple):
    """Bytes that offload keeps in host memory on one rank."""

    own: int
    """Of all roles, without what is frozen below adapters."""
    base: int
    """What is frozen below adapters, each copy once."""


def offloaded(shape: ModelShape, config: VapoConfig) -> MeasuredHost:
    """Build and offload a run's roles as training/build.py does."""
    from vapo_megatron.parallel import groups
    from vapo_megatron.roles.actor import Actor, Reference
    from vapo_megatron.roles.critic import Critic

    here, lora = groups.initialize(config.parallel), config.model.lora
    actor = Actor(shape, config, here, None)
    actor.placed.offload()
    shared = {role: actor.placed.base for role in config.roles if lora.shares(role)}
    models = [actor, Critic(shape, config, here, None, shared.get("critic"))]
    if "reference" in config.roles:
        models.append(Reference(shape, config, here, shared.get("reference")))
    for model in models[1:]:
        model.placed.offload()
    bases = {id(base): base for model in models if (base := model.placed.base) is not None}
    return MeasuredHost(
        sum(model.placed._offload.num_bytes for model in models),
        sum(base._offload.num_bytes for base in bases.values()),
    )


def checkpoint_size(shape: ModelShape, config: VapoConfig, directory: str) -> int:
    """Save both roles as they are built; return the bytes of all files."""
    from vapo_megatron.parallel import groups
    from vapo_megatron.roles.actor import Actor
    from vapo_megatron.roles.critic import Critic
    from vapo_megatron.run.checkpoint.writer import CheckpointWriter

    here = groups.initialize(config.parallel)
    kinds = {"actor": Actor, "critic": Critic}
    models = {
        role: kinds[role](shape, config, here, None).trained
        for role in config.algorithm.trained_roles
    }
    with CheckpointWriter(Path(directory), config.checkpoint) as writer:
        writer.save(1, models, {})
    return sum(file.stat().st_size for file in Path(directory).rglob("*") if file.is_file())


def _head(shape: ModelShape, config: VapoConfig, role: str, model: Any, here: Any) -> Any:
    from vapo_megatron.models.build import gather_hidden, output_weight
    from vapo_megatron.models.value_head import values_of
    from vapo_megatron.parallel.logprobs import linear_logprobs

    def values(output, microbatch, *, with_entropy=False):
        return values_of(output)[microbatch.predicting]

    def logprobs(output, microbatch, *, with_entropy=True):
        hidden = gather_hidden(output, sequence_parallel=config.parallel.sequence_parallel)
        found, _ = linear_logprobs(
            hidden[microbatch.predicting],
            output_weight(model[-1]),
            microbatch.targets,
            here.tp_group,
            vocab_size=shape.vocab_size,
            with_entropy=with_entropy,
        )
        return found

    return values if role == "critic" else logprobs


def _response(size: int, vocab_size: int) -> RolloutBatch:
    return batch_of(torch.randint(vocab_size, (size,)), [size], [size - PROMPT_TOKENS])
