#!/usr/bin/env bash
# Probes of reflection (arXiv 2504.04022) in miniature, on a CPU: what a model that errs and often corrects itself makes of
# chains of thought with an error, before and after VAPO, with and without a trigger.
#
#   bash examples/run_reflection_tiny.sh [--seeds 0 1 2 3 4] [--quick] [--jobs 2]
#
# Output is in runs/reflection_tiny: table.md, and all runs. If interrupted, the same command resumes. --quick
# (runs/reflection_quick) is one seed with few steps.
exec bash "$(dirname "${BASH_SOURCE[0]}")/tiny/run.sh" reflection "$@"
