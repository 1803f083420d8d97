#!/usr/bin/env bash
# Runs the GPU tests, one step of a large model and the benchmarks on CUDA, the most important first. Arguments go to
# pytest. Each part may take LIMIT seconds.
# Environment: OUT, folder of the figures (default docs/benchmarks; one file for each benchmark and GPU);
# PYTHON, the interpreter (default: .venv's, else python3); LIMIT (default 600).
# Exit status: 0 success; 1 a test or a benchmark failed; 3 no CUDA.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

out=${OUT:-docs/benchmarks}
limit=${LIMIT:-600}
if [ -x .venv/bin/python ]; then python=${PYTHON:-.venv/bin/python}; else python=${PYTHON:-python3}; fi
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

if ! "$python" -c "import sys, torch; sys.exit(not torch.cuda.is_available())"; then
    echo "gpu_check: no usable CUDA device (torch.cuda.is_available() is false for $python)." \
        "Run it on a machine with an NVIDIA GPU and a CUDA build of torch." >&2
    exit 3
fi
mkdir -p "$out" || exit 1

"$python" - <<'PY'
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
timeout "$limit" "$python" -m pytest tests/gpu -m gpu "$@" || failed+=("tests/gpu")  # on 24 GB: tests/gpu/conftest.py

# bench_rivals compares on the CPU; bench_io knows no device, and measures the drive.
for name in gpu_step bench_io bench_planner bench_durability bench_large bench_codecs; do
    echo "== $name"
    timeout "$limit" "$python" "scripts/benchmarks/$name.py" --device cuda --output "$out" || failed+=("$name")
done

if [ ${#failed[@]} -gt 0 ]; then
    echo "gpu_check: failed: ${failed[*]}" >&2
    exit 1
fi
echo "gpu_check: all passed; figures in $out"
