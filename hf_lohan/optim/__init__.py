"""The optimizer: torch's fused CPU AdamW over flat chunks, exact precision codecs, and the `Optimizer` the world sees.

Nothing here knows where a chunk comes from or goes to; it takes host tensors and updates them.
"""

from hf_lohan.optim.adamw import AdamWGroup, Segment, adamw_, within
from hf_lohan.optim.optimizer import OffloadAdamW
from hf_lohan.optim.precision import (
    MasterFormat,
    decode_master_,
    encode_master_,
    master_format,
    widen_in_place,
)

__all__ = [
    "AdamWGroup",
    "MasterFormat",
    "OffloadAdamW",
    "Segment",
    "adamw_",
    "decode_master_",
    "encode_master_",
    "master_format",
    "widen_in_place",
    "within",
]
