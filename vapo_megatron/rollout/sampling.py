"""Samples responses with vLLM and judges them, for training and for evaluation."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from vapo_megatron.algorithm.group_sampling import repeat_for_group
from vapo_megatron.config import (
    AlgorithmConfig,
    EnvironmentConfig,
    EvaluationConfig,
    LoggingConfig,
    ModelConfig,
    RewardConfig,
    RolloutConfig,
)
from vapo_megatron.config.phases import EVALUATION, GENERATION, REWARD
from vapo_megatron.data.labels import count_rows, labels_of
from vapo_megatron.data.rollout import ScoredRollout
from vapo_megatron.errors import Stopped
from vapo_megatron.parallel.groups import Ranks
from vapo_megatron.parallel.reduce import any_rank, gather_objects
from vapo_megatron.reward.checks import any_sees_groups, start_verifiers
from vapo_megatron.reward.own_metrics import own_metrics, sums_of
from vapo_megatron.reward.scoring import VerdictStream, score_rollouts
from vapo_megatron.reward.verifiers import default_name
from vapo_megatron.rollout.dynamic_sampling import Round, sample_mixed_groups
from vapo_megatron.rollout.episodes import start_episodes, waiting_metrics
from vapo_megatron.rollout.evaluation.judging import evaluate, judge_problems
from vapo_megatron.rollout.inputs import Inputs
from vapo_megatron.rollout.partial.files import all_sums, write_files
from vapo_megatron.rollout.partial.lag import lag_metrics, tokens_by_version
from vapo_megatron.rollout.partial.sampling import PartialSampling
from vapo_megatron.rollout.requests import SamplingSettings
from vapo_megatron.rollout.source import HasTime, Phase, PromptSource, StepRequest
from vapo_megatron.rollout.tokenizer import decode_responses
from vapo_megatron.rollout.work import firsts, generate
from vapo_megatron.weights.reshard.sync import WeightSync


class Sampling(PromptSource):
    """One rank's engine, verifier and place in the data."""

    def __init__(
        self,
        inputs: Inputs,
        ranks: Ranks | None,
        *,
        model: ModelConfig,
        rollout: RolloutConfig,
        algorithm: AlgorithmConfig,
        reward: RewardConfig,
        environment: EnvironmentConfig,
        evaluation: EvaluationConfig,
        logging: LoggingConfig,
        seed: int,
        offload: bool,
        verifier: object | None = None,
    ) -> None:
        """Start the verifiers, check all problems, then start vLLM. Collective.

        Without ranks it only samples: others train, and nothing is published by it. With offload,
        vLLM will be told to leave the device. A verifier is an instance or a class in place of
        reward.verifier. Raises UserError, on every rank: a verifier does not load, a problem cannot
        be judged, or vLLM refuses the model.
        """
        super().__init__(inputs, rollout, algorithm, logging)
        self._reward, self._evaluation, self._held_out = reward, evaluation, inputs.held_out
        self._decode_responses = functools.partial(decode_responses, inputs.tokenizer)
        self._verifier = start_verifiers(
            reward, self.prompts, self._held_out, rollout.tensor_model_parallel_size, verifier,
            reward_hf_path=model.reward_hf_path, skip_unusable=inputs.skip_unusable,
        )  # fmt: skip
        self._sees_groups = any_sees_groups(self._verifier, rollout)
        name = default_name(reward, verifier)
        self.labels = labels_of(self.prompts.kept, name)
        if "verifier" in self.labels.several:
            self.note = "; ".join(count_rows(self.labels, self.prompts.path, "data"))
        held_out = () if self._held_out is None else self._held_out.kept
        self._held_out_labels = labels_of(held_out, name)
        self._episodes = start_episodes(
            environment, rollout, reward, inputs, has_players=self._verifier is not None
        )
        # Imported here: loading vLLM takes long, and the checks above may fail first.
        from vapo_megatron.rollout.vllm.engine import RolloutEngine

        self.engine = RolloutEngine(
            str(model.hf_path), inputs, rollout, dtype=rollout.dtype or model.dtype, seed=seed,
            offload=offload, returns_routes=algorithm.router_replay == "r3",
            adapters=model.lora if rollout.adapter_sync == "adapter" else None,
        )  # fmt: skip
        self._sync = None
        if ranks is not None:
            self._sync = WeightSync(inputs.shape, ranks, model, rollout, self.engine)
        self._settings = SamplingSettings(
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            max_response_tokens=rollout.max_response_tokens,
            seed_role="train",
            # So that each rank keeps whole groups when groups are dropped, or judged as such.
            whole_groups=algorithm.dynamic_sampling or self._sees_groups,
            shared=rollout.shared_queue,
        )
        self._partial: PartialSampling | None = None
        if rollout.carry_over_groups:
            self._partial = PartialSampling(
                self.engine, self.prompts, rollout=rollout, algorithm=algorithm, reward=reward,
                settings=self._settings,
            )  # fmt: skip

    def rollouts(self, asked: StepRequest) -> tuple[list[ScoredRollout], dict[str, float]]:
        """Sample a group of responses per prompt and judge them; see RolloutSource."""
        algorithm, groups = self._algorithm, functools.partial(self._round, asked)
        if algorithm.dynamic_sampling and asked.trains_actor:
            scored, metrics = sample_mixed_groups(
                groups, asked.phase, algorithm, self._reward,
                has_environment=self._episodes is not None,
            )  # fmt: skip
        else:
            scored, metrics = groups(0, algorithm.num_prompts).scored, {}
        if self._partial is not None:
            tokens = sum(gather_objects(tokens_by_version(scored)), Counter[int]())
            metrics = lag_metrics(tokens, asked.policy_version)
        found = gather_objects((sums_of(scored), self.take_idle_seconds()))
        metrics |= own_metrics(sums for sums, _ in found)
        return scored, metrics | waiting_metrics(seconds for _, seconds in found)

    def take_idle_seconds(self) -> float | None:
        """Return how long this replica waited for its environment; None: there is none."""
        return None if self._episodes is None else self._episodes.take_idle_seconds()

    def _round(self, asked: StepRequest, round: int, num_prompts: int) -> Round:
        """Sample and judge this rank's share of one round, ordered by position. Collective."""
        scored = self.share(asked, round, num_prompts)
        # This replica may have finished in time while another had to stop.
        if any_rank(scored is None):
            raise Stopped
        assert scored is not None
        return Round(scored, [self._algorithm.group_size] * num_prompts)

    def share(
        self, asked: StepRequest, round: int = 0, num_prompts: int | None = None
    ) -> list[ScoredRollout] | None:
        """Sample and judge this rank's share of a round; None: there was no time for it.

        Responses are judged as they finish: the reward phase waits for the last verdicts alone.
        Replicas do not communicate. With partial rollouts a step is one round.
        """
        if self._partial is not None:
            stream = VerdictStream(self._verifier, self._decode_responses)
            with contextlib.suppress(Stopped), stream:
                return self._partial.share(asked, stream)
            return None
        group_size = self._algorithm.group_size
        prompts = self.prompts.next(num_prompts or self._algorithm.num_prompts, asked.step)
        sizes = [group_size] * len(prompts)
        settings = dataclasses.replace(self._settings, round=round)
        seen = firsts(sizes) if self._sees_groups else None
        stream = VerdictStream(self._verifier, self._decode_responses, seen)
        with contextlib.suppress(Stopped), stream:
            with asked.phase(GENERATION) as show:
                on_progress = functools.partial(show, part=f"round {round + 1}" if round else "")
                rollouts = generate(
                    self.engine, repeat_for_group(prompts, group_size), sizes, asked.step, settings,
                    asked.policy_version, on_progress, asked.has_time, on_finished=stream.submit,
                    episodes=self._episodes,
                )  # fmt: skip
            with asked.phase(REWARD):
                limit = settings.max_response_tokens
                return score_rollouts(stream, rollouts, self._reward, limit)
        return None

    def num_prompts(self, step: int) -> int:
        """Return how many prompts the latest step has started."""
        if self._partial is not None:
            return self._partial.num_prompts(step)
        return self._algorithm.num_prompts

    def skip(self, step: int, num_prompts: int) -> None:
        """Skip prompts of steps already started; their responses are in the checkpoint."""
        self.prompts.next(num_prompts, step)

    def holds(self, policy_version: int) -> bool:
        """Compare with vLLM's version; a sleeping engine has none."""
        return self.engine.policy_version == policy_version

    def leave_device(self) -> None:
        """Put vLLM to sleep."""
        self.engine.sleep()

    def publish(self, chunks: Sequence[torch.nn.Module], policy_version: int) -> dict[str, float]:
        """Sync the actor's weights to vLLM; return the sync's metrics."""
        assert self._sync is not None, "weights arrive from other processes"
        return self._sync.publish(chunks, policy_version)

    def evaluate(
        self, policy_version: int, phase: Phase, has_time: HasTime | None = None
    ) -> tuple[dict[str, float], list[int]]:
        """Sample and judge the held-out problems."""
        if self._held_out is None:
            return {}, []
        with phase(EVALUATION) as on_progress:
            problems = self._held_out.problems
            judged = judge_problems(
                self.engine,
                self._verifier,
                problems,
                self._evaluation,
                self._rollout,
                decode=self._decode_responses,
                policy_version=policy_version,
                on_progress=on_progress,
                has_time=has_time,
                episodes=self._episodes,
            )
            samples, labels = self._evaluation.samples, self._held_out_labels
            found = evaluate(
                judged, problems, samples, labels, self._reward,
                has_environment=self._episodes is not None,
            )  # fmt: skip
            self.take_idle_seconds()  # These are not the next step's.
            return found

    def resume(self, done: int, checkpoint: Path | None) -> None:
        """Go on with the groups in flight. Raises CheckpointError: see check_partial."""
        super().resume(done, checkpoint)
        self.load_groups(done, checkpoint)

    def load_groups(self, done: int, checkpoint: Path | None) -> None:
        """Go on with a checkpoint's groups in flight, if any, once `done` steps are sampled."""
        if self._partial is not None and checkpoint is not None:
            self._partial.load(done, checkpoint)

    def save_in_flight(self, done: int, directory: Path) -> dict[str, str]:
        """Write the groups in flight, each replica its own."""
        if self._partial is None:
            return {}
        return all_sums(gather_objects(write_files(directory, self.group_files(done))), directory)

    def group_files(self, done: int) -> Iterator[tuple[str, bytes]]:
        """Yield this rank's file of groups in flight, if any; see PartialSampling.files."""
        return iter(()) if self._partial is None else self._partial.files(done)

    def close(self) -> None:
        """Shut down the verifier and vLLM."""
        if self._verifier is not None:
            self._verifier.close()
        if self._episodes is not None:
            self._episodes.close()
        self.engine.shutdown()
