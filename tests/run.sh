#!/usr/bin/env bash
# Sets up what is missing and runs the tests, three files at a time, which keeps two cores at work: some tests wait.
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
"$VAPO_PYTHON" -m ruff check vapo_megatron tools examples tests setup.py
[[ $# -gt 0 ]] || set -- -n 3 --dist loadfile --no-loadscope-reorder
exec "$VAPO_PYTHON" -m pytest -q "$@"
