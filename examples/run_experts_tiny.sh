#!/usr/bin/env bash
# The tiny task with a mixture of experts: router replay off, r2 and r3, beside the dense model, on a CPU.
#
#   bash examples/run_experts_tiny.sh [--seeds 0 1 2] [--quick] [--jobs 2] [section.field=value ...]
#
# Output is in runs/experts_tiny: table.md and the run directories. If interrupted, the same command resumes. --quick
# (runs/experts_quick) is one seed of two arms, 3 steps each.
exec bash "$(dirname "${BASH_SOURCE[0]}")/tiny/run.sh" experts "$@"
