#!/usr/bin/env python3
"""Prepare training or evaluation problems: one parquet file of prompts and answers.

python tools/prepare_prompts.py --data FILE [FILE ...] --out FILE.parquet --tokenizer DIR

Reads JSONL, CSV and parquet files, or OWNER/NAME[:FILE] from the Hugging Face hub. The shape is
found from the columns:

    verl     prompt (one user message, or text), reward_model.ground_truth    DAPO-Math-17k
    gsm8k    question, answer (behind ####)                                   GSM8K
    aime     problem, answer                                                  AIME
    plain    prompt, answer

Problems that repeat are kept once; those whose rows have different answers, and those over the
length limit, are left out and counted. The result's columns are what training reads by default.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from vapo_megatron.cli.command import Parser, run
from vapo_megatron.cli.prepare.columns import SHAPES, Shape, choose_columns, choose_shape
from vapo_megatron.cli.prepare.prepare import TEMPLATES, prepare
from vapo_megatron.config import RolloutConfig
from vapo_megatron.errors import DataError


def main(arguments: list[str] | None = None) -> int:
    """Return 0; 2 after an error that the user can put right; 130 when interrupted."""
    return run(
        "prepare_prompts",
        lambda: _prepare(_parser().parse_args(arguments)),
        interrupted="nothing was written",
    )


def _prepare(options: argparse.Namespace) -> str:
    from vapo_megatron.reward.math_verifier import MathVerifier
    from vapo_megatron.rollout.tokenizer import load_tokenizer

    def choose(columns: Sequence[str], where: str) -> tuple[str, Shape]:
        if options.prompt_column or options.answer_column:
            return choose_columns(columns, options.prompt_column, options.answer_column, where)
        return choose_shape(columns, options.shape, where)

    if not Path(options.tokenizer).is_dir():
        raise DataError(f"--tokenizer={options.tokenizer} is no directory; give the model's")
    with MathVerifier() as verifier:
        summary = prepare(
            options.data,
            options.out,
            tokenizer=load_tokenizer(options.tokenizer),
            verifier=verifier,
            template=options.template,
            max_prompt_tokens=options.max_prompt_tokens,
            choose=choose,
            drop_unparsable=options.drop_unparsable,
            overwrite=options.overwrite,
        )
    return f"{summary.describe()}\n{options.out}"


def _parser() -> argparse.ArgumentParser:
    parser = Parser(description=__doc__)
    parser.add_argument(
        "--data", nargs="+", required=True, metavar="FILE",
        help=".jsonl, .csv, .parquet, or OWNER/NAME[:FILE] on the hub",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.parquet")
    parser.add_argument(
        "--tokenizer", required=True, metavar="DIR",
        help="HF directory of the model that will be trained: prompts are measured with it",
    )  # fmt: skip
    parser.add_argument(
        "--template", choices=TEMPLATES, default="answer",
        help="answer (default): for base models, text that asks for a last line 'Answer: ...'; "
        "chat: the same in the tokenizer's chat template; none: prompts as they are",
    )  # fmt: skip
    parser.add_argument(
        "--max-prompt-tokens", type=int, default=RolloutConfig().max_prompt_tokens, metavar="N",
        help="problems with longer prompts are left out (default %(default)s)",
    )  # fmt: skip
    columns = parser.add_mutually_exclusive_group()
    columns.add_argument(
        "--shape", choices=sorted(SHAPES), help="default: the one that the columns fit"
    )
    columns.add_argument(
        "--prompt-column", metavar="NAME", help="read this column as it is; with --answer-column"
    )
    parser.add_argument("--answer-column", metavar="NAME", help="with --prompt-column")
    parser.add_argument(
        "--drop-unparsable", action="store_true",
        help="leave out problems whose answer the verifier cannot read; default: refuse them",
    )  # fmt: skip
    parser.add_argument("--overwrite", action="store_true", help="replace --out")
    return parser


if __name__ == "__main__":
    sys.exit(main())
