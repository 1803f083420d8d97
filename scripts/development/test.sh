#!/usr/bin/env bash
# Install into .venv (made if there is none), then ruff, mypy and pytest. Arguments go to pytest:
#   bash scripts/development/test.sh tests/config -k ssd
#   bash scripts/development/test.sh -m slow                 # hundreds of kills, full disks and whole matrices, not run by default
#   bash scripts/development/test.sh --newest                # in .venv-newest, with the newest release of every dependency
# Versions are those of constraints.txt, so that two machines test the same.
# Environment: PYTHON, the interpreter that makes the environment; TORCH_SPEC, the torch to install, e.g. "torch==2.11.0";
# WORKERS, how many processes run tests (0: pytest itself).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
. scripts/development/python_environment.sh

if [ "${1:-}" = --newest ]; then
    shift
    make_environment .venv-newest test newest
else
    make_environment .venv test
fi

echo "ruff";   ruff check .
echo "mypy";   mypy
# Two at a time: many tests wait for a drive or for a process that is to be killed.
echo "pytest"; python -m pytest --numprocesses="${WORKERS:-2}" --dist=worksteal -m "not slow" "$@"
