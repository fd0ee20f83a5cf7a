"""Takes the responses from the data file, without vLLM and verifier: supervised fine-tuning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from vapo_megatron.config import AlgorithmConfig, LoggingConfig, RolloutConfig
from vapo_megatron.data.prompts import PromptDataset
from vapo_megatron.data.rollout import Prompt, Rollout, ScoredRollout
from vapo_megatron.rollout.inputs import Inputs
from vapo_megatron.rollout.requests import assign
from vapo_megatron.rollout.source import PromptSource, StepRequest
from vapo_megatron.rollout.tokenizer import decode_responses

if TYPE_CHECKING:
    from vapo_megatron.parallel.groups import Ranks


class GivenSource(PromptSource):
    """A source whose responses are those of the data's rows; all of them count as correct."""

    def __init__(
        self,
        inputs: Inputs,
        ranks: Ranks,
        *,
        rollout: RolloutConfig,
        algorithm: AlgorithmConfig,
        logging: LoggingConfig,
    ) -> None:
        """Begin with the first row."""
        super().__init__(inputs, rollout, algorithm, logging)
        self._ranks, self._tokenizer, self._held_out = ranks, inputs.tokenizer, inputs.held_out
        self.num_held_out = 0 if inputs.held_out is None else len(inputs.held_out.kept)
        self.note = f"responses are given by {self.prompts.path}: nothing is sampled or judged"

    def rollouts(self, asked: StepRequest) -> tuple[list[ScoredRollout], dict[str, float]]:
        """Return this rank's share of the next rows' responses; every rank knows all rows."""
        prompts = self.prompts.next(self._algorithm.num_prompts, asked.step)
        return self._share(self.prompts, prompts), {}

    def held_out(self) -> list[ScoredRollout]:
        """Return this rank's share of the held-out rows' responses, in the file's order."""
        if self._held_out is None:
            return []
        return self._share(self._held_out, self._held_out.problems)

    def _share(self, dataset: PromptDataset, prompts: Sequence[Prompt]) -> list[ScoredRollout]:
        own = assign(len(prompts), self._ranks.world_size)[self._ranks.rank]
        if not own:
            return []
        ids = {position: dataset.response(prompts[position]) for position in own}
        texts = dict(zip(own, decode_responses(self._tokenizer, [*ids.values()]), strict=True))
        return [
            ScoredRollout(
                Rollout(
                    prompts[position],
                    sample=0,
                    position=position,
                    token_ids=ids[position],
                    logprobs=None,
                    truncated=False,
                    policy_version=0,
                ),
                text=texts[position],
                status="correct",
                reward=0.0,
            )
            for position in own
        ]


def count_responses(inputs: Inputs) -> list[str]:
    """Return how many responses each section's files give, and how long they are."""
    found = []
    for dataset in (inputs.dataset, inputs.held_out):
        if dataset is not None:
            lengths = [len(dataset.response(prompt)) for prompt in dataset.problems]
            found.append(
                f"{dataset.path}, {len(lengths)} rows: responses given, {sum(lengths)} tokens, the "
                f"longest {max(lengths)}"
            )
    return found
