"""Episodes of an environment, written as trajectories (data/trajectories.py)."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from vapo_megatron.cli.sampling.inputs import Evaluation
from vapo_megatron.cli.sampling.samples import sample_missing
from vapo_megatron.config import VapoConfig
from vapo_megatron.data.storage import replacing, to_line
from vapo_megatron.data.trajectories import FORMAT
from vapo_megatron.errors import ConfigError, DataError
from vapo_megatron.reward.checks import FAILED
from vapo_megatron.rollout.evaluation.samples_file import collect
from vapo_megatron.rollout.inputs import tools_of

SAMPLING = ("temperature", "top_p", "top_k", "max_response_tokens", "seed")
"""Of an evaluation's header."""


def check(config: VapoConfig) -> None:
    """Refuse a configuration without an environment. ConfigError: names the fields."""
    if not config.environment.is_on:
        raise ConfigError(
            "environment.use=null and environment.tools=[]: trajectories are episodes of an "
            "environment; set one of them (docs/environments.md), or give --revise"
        )


def write(
    evaluation: Evaluation, config: VapoConfig, kept: Path, out: Path, batch: int | None
) -> str | None:
    """Sample what is missing, then write all trajectories. Collective.

    Args:
        evaluation, config: checked.
        kept: file of all samples, which an interrupted command goes on with.
        out: replaced atomically.
        batch: problems sampled together; None: the default.

    Returns:
        On rank 0 what was written, for people; None elsewhere.

    Raises:
        UserError: see sample_missing; DataError where no episode had a turn.
    """
    return sample_missing(
        evaluation, config, kept, evaluation.dataset.problems, batch,
        lambda: _written(evaluation, config, kept, out),
    )  # fmt: skip


def header(evaluation: Evaluation, config: VapoConfig) -> dict[str, Any]:
    """Return the first line of a file of trajectories.

    Prompts and observations are texts with the chat template's tokens, and an action ends with its
    stop token: joined, they are what the policy saw.
    """
    found, tokenizer = evaluation.header, evaluation.inputs.tokenizer
    return {
        "trajectories": FORMAT, "weights": found["weights"], "chat": False,
        "ends": [tokenizer.decode([i]) for i in evaluation.inputs.stop_token_ids],
        "tags": None, "tools": tools_of(config.environment, tokenizer) or None,
        "sampling": {name: found[name] for name in SAMPLING},
        "environment": config.environment.model_dump(), "judge": None,
        "checkpoint": found["checkpoint"], "data": found["data"],
    }  # fmt: skip


def _written(evaluation: Evaluation, config: VapoConfig, kept: Path, out: Path) -> str:
    collect(kept, evaluation.header)
    counts = Counter[str]()
    with replacing(out) as file:
        file.write(to_line(header(evaluation, config)).encode())
        for line in _lines(kept):
            row = evaluation.dataset.rows[line["prompt_index"]]
            for response in line["responses"]:
                if not response.get("turns"):
                    counts["without a turn"] += 1
                    continue
                counts["failed"] += response["status"] in FAILED
                if response["status"] not in FAILED:
                    counts["written"] += 1
                    file.write(to_line(trajectory(line, response, row.metadata)).encode())
        if not counts["written"]:
            raise DataError(
                f"no episode can be a trajectory: {counts['without a turn']} have no turn, "
                f"{counts['failed']} failed; {kept} says why"
            )
    more = [f"{counts[name]} {name}" for name in ("without a turn", "failed") if counts[name]]
    return f"{out}: {counts['written']} trajectories{', left out: ' * bool(more)}{', '.join(more)}"


def trajectory(
    line: Mapping[str, Any], response: Mapping[str, Any], columns: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a response with turns as a trajectory.

    Args:
        line: of a samples file.
        response: one of its.
        columns: of the row, beside prompt and answer.
    """
    *before, last = response["turns"]
    steps = [
        {"action": turn["action"], "observation": turn["observation"], "process": None, "note": ""}
        for turn in before
    ]
    steps.append(
        {
            "action": last["action"], "observation": None, "process": None,
            "note": response.get("note", ""),
        }
    )  # fmt: skip
    return {
        **columns, "question_id": columns.get("question_id", line["prompt_index"]),
        "sample": response["sample"], "prompt": response["begin"], "steps": steps,
        "answer": line["answer"], "outcome": response["status"] == "correct",
        "truncated": response["truncated"],
    }  # fmt: skip


def _lines(kept: Path) -> Iterator[dict[str, Any]]:
    """Yield the problems of a complete samples file."""
    with kept.open("rb") as file:
        next(file)
        for line in file:
            yield json.loads(line)
