"""Keep the prompts of a file that are worth training on, by what a base policy makes of them.

  vapo select --checkpoint models/base --data all.parquet --out some.parquet --pass-rate 0.1 0.9
  vapo select ... --drop-duplicates --hardest 20000 reward.verifier=pairwise --nproc 8

It samples K responses to each prompt with vLLM and judges them with any verifier. Rules apply in
this order: near-duplicates, pass rate, hardest; without a rule everything is kept. The output has
the rows that are left, with pass_rate, score_mean, scores, length_mean, lengths and
truncated_fraction as columns, and can be data.train_path as it is. Beside it are a page with
histograms and every response (.html, .samples.jsonl). An interrupted command resumes; other rules
on the same samples take seconds. --best-of adds each prompt's best response as a column, such as
the reference of the verifier pairwise.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from vapo_megatron.cli.command import Parser, under_torchrun
from vapo_megatron.cli.sampling import options as shared
from vapo_megatron.cli.select.rules import Rules
from vapo_megatron.cli.select.table import check_out

SIMILARITY = 0.8
"""Of --drop-duplicates without a number."""


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0; 2 for a user's mistake; 130 when interrupted."""
    return shared.main_of("select", _parser(), _select, argv)


def _select(options: argparse.Namespace, worker: Sequence[str]) -> str | None:
    rules = Rules(
        options.drop_duplicates,
        options.pass_rate and (options.pass_rate[0], options.pass_rate[1]),
        options.hardest,
        options.within,
    )
    rules.check()
    check_out(options.out)
    # These load torch, so they come after the options are checked.
    from vapo_megatron.cli.sampling.inputs import evaluation_config
    from vapo_megatron.cli.select import select
    from vapo_megatron.rollout.input_warnings import tell_warnings

    config = evaluation_config(
        options.checkpoint, shared.sampling_overrides(options), shared.num_processes(options.nproc)
    )
    job = select.prepare(
        options.checkpoint, options.data, config, rules, options.out, options.best_of
    )
    if not under_torchrun():
        tell_warnings(job.evaluation.inputs)
        if (told := select.select_from_samples(job)) is not None:
            return told
        if config.parallel.world_size > 1:
            shared.become_torchrun(config.parallel.world_size, worker)
    return select.sample_and_select(job, options.batch)


def number(text: str) -> int | float:
    """Return a whole number, or another one as a float. ValueError: it is none."""
    try:
        return int(text)
    except ValueError:
        return float(text)


def _parser() -> Parser:
    usage = (
        "vapo select --checkpoint DIR --data FILE --out FILE.parquet [options] "
        "[section.field=value ...]"
    )
    parser = Parser(prog="vapo select", usage=usage, description=__doc__)
    files = parser.add_argument_group("files")
    shared.add_checkpoint(files)
    files.add_argument(
        "--data", type=Path, required=True, metavar="FILE",
        help="JSONL or parquet with the columns data.prompt_column and data.answer_column",
    )  # fmt: skip
    files.add_argument("--out", type=Path, required=True, metavar="FILE.parquet")
    rules = parser.add_argument_group("rules")
    rules.add_argument(
        "--drop-duplicates", type=float, nargs="?", const=SIMILARITY, metavar="SIMILARITY",
        help="drop prompts whose 5-character pieces are so similar to an earlier prompt's, by the "
        f"Jaccard index (default: off; without a number {SIMILARITY}); they are not sampled",
    )  # fmt: skip
    rules.add_argument(
        "--pass-rate", type=float, nargs=2, metavar=("LOW", "HIGH"),
        help="keep prompts whose share of correct responses is in [LOW, HIGH]",
    )  # fmt: skip
    rules.add_argument(
        "--hardest", type=number, metavar="N",
        help="keep the N prompts with the lowest mean score, or with a fraction such as 0.25 that "
        "share of those left (Pre-PPO, arXiv 2503.22230); scores are standardized within each "
        "verifier's prompts first",
    )  # fmt: skip
    rules.add_argument(
        "--within", metavar="COLUMN",
        help="with --hardest: standardize within the values of this column instead",
    )  # fmt: skip
    columns = parser.add_argument_group("columns")
    columns.add_argument(
        "--best-of", metavar="COLUMN",
        help="write each prompt's response of the highest score, such as a reward model's, into "
        "this column; of equal scores the first",
    )  # fmt: skip
    shared.add_sampling(parser, samples=8, temperature=1.0, top_p=1.0, top_k=-1)
    shared.add_processes(parser)
    return parser
