#!/usr/bin/env python3
"""Convert a megatron-core distributed checkpoint to a Hugging Face directory.

python tools/convert_megatron_to_hf.py --megatron DIR --out DIR
python tools/convert_megatron_to_hf.py --megatron RUN/checkpoints/STEP/actor --hf BASE --out DIR
torchrun --nproc-per-node K tools/convert_megatron_to_hf.py ...    each process writes its own files

It takes converted checkpoints and a run's own, of any layout; optimizer state is left out. A critic
becomes ...ForSequenceClassification if it came from one, else ...ForTokenClassification, with one
label.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from vapo_megatron.cli.command import Parser, add_conversion_arguments, run


def main(arguments: list[str] | None = None) -> int:
    """Return 0; 2 after an error that the user can put right; 130 when interrupted."""
    parser = Parser(description=__doc__)
    parser.add_argument(
        "--megatron", required=True, metavar="DIR", help="holds .metadata and metadata.json"
    )
    parser.add_argument(
        "--hf", metavar="DIR",
        help="where config.json and the tokenizer come from; default: the checkpoint itself",
    )  # fmt: skip
    add_conversion_arguments(parser)

    def convert() -> Path:
        options = parser.parse_args(arguments)
        from vapo_megatron.weights.convert.to_hf import convert_to_hf

        return convert_to_hf(options.megatron, options.out, options.hf, overwrite=options.overwrite)

    return run("convert_megatron_to_hf", convert, interrupted="nothing is left under --out")


if __name__ == "__main__":
    sys.exit(main())
