"""Weight sync: sends the actor's weights to the engine, and verifies them.

Before: every rank holds its shard of the actor, and of the engine with older weights; where these
are processes of their own (parallel/worlds.py), one of the two. During: each rank receives what its
engine shard is missing, by a plan that is made once; see planner.py and transfer.py. After: the
engine holds the actor's weights, and their version.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from vapo_megatron.config.metrics import emits
from vapo_megatron.parallel import backend
from vapo_megatron.parallel.gradient_buffers import wait_for_parameters
from vapo_megatron.parallel.reduce import gather_objects
from vapo_megatron.weights.holders import TrainerLayout, trainer_layout
from vapo_megatron.weights.parameters import adapters_of, local_parameters, unwrap
from vapo_megatron.weights.reshard.merged import MergedWeights
from vapo_megatron.weights.reshard.plan import ENGINE, LiveWeight, Plan, Step
from vapo_megatron.weights.reshard.planner import make_plan
from vapo_megatron.weights.reshard.steps import steps_of
from vapo_megatron.weights.reshard.transfer import Weights, execute
from vapo_megatron.weights.reshard.verify import destination_problems, differences, source_problems
from vapo_megatron.weights.reshard.vllm_layout import ADAPTER_NAME

if TYPE_CHECKING:
    from vapo_megatron.config import ModelConfig, RolloutConfig
    from vapo_megatron.config.lora import LoraConfig
    from vapo_megatron.models.hf_config import ModelShape
    from vapo_megatron.parallel.groups import Ranks
    from vapo_megatron.parallel.worlds import Worlds
    from vapo_megatron.weights.parameters import LocalParameter

T = TypeVar("T")


class Engine(Protocol):
    """What a sync needs from the inference engine (rollout/vllm/engine.py)."""

    has_weights: bool
    """Whether its weights are a policy's, of any version."""

    def live_weights(self) -> dict[str, LiveWeight]:
        """Return every weight of this rank's shard by name, in place."""

    def weights_replaced(self, policy_version: int) -> AbstractContextManager[None]:
        """Context in which the weights are overwritten; afterwards they have this version."""


class _Prepared(NamedTuple):
    """Of the weights, or of the adapters; prepared in the first sync, used in all."""

    plan: Plan
    steps: list[Step]
    """This rank's."""
    weights: Weights
    """Both worlds' parameters; later updates are in place."""
    live: dict[str, LiveWeight]
    """The engine's among them."""
    dtype: torch.dtype
    """Of the engine's weights."""
    device: torch.device
    """Of messages."""
    received_bytes: int
    """By all ranks together in each sync."""


class WeightSync:
    """One rank's part of the weight sync."""

    def __init__(
        self,
        shape: ModelShape,
        ranks: Ranks | None,
        model: ModelConfig,
        rollout: RolloutConfig,
        engine: Engine | None,
        worlds: Worlds | None = None,
    ) -> None:
        """Send nothing yet.

        Args:
            ranks: this rank's place among the trainers; None: it only samples.
            model: make_vocab_size_divisible_by and lora are used.
            rollout: the engine's layout, bucket size, verification.
            engine: this rank's engine; None: it only trains.
            worlds: None: every rank trains and samples.
        """
        self._shape, self._ranks, self._worlds = shape, ranks, worlds
        self._model, self._rollout, self._engine = model, rollout, engine
        self._group = None if worlds is None else worlds.group
        lora = model.lora if model.lora.of("actor") else None
        self._apart = lora if rollout.adapter_sync == "adapter" else None
        """The adapters are sent apart from the weights."""
        self._merges = lora is not None and self._apart is None
        self._weights: _Prepared | None = None
        self._adapters: _Prepared | None = None
        self.received_bytes = 0
        """Received by this rank from others in the latest sync."""

    @emits("sync/received_bytes")
    def publish(self, chunks: Sequence[torch.nn.Module], policy_version: int) -> dict[str, float]:
        """Send the actor's weights to the engine. Collective over all ranks.

        Adapters are added to the weights as they are sent; or are sent alone, and the weights with
        them only to an engine that has none (rollout.adapter_sync).

        Args:
            chunks: this rank's model chunks, none where it only samples; with DDP around them,
                parameters that overlap_param_gather has not fetched yet are fetched first.
            policy_version: of these weights.

        Returns:
            "sync/received_bytes": received from other ranks, summed over all ranks.

        Raises:
            ConfigError: the engine's layout does not divide the model, or a bucket is too small.
            RuntimeError: on every rank, when the plan does not cover the engine's weights exactly,
                or verification (rollout.verify_sync_every) finds a difference. The engine then
                refuses to sample.
        """
        wait_for_parameters(chunks)
        is_first = self._weights is None
        if self._weights is None:
            self._weights = self._prepare(chunks)
        if self._apart is not None and self._adapters is None:
            self._adapters = self._prepare(chunks, self._apart)
        for index, chunk in enumerate(chunks):
            name, parameter = next(unwrap(chunk).named_parameters())
            assert self._weights.weights[index, name] is parameter, "another model than at first"
        engine = self._engine
        sent = [self._weights] if self._lacks_weights() else []
        sent += [] if self._adapters is None else [self._adapters]
        with engine.weights_replaced(policy_version) if engine else contextlib.nullcontext():
            self.received_bytes = sum(self._send(part, chunks) for part in sent)
            if self._is_verified(policy_version, is_first):
                self.verify(chunks)
        return {"sync/received_bytes": float(sum(part.received_bytes for part in sent))}

    def _lacks_weights(self) -> bool:
        """Whether any rank's engine needs the weights; where adapters are merged, it always does.

        Collective where adapters are sent apart.
        """
        if self._apart is None:
            return True
        return any(self._gather(self._engine is not None and not self._engine.has_weights))

    def _send(self, part: _Prepared, chunks: Sequence[torch.nn.Module]) -> int:
        """Fill the engine's shards; return the bytes that this rank received."""
        weights = self._as_sent(part.weights, chunks)
        received = execute(part.steps, weights, part.dtype, part.device, self._group)
        for weight in part.live.values():
            if weight.padding_rows:
                weight.tensor[-weight.padding_rows :].zero_()
        return received

    def _as_sent(self, weights: Weights, chunks: Sequence[torch.nn.Module]) -> Weights:
        """Return the weights with their adapters added, if they are sent so."""
        if not self._merges:
            return weights
        found = {
            (index, f"{name}.weight"): adapter
            for index, chunk in enumerate(map(unwrap, chunks))
            for name, adapter in adapters_of(chunk).items()
        }
        return MergedWeights(weights, found)

    def _is_verified(self, policy_version: int, is_first: bool) -> bool:
        """Whether both worlds' checksums are compared; between processes always at first."""
        every = self._rollout.verify_sync_every
        return (is_first and (self._group is not None or every > 0)) or (
            every > 0 and policy_version % every == 0
        )

    def verify(self, chunks: Sequence[torch.nn.Module]) -> None:
        """Compare checksums of the engine's live weights with the actor's. Collective.

        Args:
            chunks: published last.

        Raises:
            RuntimeError: on every rank, when they differ; names rank, parameter and slice.
        """
        assert self._weights is not None, "nothing has been published"
        # Look them up again: the weights that the engine uses now, not those written to.
        weights = self._as_sent(all_weights(chunks, self._live()), chunks)
        found: list[str] = []
        for part in filter(None, (self._weights, self._adapters)):
            found += differences(
                part.plan, self._rank, weights, part.dtype, part.device, self._group
            )
        self._raise_together(found, "the engine's weights differ from the trainer's")

    def _live(self) -> dict[str, LiveWeight]:
        return self._engine.live_weights() if self._engine else {}

    @property
    def _rank(self) -> int:
        if self._worlds is not None:
            return self._worlds.rank
        assert self._ranks is not None, "without worlds every rank trains"
        return self._ranks.rank

    def _prepare(
        self, chunks: Sequence[torch.nn.Module], lora: LoraConfig | None = None
    ) -> _Prepared:
        """Make the plan of the weights, or of the adapters, and check it; raises on all ranks."""
        rollout, worlds, rank = self._rollout, self._worlds, self._rank
        apart = lora is not None
        live = {n: w for n, w in self._live().items() if n.startswith(ADAPTER_NAME) == apart}
        weights = all_weights(chunks, live)
        parameters = local_parameters(chunks, self._shape, "actor")
        own = self._trainer_layout(parameters)
        dtype = next(iter(live.values())).tensor.dtype if live else None
        on_node = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size(self._group)))
        # What only one of the worlds knows; on a rank that is both, it is its own.
        layouts, dtypes, of_nodes = zip(*self._gather((own, dtype, on_node)), strict=True)
        trainer = own or next(filter(None, layouts))
        dtype = dtype or next(filter(None, dtypes))
        plan = make_plan(
            self._shape,
            trainer,
            rollout.tensor_model_parallel_size,
            gpus_per_node=of_nodes[0],
            bytes_per_element=dtype.itemsize,
            relay=True,
            rollout_workers=None if worlds is None else worlds.rollout_workers,
            experts_apart=rollout.expert_parallel,
            lora=lora,
        )
        received, sent = plan.received(rank), plan.sent(rank)
        problems = destination_problems(received, live, dtype)
        problems += source_problems([m for m in received if m.source_rank == rank] + sent, weights)
        # A shard's first row depends on the vocabulary's padding.
        num_rows = trainer.vocab_rows // trainer.tp_size
        problems += [
            f"{p.name} has {p.data.shape[0]} rows, not {num_rows}"
            for p in parameters
            if p.row.kind == "vocabulary" and p.data.shape[0] != num_rows
        ]
        self._raise_together(problems, "the plan does not fit the live weights")
        identity = (hashlib.sha256(repr(plan).encode()).hexdigest(), dtype)
        assert len(set(self._gather(identity))) == 1, "ranks have made different plans"
        steps = steps_of(plan, rank, rollout.sync_bucket_bytes)
        elements = sum(m.source.num_elements for m in received if m.source_rank != rank)
        num_bytes = sum(self._gather(elements)) * dtype.itemsize
        return _Prepared(plan, steps, weights, live, dtype, backend.device(), num_bytes)

    def _trainer_layout(self, parameters: Sequence[LocalParameter]) -> TrainerLayout | None:
        """Describe the trainers by this rank's place and parameters; None: it does not train."""
        ranks = self._ranks
        if ranks is None:
            return None
        return trainer_layout(
            self._shape,
            tp_size=ranks.tp_size,
            pp_size=ranks.pp_size,
            vpp_size=ranks.vpp_size,
            dp_size=ranks.replica_size,
            ep_size=ranks.ep_size,
            make_vocab_size_divisible_by=self._model.make_vocab_size_divisible_by,
            transformer_engine=any(p.name.endswith("layer_norm_weight") for p in parameters),
        )

    def _gather(self, value: T) -> list[T]:
        return gather_objects(value, self._group)

    def _raise_together(self, problems: list[str], what: str) -> None:
        """Raise on all ranks if any has problems.

        Raises:
            RuntimeError: names the first few, with their ranks.
        """
        everyone = self._gather((len(problems), problems[:5]))
        named = [f"rank {rank}: {p}" for rank, (_, some) in enumerate(everyone) for p in some]
        if named:
            count = sum(number for number, _ in everyone)
            raise RuntimeError(f"{what} in {count} places: {'; '.join(named[:5])}")


def all_weights(
    chunks: Sequence[torch.nn.Module], live: Mapping[str, LiveWeight]
) -> dict[tuple[int, str], Tensor]:
    """Return both worlds' parameters for transfer.execute."""
    found = {(ENGINE, name): weight.tensor for name, weight in live.items()}
    for index, chunk in enumerate(chunks):
        for name, parameter in unwrap(chunk).named_parameters():
            found[index, name] = parameter
    return found
