#!/usr/bin/env bash
# VAPO on Qwen2.5-32B. One file, two ways of starting it:
#
#   bash examples/run_vapo_qwen32b.sh [section.field=value ...]            on every node; reads NNODES, NODE_RANK,
#                                                                          MASTER_ADDR, MASTER_PORT, NPROC_PER_NODE
#   torchrun [options] examples/run_vapo_qwen32b.sh [section.field=value ...]
#
# --dry-run prints the resolved configuration; --help lists every field.
# To bash the next line is a command that hands this file to Python; to Python it is a string.
"exec" "${VAPO_PYTHON:-python3}" "$0" "$@"

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from vapo_megatron.launch import run_recipe  # noqa: E402

if __name__ == "__main__":
    sys.exit(run_recipe(ROOT / "examples/configs/qwen2.5_32b.yaml", __file__, sys.argv[1:]))
