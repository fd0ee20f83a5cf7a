#!/usr/bin/env bash
# Sets up what is missing and runs the tests, four files at a time, which keeps two cores at work: some tests wait.
# Arguments go to pytest, which then runs one test after the other:  bash tests/run.sh tests/algorithm -k gae
# --environment newest before them: with Python 3.12 and the newest megatron-core (see tools/setup_env.sh).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [[ "${1:-}" == --environment ]]; then
  VAPO_ENVIRONMENT="${2:?--environment needs a name: newest}"
  shift 2
fi
source tools/setup_env.sh
export OMP_NUM_THREADS=1
# Without bytecode on disk every process compiles the tests and translates megatron-core anew.
unset PYTHONDONTWRITEBYTECODE
# Not ".": a verifier of your own may lie beside these.
sources=(vapo_megatron tools examples tests docs setup.py)
"$VAPO_PYTHON" -m ruff check "${sources[@]}"
"$VAPO_PYTHON" -m ruff format --check --quiet "${sources[@]}"
[[ $# -eq 0 ]] || exec "$VAPO_PYTHON" -m pytest -q "$@"
# Types take most of a minute, in which the first tests wait for what they share.
"$VAPO_PYTHON" -m mypy vapo_megatron & types=$!
"$VAPO_PYTHON" -m pytest -q -n 4 --dist loadfile --no-loadscope-reorder || failed=$?
wait "$types" && exit "${failed:-0}"
