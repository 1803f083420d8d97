"""`python -m hf_lohan.cli` runs the `lohan` command if it is not on the PATH."""

from __future__ import annotations

from hf_lohan.cli.application import app

if __name__ == "__main__":
    app(prog_name="lohan")
