"""What a layer's forward leaves for its backward: kept, made again, or moved to RAM and the SSD and back (LoHan, MEMO).

Follow one tensor: `tiers` wraps each layer's run in a `layer_frame`, which sees every operation go by, and gives what
is to be swapped to the `swapper`; meanwhile a `swapped_tensor` stands for it. What the layers did in the first step,
`trace` keeps for the planner. Knows tensors; weights are another room's.
"""

from hf_lohan.activations.swapper import ActivationSwapper
from hf_lohan.activations.tiers import ActivationTiers
from hf_lohan.activations.trace import LayerTrace

__all__ = [
    "ActivationSwapper",
    "ActivationTiers",
    "LayerTrace",
]
