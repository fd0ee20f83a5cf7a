"""Sample episodes of an environment into a file, or revise right responses to be shorter.

  vapo trajectories --checkpoint DIR --data x.jsonl --out some.jsonl environment.use=mine.py:Mine
  vapo trajectories --checkpoint DIR --data x.jsonl --out shorter.jsonl --revise samples.jsonl

Episodes are written with their turns, in a JSONL file that begins with a header: the first stage of
SWiRL (arXiv 2504.04736). --revise is Retro-Search (arXiv 2504.04383): it reads the samples of vapo
evaluate or vapo select, goes on from each step that begins with a keyword ("Wait") without one, and
takes the new ending where that is right and has fewer steps; its output is a data file with a
column of responses. An interrupted command resumes.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from vapo_megatron.cli.command import Parser, under_torchrun
from vapo_megatron.cli.sampling import options as shared
from vapo_megatron.errors import ConfigError
from vapo_megatron.rollout.revision import BLANK_LINES, KEYWORDS, Settings

ENDINGS = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0; 2 for a user's mistake; 130 when interrupted."""
    return shared.main_of("trajectories", _parser(), _trajectories, argv)


def _trajectories(options: argparse.Namespace, worker: Sequence[str]) -> str | None:
    if options.out.suffix != ".jsonl":
        raise ConfigError(f"--out={options.out} must end in .jsonl; change it")
    if options.revise is not None and options.samples is not None:
        raise ConfigError(
            f"--samples={options.samples} is for episodes; with --revise, --endings says how many "
            "endings are sampled"
        )
    settings = _settings(options)
    # These load torch, so they come after the options are checked.
    from vapo_megatron.cli.sampling import inputs, samples
    from vapo_megatron.cli.trajectories import episodes, revise
    from vapo_megatron.rollout.input_warnings import tell_warnings

    options.samples = 5 if options.samples is None else options.samples
    config = inputs.evaluation_config(
        options.checkpoint, shared.sampling_overrides(options), shared.num_processes(options.nproc)
    )
    kept = options.out.with_suffix(".samples.jsonl")
    evaluation = inputs.check(options.checkpoint, options.data, config, kept)
    if options.revise is None:
        episodes.check(config)
    else:
        if config.environment.is_on:
            raise ConfigError(
                "--revise is for responses of one turn, but an environment answers these; give "
                "environment.use=null environment.tools=[]"
            )
        evaluation = revise.prepare(
            evaluation, config, options.revise, settings, endings=options.endings
        )
    if not under_torchrun():
        tell_warnings(evaluation.inputs)
        if config.parallel.world_size > 1:
            samples.check_out(kept, evaluation)
            shared.become_torchrun(config.parallel.world_size, worker)
    if options.revise is None:
        return episodes.write(evaluation, config, kept, options.out, options.batch)
    return revise.write(
        evaluation, config, kept, options.out, options.revise, settings, options.endings,
        options.batch,
    )  # fmt: skip


def _settings(options: argparse.Namespace) -> Settings:
    keywords = tuple(word.strip() for word in options.keywords.split(","))
    # As a shell gives it: \n is two characters there, which a regular expression reads as one.
    settings = Settings(keywords, options.separator, options.gamma, options.max_switches)
    settings.check()
    if options.endings < 1:
        raise ConfigError(f"--endings={options.endings} must be at least 1; change it")
    return settings


def _parser() -> Parser:
    usage = (
        "vapo trajectories --checkpoint DIR --data FILE --out FILE.jsonl [options] "
        "[section.field=value ...]"
    )
    parser = Parser(prog="vapo trajectories", usage=usage, description=__doc__)
    files = parser.add_argument_group("files")
    shared.add_checkpoint(files)
    files.add_argument(
        "--data", type=Path, required=True, metavar="FILE",
        help="JSONL or parquet with the columns data.prompt_column and data.answer_column",
    )  # fmt: skip
    files.add_argument(
        "--out", type=Path, required=True, metavar="FILE.jsonl",
        help="beside it all that is sampled, in .samples.jsonl",
    )  # fmt: skip
    revision = parser.add_argument_group("revision")
    revision.add_argument(
        "--revise", type=Path, metavar="SAMPLES.jsonl",
        help="responses of this checkpoint to this data (vapo evaluate --token-ids)",
    )  # fmt: skip
    revision.add_argument(
        "--endings", type=int, default=ENDINGS, metavar="K", help=f"at each switch ({ENDINGS})"
    )
    revision.add_argument(
        "--keywords", default=",".join(KEYWORDS), metavar="A,B",
        help=f"a step that begins with one is a switch ({', '.join(KEYWORDS)})",
    )  # fmt: skip
    revision.add_argument(
        "--separator", default=BLANK_LINES, metavar="REGEX",
        help="between steps (default: blank lines)",
    )  # fmt: skip
    revision.add_argument(
        "--gamma", type=float, default=Settings().gamma, metavar="G",
        help=f"discount of a step ({Settings().gamma})",
    )  # fmt: skip
    revision.add_argument(
        "--max-switches", type=int, metavar="N", help="tried in one response (default: all)"
    )
    shared.add_sampling(parser, temperature=1.0, top_p=1.0, top_k=-1)
    shared.add_processes(parser)
    return parser
