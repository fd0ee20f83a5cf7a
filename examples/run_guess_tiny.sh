#!/usr/bin/env bash
# A game of GEM (the package gem-llm) through the adapter: VAPO, DAPO and GRPO on guess the number, on a CPU.
#
#   bash examples/run_guess_tiny.sh [--seeds 0 1 2 3 4] [--quick] [--jobs 2] [section.field=value ...]
#
# Output is in runs/guess_tiny: table.md and the run directories. If interrupted, the same command resumes. --quick
# (runs/guess_quick) is one seed of two arms, 5 steps each. GEM comes from the package index, once, into runs/packages.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tools/setup_env.sh
packages="$PWD/runs/packages/gem"
if [[ ! -e "$packages/gem/__init__.py" ]]; then
  # Without its pins, which would change the environment; the adapter has stand-ins for what the games need not.
  "$VAPO_PYTHON" -m pip install -qq --disable-pip-version-check --no-deps --target "$packages" gem-llm==0.1.0
fi
export PYTHONPATH="$packages${PYTHONPATH:+:$PYTHONPATH}"
exec "$VAPO_PYTHON" examples/tiny/run.py guess "$@"
