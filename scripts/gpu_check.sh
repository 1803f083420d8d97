#!/usr/bin/env bash
# On a machine with CUDA: the GPU tests, then every benchmark on the GPU. Arguments go to pytest.
# Each scripts/bench_*.py that has a --device runs as: bench_x.py --device cuda --output $OUT/bench_x.json
# Environment: OUT, where the figures go (default bench_out); PYTHON, the interpreter (default: .venv's, else python3).
# Exit status: 0 all well; 1 a test or a benchmark failed; 3 no CUDA.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

out=${OUT:-bench_out}
if [ -x .venv/bin/python ]; then python=${PYTHON:-.venv/bin/python}; else python=${PYTHON:-python3}; fi
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

if ! "$python" -c "import sys, torch; sys.exit(not torch.cuda.is_available())"; then
    echo "gpu_check: no usable CUDA device (torch.cuda.is_available() is false for $python)." \
        "Run it on a machine with an NVIDIA GPU and a CUDA build of torch." >&2
    exit 3
fi
mkdir -p "$out" || exit 1

"$python" - <<'PY' | tee "$out/machine.txt"
import importlib.metadata as metadata
import platform

import psutil
import torch

gpu = torch.cuda.get_device_properties(0)
print(f"gpu           {gpu.name}, {gpu.total_memory / 2**30:.1f} GiB, sm_{gpu.major}{gpu.minor}")
print(f"host          {psutil.cpu_count()} CPUs, {psutil.virtual_memory().total / 2**30:.1f} GiB, {platform.platform()}")
print(f"python        {platform.python_version()}, CUDA {torch.version.cuda}")
for package in ("torch", "transformers", "accelerate", "peft", "datasets", "safetensors"):
    print(f"{package:<13} {metadata.version(package)}")
PY

failed=()
"$python" -m pytest tests/gpu -m gpu "$@" || failed+=("tests/gpu")

# Those that compute; the others (bench_io, bench_rivals) measure the drive and the CPU.
for bench in $(grep -l 'device: DeviceOption' scripts/bench_*.py); do
    name=$(basename "$bench" .py)
    echo "== $name"
    "$python" "$bench" --device cuda --output "$out/$name.json" || failed+=("$name")
done

if [ ${#failed[@]} -gt 0 ]; then
    echo "gpu_check: failed: ${failed[*]}" >&2
    exit 1
fi
echo "gpu_check: all passed; figures in $out"
