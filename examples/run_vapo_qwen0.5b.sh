#!/usr/bin/env bash
# VAPO on Qwen2.5-0.5B, on one GPU of 80 GB. One file, two ways of starting it:
#
#   bash examples/run_vapo_qwen0.5b.sh [section.field=value ...]
#   torchrun [torchrun's options] examples/run_vapo_qwen0.5b.sh [section.field=value ...]
#
# The first calls torchrun itself. With several nodes it is started on each, with NNODES, NODE_RANK and MASTER_ADDR
# set; NPROC_PER_NODE and MASTER_PORT have defaults. VAPO_PYTHON names the interpreter (default: python3).
# --dry-run prints the resolved configuration and starts nothing; --help lists every field.

# To bash this line hands the file over to Python; to Python it is a string.
"exec" "${VAPO_PYTHON:-python3}" "$0" "$@"

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from vapo_megatron.cli.launch import run_recipe  # noqa: E402

if __name__ == "__main__":
    sys.exit(run_recipe(__file__, ["qwen2.5_base.yaml", "qwen2.5_0.5b.yaml"], sys.argv[1:]))
