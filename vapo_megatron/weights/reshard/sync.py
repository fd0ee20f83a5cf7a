"""Weight sync: sends the actor's weights to the sampler in the same processes, and verifies them.

Before: every rank holds its shard of the actor, and of the sampler with older weights. During: each
rank receives what its sampler shard is missing, by a plan that is made once; see planner.py and
transfer.py. After: the sampler holds the actor's weights, and their version.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from vapo_megatron.config.metrics import emits
from vapo_megatron.parallel.reduce import gather_objects
from vapo_megatron.weights.mapping import local_parameters, unwrap, wait_for_parameters
from vapo_megatron.weights.reshard.plan import SAMPLER, LiveWeight, Plan, Step
from vapo_megatron.weights.reshard.planner import make_plan
from vapo_megatron.weights.reshard.shards import trainer_layout
from vapo_megatron.weights.reshard.steps import steps_of
from vapo_megatron.weights.reshard.transfer import Weights, execute
from vapo_megatron.weights.reshard.verify import destination_problems, differences, source_problems

if TYPE_CHECKING:
    from vapo_megatron.config import ModelConfig, RolloutConfig
    from vapo_megatron.models.hf_config import ModelShape
    from vapo_megatron.parallel.groups import Ranks


class Engine(Protocol):
    """What a sync needs from the inference engine (rollout/vllm/engine.py)."""

    def live_weights(self) -> dict[str, LiveWeight]:
        """Return every weight of this rank's shard by name, in place."""

    def weights_replaced(self, policy_version: int) -> AbstractContextManager[None]:
        """Context in which the weights are overwritten; afterwards they have this version."""


class _Prepared(NamedTuple):
    """Prepared in the first sync, used in all."""

    plan: Plan
    steps: list[Step]
    """This rank's."""
    weights: Weights
    """Both sides' parameters; later updates are in place."""
    live: dict[str, LiveWeight]
    """The sampler's among them."""
    dtype: torch.dtype
    """Of the sampler's weights."""
    device: torch.device
    received_bytes: int
    """By all ranks together in each sync."""


class WeightSync:
    """One rank's part of the weight sync."""

    def __init__(
        self,
        shape: ModelShape,
        ranks: Ranks,
        model: ModelConfig,
        rollout: RolloutConfig,
        engine: Engine,
    ) -> None:
        """Send nothing yet.

        Args:
            model: make_vocab_size_divisible_by is used.
            rollout: the sampler's layout, bucket size, verification.
            engine: this rank's sampler.
        """
        self._shape, self._ranks = shape, ranks
        self._model, self._rollout, self._engine = model, rollout, engine
        self._prepared: _Prepared | None = None
        self.received_bytes = 0
        """Received by this rank from others in the latest sync."""

    @emits("sync/received_bytes")
    def publish(self, chunks: Sequence[torch.nn.Module], policy_version: int) -> dict[str, float]:
        """Send the actor's weights to the sampler. Collective over all ranks.

        Args:
            chunks: this rank's model chunks; with DDP around them, parameters that
                overlap_param_gather has not fetched yet are fetched first.
            policy_version: of these weights.

        Returns:
            "sync/received_bytes": received from other ranks, summed over all ranks.

        Raises:
            ConfigError: the sampler's layout does not divide the model, or a bucket is too small.
            RuntimeError: on every rank, when the plan does not cover the sampler's weights exactly,
                or verification (rollout.verify_sync_every) finds a difference. The engine then
                refuses to sample.
        """
        wait_for_parameters(chunks)
        is_first = self._prepared is None
        if self._prepared is None:
            self._prepared = self._prepare(chunks)
        ready = self._prepared
        for index, chunk in enumerate(chunks):
            name, parameter = next(unwrap(chunk).named_parameters())
            assert ready.weights[index, name] is parameter, "another model than at first"
        with self._engine.weights_replaced(policy_version):
            self.received_bytes = execute(ready.steps, ready.weights, ready.dtype, ready.device)
            for weight in ready.live.values():
                if weight.padding_rows:
                    weight.tensor[-weight.padding_rows :].zero_()
            every = self._rollout.verify_sync_every
            if every and (is_first or policy_version % every == 0):
                self.verify(chunks)
        return {"sync/received_bytes": float(ready.received_bytes)}

    def verify(self, chunks: Sequence[torch.nn.Module]) -> None:
        """Compare checksums of the sampler's live weights with the actor's. Collective.

        Args:
            chunks: published last.

        Raises:
            RuntimeError: on every rank, when they differ; names rank, parameter and slice.
        """
        assert self._prepared is not None, "nothing has been published"
        # Look them up again: the weights that the sampler uses now, not those written to.
        weights = all_weights(chunks, self._engine.live_weights())
        ready = self._prepared
        found = differences(ready.plan, self._ranks.rank, weights, ready.dtype, ready.device)
        _raise_together(found, "the sampler's weights differ from the trainer's")

    def _prepare(self, chunks: Sequence[torch.nn.Module]) -> _Prepared:
        """Make the plan and check it; raises on all ranks."""
        rollout, ranks, rank = self._rollout, self._ranks, self._ranks.rank
        live = self._engine.live_weights()
        weights = all_weights(chunks, live)
        first = next(iter(live.values())).tensor
        parameters = local_parameters(chunks, self._shape, "actor")
        trainer = trainer_layout(
            self._shape,
            tp_size=ranks.tp_size,
            pp_size=ranks.pp_size,
            vpp_size=ranks.vpp_size,
            dp_size=ranks.dp_size,
            make_vocab_size_divisible_by=self._model.make_vocab_size_divisible_by,
            transformer_engine=any(p.name.endswith("layer_norm_weight") for p in parameters),
        )
        of_nodes = gather_objects(int(os.environ.get("LOCAL_WORLD_SIZE", trainer.world_size)))
        plan = make_plan(
            self._shape,
            trainer,
            rollout.tensor_model_parallel_size,
            gpus_per_node=of_nodes[0],
            bytes_per_element=first.element_size(),
            relay=True,
        )
        received, sent = plan.received(rank), plan.sent(rank)
        problems = destination_problems(received, live, first.dtype)
        problems += source_problems([m for m in received if m.source_rank == rank] + sent, weights)
        # A shard's first row depends on the vocabulary's padding.
        num_rows = trainer.vocab_rows // trainer.tp_size
        problems += [
            f"{p.name} has {p.data.shape[0]} rows, not {num_rows}"
            for p in parameters
            if p.row.kind == "vocabulary" and p.data.shape[0] != num_rows
        ]
        _raise_together(problems, "the plan does not fit the live weights")
        identity = (hashlib.sha256(repr(plan).encode()).hexdigest(), first.dtype)
        assert len(set(gather_objects(identity))) == 1, "ranks have made different plans"
        steps = steps_of(plan, rank, rollout.sync_bucket_bytes)
        elements = sum(m.source.num_elements for m in received if m.source_rank != rank)
        num_bytes = sum(gather_objects(elements)) * first.element_size()
        return _Prepared(plan, steps, weights, live, first.dtype, first.device, num_bytes)


def all_weights(
    chunks: Sequence[torch.nn.Module], live: Mapping[str, LiveWeight]
) -> dict[tuple[int, str], Tensor]:
    """Return both sides' parameters for transfer.execute."""
    found = {(SAMPLER, name): weight.tensor for name, weight in live.items()}
    for index, chunk in enumerate(chunks):
        for name, parameter in unwrap(chunk).named_parameters():
            found[index, name] = parameter
    return found


def _raise_together(problems: list[str], what: str) -> None:
    """Raise on all ranks if any has problems.

    Raises:
        RuntimeError: names the first few, with their ranks.
    """
    everyone = gather_objects((len(problems), problems[:5]))
    named = [f"rank {rank}: {p}" for rank, (_, some) in enumerate(everyone) for p in some]
    if named:
        count = sum(number for number, _ in everyone)
        raise RuntimeError(f"{what} in {count} places: {'; '.join(named[:5])}")
