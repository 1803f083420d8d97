"""Studies of a plan: a simulated step, other solvers, the lifetimes of tensors, and a picture.

`lohan plan` prints the simulated step, and with --lifetimes and --plot the lifetimes and the picture. The solver
`migration` reserves time on lanes (TeraIO). Simulated steps differ from measured steps by up to 5%. Measured steps did
not show the gains of other solvers, so `auto` does not use them. Simulating a plan of a run takes milliseconds.
"""

from types import ModuleType

from hf_lohan.annexes.studies.studies import Studies


def functions_for_options() -> ModuleType:
    """Return the functions for options of `lohan plan`."""
    from hf_lohan.annexes.studies import plan_options  # imports rich

    return plan_options
