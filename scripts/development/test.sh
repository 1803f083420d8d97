#!/usr/bin/env bash
# Install into .venv (made if there is none), then ruff, mypy and pytest. Arguments go to pytest:
#   bash scripts/development/test.sh tests/config -k ssd
#   bash scripts/development/test.sh -m slow                 # hundreds of kills, full disks and whole matrices, not run by default
#   bash scripts/development/test.sh --newest                # in .venv-newest, with the newest release of every dependency
#   bash scripts/development/test.sh --versions              # the tests of Hugging Face's libraries, with each row of versions.txt
# Versions are those of constraints.txt, so that two machines test the same.
# Environment: PYTHON, the interpreter that makes the environment; TORCH_SPEC, the torch to install, e.g. "torch==2.11.0";
# WORKERS, how many processes run tests (0: pytest itself).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
. scripts/development/python_environment.sh

# run_tests ARGUMENTS: three at a time, also on two cores, because many tests wait for a drive or for a process that is to
# be killed.
run_tests() { python -m pytest --numprocesses="${WORKERS:-3}" --dist=worksteal "$@"; }

# test_versions ARGUMENTS: with each row of versions.txt. The environments borrow from .venv what the row does not name.
test_versions() {
    local row transformers trl peft accelerate more status=0 results=() tests=(
        tests/compat tests/huggingface/models tests/huggingface/trainer tests/huggingface/launch/test_trl_launch.py
    )
    if [ $# -gt 0 ]; then tests=("$@"); fi
    make_environment .venv test
    while read -r row transformers trl peft accelerate more <&3; do
        case $row in "" | "#"*) continue ;; esac
        echo "versions $row: transformers $transformers, TRL $trl, PEFT $peft, accelerate $accelerate"
        # shellcheck disable=SC2086
        borrow_environment ".venv-versions-$row" .venv \
            "transformers==$transformers" "trl==$trl" "peft==$peft" "accelerate==$accelerate" $more
        case $more in *triton*) export TRITON_INTERPRET=1 ;; *) unset TRITON_INTERPRET ;; esac
        if run_tests "${tests[@]}"; then results+=("$row: passed"); else results+=("$row: FAILED") status=1; fi
    done 3<scripts/development/versions.txt
    printf '%s\n' "${results[@]}"
    return $status
}

if [ "${1:-}" = --versions ]; then
    shift
    test_versions "$@"
    exit
elif [ "${1:-}" = --newest ]; then
    shift
    make_environment .venv-newest test newest
else
    make_environment .venv test
fi

echo "ruff";   ruff check .
echo "mypy";   mypy
echo "pytest"; run_tests -m "not slow" "$@"
