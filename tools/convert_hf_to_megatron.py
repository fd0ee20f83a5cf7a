#!/usr/bin/env python3
"""Convert a Hugging Face directory to a megatron-core distributed checkpoint.

python tools/convert_hf_to_megatron.py --hf DIR --out DIR \\
    --tensor-model-parallel-size N --pipeline-model-parallel-size M
torchrun --nproc-per-node K tools/convert_hf_to_megatron.py ...    each process writes its own part

The checkpoint holds config.json and the tokenizer too: model.hf_path and model.critic_hf_path take
it in place of a Hugging Face directory, under any layout; the one that it was written for reads
each rank's own files alone. Weights pass through in blocks, so that memory does not grow with the
model, and are kept bit by bit.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from vapo_megatron.cli.command import Parser, add_conversion_arguments, run
from vapo_megatron.config import load_config


def main(arguments: list[str] | None = None) -> int:
    """Return 0; 2 after an error that the user can put right; 130 when interrupted."""
    parser = Parser(description=__doc__)
    parser.add_argument(
        "--hf", required=True, metavar="DIR", help="config.json, safetensors, tokenizer"
    )
    add_conversion_arguments(parser)
    for name, default, what in (
        ("tensor-model-parallel-size", 1, "ranks that share each layer's matrices"),
        ("pipeline-model-parallel-size", 1, "ranks that share the layers"),
        ("virtual-pipeline-model-parallel-size", None, "model chunks on each pipeline rank"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=what)
    parser.add_argument(
        "--role", choices=("actor", "critic"), default="actor",
        help="a critic is made of a policy (new value head) or of a reward model with one label",
    )  # fmt: skip
    parser.add_argument(
        "--make-vocab-size-divisible-by", type=int, default=128, metavar="N",
        help="the vocabulary is padded to a multiple of this times the tensor-parallel size",
    )  # fmt: skip
    parser.add_argument(
        "--value-head-init-std", type=float, default=0.0, metavar="STD",
        help="standard deviation of a critic's new value head (default 0: V = 0)",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="of a critic's new value head")

    def convert() -> Path:
        options = parser.parse_args(arguments)
        tp_size = options.tensor_model_parallel_size
        pp_size = options.pipeline_model_parallel_size
        settings = {
            "parallel.world_size": tp_size * pp_size,
            "parallel.tensor_model_parallel_size": tp_size,
            "parallel.pipeline_model_parallel_size": pp_size,
            "parallel.virtual_pipeline_model_parallel_size": (
                options.virtual_pipeline_model_parallel_size or "null"
            ),
            "model.make_vocab_size_divisible_by": options.make_vocab_size_divisible_by,
            "model.value_head_init_std": options.value_head_init_std,
            "seed": options.seed,
        }
        config = load_config([], [f"{name}={value}" for name, value in settings.items()])
        from vapo_megatron.weights.convert.to_megatron import convert_to_megatron

        return convert_to_megatron(
            options.hf,
            options.out,
            config.parallel,
            options.role,
            make_vocab_size_divisible_by=config.model.make_vocab_size_divisible_by,
            value_head_init_std=config.model.value_head_init_std,
            seed=config.seed,
            overwrite=options.overwrite,
        )

    return run("convert_hf_to_megatron", convert, interrupted="nothing is left under --out")


if __name__ == "__main__":
    sys.exit(main())
