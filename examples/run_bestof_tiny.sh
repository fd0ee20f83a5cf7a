#!/usr/bin/env bash
# Pairwise-RL (arXiv 2504.04950) in miniature, on a CPU: VAPO on the verdicts of a judge that compares each response with a
# reference, which is the best of eight samples by a reward model, a single sample, or the right answer.
#
#   bash examples/run_bestof_tiny.sh [--seeds 0 1 2 3 4] [--quick] [--jobs 2] [--port N]
#
# Output is in runs/bestof_tiny: table.md, the judge, and all runs. The judge takes three to five minutes. If
# interrupted, the same command resumes. --quick (runs/bestof_quick) is one seed with few steps.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

port=8000 judge=runs/bestof_tiny/judge options=()
while [ $# -gt 0 ]; do
  case "$1" in
    --port) port="${2:?--port needs a number}"; shift 2 ;;
    -h | --help) sed -n '2,8s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *) options+=("$1"); shift ;;
  esac
done

source tools/setup_env.sh
export OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1
"$VAPO_PYTHON" examples/tiny/make_judge.py --pairwise --out "$judge"
source examples/tiny/serve_judge.sh
serve_judge "$judge" "$port" "$judge.log"
"$VAPO_PYTHON" examples/tiny/run.py bestof --judge "http://127.0.0.1:$port/v1" "${options[@]}"
