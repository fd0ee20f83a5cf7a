"""The trainers' side of disaggregated generation: a rollout source without an engine.

`rollouts` waits until the rollout workers have finished a step's responses and leaves them there;
the exchange that follows, over the joint group, sends each to the ranks that train on it.

What lag L means: step k trains on responses that were sampled with the weights from the start of
step k - L. The rollout workers may sample step k as soon as step k - L has started, and each
version is sent to them as soon as it exists.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from vapo_megatron.config import AlgorithmConfig, LoggingConfig, ModelConfig, RolloutConfig
from vapo_megatron.config.metrics import emits
from vapo_megatron.config.phases import EVALUATION, GENERATION
from vapo_megatron.data.rollout import ScoredRollout
from vapo_megatron.errors import Stopped
from vapo_megatron.parallel import store
from vapo_megatron.parallel.groups import Ranks
from vapo_megatron.parallel.reduce import gather_objects, sum_over_world
from vapo_megatron.parallel.worlds import Worlds
from vapo_megatron.reward.own_metrics import own_metrics
from vapo_megatron.rollout.disaggregated.orders import Orders
from vapo_megatron.rollout.episodes import waiting_metrics
from vapo_megatron.rollout.inputs import Inputs
from vapo_megatron.rollout.partial.files import all_sums
from vapo_megatron.rollout.partial.lag import lag_metrics
from vapo_megatron.rollout.source import HasTime, Phase, PromptSource, StepRequest
from vapo_megatron.weights.reshard.sync import WeightSync

POLL_SECONDS = 0.02


class RemoteSampling(PromptSource):
    """One trainer's end; all trainers call the same methods in the same order."""

    def __init__(
        self,
        inputs: Inputs,
        ranks: Ranks,
        worlds: Worlds,
        *,
        model: ModelConfig,
        rollout: RolloutConfig,
        algorithm: AlgorithmConfig,
        logging: LoggingConfig,
        waiting: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """Ask for nothing yet.

        Args:
            inputs: the same as the rollout workers'.
            ranks: this rank's place among the trainers.
            worlds: from backend.initialize_distributed.
            model, rollout, algorithm, logging: of the run.
            waiting: see Watchdog.waiting.
        """
        super().__init__(inputs, rollout, algorithm, logging)
        self._worlds, self._waiting = worlds, waiting
        self.group = worlds.group
        self._orders = Orders(store.own_connection(), worlds)
        self._sync = WeightSync(inputs.shape, ranks, model, rollout, None, worlds)
        self._published: int | None = None
        self._start: dict[str, Any] = {"done": 0, "checkpoint": None}
        self._recorded: Sequence[ScoredRollout] = ()

    def resume(self, done: int, checkpoint: Path | None) -> None:
        """Note what the rollout workers begin with. Raises CheckpointError: see check_partial."""
        super().resume(done, checkpoint)
        self._start = {"done": done, "checkpoint": checkpoint and str(checkpoint)}

    def holds(self, policy_version: int) -> bool:
        """Compare with the latest version that was sent."""
        return self._published == policy_version

    def publish(self, chunks: Sequence[torch.nn.Module], policy_version: int) -> dict[str, float]:
        """Send the actor's weights; a busy rollout worker receives them between two tokens."""
        if self._published is None:
            self._meet()
        self._orders.give("publish", version=policy_version)
        with self._waiting():
            metrics = self._sync.publish(chunks, policy_version)
        self._published = policy_version
        return metrics

    def _meet(self) -> None:
        """Wait for the rollout workers, tell them where the run starts; learn what they know."""
        self._orders.give("start", data=self.prompts.state_dict(), **self._start)
        self.labels, self.note, left_out = self._from_rollout_workers()[0]
        # The same draws as the rollout workers'.
        self.prompts.leave_out(left_out)

    def _from_rollout_workers(self) -> list[Any]:
        """Wait for what each rollout worker answers."""
        nothing: Any = None
        with self._waiting():
            return gather_objects(nothing, self.group)[self._worlds.num_trainers :]

    @emits(
        "rollout/lag_mean",
        "rollout/lag_max",
        "rollout/lag_share@K",
        "time/trainer_idle_seconds",
        "time/sampler_idle_seconds",
        "time/environment_waiting_seconds",
        "reward/own/NAME",
    )
    def rollouts(self, asked: StepRequest) -> tuple[list[ScoredRollout], dict[str, float]]:
        """Wait until a step's responses are there; no trainer holds any.

        Metrics: the lag, in versions, over response tokens; seconds that trainers waited here, and
        that the main rollout worker waited since the latest step.
        """
        step, policy_version = asked.step, asked.policy_version
        with asked.phase(GENERATION):
            start = time.monotonic()
            self._orders.give("want", step=step, version=policy_version)
            self._await(f"sampled/{step}", asked.has_time)
            idle = time.monotonic() - start
            self._orders.give("take", step=step)
            found = self._from_rollout_workers()
            self._recorded = super().recorded(())
        self.rollout_spans = found[0].spans
        self.prompts.next(found[0].num_prompts, step)
        metrics = {"time/trainer_idle_seconds": idle, "time/sampler_idle_seconds": found[0].idle}
        metrics |= own_metrics(each.own for each in found)
        metrics |= waiting_metrics(each.waited for each in found)
        if self._rollout.is_stale:
            tokens: Counter[int] = sum((each.tokens for each in found), Counter())
            metrics |= lag_metrics(tokens, policy_version)
        return [], metrics

    def _await(self, what: str, has_time: HasTime | None) -> None:
        """Wait until all rollout workers have reported something. Collective over the trainers.

        Raises:
            Stopped: on every trainer, once one of them has no time left.
        """
        is_main = self._worlds.rank == 0
        with self._waiting():
            while True:
                lacks_time = has_time is not None and not has_time()
                is_missing = is_main and not self._orders.have_all(what)
                some = torch.tensor([float(lacks_time), float(is_missing)])
                none_left, missing = sum_over_world(some).tolist()
                if none_left:
                    raise Stopped
                if not missing:
                    return
                time.sleep(POLL_SECONDS)

    def recorded(self, shown: Sequence[ScoredRollout]) -> Sequence[ScoredRollout]:
        """Return what the rollout workers have sent to the main trainer; no trainer holds any."""
        return self._recorded

    def dump(
        self,
        root: Path,
        step: int,
        scored: Sequence[ScoredRollout],
        algorithm: AlgorithmConfig,
        *,
        keep_last: int,
    ) -> None:
        """Let the rollout workers write the responses, kept until a later step starts."""
        self._orders.give("dump", root=str(root), step=step, keep_last=keep_last)
        self._from_rollout_workers()

    def evaluate(
        self, policy_version: int, phase: Phase, has_time: HasTime | None = None
    ) -> tuple[dict[str, float], list[int]]:
        """Let the rollout workers evaluate a version, once they have finished their step.

        Raises:
            Stopped: on every trainer, once one of them has no time left.
        """
        with phase(EVALUATION):
            number = self._orders.give("evaluate", version=policy_version)
            try:
                self._await(f"evaluated/{number}", has_time)
            except Stopped:
                self._orders.cancel(number)
            found = self._from_rollout_workers()[0]
        if found is None:
            raise Stopped
        return found

    def finish_in_flight(self, done: int, has_time: HasTime) -> bool:
        """Wait until the rollout workers have the responses that a checkpoint needs."""
        last = min(done + self._rollout.lag, self._algorithm.num_steps) - 1
        try:
            if last >= done:
                self._await(f"sampled/{last}", has_time)
        except Stopped:
            return False
        return True

    def save_in_flight(self, done: int, directory: Path) -> dict[str, str]:
        """Let the rollout workers write their responses, each its own."""
        if not self._rollout.is_stale:
            return {}
        self._orders.give("save", directory=str(directory), done=done)
        return all_sums(self._from_rollout_workers(), directory)

    def close(self) -> None:
        """Let the rollout workers end."""
        self._orders.give("end")
