"""Hit rates of caches of experts over passes, as routing makes them, and what each policy gives up."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from routings import routed

from hf_lohan.experts.cache_policies import (
    NEVER,
    Algorithm2,
    CachePolicy,
    FrequencyWithAdmission,
    LeastRecentlyUsed,
    NextUse,
    policy_named,
)

POLICIES = ("lru", "lfu", "auto", "next_use")


def hit_rate(policy: CachePolicy[int], passes: Sequence[Sequence[int]], *, is_training: bool) -> float:
    """Forward in ascending order, in training the backward in descending."""
    uses = [[*one, *(reversed(one) if is_training else ())] for one in passes]
    flat = [expert for one in uses for expert in one]
    when, following = [NEVER] * len(flat), dict[int, int]()
    for index in range(len(flat) - 1, -1, -1):
        when[index] = following.get(flat[index], NEVER)
        following[flat[index]] = index
    num_hits = index = 0
    for one in uses:
        for expert in one:
            outcome = policy.use(expert, when[index])
            num_hits += outcome.is_hit
            assert (expert in policy) == outcome.is_kept and len(policy) <= policy.capacity
            index += 1
        policy.end_pass()
    return num_hits / index


TRAINING = [  # tokens, skew, rates by policy with room for an eighth, a quarter and half of the experts
    (1024, 0.0, (0.12, 0.25, 0.50), (0.12, 0.24, 0.49), (0.00, 0.00, 0.00), (0.12, 0.25, 0.50)),
    (16, 0.0, (0.14, 0.29, 0.57), (0.12, 0.24, 0.49), (0.11, 0.24, 0.48), (0.19, 0.39, 0.70)),
    (16, 1.5, (0.26, 0.53, 0.84), (0.27, 0.48, 0.78), (0.35, 0.58, 0.80), (0.39, 0.67, 0.91)),
]
GENERATION = [
    (1, 0.0, (0.11, 0.23, 0.48), (0.11, 0.24, 0.49), (0.12, 0.23, 0.48), (0.40, 0.57, 0.77)),
    (1, 1.0, (0.37, 0.57, 0.77), (0.42, 0.59, 0.78), (0.54, 0.67, 0.79), (0.63, 0.77, 0.89)),
]


@pytest.mark.parametrize(
    ("is_training", "row"), [*((True, row) for row in TRAINING), *((False, row) for row in GENERATION)]
)
def test_hit_rates_with_room_for_an_eighth_a_quarter_and_half(is_training: bool, row: tuple[Any, ...]) -> None:
    num_tokens, skew, *rates = row
    passes = routed(60 if is_training else 400, num_tokens, skew)
    for name, of_policy in zip(POLICIES, rates, strict=True):
        for capacity, expected in zip((16, 32, 64), of_policy, strict=True):
            rate = hit_rate(policy_named(name, capacity), passes, is_training=is_training)  # type: ignore[arg-type]
            assert rate == pytest.approx(expected, abs=0.03), (name, capacity)


def test_frequency_counts_what_is_not_kept_and_lets_nothing_in_that_is_used_once() -> None:
    policy = FrequencyWithAdmission[str](1)
    assert policy.use("a").is_kept and policy.use("a").is_hit
    assert not policy.use("b").is_kept and not policy.use("b").is_kept, "not oftener than a"
    assert policy.use("b").victim == "a"
    assert not policy.use("a").is_kept, "as often, which is not oftener"
    assert policy.use("a").victim == "b"


def test_algorithm_2_protects_what_has_too_few_hits_and_forgets_what_it_gives_up() -> None:
    policy = Algorithm2[str](2, passes=1)
    policy.use("a")
    policy.use("a")
    policy.use("b")
    policy.end_pass()  # a has 1.8 hits, b 0.9: below the threshold
    assert policy.use("c").victim == "a", "though it has more hits than b"
    policy.end_pass()
    assert policy.use("a") == (False, False, None), "nothing may be given up"
    policy.use("b")
    assert policy.use("a").victim == "b"


def test_least_recent_and_next_use() -> None:
    lru = LeastRecentlyUsed[str](2)
    for key in "aba":
        lru.use(key)
    assert lru.use("c").victim == "b"
    foreseen = NextUse[str](2)
    foreseen.use("a", 10)
    foreseen.use("b", 20)
    assert foreseen.use("c", 30) == (False, False, None)
    assert foreseen.use("c", 15).victim == "b"
    foreseen.use("a", 40)
    assert foreseen.use("d", 20).victim == "a"


@pytest.mark.parametrize("name", POLICIES)
def test_what_was_dropped_is_loaded_again_and_counts_stay_finite(name: str) -> None:
    rng = random.Random(0)
    policy: CachePolicy[int] = policy_named(name, 5)  # type: ignore[arg-type,assignment]
    kept: set[int] = set()
    for _ in range(3000):
        key = rng.randrange(12)
        outcome = policy.use(key, rng.randrange(1000))
        assert outcome.is_hit == (key in kept)
        kept.discard(outcome.victim if outcome.victim is not None else -1)
        kept |= {key} if outcome.is_kept else set()
        assert len(kept) == len(policy) <= 5 and all(one in policy for one in kept)
        if rng.random() < 0.02 and kept:
            gone = rng.choice(sorted(kept))
            policy.drop(gone)
            kept.remove(gone)
        policy.end_pass()


def test_a_wrong_name_and_no_room_are_refused() -> None:
    with pytest.raises(ValueError, match=r"no cache policy 'arc'.*auto, lfu, lru"):
        policy_named("arc", 4)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="0 places"):
        policy_named("lfu", 0)
