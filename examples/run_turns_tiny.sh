#!/usr/bin/env bash
# Where a value model pays over the turns of an episode: VAPO, PPO, DAPO and GRPO on turns with luck, on a CPU.
#
#   bash examples/run_turns_tiny.sh [--seeds 0 1 2 3 4] [--quick] [--jobs 2] [section.field=value ...]
#
# Output is in runs/turns_tiny: table.md and the run directories. If interrupted, the same command resumes. --quick
# (runs/turns_quick) is one seed of two arms, 5 steps each.
exec bash "$(dirname "${BASH_SOURCE[0]}")/tiny/run.sh" turns "$@"
