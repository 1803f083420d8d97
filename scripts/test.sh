#!/usr/bin/env bash
# Install into .venv (made if there is none), then ruff, mypy and pytest. Arguments go to pytest:
#   bash scripts/test.sh tests/config -k ssd
#   bash scripts/test.sh -m slow                 # kills by the hundred, full disks, all of each matrix: left out otherwise
# Environment: PYTHON, the interpreter that makes .venv; TORCH_SPEC, the torch to install, e.g. "torch==2.11.0";
# WORKERS, how many processes run tests (0: pytest itself).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

[ -x .venv/bin/python ] || "${PYTHON:-python3}" -m venv .venv
# shellcheck disable=SC1091
. .venv/bin/activate

if ! python -c "import torch" 2>/dev/null; then
    if command -v nvidia-smi >/dev/null; then default_torch="torch"; else default_torch="torch==2.13.0"; fi
    echo "installing ${TORCH_SPEC:-$default_torch}"
    pip install --quiet --disable-pip-version-check "${TORCH_SPEC:-$default_torch}"
fi

# Kept once the install succeeded, so that a second run neither waits for pip nor needs the network.
installed=.venv/installed-for-tests
if ! cmp --silent pyproject.toml "$installed"; then
    echo "installing hf-lohan[test]"
    pip install --quiet --disable-pip-version-check -e ".[test]"
    cp pyproject.toml "$installed"
fi

echo "ruff";   ruff check .
echo "mypy";   mypy
# Two at a time: many tests wait for a drive or for a process that is to be killed.
echo "pytest"; python -m pytest --numprocesses="${WORKERS:-2}" --dist=worksteal -m "not slow" "$@"
