"""Experts that come one by one: the operation that a model calls in their place, and what it does.

`operation` is what autograd and the layers' frames see: one opaque call, whose output is an anchor like that of a
matrix product. `streamed` brings each expert that tokens go to, once in forward and once in backward, computes with it,
and sends its gradient away before the next one comes.
"""

from hf_lohan.experts.operation import run_experts
from hf_lohan.experts.streamed import ComputeExpert, ExpertParts, StreamedExperts

__all__ = ["ComputeExpert", "ExpertParts", "StreamedExperts", "run_experts"]
