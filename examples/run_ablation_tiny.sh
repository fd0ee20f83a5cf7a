#!/usr/bin/env bash
# The paper's table 1 in miniature, on a CPU: VAPO, VAPO without each of its seven techniques, PPO, GRPO and DAPO.
#
#   bash examples/run_ablation_tiny.sh [--form long] [--seeds 3] [--arms NAME ...] [--jobs 2] [section.field=value ...]
#
# Output is in runs/ablation: table.md and comparison.html of all finished arms and seeds, and their run directories.
# If interrupted, the same command resumes. --form long (runs/ablation_long) has responses of 500 to 600 tokens and
# fewer arms. --help lists the arms.
exec bash "$(dirname "${BASH_SOURCE[0]}")/tiny/run.sh" ablation "$@"
