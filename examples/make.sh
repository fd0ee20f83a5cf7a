# For scripts, after tools/setup_env.sh: make SCRIPT [ARGUMENT ...] runs Python.
export OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1

# A background command does not hear Ctrl-C, on which Python would print a traceback.
make() { "$VAPO_PYTHON" "$@" & wait "$!"; }
trap 'kill "$!" 2>/dev/null; [ ! -t 2 ] || printf "\e[?25h\n" >&2  # The cursor is hidden.
  echo "interrupted; the same command goes on" >&2; exit 130' INT
