#!/usr/bin/env bash
# Sets up Python and runs a miniature:  bash examples/tiny/run.sh NAME [options]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source tools/setup_env.sh
exec "$VAPO_PYTHON" examples/tiny/run.py "$@"
