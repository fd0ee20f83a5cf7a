"""The interface between the trainer and whatever provides its rollouts."""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch.distributed import ProcessGroup

from vapo_megatron.config import AlgorithmConfig, LoggingConfig, RolloutConfig
from vapo_megatron.config.phases import DUMP, Span
from vapo_megatron.data.labels import NO_LABELS, Labels
from vapo_megatron.data.prompts import PromptDataset
from vapo_megatron.data.rollout import ScoredRollout
from vapo_megatron.parallel.reduce import gather_objects_on
from vapo_megatron.rollout.dump import write_step
from vapo_megatron.rollout.inputs import Inputs
from vapo_megatron.rollout.partial.files import check_partial


class OnProgress(Protocol):
    """Reports the progress of a phase."""

    def __call__(self, done: int, total: int, part: str = "") -> None:
        """Show a count of something; `part` names the part of the phase it belongs to."""


Decode = Callable[[Sequence[int]], str]
"""Token ids to text, special tokens included."""
Phase = Callable[[str], AbstractContextManager[OnProgress]]
"""Times and shows one of phases.PHASES."""
HasTime = Callable[[], bool]
"""Whether there is time to continue, checked periodically; None: always."""


class StepRequest(NamedTuple):
    """What the trainer asks for."""

    step: int
    """From 0."""
    policy_version: int
    """Of the weights that sample."""
    phase: Phase
    trains_actor: bool = True
    """False: dynamic sampling is off, because the critic learns the values of everything that the
    policy samples."""
    has_time: HasTime | None = None


class RolloutSource(abc.ABC):
    """What the trainer needs; every rank calls the same methods in the same order.

    A subclass defines `rollouts`; the other methods are those of a source that has neither an
    engine nor a position in the data.
    """

    note: str = ""
    """Shown to the user when the run starts."""
    decode: Decode | None = None
    """None: there is no tokenizer, on any rank."""
    stop_token_ids: Sequence[int] = ()
    """Ids that end a response; none are known where there is no tokenizer."""
    date: str | None = None
    """See Inputs."""
    labels: Labels = NO_LABELS
    """Of the problems of the last step's prompts, at least; the same on every rank."""
    group: ProcessGroup | None = None
    """Of all ranks that sample or train, over which responses are exchanged; None: the world."""
    rollout_spans: Sequence[Span] = ()
    """What the first engine did up to the last step's responses, if processes of its own sample;
    on the main rank."""

    prompts: PromptDataset | None = None
    """What the rollouts' prompts are of; None: not known."""
    num_held_out: int = 0
    """Of the responses in held_out, over all ranks."""

    @abc.abstractmethod
    def rollouts(self, asked: StepRequest) -> tuple[list[ScoredRollout], dict[str, float]]:
        """Return this rank's share of a step's responses, ordered by position, and metrics.

        The ranks' shares are disjoint. With a reward model, verdicts may be pending.

        Raises:
            Stopped: on every rank, once one of them has no time left.
        """

    def keep(  # noqa: B027 - optional
        self, step: int, scored: Sequence[ScoredRollout], phase: Phase
    ) -> None:
        """Keep a step's responses, now with all verdicts, for a replay. Collective."""

    def dump(
        self,
        root: Path,
        step: int,
        scored: Sequence[ScoredRollout],
        algorithm: AlgorithmConfig,
        *,
        keep_last: int,
    ) -> None:
        """Write the responses of the latest step, from 0; see dump.write_step. Collective.

        scored: as `rollouts` returned them, or with verdicts that were pending.
        """
        write_step(
            root,
            step + 1,
            scored,
            num_responses=algorithm.responses_per_step,
            group_size=algorithm.group_size,
            keep_last=keep_last,
        )

    def recorded(self, shown: Sequence[ScoredRollout]) -> Sequence[ScoredRollout]:
        """Return, on the main rank, all ranks' responses of a step's first groups. Collective.

        shown: those that this rank has, as for `dump`; logging.rollout_groups groups in all.
        """
        held = gather_objects_on(0, [item.without_routes() for item in shown], self.group)
        return [item for of_rank in held for item in of_rank]

    def holds(self, policy_version: int) -> bool:
        """Return whether it can sample from this version without a weight sync."""
        return True

    def leave_device(self) -> None:  # noqa: B027 - optional
        """Free the device until the next `publish`; the weights are dropped."""

    def publish(self, chunks: Sequence[torch.nn.Module], policy_version: int) -> dict[str, float]:
        """Sync the actor's weights to the engine; return metrics of the sync."""
        return {}

    def evaluate(
        self, policy_version: int, phase: Phase, has_time: HasTime | None = None
    ) -> tuple[dict[str, float], list[int]]:
        """Return metrics of the held-out problems, and each problem's number of correct responses.

        Both are empty without held-out problems. Raises Stopped as `rollouts` does.
        """
        return {}, []

    def held_out(self) -> list[ScoredRollout]:
        """Return this rank's share of the responses whose loss is an evaluation, by position."""
        return []

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the data as JSON values."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027 - optional
        """Continue where `state_dict` was taken."""

    def resume(self, done: int, checkpoint: Path | None) -> None:  # noqa: B027 - optional
        """Begin after `done` steps, of which a checkpoint is the last; None: from scratch."""

    def finish_in_flight(self, done: int, has_time: HasTime) -> bool:
        """Finish what a checkpoint after `done` steps needs; False: there was no time. Collective.

        Those are the responses of later steps that older versions than the checkpoint's sample.
        """
        return True

    def save_in_flight(self, done: int, directory: Path) -> dict[str, str]:
        """Write them into a checkpoint; return the SHA-256 of each file by its name. Collective.

        Raises:
            CheckpointError: on every rank: a file cannot be written.
        """
        return {}

    def close(self) -> None:  # noqa: B027 - optional
        """Free all resources."""


class PromptSource(RolloutSource):
    """A source of responses to prompts: it has a position in these, and a dump."""

    prompts: PromptDataset

    def __init__(
        self,
        inputs: Inputs,
        rollout: RolloutConfig,
        algorithm: AlgorithmConfig,
        logging: LoggingConfig,
    ) -> None:
        """Begin with the first prompt."""
        assert inputs.dataset is not None, "a replay samples nothing"
        self.prompts = inputs.dataset
        self._rollout, self._algorithm, self._logging = rollout, algorithm, logging
        self.stop_token_ids, self.date = inputs.stop_token_ids, inputs.date
        self.decode = functools.lru_cache(65536)(
            functools.partial(inputs.tokenizer.decode, clean_up_tokenization_spaces=False)
        )

    def keep(self, step: int, scored: Sequence[ScoredRollout], phase: Phase) -> None:
        """Dump the step's responses if logging.dump_steps says so."""
        if keep_last := self._logging.dump_steps:
            with phase(DUMP):
                root = Path(self._logging.run_dir) / "replay"
                self.dump(root, step, scored, self._algorithm, keep_last=keep_last)

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the prompt after those that were trained on."""
        return self.prompts.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the prompt that comes next."""
        self.prompts.load_state_dict(state)

    def resume(self, done: int, checkpoint: Path | None) -> None:
        """Refuse to lose what a checkpoint has in flight. CheckpointError: see check_partial."""
        check_partial(checkpoint, self._rollout, self._algorithm)
