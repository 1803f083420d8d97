"""Experts that come one by one: the operation that a model calls in their place, and what it does.

`operation` is what autograd and the layers' frames see: one opaque call, whose output is an anchor like that of a
matrix product. `routing` tells the host how many rows go to which expert. `streamed` brings each expert that tokens go
to, once in forward and once in backward, computes with it, and sends its gradient away before the next one comes.

They have a lane of loads of their own. The `expert_schedule` says which is needed next, for sure or by a hint;
`next_expert` which slot it goes to; the `expert_loader` has a thread of its own, beside that
for layers. Of few tokens, the `next_router` is asked what they will need next. Where a model generates,
an `expert_cache` keeps in RAM what a policy (`cache_policies`) finds worth it.
"""

from hf_lohan.experts.cache_policies import make_policy
from hf_lohan.experts.expert_cache import ExpertCache
from hf_lohan.experts.expert_loader import ExpertLoader, LayerAndExpertLoaders
from hf_lohan.experts.next_router import NextRouter, find_routers
from hf_lohan.experts.operation import run_experts
from hf_lohan.experts.routing import HostNumbers
from hf_lohan.experts.streamed import ComputeExpert, ExpertParts, StreamedExperts

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
