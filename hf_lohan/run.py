"""Run an unmodified script that uses `transformers.Trainer` or `accelerate.Accelerator`, offloaded.

```
accelerate launch -m hf_lohan.run --offload configs/lohan.yaml any_script.py --its arguments
python -m hf_lohan.run --offload lohan -m any.module --its arguments
```
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from hf_lohan.config import ALL_AUTO, OFFLOAD_VARIABLE, OffloadConfig, offload_of_environment


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the script or module in `arguments` (default: `sys.argv`) as if it were started directly.

    Exits with status 2 and one line for a bad offload configuration and for a script that does not exist. Exceptions of
    the script are not caught.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        asked = options.offload or offload_of_environment(may_fit=False) or ALL_AUTO
        config = OffloadConfig.load(asked, **({"trace": True} if options.trace else {}))
        _check_target(options.target, is_module=options.module)
    except ValueError as error:
        parser.exit(2, f"error: {error}\n")
    from hf_lohan.huggingface.launch import join_other_ranks
    from hf_lohan.huggingface.unmodified_scripts import offload_by_default

    join_other_ranks()
    sys.argv = [options.target, *options.arguments]
    with offload_by_default(config):
        if options.module:
            runpy.run_module(options.target, run_name="__main__", alter_sys=True)
        else:
            if not getattr(sys.flags, "safe_path", False):
                sys.path[0] = os.path.dirname(os.path.realpath(options.target))
            runpy.run_path(options.target, run_name="__main__")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m hf_lohan.run",
        usage="%(prog)s [--offload X] [--trace] (script.py | -m module) [its arguments]",
        description="Run an unmodified script that uses transformers.Trainer or accelerate.Accelerator, offloaded.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--offload",
        metavar="X",
        help="lohan (everything automatic) or the path of a YAML file; "
        f"default: {OFFLOAD_VARIABLE} in the environment, or lohan",
    )
    parser.add_argument("--trace", action="store_true", help="write lohan/trace.json into the run's output folder")
    parser.add_argument("-m", "--module", action="store_true", help="the target is a module, as in python -m")
    parser.add_argument("target", help="path of a Python file, or the name of a module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the script or module")
    return parser


def _check_target(target: str, *, is_module: bool) -> None:
    """Raise ValueError if the script or the top-level module does not exist. Nothing is imported."""
    if is_module:
        top = target.partition(".")[0]
        if not top or importlib.util.find_spec(top) is None:
            raise ValueError(
                f"there is no module {target!r}; install its package, or give a module that python -m finds"
            )
    elif not Path(target).is_file():
        raise ValueError(f"there is no script {target!r}; give the path of a Python file, or -m and a module")


if __name__ == "__main__":
    main()
