#!/usr/bin/env bash
# Sets up what is missing, runs the tests that kill, stop and signal whole runs, and prints a table of the faults:
# injected, survived, optimizer updates lost. Arguments go to pytest:
#   bash tests/run_faults.sh tests/e2e/test_faults.py
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tools/setup_env.sh
export OMP_NUM_THREADS=1
[[ $# -gt 0 ]] || set -- tests/e2e/test_kill_matrix.py tests/e2e/test_faults.py
exec "$VAPO_PYTHON" -m pytest -v -m slow "$@"
