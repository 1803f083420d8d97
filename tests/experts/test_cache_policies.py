"""Each cache policy has the expected hit rates for random routing, and replaces the right expert."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from routings import routed

from hf_lohan.experts.cache_policies import CachePolicy, PolicyName


def hit_rate(policy: CachePolicy[int], passes: Sequence[Sequence[int]]) -> float:
    num_hits = 0
    for experts in passes:
        for expert in experts:
            outcome = policy.use(expert)
            num_hits += outcome.is_hit
            assert (expert in policy) == outcome.is_kept and len(policy) <= policy.capacity
        policy.end_pass()
    return num_hits / sum(map(len, passes))


def changing(num_tokens: int) -> list[list[int]]:
    """Return 400 tokens of skewed routing. Every `num_tokens` tokens it prefers other experts."""
    return [experts for seed in range(400 // num_tokens) for experts in routed(num_tokens, 1, 1.0, seed=seed)]


@pytest.mark.parametrize(
    ("passes", "by_use", "by_frequency"),
    [
        (routed(400, 1, 0.0), (0.11, 0.23, 0.48), (0.12, 0.23, 0.48)),
        (routed(400, 1, 1.0), (0.37, 0.57, 0.77), (0.54, 0.67, 0.79)),
        (routed(200, 16, 1.5), (0.00, 0.00, 0.71), (0.36, 0.58, 0.80)),
        (changing(50), (0.35, 0.53, 0.73), (0.41, 0.55, 0.73)),
        (changing(10), (0.33, 0.49, 0.67), (0.26, 0.40, 0.62)),
    ],
    ids=["even", "skewed", "skewed, batches", "changes slowly", "changes fast"],
)
def test_hit_rates_with_room_for_an_eighth_a_quarter_and_half(
    passes: list[list[int]], by_use: Sequence[float], by_frequency: Sequence[float]
) -> None:
    """Counting is better if tokens prefer the same experts for a while. If that changes every 10 tokens, the last use
    is better.
    """
    for capacity, last, counted in zip((16, 32, 64), by_use, by_frequency, strict=True):
        assert hit_rate(CachePolicy(capacity, "lru"), passes) == pytest.approx(last, abs=0.03)
        assert hit_rate(CachePolicy(capacity, "auto"), passes) == pytest.approx(counted, abs=0.03)


def test_uses_of_experts_that_are_not_kept_count_and_a_single_use_replaces_nothing() -> None:
    policy = CachePolicy[str](1, "auto")
    assert policy.use("a").is_kept and policy.use("a").is_hit
    assert not policy.use("b").is_kept and not policy.use("b").is_kept, "not more often than a"
    assert policy.use("b").victim == "a"
    assert not policy.use("a").is_kept, "used as often, but not more often"
    assert policy.use("a").victim == "b"


def test_the_least_recently_used_expert_is_replaced() -> None:
    policy = CachePolicy[str](2, "lru")
    for expert in "aba":
        policy.use(expert)
    assert policy.use("c").victim == "b"


@pytest.mark.parametrize("name", ["auto", "lru"])
def test_a_removed_expert_is_a_miss_and_counts_stay_finite(name: PolicyName) -> None:
    rng = random.Random(0)
    policy = CachePolicy[int](5, name)
    kept: set[int] = set()
    for _ in range(3000):
        expert = rng.randrange(12)
        outcome = policy.use(expert)
        assert outcome.is_hit == (expert in kept)
        kept.discard(-1 if outcome.victim is None else outcome.victim)
        kept |= {expert} if outcome.is_kept else set()
        assert len(kept) == len(policy) <= 5 and all(one in policy for one in kept)
        if rng.random() < 0.02 and kept:
            removed = rng.choice(sorted(kept))
            policy.remove(removed)
            kept.remove(removed)
        policy.end_pass()


def test_a_cache_without_entries_is_refused() -> None:
    with pytest.raises(ValueError, match="this one has 0"):
        CachePolicy(0, "auto")
