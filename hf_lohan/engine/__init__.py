"""Executes a plan: streams blocks through the device, gradients to the host, and states through the optimizer.

`tiers` opens the store, to which `drain_model` or the streamed load writes parameters. When `model_hooks` see that a
block is needed, `weights` loads it. `model_pass` passes a gradient to `updates`, which writes the parameter's next
version. `commits` commits the new versions. `build` makes the parts, and `engine` connects them.
"""

from hf_lohan.engine.commits import Journal
from hf_lohan.engine.engine import OffloadEngine
from hf_lohan.engine.events import EngineEvents, StepsSoFar
from hf_lohan.engine.lifetime import wait_until_closed
from hf_lohan.engine.parameter_access import CollectiveReads, ParameterAccess, drain_model
from hf_lohan.engine.planned_memory import OutOfMemoryAdvice
from hf_lohan.engine.ranks import check_equal_weights
from hf_lohan.engine.tiers import Tiers, open_tiers
