#!/usr/bin/env bash
# Test the CUDA path without a GPU: PyTorch's CUDA build runs on the double of tests/cuda_double, in its own environment
# (.venv-cuda-double, 2 GB). Without arguments it runs tests/gpu, the tests of the double and some of tests/exactness, with
# late streams, poisoned memory and the race finder. Arguments go to pytest:
#   bash scripts/development/cuda_double.sh
#   bash scripts/development/cuda_double.sh tests/gpu -k experts
#   CUDA_DOUBLE_COPY_DELAY_US=2000 CUDA_DOUBLE_SEED=7 bash scripts/development/cuda_double.sh   # late copies, drawn from a seed
#   bash scripts/development/cuda_double.sh --require                  # fail if the double is not available
#   bash scripts/development/cuda_double.sh --prepare                  # download and build, but install and test nothing of this clone
# Environment: PYTHON, the interpreter that makes the environment; WORKERS, how many processes run tests (0: pytest itself);
# CUDA_DOUBLE_*, properties of the device: see tests/cuda_double/README.md.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

torch_version=2.14.1  # tests/cuda_double/kernels is written for this one
headers=(nvidia-cuda-runtime==13.0.96 nvidia-cuda-crt==13.0.88)
test_packages=(pytest pytest-timeout pytest-xdist hypothesis lion-pytorch gguf 'trl; python_version >= "3.11"')
double=tests/cuda_double
environment=.venv-cuda-double
python=$environment/bin/python
default_tests=(
    tests/gpu
    $double
    tests/exactness/test_experts.py
    tests/exactness/test_against_stock_trainer.py::test_kept_activations_equal_stock
    tests/exactness/test_against_stock_trainer.py::test_schedules_differ_only_in_time
    tests/exactness/test_against_stock_trainer.py::test_dropout_draws_the_same_numbers
    tests/exactness/test_activations.py::test_every_mode_trains_as_stock
    tests/exactness/test_activations.py::test_a_streamed_model_trains_as_stock
    tests/exactness/test_activations.py::test_adapters_train_as_stock
)

is_required=0
is_preparing=0
if [ "${1:-}" = --prepare ]; then
    is_preparing=1
    shift
fi
if [ "${1:-}" = --require ]; then
    is_required=1
    shift
fi
not_available() {
    echo "cuda_double: not run, because $1."
    exit $is_required
}

[ "$(uname -sm)" = "Linux x86_64" ] || not_available "the double is for Linux on x86_64, and this is $(uname -sm)"
for tool in g++ readelf; do
    command -v $tool >/dev/null || not_available "$tool is missing"
done

# The versions of the default environment, but its torch. They are for Python 3.11 and newer.
constraints=$(mktemp)
reports=$(mktemp -d)
trap 'rm -rf "$constraints" "$reports"' EXIT
grep -v '^torch==' constraints.txt >"$constraints"
"${PYTHON:-python3}" -c "import sys; sys.exit(sys.version_info < (3, 11))" || : >"$constraints"

pins=$(cat pyproject.toml "$constraints" - <<<"$torch_version ${headers[*]} ${test_packages[*]}" | sha256sum)
pip=("$python" -m pip install --quiet --disable-pip-version-check)
if [ "$(cat $environment/prepared-for 2>/dev/null)" != "$pins" ]; then
    echo "installing the CUDA build of torch $torch_version, and what the tests need, into $environment"
    [ -x $python ] || "${PYTHON:-python3}" -m venv $environment || {
        rm -rf $environment # without pip the next call would take it for whole
        not_available "python -m venv $environment failed"
    }
    "${pip[@]}" --no-deps "torch==$torch_version" "${headers[@]}" ||
        not_available "torch $torch_version for CUDA could not be installed (no network, or no wheel for this Python)"
    packages=$("$python" -c "import sysconfig; print(sysconfig.get_paths()['purelib'])")
    [ -e "$packages/torch/lib/libtorch_cuda.so" ] || not_available "pip's index has torch $torch_version without CUDA"
    # NVIDIA's libraries and triton are what the double stands for: pip is not to miss them.
    sed -i -E '/^Requires-Dist: (nvidia|cuda|triton)/d' "$packages/torch-$torch_version"*.dist-info/METADATA
    "${pip[@]}" -c "$constraints" "torch==$torch_version" "${test_packages[@]}" ||
        not_available "what the tests need could not be installed"
    rm -f $environment/built-for $environment/installed-for
    echo "$pins" >$environment/prepared-for
fi
# Not while the environment is prepared: two installations of this clone at once would write the same files.
if [ $is_preparing = 0 ] && [ "$(cat $environment/installed-for 2>/dev/null)" != "$pins" ]; then
    "${pip[@]}" -c "$constraints" "torch==$torch_version" -e . "${test_packages[@]}" ||
        not_available "what the tests need could not be installed"
    echo "$pins" >$environment/installed-for
fi

sources=$(cat $double/*.py $double/*/*.{cpp,h} | sha256sum)
if [ "$(cat $environment/built-for 2>/dev/null)" != "$sources" ]; then
    echo "building the CUDA double"
    "$python" $double/build.py >"$environment/build.log" || { cat "$environment/build.log"; exit 1; }
    echo "$sources" >$environment/built-for
fi
[ $is_preparing = 0 ] || exit 0

export CUDA_DOUBLE_ASYNC=${CUDA_DOUBLE_ASYNC-1} CUDA_DOUBLE_POISON=${CUDA_DOUBLE_POISON-1}
export CUDA_DOUBLE_RACES=${CUDA_DOUBLE_RACES-1} CUDA_DOUBLE_REPORT=$reports LOHAN_TEST_DEVICE=cuda OMP_NUM_THREADS=1
[ $# -gt 0 ] || set -- "${default_tests[@]}"
status=0
"$python" -m pytest --numprocesses="${WORKERS:-2}" --dist=worksteal -m "not slow" -p no:cacheprovider "$@" || status=$?
"$python" -m cuda_double "$reports" || status=1
exit $status
