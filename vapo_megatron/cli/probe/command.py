"""Make probes of reflection: prompts with the beginning of a response that has an error.

  vapo probe self --samples runs/evaluation/hf/test.jsonl --out self.parquet
  vapo probe arithmetic --data gsm8k.parquet --chain-column solution --out arithmetic.parquet

Whether a model that goes on from there notices the error is what the probes measure
(arXiv 2504.04022). The output has the rows' columns, prefix, wrong_answer and task.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vapo_megatron.cli.command import Parser, run
from vapo_megatron.config import VapoConfig, load_config
from vapo_megatron.errors import ConfigError, DataError

if TYPE_CHECKING:
    from vapo_megatron.cli.probe.probes import Made
    from vapo_megatron.data.problems import Problem

SELF = """Take a model's own wrong chains of thought.

  vapo probe self --samples runs/evaluation/hf/test.jsonl --out self.parquet --cut 0.5

--samples is what vapo evaluate or vapo select wrote. A prefix is a wrong sample without the line
or sentence of its final answer, or the first steps of that.
"""

ARITHMETIC = """Put an error into given chains of thought.

  vapo probe arithmetic --data gsm8k.parquet --chain-column solution --out arithmetic.parquet

One step `a op b = c` of each chain gets a wrong value, where its value is a new number, and later
steps and sentences that use it follow. The last step's value must be the row's answer.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0; 2 for a user's mistake; 130 when interrupted."""

    def work() -> object:
        options = _parser().parse_args(argv)
        return options.work(options)

    return run("probe", work, interrupted="nothing was written")


def _self(options: argparse.Namespace) -> str:
    _check(options)
    if options.per_problem < 1:
        raise ConfigError(f"--per-problem={options.per_problem} must be at least 1; change it")
    from vapo_megatron.cli.probe import probes
    from vapo_megatron.rollout.evaluation.samples_file import read_samples

    header, lines = read_samples(options.samples)
    if "probe" in header:
        raise DataError(
            f"{options.samples} is of responses that go on from a prefix, which are no whole "
            "chains; give samples without one"
        )
    # The verifiers are those that judged the samples, unless the command line names others.
    noted = [f"reward.{name}={json.dumps(v)}" for name, v in header.get("reward", {}).items()]
    config = load_config([], [*noted, *options.overrides])
    data = options.data or Path(header["data"])
    problems, counts = probes.read_rows(data, config.data), Counter[str]()
    made = probes.self_probes(
        lines, problems, config.reward, samples=options.samples, data=data,
        cutting=probes.Cut(options.cut, options.separator), most=options.per_problem,
        counts=counts,
    )  # fmt: skip
    about = {"samples": str(options.samples), "per_problem": options.per_problem, "header": header}
    return _make(made, problems, data, options, config, counts, about)


def _arithmetic(options: argparse.Namespace) -> str:
    _check(options)
    from vapo_megatron.cli.probe import probes

    config = load_config([], options.overrides)
    problems = probes.read_rows(options.data, config.data)
    made = probes.arithmetic_probes(
        problems, data=options.data, columns=config.data, chain_column=options.chain_column,
        cutting=probes.Cut(options.cut, options.separator), seed=options.seed,
    )  # fmt: skip
    about = {"chain_column": options.chain_column, "seed": options.seed}
    return _make(made, problems, options.data, options, config, Counter(), about)


def _check(options: argparse.Namespace) -> None:
    """Refuse options that are out of their range, and to replace another file."""
    from vapo_megatron.cli.probe.probes import KIND, METADATA_KEY
    from vapo_megatron.cli.select.table import check_out

    if not 0 < options.cut <= 1:
        raise ConfigError(f"--cut={options.cut:g} must be in (0, 1], a share of steps; change it")
    try:
        is_empty = re.compile(options.separator).fullmatch("") is not None
    except re.error as error:
        raise ConfigError(
            f"--separator={options.separator} is no regular expression ({error}); correct it"
        ) from None
    if is_empty:
        raise ConfigError(f"--separator={options.separator} matches nothing at all; change it")
    check_out(options.out, METADATA_KEY, KIND)


def _make(
    made: Iterator[Made],
    problems: Sequence[Problem],
    data: Path,
    options: argparse.Namespace,
    config: VapoConfig,
    counts: Counter[str],
    about: Mapping[str, Any],
) -> str:
    from vapo_megatron.cli.probe.probes import make

    settings = {"data": str(data), "cut": options.cut, "separator": options.separator}
    return make(
        made, problems, data, options.out, columns=config.data, reward=config.reward,
        prefix_column=options.prefix_column, task=options.task, counts=counts,
        skip_unusable=options.skip_unusable, about={**about, **settings},
    )  # fmt: skip


def _parser() -> Parser:
    parser = Parser(prog="vapo probe", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="self | arithmetic")
    own = commands.add_parser("self", help="from a model's own wrong samples", description=SELF)
    own.add_argument(
        "--samples", type=Path, required=True, metavar="FILE", help="what vapo evaluate wrote"
    )
    own.add_argument(
        "--data", type=Path, metavar="FILE", help="that was sampled (default: as the samples say)"
    )
    own.add_argument(
        "--per-problem", type=int, default=1, metavar="N",
        help="the most probes of one problem, its first wrong samples (default: %(default)s)",
    )  # fmt: skip
    _add_output(own, "self")
    own.set_defaults(work=_self)
    arithmetic = commands.add_parser(
        "arithmetic", help="from right chains of thought", description=ARITHMETIC
    )
    arithmetic.add_argument(
        "--data", type=Path, required=True, metavar="FILE", help="JSONL or parquet"
    )
    arithmetic.add_argument(
        "--chain-column", required=True, metavar="COLUMN",
        help="of right chains of thought, with or without a final answer at the end",
    )  # fmt: skip
    arithmetic.add_argument(
        "--seed", type=int, default=0, metavar="S", help="other errors (default: %(default)s)"
    )
    _add_output(arithmetic, "arithmetic")
    arithmetic.set_defaults(work=_arithmetic)
    return parser


def _add_output(parser: argparse.ArgumentParser, task: str) -> None:
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.parquet")
    parser.add_argument(
        "--cut", type=float, default=1.0, metavar="SHARE",
        help="keep this share of the chain's steps, at least one (default: 1)",
    )  # fmt: skip
    parser.add_argument(
        "--separator", default="\n", metavar="REGEX",
        help="what ends a step, for --cut (default: a line's end)",
    )  # fmt: skip
    parser.add_argument(
        "--prefix-column", default="prefix", metavar="NAME", help="(default: %(default)s)"
    )
    parser.add_argument(
        "--task", default=task, metavar="NAME",
        help="goes into the column task, by which metrics are divided (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--skip-unusable", action="store_true",
        help="leave out and count rows of which no probe can be made; default: an error",
    )  # fmt: skip
    parser.add_argument(
        "overrides", nargs="*", metavar="section.field=value",
        help="fields of data and reward, such as data.answer_column=target reward.verifier=exact",
    )  # fmt: skip
