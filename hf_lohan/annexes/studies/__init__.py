"""Studies of a plan: a simulated step, other solvers, the lifetimes of tensors, and a picture.

`lohan plan` prints the simulated step, and the rest with --lifetimes and --plot. `solver: migration` plans by bookings
of lanes (TeraIO). Simulated steps are up to 5% off the measured ones, and the gains of other solvers did not show in
measured steps, so `solver: auto` takes none of them. It costs some milliseconds for each plan of a run.
"""

from types import ModuleType

from hf_lohan.annexes.studies.studies import Studies


def functions_for_options() -> ModuleType:
    """Return the functions for options of `lohan plan`."""
    from hf_lohan.annexes.studies import plan_options  # imports rich

    return plan_options
