"""Who has the device in which phase: the actor, the critic, the reference policy, or vLLM.

    generation, evaluation   vLLM, with its weights and KV cache
    sync                     the actor's parameters, and vLLM's weights
    the others in TURNS      what they name of each role, and nothing of vLLM
    any other phase          whoever had it before

Without parallel.offload all of them are there all the time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from vapo_megatron.config import VapoConfig
from vapo_megatron.models.hf_config import ModelShape
from vapo_megatron.parallel.groups import ParallelGroups
from vapo_megatron.parallel.offload import Held, check_host_memory, expandable_segments, is_on
from vapo_megatron.planning.host_memory import host_bytes
from vapo_megatron.planning.model_bytes import Role
from vapo_megatron.rollout_source import RolloutSource
from vapo_megatron.trained_model import PlacedModel

TURNS: dict[str, dict[Role, Held]] = {
    "values": {"critic": "parameters"},
    "logprobs": {"actor": "parameters"},
    "reference_logprobs": {"reference": "parameters"},
    "critic_update": {"critic": "training"},
    "actor_update": {"actor": "training"},
    "sync": {"actor": "parameters"},
    "checkpoint": {},  # One role after the other: checkpoint.py.
    "export": {"actor": "parameters"},
}


class Turns:
    """Moves models and vLLM between the device and the host."""

    def __init__(
        self, shape: ModelShape, config: VapoConfig, groups: ParallelGroups, source: RolloutSource
    ) -> None:
        """Let the source leave the device: the models are built next. Collective.

        Raises:
            ConfigError: a node lacks the host memory for all roles and for a checkpoint.
        """
        self._source = source
        self._models: dict[str, PlacedModel] = {}
        self.is_on = is_on(config.parallel)
        if self.is_on:
            # First, for vLLM keeps some of itself in host memory while it sleeps.
            source.leave_device()
        needed = host_bytes(
            shape,
            config,
            pp_rank=groups.pp_rank,
            is_first_replica=groups.dp_rank == 0,
            is_offloaded=self.is_on,
        )
        remedies = ["checkpoint.asynchronous=false"] * config.checkpoint.asynchronous
        remedies += ["parallel.offload=false"] * self.is_on
        if remedies:
            check_host_memory(
                {"what is offloaded": needed.offloaded, "a checkpoint": needed.checkpoint},
                config.parallel,
                remedies,
            )

    def join(self, role: Role, model: PlacedModel) -> PlacedModel:
        """Let a model that was just built take turns from now on, and return it."""
        if self.is_on:
            model.offload()
        self._models[role] = model
        return model

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Give the device to whom the phase needs, and take it back."""
        if phase not in TURNS:
            yield
            return
        if self.is_on:
            self._source.leave_device()
        with contextlib.ExitStack() as stack:
            stack.enter_context(expandable_segments())
            for role, part in TURNS[phase].items():
                stack.enter_context(self._models[role].held(part))
            yield

    def close(self) -> None:
        """Give back the memory of models that take turns; they must not be used any more."""
        for model in self._models.values():
            model.close()
