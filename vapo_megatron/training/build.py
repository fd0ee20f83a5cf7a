"""Builds what a run needs, in order, and chooses once where its rollouts come from."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Self, TypeVar

import torch
import torch.distributed as dist

from vapo_megatron.config import VapoConfig
from vapo_megatron.config.phases import Role
from vapo_megatron.errors import ConfigError
from vapo_megatron.models.hf_config import read_model_shape, read_reward_shape
from vapo_megatron.parallel import backend, groups
from vapo_megatron.parallel.environment import check_processes
from vapo_megatron.parallel.health.early_stop import EarlyStop
from vapo_megatron.parallel.health.watchdog import Watchdog
from vapo_megatron.parallel.offload import check_host_memory, is_on
from vapo_megatron.planning.host_memory import host_bytes
from vapo_megatron.reward.verifiers import default_name
from vapo_megatron.roles.actor import Actor, Reference
from vapo_megatron.roles.critic import Critic
from vapo_megatron.roles.device_schedule import DeviceSchedule
from vapo_megatron.roles.reward_model import RewardModel
from vapo_megatron.roles.trained import TrainedModel
from vapo_megatron.rollout.disaggregated.source import RemoteSampling
from vapo_megatron.rollout.given import GivenSource
from vapo_megatron.rollout.inputs import Inputs, read_inputs
from vapo_megatron.rollout.replay import Replay
from vapo_megatron.rollout.source import OnProgress, RolloutSource
from vapo_megatron.run.checkpoint import load as checkpoint
from vapo_megatron.run.output import RunOutput

_Model = TypeVar("_Model", Actor, Critic, Reference, RewardModel)


class Built:
    """What a run needs, and its phases; a context manager that closes all of it."""

    def __init__(
        self,
        config: VapoConfig,
        replay: Path | None = None,
        inputs: Inputs | None = None,
        *,
        verifier: object | None = None,
    ) -> None:
        """Build everything that a run needs.

        Args:
            config: from load_config.
            replay: run directory whose dumped responses to train on; None: sample.
            inputs: from read_inputs; None: read them here.
            verifier: a function, or an instance or a class with the method of
                reward.verifier.Verifier, in place of reward.verifier; pickled for the processes
                that judge.

        Raises:
            UserError: what is wrong with the configuration, the files or the number of processes.
        """
        check_processes(config.parallel.world_size, config.rollout.num_processes)
        self.config = config
        self.run_dir = Path(config.logging.run_dir)
        torch.manual_seed(config.seed)
        self.worlds = backend.initialize_distributed(
            config.parallel.timeout_seconds, config.rollout.num_processes
        )
        self.early_stop = EarlyStop(config.checkpoint.grace_seconds)
        rank, world_size = dist.get_rank(), config.num_processes
        self.watchdog = Watchdog(
            config.timeouts, self.run_dir, rank, world_size, self.early_stop.is_signalled,
            "trainer" if self.worlds else "",
        )  # fmt: skip
        with self.watchdog.reporting():
            self._build(replay, inputs, verifier)

    def _build(self, replay: Path | None, inputs: Inputs | None, verifier: object | None) -> None:
        config = self.config if replay is None else self.config.for_replay()
        self.ranks = groups.initialize(config.parallel, config.seed)
        self.shape = inputs.shape if inputs else read_model_shape(str(config.model.hf_path))
        self._start = checkpoint.find_start(config)
        # vLLM first, because it measures free device memory; it sleeps while the models are built.
        self.source = self._source(replay, inputs, verifier)
        offloads = is_on(config.parallel)
        self.device_schedule = DeviceSchedule(self.source.leave_device, is_on=offloads)
        # After vLLM went to sleep, because a sleeping vLLM uses host memory too.
        self._check_host_memory(config, is_offloaded=offloads)
        hf_path = partial(self._start.path, config=config)
        of, join, roles = (self.shape, config, self.ranks), self._join, config.roles
        self.actor = join("actor", Actor(*of, hf_path("actor")))
        base = {role: self.actor.placed.base for role in roles if config.model.lora.shares(role)}
        # A run without a role has None in its place.
        self.critic = self.reference = None
        if "critic" in roles:
            self.critic = join("critic", Critic(*of, hf_path("critic"), base.get("critic")))
        if "reference" in roles:
            self.reference = join("reference", Reference(*of, base.get("reference")))
        self.reward_model = None
        if "reward_model" in roles:
            shape = read_reward_shape(config.model, self.shape)
            self.reward_model = join("reward_model", RewardModel(shape, config, self.ranks))
        self.policy_version = 0
        self.watchdog.report_progress(lambda: sum(m.num_tried for m in self._models.values()))
        self.output = RunOutput(self.config, self.ranks)

    def _join(self, role: Role, model: _Model) -> _Model:
        """Offload a role's model as soon as it is built, to make room for the next."""
        self.device_schedule.join(role, model.placed)
        return model

    def _source(
        self, replay: Path | None, inputs: Inputs | None, verifier: object | None
    ) -> RolloutSource:
        """Choose where the run's rollouts come from: dumps, data, other processes, or vLLM here.

        Raises:
            ConfigError: what samples is given a trainer, or a process that trains a verifier.
        """
        if replay is not None:
            default = default_name(self.config.reward, verifier)
            routes = self.shape.num_layers * self.shape.experts_per_token
            return Replay(
                replay, self.ranks, default, takes_given=not self.config.samples,
                routes_per_token=routes if self.config.algorithm.router_replay == "r3" else 0,
            )  # fmt: skip
        c, hf_path = self.config, str(self.config.model.hf_path)
        inputs = inputs or read_inputs(
            self.shape,
            hf_path,
            c.data,
            c.rollout,
            c.evaluation,
            seed=c.seed,
            environment=c.environment,
        )
        inputs = inputs.agreed()
        if not c.samples:
            return GivenSource(
                inputs, self.ranks, rollout=c.rollout, algorithm=c.algorithm, logging=c.logging
            )
        if self.worlds is not None:
            if verifier is not None or self.worlds.is_rollout_worker:
                raise ConfigError(
                    "rollout.placement=disaggregated: process "
                    f"{self.worlds.rank} of {self.worlds.world_size} is given "
                    f"{'a verifier' if verifier is not None else 'a trainer'}, but the last "
                    f"{self.worlds.num_rollout_workers} processes sample and judge; give them "
                    "rollout.disaggregated.server.Server, with the verifier"
                )
            return RemoteSampling(
                inputs, self.ranks, self.worlds, model=c.model, rollout=c.rollout,
                algorithm=c.algorithm, logging=c.logging, waiting=self.watchdog.waiting,
            )  # fmt: skip
        # Imported here, because only what samples may import vLLM.
        from vapo_megatron.rollout.sampling import Sampling

        return Sampling(
            inputs, self.ranks, model=c.model, rollout=c.rollout, algorithm=c.algorithm,
            reward=c.reward, environment=c.environment, evaluation=c.evaluation, logging=c.logging,
            seed=c.seed, offload=is_on(c.parallel), verifier=verifier,
        )  # fmt: skip

    def _check_host_memory(self, config: VapoConfig, *, is_offloaded: bool) -> None:
        """Check that each node has host memory for offload, checkpoints and a step; collective.

        Raises:
            ConfigError: on every rank, before the models are built.
        """
        needed = host_bytes(
            self.shape,
            config,
            pp_rank=self.ranks.pp_rank,
            is_first_replica=self.ranks.replica_rank == 0,
            is_offloaded=is_offloaded,
            keeps_rollouts=self.ranks.rank % config.rollout.tensor_model_parallel_size == 0,
        )
        remedies = ["checkpoint.asynchronous=false"] * config.checkpoint.asynchronous
        remedies += ["parallel.offload=false"] * is_offloaded
        remedies += ["a smaller rollout.lag"] * (config.rollout.lag > 0)
        remedies += ["a smaller algorithm.responses_per_step"]
        group = None if self.worlds is None else self.worlds.group
        check_host_memory(needed.by_purpose, config.parallel, remedies, group)

    @property
    def _models(self) -> dict[str, TrainedModel]:
        roles = self.config.algorithm.trained_roles
        return {role: getattr(self, role).trained for role in roles}

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[OnProgress]:
        """Enter a phase: watchdog, timing, display, device; yields a callback for (done, total)."""
        with (
            self.watchdog.phase(name),
            self.output.phase(name) as on_progress,
            self.device_schedule(name),
        ):
            yield on_progress

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, where: object) -> None:
        if error is not None:
            self.watchdog.fail(error)
        with self.watchdog.reporting():
            # First, because vLLM needs memory to wake up, and an error may have left a model there.
            self.device_schedule.close()
            self.source.close()
            if error is None:
                # No rank leaves while others may still communicate with it.
                dist.barrier(group=self.source.group)
            if self.worlds is not None:
                self.worlds.close()
            groups.destroy()
            dist.destroy_process_group()
        self.watchdog.close()
