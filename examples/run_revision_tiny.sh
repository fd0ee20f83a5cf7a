#!/usr/bin/env bash
# Retro-Search (arXiv 2504.04383) in miniature, on a CPU: supervised fine-tuning of a model that begins again for no reason,
# on its own right traces and on the same with other endings.
#
#   bash examples/run_revision_tiny.sh [--seeds 0 1 2 3 4] [--quick] [--jobs 2]
#
# Output is in runs/revision_tiny: table.md, and all runs. If interrupted, the same command resumes. --quick
# (runs/revision_quick) is one seed with few steps.
exec bash "$(dirname "${BASH_SOURCE[0]}")/tiny/run.sh" revision "$@"
