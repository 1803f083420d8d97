"""The turns in which ranks of a node lend experts use each place for one thing at a time."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from hf_lohan.experts.lent_experts import LentExpert, in_turns


def lent_experts(seed: int) -> list[LentExpert]:
    """Return experts of four ranks, each with groups that two or more ranks compute."""
    chooses, found = random.Random(seed), []
    for expert in range(chooses.randint(1, 6)):
        owner = chooses.randrange(4)
        computed_by = [chooses.randrange(4) for _ in range(chooses.randint(1, 8))]
        computed_by.append(chooses.choice([rank for rank in range(4) if rank != owner]))
        chooses.shuffle(computed_by)
        found.append(LentExpert(expert, owner, 0, tuple(computed_by), 10))
    return found


@pytest.mark.parametrize("gives_gradients", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_each_place_has_one_use_in_a_turn(seed: int, gives_gradients: bool) -> None:
    lent = in_turns(lent_experts(seed), gives_gradients=gives_gradients)
    weights: Counter[tuple[int, int]] = Counter()
    gradients: Counter[tuple[int, int]] = Counter()
    for item in lent:
        borrowed = [pair for pair in item.borrowed if pair is not None]
        turns = [turn for _, turn in borrowed]
        assert turns == sorted(turns), "an owner adds gradients in the order of the groups"
        assert item.first_turn == turns[0] and item.turns[-1] == turns[-1]
        assert gives_gradients or len(set(turns)) == 1
        weights.update((item.owner, turn) for turn in range(turns[0], turns[-1] + 1))
        gradients.update(borrowed)
        for rank in range(4):
            of_rank = replace(item, rank=rank)
            assert len(of_rank.own_turns) == (0 if of_rank.is_own else item.computed_by.count(rank))
    assert max(weights.values()) == 1
    assert not gives_gradients or max(gradients.values()) == 1
