"""Evaluate a checkpoint: avg@k, pass@k, majority@k, length and truncation, with 95% intervals.

  vapo evaluate --checkpoint DIR --data test.parquet --samples 32
  vapo evaluate --checkpoint RUN --data test.parquet --nproc 8 seed=1
  torchrun --nproc-per-node 8 -m vapo_megatron evaluate ...      on several nodes

The checkpoint is a Hugging Face directory, or a run directory, which brings its hf_export and its
configuration; vapo convert to-hf makes one of a checkpoints/step_* directory. Lengths that are not
set are limited by the longest prompt of the data and the positions of the model. Every sample goes
to --out, a JSONL file; an interrupted evaluation resumes with the problems that are missing there.
rollout.tensor_model_parallel_size processes hold one vLLM replica, and the replicas of --nproc
processes share the problems.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vapo_megatron.cli.command import Parser, under_torchrun
from vapo_megatron.cli.sampling import options as shared
from vapo_megatron.errors import ConfigError

if TYPE_CHECKING:
    from vapo_megatron.cli.sampling.probes import Probe
    from vapo_megatron.rollout.evaluation.reflection import Reflection
    from vapo_megatron.rollout.evaluation.statistics import Estimate


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0; 2 for a user's mistake; 130 when interrupted."""
    return shared.main_of("evaluate", _parser(), _evaluate, argv)


def _evaluate(options: argparse.Namespace, worker: Sequence[str]) -> Path | None:
    # These load torch, so they come after the options are checked.
    from vapo_megatron.cli.evaluate.summary import evaluate_checkpoint
    from vapo_megatron.cli.sampling import inputs, samples
    from vapo_megatron.rollout.input_warnings import tell_warnings

    config = inputs.evaluation_config(
        options.checkpoint, shared.sampling_overrides(options), shared.num_processes(options.nproc)
    )
    out = options.out or default_out(options.checkpoint, options.data)
    if out.suffix == ".json":
        raise ConfigError(
            f"--out={out} must not end in .json: the summary, of the same name with that ending, "
            "would replace the samples; let it end in .jsonl"
        )
    probe = _probe(options)
    if probe is not None:
        probe.check(config)
    evaluation = inputs.check(options.checkpoint, options.data, config, out, probe)
    if not under_torchrun():
        tell_warnings(evaluation.inputs)
    if config.parallel.world_size > 1 and not under_torchrun():
        samples.check_out(out, evaluation)
        shared.become_torchrun(config.parallel.world_size, worker)
    found = evaluate_checkpoint(
        evaluation, config, out, options.batch, keeps_tokens=options.token_ids
    )
    if found is None:
        return None
    step = evaluation.header.get("step")
    of_step = "" if step is None else f" (step {step})"
    _print_table(found.overall, f"{options.checkpoint}{of_step} on {options.data}")
    for name, (count, statistics) in found.by_verifier.items():
        _print_table(statistics, f"{count} of {evaluation.header['num_problems']} problems: {name}")
    for task, reflected in found.reflection.items():
        _print_table(reflected.metrics, _reflection_title(reflected, task, probe))
    return out


def _reflection_title(found: Reflection, task: str | None, probe: Probe | None) -> str:
    assert probe is not None
    by = f"the words {', '.join(probe.words)}" if probe.words else f"the verifier {probe.verifier}"
    unclear = f", {found.num_unclear} samples without a verdict left out" * bool(found.num_unclear)
    return f"reflection{'' if task is None else f', task {task}'}, by {by}{unclear}"


def _probe(options: argparse.Namespace) -> Probe | None:
    from vapo_megatron.cli.sampling.probes import Probe

    words = tuple(word.strip() for word in options.reflects_words.split(",") if word.strip())
    probe = Probe(options.prefix_column, options.trigger, options.reflects, words)
    return None if probe == Probe() else probe


def default_out(checkpoint: Path, data: Path) -> Path:
    """Return runs/evaluation/PATH/DATA.jsonl, where PATH is relative to here or to the root."""
    path = checkpoint.resolve()
    start = Path.cwd() if path.is_relative_to(Path.cwd()) else path.anchor
    return Path("runs/evaluation") / path.relative_to(start) / f"{data.stem}.jsonl"


def _print_table(found: Mapping[str, Estimate | None], title: str) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    table.add_column("")
    table.add_column("mean", justify="right")
    table.add_column("95% interval", justify="right")
    for name, estimate in found.items():
        if estimate is None:
            table.add_row(name.replace("_", " "), "-", "-")
            continue
        form = ",.1f" if name == "response_length_mean" else ".4f"
        interval = "-"
        if estimate.low is not None and estimate.high is not None:
            interval = f"{format(estimate.low, form)} .. {format(estimate.high, form)}"
        label = name.replace("length_mean", "length (tokens)").replace("_", " ")
        table.add_row(label, format(estimate.value, form), interval)
    Console().print(table)


def _parser() -> Parser:
    usage = "vapo evaluate --checkpoint DIR --data FILE [options] [section.field=value ...]"
    parser = Parser(prog="vapo evaluate", usage=usage, description=__doc__)
    files = parser.add_argument_group("files")
    shared.add_checkpoint(files)
    files.add_argument(
        "--data", type=Path, required=True, metavar="FILE",
        help="JSONL or parquet with the columns prompt and answer (vapo prepare)",
    )  # fmt: skip
    files.add_argument(
        "--out", type=Path, metavar="FILE",
        help="default: runs/evaluation/PATH/DATA.jsonl, where PATH is the checkpoint's; the "
        "summary has the same name, ending in .json",
    )  # fmt: skip
    files.add_argument(
        "--token-ids", action="store_true",
        help="write responses' token ids, too (vapo trajectories --revise)",
    )  # fmt: skip
    shared.add_sampling(parser)
    probes = parser.add_argument_group("responses that have begun (docs/evaluation.md)")
    probes.add_argument(
        "--prefix-column", metavar="COLUMN",
        help="column of the data with the text that a response starts with, such as a chain of "
        "thought with an error (vapo probe); the rest of it is sampled, and judged alone",
    )  # fmt: skip
    probes.add_argument(
        "--trigger", default="", metavar="TEXT", help="follows that text, such as 'Wait,'"
    )
    probes.add_argument(
        "--reflects", metavar="VERIFIER",
        help="a second verifier, with its entry in reward.verifiers: correct means that the "
        "response reflects on what it began with",
    )  # fmt: skip
    probes.add_argument(
        "--reflects-words", default="", metavar="A,B",
        help="in place of it: a response with one of these words reflects",
    )  # fmt: skip
    shared.add_processes(parser)
    return parser
