"""The experts of a layer that stream one by one: how many of them a micro-batch needs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace


def expected_hits(num_experts: int, num_chosen: int, num_tokens: float, chances: Sequence[float] = ()) -> float:
    """Experts of a layer to which at least one of ``num_tokens`` goes, if each token chooses ``num_chosen``.

    ``chances``: of each expert, the share of tokens that choose it; without them all are alike, and E experts are
    expected to have E (1 - (1 - k/E)^T).
    """
    if not chances:
        return num_experts * _chance_of_any(num_chosen / num_experts, num_tokens)
    return math.fsum(_chance_of_any(chance, num_tokens) for chance in chances)


def _chance_of_any(chance: float, num_tokens: float) -> float:
    if chance >= 1:
        return 1.0 if num_tokens > 0 else 0.0
    return -math.expm1(num_tokens * math.log1p(-chance))


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertsProfile:
    """Of one layer. Parameters and bytes are those of each expert."""

    num_experts: int
    num_chosen: int
    """By each token (top-k)."""
    num_params: int
    num_trainable_params: int
    param_bytes: int
    """In working precision."""
    num_tokens: int
    """Of a micro-batch, or of all micro-batches that share the weights."""
    inner_bytes: int = 0
    """What autograd keeps of what they do, where they do not stream."""
    chances: tuple[float, ...] = ()
    """Measured: of each expert, the share of tokens that choose it. Without them all are taken to be alike."""

    def hits(self, num_micro_batches: int = 1) -> float:
        """Experts that at least one token of so many micro-batches goes to."""
        return expected_hits(self.num_experts, self.num_chosen, num_micro_batches * self.num_tokens, self.chances)

    def chances_of_hit(self, num_micro_batches: int = 1) -> list[tuple[float, int]]:
        """That a token of so many micro-batches goes to an expert, and of how many experts that is the chance."""
        num_tokens = num_micro_batches * self.num_tokens
        if not self.chances:
            return [(_chance_of_any(self.num_chosen / self.num_experts, num_tokens), self.num_experts)]
        return [(_chance_of_any(chance, num_tokens), 1) for chance in self.chances]

    @property
    def hit_share(self) -> float:
        """Of the experts, in one micro-batch."""
        return self.hits() / self.num_experts

    @property
    def hit_bytes(self) -> float:
        """Weights that a forward of one micro-batch needs."""
        return self.hits() * self.param_bytes

    @property
    def all_hit_from_tokens(self) -> int | None:
        """With so many tokens the one that is chosen least is left out in fewer than one micro-batch of 2E, so that
        less than half an expert is expected to be. None: some are never chosen."""
        rarest = min(self.chances, default=self.num_chosen / self.num_experts)
        if rarest <= 0:
            return None
        return 1 if rarest >= 1 else math.ceil(math.log(2 * self.num_experts) / -math.log1p(-rarest))

    def routed(self, counts: Sequence[float]) -> ExpertsProfile:
        """With chances from ``counts``: how many tokens went to each expert. Raises ValueError for counts of another
        number of experts."""
        if len(counts) != self.num_experts or min(counts) < 0 or sum(counts) <= 0:
            raise ValueError(
                f"a routing histogram needs {self.num_experts} counts, none negative and not all 0; "
                f"got {len(counts)} that sum to {sum(counts)}"
            )
        num_tokens = sum(counts) / self.num_chosen
        return replace(self, chances=tuple(min(1.0, count / num_tokens) for count in counts))
