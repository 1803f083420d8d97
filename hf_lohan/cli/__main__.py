"""Runs the `lohan` command as `python -m hf_lohan.cli`, in case `lohan` is not on the PATH."""

from __future__ import annotations

from hf_lohan.cli.application import app

if __name__ == "__main__":
    app(prog_name="lohan")
