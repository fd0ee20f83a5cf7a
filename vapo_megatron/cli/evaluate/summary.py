"""The statistics of an evaluation's samples."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from vapo_megatron.cli.sampling.inputs import Evaluation
from vapo_megatron.cli.sampling.samples import sample_missing
from vapo_megatron.config import VapoConfig
from vapo_megatron.data.storage import replace_file
from vapo_megatron.rollout.evaluation.judging import judge_problems, reward_mean
from vapo_megatron.rollout.evaluation.reflection import (
    Reflection,
    Sample,
    reflection,
    reflection_by_task,
)
from vapo_megatron.rollout.evaluation.samples_file import collect, line_values
from vapo_megatron.rollout.evaluation.statistics import Estimate, as_json, estimates


class Summary(NamedTuple):
    """The statistics of an evaluation, by name."""

    overall: dict[str, Estimate]
    by_verifier: dict[str, tuple[int, dict[str, Estimate]]]
    """Each verifier's number of problems, and their statistics; empty where there is only one."""
    reflection: dict[str | None, Reflection]
    """Of all problems (None), and by the column task where there are several; empty where nobody
    says whether responses reflect."""


def evaluate_checkpoint(
    evaluation: Evaluation,
    config: VapoConfig,
    out: Path,
    problems_per_batch: int | None = None,
    *,
    keeps_tokens: bool = False,
) -> Summary | None:
    """Sample and judge every problem that is missing in `out`, then summarize. Collective.

    Args:
        evaluation, config, out, problems_per_batch: see sample_missing; the summary has the same
            name as out, ending in .json.
        keeps_tokens: see judge_problems.

    Returns:
        The statistics on rank 0, None elsewhere.

    Raises:
        UserError: see sample_missing.
    """
    return sample_missing(
        evaluation, config, out, evaluation.dataset.problems, problems_per_batch,
        lambda: _sum_up(out, evaluation, config),
        sample=functools.partial(judge_problems, keeps_tokens=keeps_tokens),
    )  # fmt: skip


def _sum_up(out: Path, evaluation: Evaluation, config: VapoConfig) -> Summary:
    """Return the statistics of all problems, and write them next to the file."""
    header, reward, seed = evaluation.header, config.reward, config.seed

    probe = evaluation.probe
    asks_reflection = probe is not None and probe.asks_reflection

    def measured(line: Mapping[str, Any]) -> tuple[str, dict[str, float], list[Sample]]:
        verifier, values = line["verifier"], line_values(line)
        if reward.from_score is not None or config.environment.is_on:
            values["reward_mean"] = reward_mean(line["responses"], reward, verifier)
        responses = line["responses"] if asks_reflection else ()
        samples = [Sample(r["status"] == "correct", r["reflects"]) for r in responses]
        return verifier, values, samples

    found = collect(out, header, measured)
    assert len(found) == len(evaluation.dataset.problems), f"{out} holds {len(found)} problems"
    groups: dict[str, list[dict[str, float]]] = {}
    for verifier, values, _ in found.values():
        groups.setdefault(verifier, []).append(values)
    overall = estimates([values for _, values, _ in found.values()], seed)
    by_verifier = {}
    if len(groups) > 1:
        by_verifier = {
            name: (len(values), estimates(values, seed)) for name, values in sorted(groups.items())
        }
    left_out = len(evaluation.dataset.left_out)
    written = {**header, "left_out": left_out, "statistics": as_json(overall)}
    if by_verifier:
        written["by_verifier"] = {
            name: {"num_problems": count, "statistics": as_json(statistics)}
            for name, (count, statistics) in by_verifier.items()
        }
    reflected: dict[str | None, Reflection] = {}
    if asks_reflection:
        of_problems = [samples for _, _, samples in found.values()]
        tasks = [evaluation.dataset.rows[index].metadata.get("task") for index in found]
        reflected[None] = reflection(of_problems, seed)
        if len(set(tasks)) > 1:
            reflected.update(reflection_by_task(of_problems, tasks, seed).items())
        written["reflection"] = {
            "all" if task is None else f"task {task}": of.as_json()
            for task, of in reflected.items()
        }
    replace_file(out.with_suffix(".json"), json.dumps(written, indent=1) + "\n")
    return Summary(overall, by_verifier, reflected)
