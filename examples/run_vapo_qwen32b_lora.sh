#!/usr/bin/env bash
# VAPO on Qwen2.5-32B with adapters (LoRA), on one node of 8 H100. Two ways to start it:
#
#   bash examples/run_vapo_qwen32b_lora.sh [section.field=value ...]
#   torchrun [torchrun's options] examples/run_vapo_qwen32b_lora.sh [section.field=value ...]
#
# The first runs torchrun itself. For several nodes, run it on each with NNODES, NODE_RANK and MASTER_ADDR set;
# NPROC_PER_NODE and MASTER_PORT have defaults. VAPO_PYTHON is the Python interpreter (default: python3).
# --dry-run prints the resolved configuration and exits; --help lists every field.

# Bash runs this line and hands over to Python, for which it is only a string.
"exec" "${VAPO_PYTHON:-python3}" "$0" "$@"

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from vapo_megatron.cli.launch import run_recipe  # noqa: E402

if __name__ == "__main__":
    sys.exit(run_recipe(__file__, ["qwen2.5_base.yaml", "qwen2.5_32b_lora.yaml"], sys.argv[1:]))
