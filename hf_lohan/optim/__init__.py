"""The optimizer: torch's fused CPU AdamW over flat chunks, exact codecs of masters, rounding ones of moments where that
is asked for, and the `Optimizer` the world sees.

Nothing here knows where a chunk comes from or goes to; it takes host tensors and updates them.
"""

from hf_lohan.optim.adamw import AdamWGroup, Segment, update_records_, within
from hf_lohan.optim.moments import SCALE_BLOCK_NUMEL, MomentDtype
from hf_lohan.optim.optimizer import OffloadAdamW
from hf_lohan.optim.precision import MasterFormat, encode_master_, master_format, widen_in_place

__all__ = [
    "SCALE_BLOCK_NUMEL",
    "AdamWGroup",
    "MasterFormat",
    "MomentDtype",
    "OffloadAdamW",
    "Segment",
    "encode_master_",
    "master_format",
    "update_records_",
    "widen_in_place",
    "within",
]
