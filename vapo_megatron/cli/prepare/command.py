"""Make a data file for training or evaluation: parquet with the columns prompt and answer.

  vapo prepare --data train.jsonl --out train.parquet --tokenizer models/Qwen2.5-7B
  vapo prepare --data OWNER/NAME --out train.parquet --tokenizer models/Qwen2.5-7B

It reads JSONL, CSV and parquet files, local or on the Hugging Face hub (OWNER/NAME[:FILE]). The
format is detected from the columns:

  verl     prompt, reward_model.ground_truth                                DAPO-Math-17k
  gsm8k    question, answer (after ####)                                    GSM8K
  aime     problem, answer                                                  AIME
  plain    prompt, answer
  messages messages; the answer is the last turn's, or a column answer        chats
  sharegpt conversations of from and value, the same                          ShareGPT

Prompts are texts or chat messages. Duplicate problems are kept once. Problems whose duplicates
disagree on the answer, and those with too many tokens, are dropped and counted. Other columns stay.
The first prompt is printed as its tokens read.

  vapo prepare --reasoning-gym chain_sum,gcd --rows 2000 --out train.parquet --tokenizer DIR

makes the rows with the tasks of the package reasoning_gym.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence
from pathlib import Path

from vapo_megatron.cli.command import Parser, run
from vapo_megatron.cli.prepare.columns import SHAPES, choose_shape
from vapo_megatron.cli.prepare.gym import (
    add_options,
    add_task_option,
    prepare_tasks,
    refuse_mixed,
)
from vapo_megatron.cli.prepare.prepare import prepare
from vapo_megatron.cli.prepare.rows import ALL
from vapo_megatron.cli.prepare.summary import TEMPLATES
from vapo_megatron.config import RewardConfig, RolloutConfig
from vapo_megatron.config.missing import missing_model
from vapo_megatron.errors import DataError


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0; 2 for a user's mistake; 130 when interrupted."""
    return run(
        "prepare", lambda: _prepare(_parser().parse_args(argv)), interrupted="nothing was written"
    )


def _prepare(options: argparse.Namespace) -> str:
    from vapo_megatron.reward.math_verifier import MathVerifier
    from vapo_megatron.reward.verifiers import Verifiers
    from vapo_megatron.rollout.tokenizer import load_tokenizer

    if not Path(options.tokenizer).is_dir():
        raise DataError(missing_model("--tokenizer", options.tokenizer))
    refuse_mixed(options)
    tokenizer = load_tokenizer(options.tokenizer, "--tokenizer")
    if options.reasoning_gym is not None:
        with MathVerifier() as verifier:
            written = prepare_tasks(options, tokenizer, verifier)
        return "\n".join(f"{summary.describe()}\n{out}" for summary, out in written)
    with MathVerifier() as verifier, Verifiers(RewardConfig(verifier="code")) as code_verifier:
        summary = prepare(
            options.data,
            options.out,
            tokenizer=tokenizer,
            verifier=verifier,
            template=options.template,
            max_prompt_tokens=options.max_prompt_tokens,
            choose=functools.partial(
                choose_shape,
                name=options.shape,
                prompt_column=options.prompt_column,
                answer_column=options.answer_column,
                needs_answers=not options.without_answers,
            ),
            skip_unusable=options.skip_unusable,
            needs_answers=not options.without_answers,
            dropped=options.drop_columns,
            solution_column=options.solution_column,
            code_verifier=code_verifier,
            overwrite=options.overwrite,
        )
    return f"{summary.describe()}\n{options.out}"


def _parser() -> Parser:
    usage = "vapo prepare --data FILE [FILE ...] --out FILE.parquet --tokenizer DIR [options]"
    parser = Parser(prog="vapo prepare", usage=usage, description=__doc__)
    files = parser.add_argument_group("files")
    source = files.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--data", nargs="+", metavar="FILE",
        help=".jsonl, .csv, .parquet, or OWNER/NAME[:FILE] on the hub",
    )  # fmt: skip
    add_task_option(source)
    files.add_argument("--out", type=Path, required=True, metavar="FILE.parquet")
    files.add_argument("--overwrite", action="store_true", help="replace --out")
    files.add_argument(
        "--tokenizer", required=True, metavar="DIR",
        help="HF directory of the model to train; prompt lengths are measured with it",
    )  # fmt: skip
    prompts = parser.add_argument_group("prompts")
    prompts.add_argument(
        "--template", choices=TEMPLATES, default="answer",
        help="answer (default): for base models, text that asks for a last line 'Answer: ...'; "
        "chat: the same in the tokenizer's chat template; none: prompts as they are, for those "
        "that are complete: already in a chat template, or for a model without one",
    )  # fmt: skip
    prompts.add_argument(
        "--max-prompt-tokens", type=int, default=RolloutConfig().max_prompt_tokens, metavar="N",
        help="drop problems with longer prompts (default: %(default)s)",
    )  # fmt: skip
    answers = parser.add_argument_group("answers")
    answers.add_argument(
        "--skip-unusable", "--drop-unparsable", action="store_true",
        help="leave out and count rows whose answer is missing or refused by the verifier; "
        "default: an error",
    )  # fmt: skip
    answers.add_argument(
        "--without-answers", action="store_true",
        help="accept rows without an answer, for verifiers that need none; it is null there",
    )  # fmt: skip
    answers.add_argument(
        "--solution-column", metavar="NAME",
        help="of programs that solve the problems: each is run against its row's tests, and a row "
        "that its own solution does not pass is an error, or left out with --skip-unusable",
    )  # fmt: skip
    columns = parser.add_argument_group("columns (default: detected)")
    choice = columns.add_mutually_exclusive_group()
    choice.add_argument("--shape", choices=sorted(SHAPES), help="one of the formats above")
    choice.add_argument(
        "--prompt-column", metavar="NAME", help="column to take as it is; with --answer-column"
    )
    columns.add_argument("--answer-column", metavar="NAME", help="with --prompt-column")
    columns.add_argument(
        "--drop-columns", nargs="+", default=(), metavar="NAME",
        help=f"other columns to leave out, or {ALL}; default: all are kept",
    )  # fmt: skip
    add_options(parser)
    return parser
