"""Samples what is missing, then keeps prompts by the rules and writes the parquet file and page.

Before: nothing. After: OUT.samples.jsonl holds every response, as an evaluation's file does, and
the first rank has written OUT and its page. What is sampled does not depend on the rules, except
that near-duplicates are not sampled: other rules on the same samples take seconds.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from vapo_megatron.cli.sampling.inputs import Evaluation, check
from vapo_megatron.cli.sampling.samples import sample_missing
from vapo_megatron.cli.select import reward_scores
from vapo_megatron.cli.select.duplicates import Duplicate, near_duplicates
from vapo_megatron.cli.select.page import write_selection_page
from vapo_megatron.cli.select.rules import Measured, Rules, best_response, measure, select
from vapo_megatron.cli.select.table import MEASURED, source_table, write_selection
from vapo_megatron.config import VapoConfig
from vapo_megatron.data.rollout import Prompt
from vapo_megatron.errors import ConfigError, DataError
from vapo_megatron.reward.checks import place
from vapo_megatron.rollout.evaluation.samples_file import (
    OF_PLACE,
    collect,
    lock_file,
    weights_digest,
)


class Job(NamedTuple):
    """What is sampled and selected from, known to fit together."""

    evaluation: Evaluation
    config: VapoConfig
    rules: Rules
    duplicates: dict[int, Duplicate]
    """By row; they are not sampled."""
    table: Any
    """A pyarrow table of all rows."""
    out: Path
    best_of: str | None = None
    """Column of each prompt's best response; None: there is none."""

    @property
    def samples(self) -> Path:
        """The file of all responses."""
        return samples_of(self.out)

    @property
    def problems(self) -> list[Prompt]:
        """What is sampled."""
        return [p for p in self.evaluation.dataset.problems if p.index not in self.duplicates]


def samples_of(out: Path) -> Path:
    """Return the file of all responses beside a selection."""
    return out.with_suffix(".samples.jsonl")


def prepare(
    checkpoint: Path, data: Path, config: VapoConfig, rules: Rules, out: Path,
    best_of: str | None = None,
) -> Job:  # fmt: skip
    """Check the files, and find near-duplicates; the same on every rank, without a process group.

    Raises:
        UserError: the first thing that is wrong: what, where, and the remedy.
    """
    if best_of in ("", *MEASURED, config.data.prompt_column, config.data.answer_column):
        raise ConfigError(
            f"--best-of={best_of} must be the name of another column than the prompts', the ground "
            f"truths' and those of what is measured, such as reference; change it"
        )
    if out.exists() and data.exists() and out.samefile(data):
        raise ConfigError(
            f"--out={out} is --data, too, whose rows it would replace; give another file"
        )
    evaluation = check(checkpoint, data, config, samples_of(out))
    reward_scores.check(evaluation, config.model_copy(update={"rollout": evaluation.rollout}))
    rows = evaluation.dataset.rows
    if rules.within is not None and not any(rules.within in row.metadata for row in rows):
        others = ", ".join(rows[0].metadata) or "none"
        raise ConfigError(
            f"--within={rules.within} is no column of {data} beside prompt and answer; give one of "
            f"{others}"
        )
    table = source_table(data, config.data, rows)
    duplicates: dict[int, Duplicate] = {}
    if rules.similarity is not None:
        duplicates = near_duplicates([row.prompt for row in rows], rules.similarity)
    if config.model.reward_hf_path is not None:
        digest = weights_digest(Path(config.model.reward_hf_path))
        header = {**evaluation.header, "reward_weights": digest}
        evaluation = evaluation._replace(header=header)
    return Job(evaluation, config, rules, duplicates, table, out, best_of)


def sample_and_select(job: Job, problems_per_batch: int | None) -> str | None:
    """Sample what is missing, then select; text for the terminal on rank 0. Collective.

    Raises:
        UserError: see sample_missing and finish.
    """
    return sample_missing(
        job.evaluation, job.config, job.samples, job.problems, problems_per_batch,
        functools.partial(finish, job),
        functools.partial(reward_scores.score_pending, job.evaluation, job.config, job.samples),
    )  # fmt: skip


def select_from_samples(job: Job) -> str | None:
    """Select if no response or score is missing, else None; for one process at a time.

    Raises:
        DataError: see finish; or the file is of other samples, or is being written.
    """
    if not job.samples.exists() and job.evaluation.inputs.date is None:
        return None
    with lock_file(job.samples):
        is_done = collect(job.samples, job.evaluation.header, reward_scores.is_judged)
        return finish(job) if all(is_done.get(p.index, False) for p in job.problems) else None


def finish(job: Job) -> str:
    """Write the selection and its page, and return text for the terminal.

    Raises:
        DataError: nothing is kept, or a prompt that is kept has no best response.
    """
    header, reward = job.evaluation.header, job.config.reward

    def summarized(line: Mapping[str, Any]) -> tuple[Measured, str | None]:
        return measure(line, reward), best_response(line) if job.best_of is not None else None

    found = collect(job.samples, header, summarized)
    problems = job.evaluation.dataset.rows
    measured = {p.index: found[p.index][0] for p in job.problems}
    selection = select(measured, problems, job.rules)
    dropped = [f"{count:,} {rule}" for rule, count in selection.dropped.items()]
    if not selection.kept:
        raise DataError(
            f"nothing is kept of {len(problems):,} prompts: {', '.join(dropped)}; give wider "
            "rules, which need no new samples"
        )
    best = {}
    if job.best_of is not None:
        best[job.best_of] = [_best(job, index, found[index][1]) for index in selection.kept]
    about = {
        "rules": job.rules._asdict(), **({"best_of": job.best_of} if best else {}),
        "read": len(problems), "dropped": selection.dropped, "kept": len(selection.kept),
        "samples": {name: value for name, value in header.items() if name not in OF_PLACE},
    }  # fmt: skip
    write_selection(job.out, job.table, selection.kept, measured, about, best)
    page = write_selection_page(
        job.out.with_suffix(".html"), out=job.out, samples=job.samples, header=header,
        problems=problems, duplicates=job.duplicates, measured=measured, selection=selection,
    )  # fmt: skip
    lines = [f"{len(problems):10,} prompts read"]
    lines += [f"{count:10,} dropped: {rule}" for rule, count in selection.dropped.items()]
    lines += [f"{len(selection.kept):10,} kept", str(page), str(job.out)]
    return "\n".join(lines)


def _best(job: Job, index: int, response: str | None) -> str:
    if response is None:
        raise DataError(
            f"{place(job.evaluation.dataset, index)}: no response has a score, so none is the best "
            f"of --best-of={job.best_of}; judge by what gives scores, such as "
            "reward.verifier=reward_model, or leave the prompt out"
        )
    return response
