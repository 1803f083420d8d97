"""Executes a plan: streams blocks through the device, gradients to the host, states through the optimizer.

The way of a parameter, which has an offset in a block (`model`): `drain_model` or the streamed load writes it to the
store that `tiers` opens. When `model_hooks` see its block coming, `weights` brings it. `model_pass` gives its gradient
to `updates`, which makes its next version, and `commits` commits that. `build` makes the parts, `engine` connects them.
"""

from hf_lohan.engine.commits import Journal
from hf_lohan.engine.engine import OffloadEngine
from hf_lohan.engine.events import EngineEvents, StepsSoFar
from hf_lohan.engine.lifetime import wait_until_closed
from hf_lohan.engine.parameter_access import CollectiveReads, ParameterAccess, drain_model
from hf_lohan.engine.planned_memory import OutOfMemoryAdvice
from hf_lohan.engine.ranks import check_equal_weights
from hf_lohan.engine.tiers import Tiers, open_tiers

__all__ = [
    "CollectiveReads",
    "EngineEvents",
    "Journal",
    "OffloadEngine",
    "OutOfMemoryAdvice",
    "ParameterAccess",
    "StepsSoFar",
    "Tiers",
    "check_equal_weights",
    "drain_model",
    "open_tiers",
    "wait_until_closed",
]
