#!/usr/bin/env bash
# The paper's table 1 in miniature, on a CPU: VAPO, VAPO without each of its seven techniques, PPO, GRPO and DAPO.
#
#   bash examples/run_ablation_tiny.sh [--form long] [--seeds 3] [--arms NAME ...] [--jobs 2] [section.field=value ...]
#
# Everything lands in runs/ablation: table.md and comparison.html, of all arms and seeds that are there, and a run
# directory for each. Started again after an interruption, it goes on where it was. --form long (runs/ablation_long) has
# responses of 500 to 600 tokens and fewer arms. --help names them.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tools/setup_env.sh
exec "$VAPO_PYTHON" examples/tiny/ablation.py "$@"
