"""The `lohan` command.

Each command reads its options, calls one function of another package and prints. Heavy imports are inside the commands,
so that `lohan --help` and `lohan --version` answer at once. An error that the user can fix is one line on stderr, with
exit status 2.
"""

from hf_lohan.cli.application import app
