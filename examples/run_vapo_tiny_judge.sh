#!/usr/bin/env bash
# The tiny run with a language model in place of the verifier: trains a judge, serves it with vLLM, and trains against
# its verdicts. The held-out problems have the true verifier.
#
#   bash examples/run_vapo_tiny_judge.sh [--seed N] [--port N] [section.field=value ...]
#
# Output is in runs/tiny/seed_N, the server's in judge.log there. If interrupted, the same command resumes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

seed=0 port=8000
overrides=()
while [ $# -gt 0 ]; do
  case "$1" in
    --seed) seed="${2:?--seed needs a number}"; shift 2 ;;
    --port) port="${2:?--port needs a number}"; shift 2 ;;
    -h | --help) sed -n '2,7s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *=*) overrides+=("$1"); shift ;;
    *) echo "error: '$1' is none of --seed N, --port N, section.field=value" >&2; exit 2 ;;
  esac
done
out="runs/tiny/seed_$seed"

source tools/setup_env.sh
source examples/make.sh

make examples/tiny/make_base_model.py --out "$out/base" --seed "$seed"
make examples/tiny/task.py --out "$out/data" --seed "$seed"
sed 's/}$/, "verifier": "math"}/' "$out/data/test.jsonl" >"$out/data/test_math.jsonl"
make examples/tiny/make_judge.py --out "$out/judge" --seed "$seed"

source examples/tiny/serve_judge.sh
serve_judge "$out/judge" "$port" "$out/judge.log"

trap - INT
"$VAPO_PYTHON" -m vapo_megatron train --config examples/configs/tiny.yaml --config examples/configs/tiny_judge.yaml \
  "seed=$seed" "model.hf_path=$out/base" "logging.run_dir=$out/judged" \
  "reward.verifiers.judge.base_url=http://127.0.0.1:$port/v1" "reward.verifiers.judge.cache=$out/judge_cache" \
  "data.train_path=$out/data/train.jsonl" "evaluation.path=$out/data/test_math.jsonl" \
  "${overrides[@]}"
