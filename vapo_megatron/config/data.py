"""Training prompts: one file, or several in the proportions of their weights."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping

from vapo_megatron.config.section import Section
from vapo_megatron.config.section import field as _field


class FileConfig(Section):
    """One of several files of problems."""

    path: str | None = _field(None, "JSONL or parquet file of problems; required.")
    prompt_column: str = _field("prompt", "Column with the prompt: text, or chat messages.")
    answer_column: str | None = _field(
        "answer", "Column with the ground truth; null: the data have none."
    )
    verifier: str | None = _field(
        None, "Judges the rows that name none in a column `verifier`; null: reward.verifier."
    )


class SourceConfig(FileConfig):
    """One of several files of training problems."""

    critic_prompt_column: str | None = _field(None, "As data.critic_prompt_column, of this file.")
    weight: float = _field(
        1.0, "Share of the prompts in proportion to the other sources' weights; 0: none.", ge=0
    )
    schedule: list[list[float]] = _field(
        [],
        "[[steps done, factor], ...]: the weight is multiplied by the factor, which is linear "
        "between two points and constant outside; empty: 1.",
    )

    def weight_after(self, steps: int) -> float:
        """Return the weight of the step that follows `steps` steps."""
        points = self.schedule or [[0, 1.0]]
        if steps <= points[0][0]:
            return self.weight * points[0][1]
        for (begin, low), (end, high) in itertools.pairwise(points):
            if steps <= end:
                return self.weight * (low + (high - low) * (steps - begin) / (end - begin))
        return self.weight * points[-1][1]


class DataConfig(Section):
    """Training prompts: one file, or several as data.sources."""

    train_path: str | None = _field(
        None, "JSONL or parquet file of training problems; required without sources."
    )
    prompt_column: str = _field(
        "prompt", "Column with the prompt of train_path and evaluation.path: text, or messages."
    )
    answer_column: str | None = _field(
        "answer", "Column with the ground truth of both; null: the data have none."
    )
    critic_prompt_column: str | None = _field(
        None,
        "Column of train_path with a prompt for the critic alone, such as one that has the answer: "
        "text, or messages; null: the critic is given the policy's prompt.",
    )
    sources: dict[str, SourceConfig] = _field(
        {}, "Several files by name, in place of train_path, each with the fields below."
    )
    response_column: str | None = _field(
        None,
        "Column of all files, evaluation's too, with the response to train on: text, or token ids; "
        "null: responses are sampled. Needs algorithm.policy_loss=none.",
    )
    skip_unusable: bool = _field(
        False,
        "Leave out the rows that their verifier cannot judge, also of evaluation files, and say "
        "how many; false: such a row ends the run.",
    )
    shuffle: bool = _field(True, "Shuffle in each epoch, with a seeded order.")

    @property
    def has_critic_prompts(self) -> bool:
        """Whether the critic is given prompts of its own."""
        columns = (source.critic_prompt_column for source in self.sources.values())
        return any(c is not None for c in (self.critic_prompt_column, *columns))


def sources_mistake(data: DataConfig, num_steps: int) -> str | None:
    """Return what is wrong with data.sources in a run of so many steps; None: nothing."""
    mistake = files_mistake("data", "train_path", data.train_path, data.sources)
    if mistake is not None:
        return mistake
    for name, source in data.sources.items():
        field = f"data.sources.{name}"
        if not _is_schedule(source.schedule):
            return (
                f"{field}.schedule={source.schedule} must be a list of [steps done, factor], none "
                "below 0, each with more steps than the one before, such as [[0, 1], [100, 0]]; "
                "change it"
            )
    sources = data.sources.values()
    for step in range(num_steps if data.sources else 0):
        if not any(source.weight_after(step) > 0 for source in sources):
            return (
                f"data.sources: after {step} steps the weights of {', '.join(data.sources)} are "
                "all 0; one must be above 0 in every step of the run: raise a weight, or a factor "
                "of its schedule"
            )
    return None


def files_mistake(
    section: str, alone: str, path: str | None, sources: Mapping[str, FileConfig]
) -> str | None:
    """Return what is wrong with a section's sources, which take the place of one path; or None."""
    if sources and path is not None:
        return (
            f"{section}.{alone}={path} must not be combined with {section}.sources, which has "
            f"{', '.join(sources)}; set {alone}=null, or make it one of the sources"
        )
    for name, source in sources.items():
        field = f"{section}.sources.{name}"
        if not re.fullmatch(r"[\w-]+", name, re.ASCII):
            return f"{field}: a name must have letters, digits, _ and - alone; rename it"
        if source.path is None:
            return f"{field}.path is required; set it to a file of problems"
    return None


def _is_schedule(points: list[list[float]]) -> bool:
    if any(len(point) != 2 or min(point) < 0 for point in points):
        return False
    return all(earlier[0] < later[0] for earlier, later in itertools.pairwise(points))
