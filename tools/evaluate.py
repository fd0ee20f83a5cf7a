#!/usr/bin/env python3
"""Evaluate a checkpoint: avg@k, pass@k, majority@k, length and truncation, with 95% intervals.

python tools/evaluate.py --checkpoint DIR --data FILE [section.field=value ...]
torchrun --nproc-per-node N tools/evaluate.py ...        N / vLLM's TP replicas share the problems

DIR is a Hugging Face directory, or a run directory: then its hf_export and its configuration are
taken. Every sample goes to --out, a JSONL file; stopped and started again, the evaluation goes on
with the problems that are missing there. Overrides are those of training that concern sampling,
such as rollout.max_response_tokens=8192 rollout.tensor_model_parallel_size=4 model.dtype=float32
rollout.gpu_memory_utilization=0.9 seed=1.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from vapo_megatron.cli.command import Parser, run


def main(arguments: list[str] | None = None) -> int:
    """Return 0; 2 after an error that the user can put right; 130 when interrupted."""
    return run(
        "evaluate",
        lambda: _evaluate(_parser().parse_intermixed_args(arguments)),
        interrupted="the same command goes on from here",
        # torchrun ends the other processes with SIGTERM: they have nothing to say or to clean up.
        signals=[signal.SIGINT],
    )


def _evaluate(options: argparse.Namespace) -> Path | None:
    # The checkpoint is on this machine, so nobody has to be asked; read when vLLM is loaded.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    # These load torch and vLLM; a wrong option is answered before.
    from vapo_megatron.cli.evaluate import (
        default_out,
        evaluate_checkpoint,
        evaluation_config,
        print_table,
    )

    given = {name: getattr(options, name) for name in ("samples", "temperature", "top_p", "top_k")}
    flags = [f"evaluation.{name}={value}" for name, value in given.items() if value is not None]
    config = evaluation_config(options.checkpoint, [*options.overrides, *flags])
    out = options.out or default_out(options.checkpoint, options.data)
    found = evaluate_checkpoint(options.checkpoint, options.data, config, out, options.batch)
    if found is None:
        return None
    print_table(found, f"{options.checkpoint} on {options.data}")
    return out


def _parser() -> argparse.ArgumentParser:
    parser = Parser(description=__doc__)
    parser.add_argument(
        "--checkpoint", type=Path, required=True, metavar="DIR", help="HF or run directory"
    )
    parser.add_argument(
        "--data", type=Path, required=True, metavar="FILE",
        help="JSONL or parquet with the columns prompt and answer (tools/prepare_prompts.py)",
    )  # fmt: skip
    default = "default: the run's; of an HF directory"
    parser.add_argument("--samples", type=int, metavar="K", help=f"per problem ({default} 32)")
    parser.add_argument("--temperature", type=float, metavar="T", help=f"({default} 1.0)")
    parser.add_argument("--top-p", type=float, metavar="P", help=f"({default} 0.7)")
    parser.add_argument("--top-k", type=int, metavar="K", help=f"({default} -1, off)")
    parser.add_argument(
        "--out", type=Path, metavar="FILE",
        help="default: runs/evaluation/PATH/DATA.jsonl, with the checkpoint's path; the summary "
        "stands beside it",
    )  # fmt: skip
    parser.add_argument(
        "--batch", type=int, metavar="N",
        help="problems that are sampled together and then written (default: two responses for "
        "each that the replicas sample at once)",
    )  # fmt: skip
    parser.add_argument("overrides", nargs="*", metavar="section.field=value")
    return parser


if __name__ == "__main__":
    sys.exit(main())
