#!/usr/bin/env bash
# Pre-PPO (arXiv 2503.22230) in miniature, on a CPU: with a reward that can be hacked on a third of the problems, prompts
# that the reward scores the base model lowest on, against random prompts of the same number.
#
#   bash examples/run_selection_tiny.sh [--seeds 0 1 2] [--steps 12] [--jobs 2]
#
# Output is in runs/selection_tiny: table.md, and all runs. If interrupted, the same command resumes.
exec bash "$(dirname "${BASH_SOURCE[0]}")/tiny/run.sh" selection "$@"
