#!/usr/bin/env bash
# SWiRL (arXiv 2504.04736) in miniature, on a CPU: reinforcement learning on single steps of trajectories, which a process
# filter, an outcome filter or none has chosen.
#
#   bash examples/run_swirl_tiny.sh [--seeds 0 1 2 3 4] [--quick] [--jobs 2]
#
# Output is in runs/swirl_tiny: table.md, and all runs. If interrupted, the same command resumes. --quick
# (runs/swirl_quick) is one seed with few steps.
exec bash "$(dirname "${BASH_SOURCE[0]}")/tiny/run.sh" swirl "$@"
