#!/usr/bin/env bash
# Sets up what is missing and runs the tests. Arguments go to pytest:  bash tests/run.sh tests/algorithm -k gae
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tools/setup_env.sh
export OMP_NUM_THREADS=1
"$VAPO_PYTHON" -m ruff check .
exec "$VAPO_PYTHON" -m pytest -q "$@"
