"""The `lohan` command.

Each command is a thin face on a room below: it reads its options, calls one function and prints. Heavy imports wait
inside the commands, so that `lohan --help` and `lohan --version` answer at once. What the user has to change is told
in one line on stderr, with exit status 2.
"""

from hf_lohan.cli.application import app

__all__ = ["app"]
