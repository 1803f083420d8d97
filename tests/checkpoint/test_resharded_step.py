"""What goes with a step, for another number of ranks."""

from hf_lohan.checkpoint.resharded_step import facts_of_all, journal_of_rank

ONE = {"trainer_state.json": b"state", "rng_state.pth": b"random", "epoch_rng_state.pth": b"epoch"}
TWO = [
    {"trainer_state.json": b"state", "rng_state_0.pth": b"0", "epoch_rng_state_0.pth": b"epoch"},
    {"rng_state_1.pth": b"1", "epoch_rng_state_1.pth": b"epoch"},
]


def test_each_rank_finds_its_random_numbers_by_its_name() -> None:
    assert journal_of_rank([ONE], 0, 1) == ONE
    assert journal_of_rank([ONE], 0, 2) == TWO[0] | {"rng_state_0.pth": b"random"}
    assert [journal_of_rank(TWO, rank, 4) for rank in (0, 1)] == TWO
    assert journal_of_rank(TWO, 0, 1) == ONE | {"rng_state.pth": b"0"}


def test_a_rank_that_was_not_there_has_none_but_draws_the_epoch_as_all_do() -> None:
    assert journal_of_rank(TWO, 2, 4) == {"trainer_state.json": b"state", "epoch_rng_state_2.pth": b"epoch"}


def test_updates_are_counted_by_whoever_makes_them() -> None:
    facts = [
        {"global_step": 7, "num_updates": {"a": 7, "b": 0}},
        {"global_step": 7, "num_updates": {"a": 0, "b": 6, "c": 7}},
    ]
    assert facts_of_all(facts) == {"global_step": 7, "num_updates": {"a": 7, "b": 6, "c": 7}}
    assert facts_of_all([{"global_step": 7}]) == {"global_step": 7}
