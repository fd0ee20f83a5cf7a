"""Convert weights between Hugging Face directories and megatron-core distributed checkpoints.

  vapo convert to-megatron --hf DIR --out DIR --tensor-model-parallel-size 8
  vapo convert to-hf --megatron RUN/checkpoints/STEP/actor --hf BASE --out DIR
  torchrun --nproc-per-node 8 -m vapo_megatron convert to-hf ...    each process writes its own part

Weights stream through in blocks, so memory does not grow with the model, and are kept bit for bit.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

from vapo_megatron.cli.command import Parser, ProgressBar, add_values, run
from vapo_megatron.config import load_config

TO_MEGATRON = """Convert a Hugging Face directory to a megatron-core distributed checkpoint.

  vapo convert to-megatron --hf DIR --out DIR \\
      --tensor-model-parallel-size N --pipeline-model-parallel-size M
  torchrun --nproc-per-node K -m vapo_megatron convert to-megatron ...    each writes its own part

The checkpoint holds config.json and the tokenizer, so model.hf_path and model.critic_hf_path take
it like a Hugging Face directory, under any layout. Under the layout given here each rank reads its
own files only.
"""

TO_HF = """Convert a megatron-core distributed checkpoint to a Hugging Face directory.

  vapo convert to-hf --megatron DIR --out DIR
  vapo convert to-hf --megatron RUN/checkpoints/STEP/actor --hf BASE --out DIR
  torchrun --nproc-per-node K -m vapo_megatron convert to-hf ...    each writes its own files

It takes converted checkpoints and those of a run, of any layout; optimizer state is left out. A
critic becomes ...ForSequenceClassification if it came from one, else ...ForTokenClassification,
with one label.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0; 2 for a user's mistake; 130 when interrupted."""

    def convert() -> Path:
        options = _parser().parse_args(argv)
        with ProgressBar("MB", unit=10**6) as bar:
            return options.convert(options, bar)

    return run("convert", convert, interrupted="nothing is left under --out")


def _to_megatron(options: argparse.Namespace, bar: ProgressBar) -> Path:
    tp_size = options.tensor_model_parallel_size
    pp_size = options.pipeline_model_parallel_size
    vpp_size = options.virtual_pipeline_model_parallel_size
    ep_size = options.expert_model_parallel_size
    settings = {
        # As few ranks as have a place for each part.
        "parallel.world_size": math.lcm(tp_size, ep_size) * pp_size,
        "parallel.sequence_parallel": str(tp_size > 1).lower(),
        "parallel.expert_model_parallel_size": ep_size,
        "parallel.tensor_model_parallel_size": tp_size,
        "parallel.pipeline_model_parallel_size": pp_size,
        "parallel.virtual_pipeline_model_parallel_size": vpp_size or "null",
        "model.make_vocab_size_divisible_by": options.make_vocab_size_divisible_by,
        "model.value_head_init_std": options.value_head_init_std,
        "seed": options.seed,
    }
    config = load_config([], [f"{name}={value}" for name, value in settings.items()])
    from vapo_megatron.weights.convert.to_megatron import convert_to_megatron

    return convert_to_megatron(
        options.hf, options.out, config.parallel, options.role,
        make_vocab_size_divisible_by=config.model.make_vocab_size_divisible_by,
        value_head_init_std=config.model.value_head_init_std, seed=config.seed,
        overwrite=options.overwrite, on_progress=bar.show,
    )  # fmt: skip


def _to_hf(options: argparse.Namespace, bar: ProgressBar) -> Path:
    from vapo_megatron.weights.convert.to_hf import convert_to_hf

    return convert_to_hf(
        options.megatron, options.out, options.hf, overwrite=options.overwrite, on_progress=bar.show
    )


def _parser() -> Parser:
    parser = Parser(prog="vapo convert", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="to-megatron | to-hf")
    to_megatron = commands.add_parser(
        "to-megatron", help="Hugging Face -> megatron-core", description=TO_MEGATRON
    )
    to_megatron.set_defaults(convert=_to_megatron)
    to_megatron.add_argument(
        "--hf", required=True, metavar="DIR", help="holds config.json, safetensors, tokenizer"
    )
    _add_out(to_megatron)
    to_megatron.add_argument(
        "--role", choices=("actor", "critic"), default="actor",
        help="a critic is made from a policy (new value head) or a reward model with one label",
    )  # fmt: skip
    layout = to_megatron.add_argument_group("layout that each rank reads its own files of")
    add_values(
        layout, int, "N",
        ("--tensor-model-parallel-size", 1, "ranks that share each layer's matrices"),
        ("--pipeline-model-parallel-size", 1, "ranks that share the layers"),
        ("--virtual-pipeline-model-parallel-size", None, "model chunks on each pipeline rank"),
        ("--expert-model-parallel-size", 1, "ranks that share each layer's experts"),
        ("--make-vocab-size-divisible-by", 128,
         "pads the vocabulary to a multiple of this times the tensor-parallel size"),
    )  # fmt: skip
    head = to_megatron.add_argument_group("a critic's new value head")
    head.add_argument(
        "--value-head-init-std", type=float, default=0.0, metavar="STD",
        help="standard deviation of its weights (default 0: V = 0)",
    )  # fmt: skip
    head.add_argument("--seed", type=int, default=0, help="of its weights (default 0)")

    to_hf = commands.add_parser("to-hf", help="megatron-core -> Hugging Face", description=TO_HF)
    to_hf.set_defaults(convert=_to_hf)
    to_hf.add_argument(
        "--megatron", required=True, metavar="DIR", help="holds .metadata and metadata.json"
    )
    to_hf.add_argument(
        "--hf", metavar="DIR",
        help="directory with config.json and the tokenizer (default: the checkpoint itself)",
    )  # fmt: skip
    _add_out(to_hf)
    return parser


def _add_out(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out", required=True, metavar="DIR", help="appears complete, or not at all"
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace an earlier conversion, nothing else"
    )
