"""Makes the rows of a probe set, refuses what is none, and writes the parquet file.

A probe is a row of a data file with the beginning of a response that is on its way to a wrong
answer, in a column of its own. Verifiers judge every prefix: one that already answers right probes
nothing.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vapo_megatron.cli.probe.chain import cut, without_answer
from vapo_megatron.cli.probe.corrupt import Corrupted, corruptions, last_value, to_fraction
from vapo_megatron.cli.select.table import source_table
from vapo_megatron.config import DataConfig, RewardConfig
from vapo_megatron.data.chat import Message
from vapo_megatron.data.parquet import write_table
from vapo_megatron.data.problems import Problem, load_problems
from vapo_megatron.errors import DataError
from vapo_megatron.reward.extraction import ground_truth
from vapo_megatron.reward.verifiers import Verifiers

METADATA_KEY = b"vapo_megatron.probe"
"""Key of the settings and counts, as JSON, in the parquet file's metadata."""
KIND = "probe set"


class Probe(NamedTuple):
    """A row to be written."""

    row: int
    """Of the data file."""
    place: str
    """Names it in messages."""
    prefix: str
    """What the response begins with."""
    wrong_answer: str | None
    """What it leads to; None: the verifier named no answer."""
    problem: Problem
    """Of the row, with the verifier that judges it."""


class Refusal(NamedTuple):
    """A row, or a sample, of which no probe can be made, and why."""

    place: str
    reason: str


Made = Probe | Refusal


class Cut(NamedTuple):
    """How much of a chain becomes a prefix."""

    share: float = 1.0
    separator: str = "\n"

    def of(self, chain: str) -> str:
        """Return the prefix."""
        return cut(chain, self.share, self.separator)


def read_rows(data: Path, columns: DataConfig) -> list[Problem]:
    """Return the problems of a file; messages become a text without a template.

    Raises:
        DataError: see load_problems.
    """

    def written(messages: Sequence[Message], **_: Any) -> str:
        return "\n".join(str(message.get("content") or "") for message in messages)

    unreadable: dict[int, str] = {}
    return load_problems(
        data, columns.prompt_column, columns.answer_column, render=written, unreadable=unreadable
    )


def self_probes(
    lines: Sequence[Mapping[str, Any]],
    problems: Sequence[Problem],
    reward: RewardConfig,
    *,
    samples: Path,
    data: Path,
    cutting: Cut,
    most: int,
    counts: Counter[str],
) -> Iterator[Made]:
    """Yield a probe of each problem's first wrong samples.

    Args:
        lines: of a samples file.
        problems: of the whole data file that was sampled.
        reward: with the verifiers that judged.
        samples, data: their files, for messages.
        cutting: of a chain.
        most: samples of one problem.
        counts: is given how many problems have no wrong sample.

    Raises:
        DataError: the samples are of other data, or of episodes.
    """
    for line in lines:
        index, place = line["prompt_index"], f"{samples}, problem {line['prompt_index']}"
        if not 0 <= index < len(problems) or problems[index].answer != line["answer"]:
            raise DataError(
                f"{place} is not row {index} (from 0) of {data}, or has another answer; give the "
                "--data that was sampled"
            )
        problem = problems[index]
        if line["verifier"] != reward.verifier:
            problem = problem.judged_by(line["verifier"])
        wrong = [r for r in line["responses"] if r["status"] == "wrong"]
        if any("turns" in response for response in wrong):
            raise DataError(
                f"{place} has episodes, whose turns are no chain of thought; give the samples of "
                "single responses"
            )
        counts["problems without a wrong sample"] += not wrong
        for response in wrong[:most]:
            of_sample = f"{place}, sample {response['sample']}"
            prefix = cutting.of(without_answer(response["text"]))
            if prefix == response["text"].rstrip():
                yield Refusal(of_sample, "has no final answer to leave out; give a smaller --cut")
            elif not prefix:
                yield Refusal(of_sample, "has no chain of thought before its answer")
            else:
                yield Probe(index, of_sample, prefix, response["answer"], problem)


def arithmetic_probes(
    problems: Sequence[Problem], *, data: Path, columns: DataConfig, chain_column: str,
    cutting: Cut, seed: int,
) -> Iterator[Made]:  # fmt: skip
    """Yield a probe of each row's chain of thought, with an error in one of its steps.

    Args:
        problems: of the whole file.
        data: their file, for messages.
        columns: their names.
        chain_column: has right chains of thought; a final answer at their end is left out.
        cutting: of a chain with its error.
        seed: of the choice of step and error; a row's does not depend on other rows.

    Raises:
        DataError: a row has no such column, or it has no text.
    """
    for index, problem in enumerate(problems):
        place = f"row {index} (from 0) of {data}"
        # The column of ground truths may have chains, too, as GSM8K's.
        row = dict(problem.metadata)
        if columns.answer_column is not None:
            row[columns.answer_column] = problem.answer
        if chain_column not in row:
            others = ", ".join(problem.metadata) or "none"
            raise DataError(
                f"{place} has no column {chain_column!r}; set --chain-column to one of those it "
                f"has beside prompt and answer: {others}"
            )
        chain = row[chain_column]
        if not isinstance(chain, str):
            raise DataError(f"{place}: {chain_column}={chain!r:.80} must be a text; correct it")
        rng = random.Random(f"{seed} {index}")
        yield _arithmetic(index, place, without_answer(chain), problem, cutting, rng)


def _arithmetic(
    index: int, place: str, chain: str, problem: Problem, cutting: Cut, rng: random.Random
) -> Made:
    try:
        truth = to_fraction(ground_truth(problem.answer))
    except (ValueError, ZeroDivisionError):
        return Refusal(place, f"has the answer {problem.answer!r:.80}, which is no number")
    last = last_value(chain)
    if last is None:
        return Refusal(place, "has no step `a op b = c` in its chain of thought")
    if last != truth:
        return Refusal(place, f"has the answer {problem.answer!r:.80}, which its last step is not")
    found: Corrupted | None = None
    for found in corruptions(chain, problem.prompt, rng):
        prefix = cutting.of(found.chain)
        # An error that leads nowhere, or lies behind the cut, is none.
        if to_fraction(found.answer) != truth and not chain.startswith(prefix):
            return Probe(index, place, prefix, found.answer, problem)
    if found is None:
        return Refusal(place, "has no step whose value is new, so none can be made wrong alone")
    return Refusal(place, "still has its right answer, or no error, with any step made wrong")


def right_already(probes: Sequence[Probe], verifiers: Verifiers) -> dict[int, str]:
    """Return index -> why a prefix cannot be used: it answers right, or no verifier can tell."""
    verdicts = verifiers.score([p.prefix for p in probes], [p.problem for p in probes])
    found = {}
    for index, verdict in enumerate(verdicts):
        if verdict.is_correct:
            found[index] = f"has a prefix that already answers right ({verdict.answer!r:.80})"
        elif verdict.status in ("failed", "timed_out"):
            found[index] = f"has a prefix that could not be judged: {verdict.note or 'timed out'}"
    return found


def make(
    made: Iterator[Made],
    problems: Sequence[Problem],
    data: Path,
    out: Path,
    *,
    columns: DataConfig,
    reward: RewardConfig,
    prefix_column: str,
    task: str,
    skip_unusable: bool,
    counts: Counter[str],
    about: Mapping[str, Any],
) -> str:
    """Write the probes, and return text for the terminal.

    The output has the rows' columns, prefix_column, wrong_answer and task; columns of these names
    are replaced.

    Args:
        made: probes and refusals, in the order of the output.
        problems, data: where the rows are from.
        out: replaced atomically.
        columns: of data.
        reward: the verifiers.
        prefix_column, task: what the output has.
        skip_unusable: leave refused rows out and count them.
        counts: what else was left out.
        about: settings, for the file's metadata.

    Raises:
        DataError: a row is refused, or none is left.
    """
    import pyarrow

    found = list(made)
    table = source_table(data, columns, problems)
    probes = [probe for probe in found if isinstance(probe, Probe)]
    with Verifiers(reward) as verifiers:
        bad = right_already(probes, verifiers)
    refused = [refusal for refusal in found if isinstance(refusal, Refusal)]
    refused += [Refusal(probes[index].place, reason) for index, reason in bad.items()]
    if refused and not skip_unusable:
        more = f" ({len(refused) - 1} more)" if len(refused) > 1 else ""
        raise DataError(
            f"{refused[0].place} {refused[0].reason}{more}; correct the rows, or leave them out "
            "with --skip-unusable"
        )
    probes = [probe for index, probe in enumerate(probes) if index not in bad]
    if refused:
        counts[f"refused, such as {refused[0].place}, which {refused[0].reason}"] = len(refused)
    dropped = {reason: count for reason, count in counts.items() if count}
    if not probes:
        told = ", ".join(f"{count:,} {reason}" for reason, count in dropped.items())
        raise DataError(f"no probe is left of {data}: {told or 'there are no samples'}")
    added = {
        prefix_column: [probe.prefix for probe in probes],
        "wrong_answer": [probe.wrong_answer for probe in probes],
        "task": [task] * len(probes),
    }
    table = table.take(pyarrow.array([probe.row for probe in probes], pyarrow.int64()))
    table = table.drop_columns([name for name in table.column_names if name in added])
    for name, values in added.items():
        table = table.append_column(name, pyarrow.array(values, pyarrow.string()))
    write_table(out, table, METADATA_KEY, {**about, "left_out": dropped, "written": len(probes)})
    lines = [f"{count:10,} {reason}" for reason, count in dropped.items()]
    return "\n".join([*lines, f"{len(probes):10,} probes written", str(out)])
