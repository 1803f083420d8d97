"""Experts that are loaded one by one, by an operation that a model calls instead of its experts.

`streamed` defines the operation, which autograd and the layers see as one opaque call. The operation loads each expert
with tokens once in forward and once in backward, computes with it, and sends its gradient before the next expert is
loaded. `routing` counts how many rows each expert gets.

Experts have their own loader and thread (`expert_loader`), because the needed experts are known only after the router
ran. `expert_schedule` returns the expert to load next, which is certain or predicted, and `next_expert` chooses the
slot. For few tokens, `next_router` predicts the next layer's experts. Generation may use an `experts.cache` in RAM,
whose policy (`cache_policies`) decides which experts it keeps.

With several ranks each expert belongs to one rank, which alone loads and updates it. `expert_ranks` sends the rows of a
call to the ranks that own their experts. If ranks of a node balance their rows, owners lend experts to them
(`lent_experts`).
"""

from hf_lohan.experts.cache_policies import CachePolicy
from hf_lohan.experts.expert_cache import ExpertCache
from hf_lohan.experts.expert_loader import ExpertLoader
from hf_lohan.experts.expert_ranks import AllHere, BalancedRows, ExpertPlaces, OneOwnerEach
from hf_lohan.experts.lent_experts import Lending
from hf_lohan.experts.next_router import NextRouter, find_routers
from hf_lohan.experts.routing import ROUTED_ROWS, HostNumbers, RoutedRows
from hf_lohan.experts.streamed import ComputeExpert, ExpertParts, StreamedExperts, run_experts
