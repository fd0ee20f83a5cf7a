#!/usr/bin/env bash
# All of VAPO on two CPU processes, from scratch to a better model:
#   sets up Python, makes a tiny base model and its problems, trains with TP=2, evaluates, exports, reports.
#
#   bash examples/run_vapo_tiny.sh [--seed N] [section.field=value ...]
#
# Output is in runs/tiny/seed_N. If interrupted, the same command resumes from the last checkpoint.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

seed=0
overrides=()
while [ $# -gt 0 ]; do
  case "$1" in
    --seed) seed="${2:?--seed needs a number}"; shift 2 ;;
    --seed=*) seed="${1#*=}"; shift ;;
    -h | --help) sed -n '2,7s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *=*) overrides+=("$1"); shift ;;
    *) echo "error: '$1' is neither --seed N nor section.field=value" >&2; exit 2 ;;
  esac
done
out="runs/tiny/seed_$seed"

source tools/setup_env.sh
source examples/make.sh

make examples/tiny/make_base_model.py --out "$out/base" --seed "$seed"
make examples/tiny/task.py --out "$out/data" --seed "$seed"
exec "$VAPO_PYTHON" -m vapo_megatron train --config examples/configs/tiny.yaml \
  "seed=$seed" "model.hf_path=$out/base" \
  "data.train_path=$out/data/train.jsonl" "evaluation.path=$out/data/test.jsonl" \
  "logging.run_dir=$out/vapo" "${overrides[@]}"
