"""Executes a plan: streams blocks through the device, gradients to the host, states through the optimizer.

Follow one parameter: `layout` places it in a block and its records; `drain` (or the streamed load) writes it to the
store; `prefetcher` reads it ahead of use into a slot of the `slot_ring`, where it becomes `p.data`; `saved_weights`
keeps autograd from holding on to it; `gradient_arrival` takes its gradient to the host; `gradient_pipeline` and
`state_update` turn that into its next version; `step_transaction` makes the step count or undoes it, and `step_commits`
makes it last. `engine` wires it all up.
"""

from hf_lohan.runtime.block import Block, Chunk, ParamSlice
from hf_lohan.runtime.discovery import DiscoveryError, check_one_dtype, discover_blocks
from hf_lohan.runtime.drain import drain_model
from hf_lohan.runtime.engine import OffloadEngine
from hf_lohan.runtime.layout import OffloadLayout, lay_out, stored_form
from hf_lohan.runtime.non_finite import NonFiniteGradientError
from hf_lohan.runtime.parameter_access import ParameterAccess
from hf_lohan.runtime.step_log import Journal
from hf_lohan.runtime.tiers import Tiers, open_tiers

__all__ = [
    "Block",
    "Chunk",
    "DiscoveryError",
    "Journal",
    "NonFiniteGradientError",
    "OffloadEngine",
    "OffloadLayout",
    "ParamSlice",
    "ParameterAccess",
    "Tiers",
    "check_one_dtype",
    "discover_blocks",
    "drain_model",
    "lay_out",
    "open_tiers",
    "stored_form",
]
