#!/usr/bin/env bash
# Makes (or reuses) .venv from requirements/cpu.txt and sets VAPO_PYTHON to its interpreter.
# Source it:  source tools/setup_env.sh     Safe to run twice at once.
#
#   VAPO_ENVIRONMENT=newest       instead .venv-newest from requirements/cpu-newest.txt: Python 3.12 and the newest
#                                 megatron-core that setup.py allows; whatever environment the shell is in
#
#   VAPO_PYTHON=/path/to/python   use this interpreter as it is; no set-up
#   an activated environment, or a machine with an NVIDIA GPU: its python is used as it is
#   VAPO_BASE_PYTHON=PYTHON       the Python 3.11 (newest: 3.12) that the environment is made with
#   VAPO_VENV=DIR                 where the environment is made (default: in the repository)

vapo_setup() {
  local root requirements version takes venv stamp wanted candidate module base
  root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
  say() { printf '[set-up] %s\n' "$*" >&2; }
  case "${VAPO_ENVIRONMENT:-}" in
    "") requirements=cpu.txt version=3.11 venv=.venv takes="two minutes" ;;
    newest) requirements=cpu-newest.txt version=3.12 venv=.venv-newest takes="five minutes, 6 GB" ;;
    *)
      say "error: VAPO_ENVIRONMENT=$VAPO_ENVIRONMENT must be newest, or unset"
      return 1
      ;;
  esac
  venv="${VAPO_VENV:-$root/$venv}"

  if [ -n "${VAPO_ENVIRONMENT:-}" ]; then
    unset VAPO_PYTHON
    # PyPI's torch for this Python is a CUDA build, which would use a GPU; vLLM's CPU build does not.
    export CUDA_VISIBLE_DEVICES=
  elif [ -n "${VAPO_PYTHON:-}" ]; then
    say "using VAPO_PYTHON=$VAPO_PYTHON"
  elif [ -n "${VIRTUAL_ENV:-}${CONDA_PREFIX:-}" ]; then
    VAPO_PYTHON="${VIRTUAL_ENV:-$CONDA_PREFIX}/bin/python"
    say "using the activated environment: $VAPO_PYTHON"
  elif [[ "$(nvidia-smi -L 2>/dev/null || true)" == *GPU* ]]; then
    VAPO_PYTHON="$(command -v python3)"
    say "a GPU is present: using $VAPO_PYTHON as it is"
  fi
  if [ -n "${VAPO_PYTHON:-}" ]; then
    for module in torch megatron.core vllm; do
      if ! "$VAPO_PYTHON" -c "import importlib.util as u, sys; sys.exit(u.find_spec('$module') is None)" \
        2>/dev/null; then
        say "error: $VAPO_PYTHON has no module '$module'."
        say "  with a GPU:    pip install -e '.[gpu,dev]'"
        say "  without a GPU: deactivate the environment and unset VAPO_PYTHON; this script makes one"
        return 1
      fi
    done
    export VAPO_PYTHON
    return 0
  fi

  if ! command -v lscpu >/dev/null 2>&1; then
    say "error: 'lscpu' is missing (vLLM reads the CPU's layout with it)."
    say "  Debian, Ubuntu: apt-get install util-linux    Fedora: dnf install util-linux"
    return 1
  fi
  # Not `ldconfig | grep -q`: under pipefail the reader's early end would count as a failure.
  case "$(ldconfig -p 2>/dev/null || /sbin/ldconfig -p 2>/dev/null || true)" in
    *libnuma.so.1*) ;;
    *)
      say "error: 'libnuma.so.1' is missing (vLLM's CPU build loads it)."
      say "  Debian, Ubuntu: apt-get install libnuma1    Fedora: dnf install numactl-libs"
      return 1
      ;;
  esac
  base="${VAPO_BASE_PYTHON:-}"
  for candidate in "python$version" python3 python "${PYENV_ROOT:-${HOME:-}/.pyenv}/versions/$version".*/bin/python; do
    [ -n "$base" ] && break
    if "$candidate" -c 'import sys, venv, ensurepip; sys.exit("%d.%d" % sys.version_info[:2] != sys.argv[1])' \
      "$version" >/dev/null 2>&1; then base="$candidate"; fi
  done
  if [ -z "$base" ]; then
    say "error: no Python $version with venv and pip was found; requirements/$requirements is pinned for $version."
    if [ "$version" = 3.11 ]; then say "  Debian 12: apt-get install python3 python3-venv"; fi
    if [ "$version" = 3.12 ]; then say "  Ubuntu 24.04: apt-get install python3 python3-venv"; fi
    say "  elsewhere: uv python install $version, or pyenv, and VAPO_BASE_PYTHON=/path/to/python$version"
    return 1
  fi

  wanted="$(cat "$root/requirements/$requirements" "$root/tools/setup_env.sh" | sha256sum | cut -d' ' -f1)"
  stamp="$venv/.vapo_installed"
  (
    if command -v flock >/dev/null 2>&1; then
      flock -n 9 || { say "another set-up is at work on $venv; waiting"; flock 9; }
    fi
    if [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
      say "reusing $venv"
      vapo_command "$venv" "$root"
      exit 0
    fi
    say "making $venv with $("$base" --version) (about $takes)"
    rm -f "$stamp"
    "$base" -m venv --clear "$venv" || exit 1
    vapo_install "$venv/bin/python" "$root/requirements/$requirements" || exit 1
    vapo_command "$venv" "$root"
    echo "$wanted" >"$stamp.new" && mv "$stamp.new" "$stamp"
    say "done"
  ) 9>"$venv.lock" || return 1
  VAPO_PYTHON="$venv/bin/python"
  export VAPO_PYTHON
}

# The command `vapo`, which runs the sources of this checkout; made again where they have another one's.
vapo_command() {
  local venv="$1" root="$2" wanted
  wanted="$root $(cat "$root/setup.py" "$root/pyproject.toml" | sha256sum | cut -d' ' -f1)"
  if [ -x "$venv/bin/vapo" ] && [ "$(cat "$venv/.vapo_command" 2>/dev/null)" = "$wanted" ]; then return 0; fi
  say "installing the command vapo"
  "$venv/bin/python" -m pip install -qq --disable-pip-version-check --no-deps --no-build-isolation --no-index \
    --editable "$root" ||
    { say "warning: the command vapo is not there; python -m vapo_megatron is the same"; return 0; }
  echo "$wanted" >"$venv/.vapo_command"
}

vapo_install() {
  local python="$1" requirements="$2" torch
  local pip=("$python" -m pip install -qq --disable-pip-version-check --no-deps --no-compile)
  torch="$(grep '^torch==' "$requirements")"
  say "installing $torch"
  if ! "${pip[@]}" "$torch"; then
    say "the configured package index has no $torch; trying PyTorch's CPU wheel index"
    "${pip[@]}" --extra-index-url https://download.pytorch.org/whl/cpu "$torch" || return 1
  fi
  say "installing the other pinned packages of requirements/${requirements##*/}"
  "${pip[@]}" --requirement "$requirements" || return 1
  say "compiling them"
  # On all cores, which pip does not; some packages have files that are no Python of this version.
  "$python" -m compileall -q -j 0 "${python%/bin/python}/lib" >/dev/null 2>&1 || true
  say "removing packages that do not load without CUDA, if an earlier install left any"
  "$python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec 2>/dev/null || return 1
  "$python" -c 'import torch, vllm, megatron.core' >/dev/null 2>&1 ||
    { say "error: the installed packages do not import:"; "$python" -c 'import torch, vllm'; return 1; }
}

vapo_setup || { echo "[set-up] failed" >&2; exit 1; }
