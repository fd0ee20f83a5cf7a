"""Replays the rollouts that an earlier run dumped, without vLLM and verifier."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vapo_megatron.config import AlgorithmConfig, RolloutConfig
from vapo_megatron.config.phases import REPLAY
from vapo_megatron.data.labels import labels_of
from vapo_megatron.data.problems import Problem
from vapo_megatron.data.rollout import ScoredRollout
from vapo_megatron.errors import DataError
from vapo_megatron.parallel.reduce import gather_objects
from vapo_megatron.reward.own_metrics import own_metrics, sums_of
from vapo_megatron.rollout.dump import held_steps, read_file, read_headers
from vapo_megatron.rollout.requests import assign, max_model_len
from vapo_megatron.rollout.source import RolloutSource, StepRequest

if TYPE_CHECKING:
    from vapo_megatron.models.hf_config import ModelShape
    from vapo_megatron.parallel.groups import Ranks


class Replay(RolloutSource):
    """A source whose step s is step s of a dump; it has no data, engine or evaluation."""

    def __init__(
        self,
        directory: Path,
        ranks: Ranks,
        default_verifier: str,
        *,
        takes_given: bool = False,
        routes_per_token: int = 0,
    ) -> None:
        """Find the dump in a run directory or its replay directory; check_dump has accepted it.

        Args:
            directory, ranks: the dump, and this rank's place.
            default_verifier: see labels_of. A replay knows the names in the step that it reads.
            takes_given: responses may be given ones, which nothing has sampled.
            routes_per_token: how many Rollout.routes must have of each token; 0: none are needed.
        """
        self._root, self._ranks = replay_directory(directory), ranks
        self._default_verifier, self._takes_given = default_verifier, takes_given
        self._routes_per_token = routes_per_token
        self.note = f"replay of {self._root}: nothing is sampled, published or evaluated"

    def rollouts(self, asked: StepRequest) -> tuple[list[ScoredRollout], dict[str, float]]:
        """Read this rank's share of the files: consecutive ones, which keeps groups together."""
        with asked.phase(REPLAY):
            files = read_headers(self._root, asked.step + 1)
            share = assign(len(files), self._ranks.world_size)[self._ranks.rank]
            scored: list[ScoredRollout] = []
            problem = None
            try:
                for index in share:
                    scored += self._read(files[index][0])
            except DataError as error:
                problem = str(error)
            # The dump has of each problem its verifier and source alone, where it has them.
            named = {s.rollout.prompt.index: s.rollout.prompt for s in scored}
            names = [(i, Problem("", "", p.metadata, p.source)) for i, p in named.items()]
            gathered = gather_objects((problem, names, sums_of(scored)))
        for found, *_ in gathered:
            if found:
                raise DataError(found)
        every = itertools.chain.from_iterable(names for _, names, _ in gathered)
        self.labels = labels_of(every, self._default_verifier)
        # Dynamic sampling leaves a rank's groups scattered over the step.
        metrics = own_metrics(sums for *_, sums in gathered)
        return sorted(scored, key=lambda s: s.rollout.position), metrics

    def _read(self, path: Path) -> list[ScoredRollout]:
        scored = read_file(path)
        if scored and scored[0].rollout.logprobs is None and not self._takes_given:
            raise DataError(
                f"{path} has responses that its run's data gave and nothing has sampled, which "
                "only the positive-example loss can train on; set data.response_column and "
                "algorithm.policy_loss=none as that run did"
            )
        for item in scored if self._routes_per_token else ():
            routes = item.rollout.routes
            found = 0 if routes is None else routes.shape[1]
            # An episode may have failed before its first token.
            if item.rollout.token_ids and found != self._routes_per_token:
                raise DataError(
                    f"{path} has {found} experts of a token that vLLM chose, but this model has "
                    f"{self._routes_per_token} in its layers; set algorithm.router_replay to r2 or "
                    "off, or dump a run of this model that has r3"
                )
        return scored


def check_dump(
    directory: Path,
    algorithm: AlgorithmConfig,
    rollout: RolloutConfig,
    shape: ModelShape,
    steps: range,
) -> None:
    """Refuse a dump that is incomplete or damaged, or does not match the configuration.

    Reads only the files' headers, of the steps to train on, from 0.

    Raises:
        DataError: names the file or the steps.
    """
    root = replay_directory(directory)
    held = held_steps(root)
    missing = [step + 1 for step in steps if step + 1 not in held]
    if missing:
        raise DataError(
            f"{root} has {_listed(held)}, but the run needs {_listed(missing)} too; lower "
            f"algorithm.policy_steps (value-pretraining and policy steps together are {steps.stop} "
            "now), or dump more with logging.dump_steps"
        )
    longest = max_model_len(shape, rollout)
    for path, header in [file for step in steps for file in read_headers(root, step + 1)]:
        for name, dumped, wanted in (
            ("responses_per_step", header.num_responses, algorithm.responses_per_step),
            ("group_size", header.group_size or algorithm.group_size, algorithm.group_size),
        ):
            if dumped != wanted:
                raise DataError(
                    f"{path} was dumped with {dumped}, but algorithm.{name}={wanted}; set "
                    f"algorithm.{name}={dumped}"
                )
        if header.longest_sequence > longest:
            raise DataError(
                f"{path} has a prompt and response of {header.longest_sequence} tokens, more "
                f"than rollout.max_prompt_tokens + rollout.max_response_tokens = {longest}; raise "
                "one of them"
            )
        if header.largest_token_id >= shape.vocab_size:
            raise DataError(
                f"{path} has token id {header.largest_token_id}, outside the vocabulary of "
                f"{shape.vocab_size}; set model.hf_path to the model that sampled it"
            )


def replay_directory(directory: Path) -> Path:
    """Return a run directory's replay directory, or the directory itself if it is one.

    Raises:
        DataError: there are no dumped steps.
    """
    for root in (directory / "replay", directory):
        if held_steps(root):
            return root
    raise DataError(
        f"--replay {directory} has no dumped steps; give a run directory whose run had "
        "logging.dump_steps above 0"
    )


def _listed(steps: Sequence[int]) -> str:
    """Name steps: "step 3", "steps 1, 2, 3" or, of many, the first three and the last."""
    listed = [str(s) for s in steps]
    if len(listed) > 6:
        listed = [*listed[:3], "...", listed[-1]]
    return ("step " if len(steps) == 1 else "steps ") + ", ".join(listed)
