"""Right responses of a samples file, revised by Retro-Search (arXiv 2504.04383)."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vapo_megatron.cli.sampling.inputs import Evaluation
from vapo_megatron.cli.sampling.samples import sample_missing
from vapo_megatron.cli.select.table import source_table
from vapo_megatron.config import VapoConfig
from vapo_megatron.data.storage import replacing, to_line
from vapo_megatron.errors import DataError
from vapo_megatron.rollout.evaluation.samples_file import collect, read_samples
from vapo_megatron.rollout.offline import Reviser, Sampled, banned_tokens
from vapo_megatron.rollout.revision import Settings

MUST_AGREE = ("weights", "problems", "num_problems", "stop_token_ids")
"""Fields of a samples file's header that say whose responses to what it has."""
RESPONSE = "response"
"""The column of revised responses, in token ids."""


def prepare(
    evaluation: Evaluation, config: VapoConfig, samples: Path, settings: Settings, *, endings: int
) -> Evaluation:
    """Return the evaluation with the header of what is revised, and of how.

    Raises:
        DataError: the samples are of another model or other data; or the table of rows cannot be.
    """
    header, _ = _read(samples, evaluation)
    source_table(Path(evaluation.header["data"]), config.data, evaluation.dataset.rows)
    revised = {**settings._asdict(), "keywords": list(settings.keywords), "endings": endings}
    own = {
        **evaluation.header, "samples": header["samples"],
        "revised": {**revised, "of": {k: v for k, v in header.items() if k != "checkpoint"}},
    }  # fmt: skip
    return evaluation._replace(header=own)


def write(
    evaluation: Evaluation,
    config: VapoConfig,
    kept: Path,
    out: Path,
    samples: Path,
    settings: Settings,
    endings: int,
    batch: int | None,
) -> str | None:
    """Revise what is missing, then write the rows with their responses. Collective.

    Args:
        evaluation: from prepare.
        config: of the command.
        kept: file of all revised responses with the decisions.
        out: replaced atomically.
        samples: what is revised.
        settings, endings: how.
        batch: problems revised together; None: enough to keep the engine busy.

    Returns:
        On rank 0 what was written, for people; None elsewhere.
    """
    _, traces = _read(samples, evaluation)
    tokenizer = evaluation.inputs.tokenizer
    banned = banned_tokens(tokenizer, evaluation.inputs.shape.vocab_size, settings)
    reviser = Reviser(traces, settings, endings, banned)
    return sample_missing(
        evaluation, config, kept, evaluation.dataset.problems, batch,
        lambda: _written(evaluation, config, kept, out), sample=reviser,
    )  # fmt: skip


def _read(samples: Path, evaluation: Evaluation) -> tuple[dict[str, Any], dict[int, list[Sampled]]]:
    """Return the header of a samples file, and its responses by problem.

    Responses without token ids are encoded once, as wholes.

    Raises:
        DataError: it is no complete samples file of this model and data.
    """
    tokenizer, stop = evaluation.inputs.tokenizer, evaluation.inputs.stop_token_ids

    def sampled(response: Mapping[str, Any], index: int) -> Sampled:
        ids = response.get("token_ids")
        if ids is None:
            ids = tokenizer.encode(
                response["text"], add_special_tokens=False, split_special_tokens=True
            )
            ids += [] if response["truncated"] else [stop[0]]
        place = f"{samples}: problem {index}, sample {response['sample']}"
        return Sampled(
            ids, response["status"], bool(response["truncated"]), response["sample"], place
        )

    header, lines = read_samples(samples)
    for name in MUST_AGREE:
        if header.get(name) != evaluation.header[name]:
            raise DataError(
                f"--revise={samples} is of another model or other data: its {name} is "
                f"{header.get(name)!r}, here it is {evaluation.header[name]!r}; give the "
                "checkpoint and the data that it was sampled with"
            )
    found = {line["prompt_index"]: line["responses"] for line in lines}
    missing = [p.index for p in evaluation.dataset.problems if p.index not in found]
    if missing:
        raise DataError(
            f"--revise={samples} lacks {len(missing)} problems, the first {missing[0]} (from 0); "
            "let the command that writes it finish"
        )
    try:
        traces = {i: [sampled(response, i) for response in of] for i, of in found.items()}
    except (KeyError, TypeError):
        raise DataError(
            f"--revise={samples} has responses without text, status or truncated; give a file that "
            "vapo evaluate or vapo select has finished"
        ) from None
    return header, traces


def _written(evaluation: Evaluation, config: VapoConfig, kept: Path, out: Path) -> str:
    data = Path(evaluation.header["data"])
    rows = source_table(data, config.data, evaluation.dataset.rows)
    counts, before, after = Counter[str](), list[int](), list[int]()
    found = collect(kept, evaluation.header, lambda line: line["responses"])
    with replacing(out) as file:
        for index, responses in found.items():
            row = {k: v for k, v in rows.slice(index, 1).to_pylist()[0].items() if v is not None}
            for response in responses:
                if reason := response.get("left_out"):
                    counts[reason] += 1
                    continue
                accepted = any(decision["accepted"] for decision in response["decisions"])
                counts["revised" if accepted else "as they were"] += 1
                before.append(response["num_tokens_before"])
                after.append(response["num_tokens"])
                line = {**row, "sample": response["sample"], RESPONSE: response["token_ids"]}
                file.write(to_line(line).encode())
        if not after:
            left_out = ", ".join(f"{count} {reason}" for reason, count in counts.items())
            raise DataError(
                f"no response can be revised ({left_out}); give samples of which some are correct"
            )
    told = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in sorted(counts.items()))
    means = statistics.fmean(before), statistics.fmean(after)
    return (
        f"{out}: {len(after)} responses in the column {RESPONSE} ({told}); mean length "
        f"{means[0]:,.1f} -> {means[1]:,.1f} tokens"
    )
