#!/usr/bin/env bash
# Where a value model pays: VAPO, DAPO, GRPO and controls on a task of many small decisions, on a CPU.
#
#   bash examples/run_credit_tiny.sh [--seeds 5] [--quick | --sensitivity] [--jobs 2] [section.field=value ...]
#
# Output is in runs/credit: table.md, credit.html, curves.svg and lead.svg of each form, and the run directories. If
# interrupted, the same command resumes. --quick (runs/credit_quick) is one seed of three arms; --sensitivity adds runs
# with other settings and writes sensitivity.md, .html and .svg.
exec bash "$(dirname "${BASH_SOURCE[0]}")/tiny/run.sh" credit "$@"
