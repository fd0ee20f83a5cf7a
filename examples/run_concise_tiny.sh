#!/usr/bin/env bash
# Concise reasoning by a second phase of reinforcement learning (arXiv 2504.05185), on a CPU: from a trained policy, on
# few problems that it solves sometimes, correct responses become shorter at the same accuracy.
#
#   bash examples/run_concise_tiny.sh [--seeds 0 1 2] [--quick] [--jobs 2]
#
# Output is in runs/concise_tiny: table.md, lengths.svg (length against the share of negative rewards), and all runs.
# If interrupted, the same command resumes. --quick takes a few small steps, which show that it works and no more.
exec bash "$(dirname "${BASH_SOURCE[0]}")/tiny/run.sh" concise "$@"
