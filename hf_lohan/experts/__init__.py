"""Experts that are brought one by one: the operation that a model calls in place of its experts.

`streamed` defines the operation, which autograd and the layers see as one opaque call. It brings each expert with
tokens, once in forward and once in backward, computes with it, and sends its gradient away before the next one comes.
`routing` tells the host how many rows go to which expert.

Experts have their own loader (`expert_loader`) with its own thread, because which ones are needed is known only after
the router. `expert_schedule` says which expert is needed next, for sure or as a hint; `next_expert` chooses the slot.
For few tokens, `next_router` predicts the next layer's experts. Generation may use an `expert_cache` in RAM, whose
policy (`cache_policies`) decides what it keeps.
"""

from hf_lohan.experts.cache_policies import make_policy
from hf_lohan.experts.expert_cache import ExpertCache
from hf_lohan.experts.expert_loader import ExpertLoader, LayerAndExpertLoaders
from hf_lohan.experts.next_router import NextRouter, find_routers
from hf_lohan.experts.routing import HostNumbers
from hf_lohan.experts.streamed import ComputeExpert, ExpertParts, StreamedExperts, run_experts

__all__ = [
    "ComputeExpert",
    "ExpertCache",
    "ExpertLoader",
    "ExpertParts",
    "HostNumbers",
    "LayerAndExpertLoaders",
    "NextRouter",
    "StreamedExperts",
    "find_routers",
    "make_policy",
    "run_experts",
]
