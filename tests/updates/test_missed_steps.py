"""Lazy experts take steps with zero gradients later. Readers see the same as if they were updated at once."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lazy_bench import CHUNK_NUMEL, NUM_EXPERTS, LazyBench, assert_equal
from torch import Tensor

from hf_lohan.device import mapped_empty
from hf_lohan.optim import MasterFormat, UpdateRule, master_format

ALL = range(NUM_EXPERTS)
MOST = 3
FORMS = [
    master_format(torch.float32),
    master_format(torch.bfloat16),
    master_format(torch.bfloat16, "bfloat16"),
    master_format(torch.float32, "int8"),
    master_format(torch.bfloat16, "int8_stochastic"),
]
MakeBench = Callable[..., LazyBench]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[MakeBench]:
    benches: list[LazyBench] = []

    def make_bench(form: MasterFormat = FORMS[1], *, most: int = MOST, folder: str = "", **settings: Any) -> LazyBench:
        benches.append(LazyBench(tmp_path / (folder or str(most)), form, most=most, **settings))
        return benches[-1]

    yield make_bench
    for bench in benches:
        bench.close()


def both(make: MakeBench, form: MasterFormat = FORMS[1], **settings: Any) -> tuple[LazyBench, LazyBench]:
    """Make a bench with lazy experts and one without."""
    return make(form, **settings), make(form, most=0, **settings)


@pytest.mark.covering(1)
@pytest.mark.parametrize("form", FORMS, ids=lambda form: f"{form.working_dtype} {form.moment_dtype}")
@pytest.mark.parametrize("mode", ["deferred", "in_backward", "accepted", "redone"])
def test_readers_see_no_difference(mode: str, form: MasterFormat, make: MakeBench) -> None:
    """Steps have changing learning rates and one or two backwards. Some are dropped or not committed."""
    settings = {"hold_gradients": mode != "in_backward", "speculates": mode in ("accepted", "redone")}
    lazy, eager = both(make, form, **settings)
    choose = random.Random(f"{mode} {form}")
    were_behind: set[int] = set()
    for step in range(12):
        touched = set(choose.sample(ALL, choose.randint(0, 2)))
        others = {number for number in ALL if choose.random() < 0.2} if mode == "deferred" else set()
        is_dropped, commits = choose.random() < 0.2, mode == "deferred" and choose.random() < 0.5
        for bench in (lazy, eager):
            bench.group = replace(bench.group, lr=1e-2 / (1 + step))
            if others:
                bench.backward(others, 100 + step, is_final=False)
            bench.backward(touched, step)
            if is_dropped:
                bench.pipeline.wait_for_norms()
                bench.pipeline.abandon_step()
            else:
                clips = mode == "redone" or (mode == "deferred" and step % 2 == 0)
                bench.finish_step(0.5 if clips else 1.0, commits=commits or mode != "deferred")
        were_behind |= lazy.experts_behind()
        assert not eager.experts_behind()
        number = choose.choice(ALL)
        assert torch.equal(lazy.weights_of(number), eager.weights_of(number)), (step, number)
    assert were_behind == set(ALL) and lazy.experts_behind()
    assert set(lazy.applied) <= {mode, "deferred"} and mode in lazy.applied
    assert_equal(lazy, eager)


def test_steps_are_missed_only_while_enough_experts_get_no_tokens(make: MakeBench) -> None:
    lazy, eager = both(make, from_share=0.5)
    most_touched = NUM_EXPERTS - 1
    were_behind = []
    for step, num_touched in enumerate([most_touched, 0, 0, most_touched, most_touched, most_touched]):
        for bench in (lazy, eager):
            bench.step(set(range(num_touched)), step, 1.0)
        were_behind.append(bool(lazy.experts_behind()))
    # The share of experts without tokens is 1/n, rises above a half and falls again. Then all experts catch up.
    assert were_behind[:4] == [False, True, True, True] and not were_behind[-1]
    assert_equal(lazy, eager)


def test_experts_that_miss_a_step_are_neither_read_nor_written(
    make: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make()
    bench.step(ALL, 0)
    accessed: list[str] = []
    for name in ("read", "write"):
        method = getattr(bench.store, name)

        def noted(block: str, *args: Any, method: Any = method, **keywords: Any) -> Any:
            accessed.append(block)
            return method(block, *args, **keywords)

        monkeypatch.setattr(bench.store, name, noted)
    bench.step({2}, 1)
    assert set(accessed) == {"expert2"} and bench.experts_behind() == {0, 1, 3}


def test_no_expert_is_more_steps_behind_than_allowed(make: MakeBench) -> None:
    lazy, eager = both(make)
    experts_behind = []
    for step in range(2 * MOST + 3):
        for bench in (lazy, eager):
            bench.step(ALL if step == 0 else {1}, step)
        experts_behind.append(max(len(lazy.missed.steps(chunk)) for chunk in lazy.chunks))
    assert experts_behind == [0, 1, 2, 3, 0, 1, 2, 3, 0]
    assert_equal(lazy, eager)


def test_experts_that_no_backward_passed_take_no_step(make: MakeBench) -> None:
    lazy, eager = both(make)
    for bench in (lazy, eager):
        for step in range(9):
            bench.step(ALL if step == 0 else {0}, step)
            for other in range(step % 3):  # steps without these experts
                bench.pipeline.submit(bench._arrived(bench.chunks[0], torch.ones(CHUNK_NUMEL)), is_final=True)
                bench.finish_step(1 / (1 + other))
    assert_equal(lazy, eager)


@pytest.mark.covering(0)
@pytest.mark.parametrize("chunk_numel", [CHUNK_NUMEL, 3 * CHUNK_NUMEL])
def test_a_commit_has_the_missed_steps(chunk_numel: int, make: MakeBench) -> None:
    """The store may be opened with other chunks and without lazy experts."""
    lazy, eager = both(make)
    for step in range(3):
        for bench in (lazy, eager):
            bench.group = replace(bench.group, lr=0.3 / (1 + step))
            bench.step(ALL if step == 0 else {step}, step)
    assert lazy.experts_behind()
    lazy.close()
    again = make(folder=str(MOST), most=0, chunk_numel=chunk_numel)
    again.restore()
    assert again.experts_behind() == {0, 1, 3}
    assert_equal(again, eager)
    again.group = eager.group
    for bench in (again, eager):
        bench.step((), 9)
    assert not again.experts_behind()
    assert_equal(again, eager)


def test_going_back_to_a_commit_restores_its_missed_steps(make: MakeBench) -> None:
    lazy, eager = both(make)
    for bench in (lazy, eager):
        bench.step(ALL, 0)
        bench.step({1}, 1)
        bench.step({0}, 2, commits=False)
        bench.backward({2}, 3)
        bench.go_back()
    assert lazy.experts_behind() == {0, 2, 3}
    assert_equal(lazy, eager)


def test_reading_writes_no_drafts(make: MakeBench) -> None:
    lazy, eager = both(make, hold_gradients=False)
    for bench in (lazy, eager):
        bench.step(ALL, 0)
        bench.step({1}, 1)
        bench.states_of(0)
        assert not bench.store.has_drafts
        bench.backward({0, 1}, 2)
        bench.pipeline.wait_for_norms()
        assert not bench.pipeline.is_past_undoing
        bench.pipeline.abandon_step()
    assert lazy.experts_behind() == {0, 2, 3}
    assert_equal(lazy, eager)


def test_a_step_that_cannot_be_undone_leaves_no_expert_partly_behind(make: MakeBench) -> None:
    """Backward failed after it had updated one chunk of an expert, over drafts of the last step."""
    lazy, eager = both(make, hold_gradients=False)
    for bench in (lazy, eager):
        bench.step(ALL, 0)
        bench.step({1}, 1, commits=False)
        bench.pipeline.wait_for_updates()
        bench.pipeline.submit(bench._arrived(bench.chunks[0], torch.ones(CHUNK_NUMEL)), is_final=True)
        bench.pipeline.abandon_step()
    assert lazy.experts_behind() == {2, 3}
    assert_equal(lazy, eager)
    lazy.commit()


def test_a_written_block_catches_up_first(make: MakeBench) -> None:
    """Missed steps apply to the old weights."""
    lazy, eager = both(make)
    bounce = mapped_empty(1 << 20)
    for bench in (lazy, eager):
        bench.step(ALL, 0)
        bench.step({1}, 1)
        bench.records.write_unaligned("expert2", "param", 3, torch.ones(40, dtype=torch.bfloat16), bounce)
    assert lazy.experts_behind() == {0, 3}
    assert_equal(lazy, eager)


def test_single_elements_are_read_up_to_date(make: MakeBench) -> None:
    lazy, eager = both(make)
    bounce = mapped_empty(1 << 20)

    def read_some(bench: LazyBench) -> Tensor:
        out = torch.empty(77)
        bench.records.read_unaligned("expert3", "exp_avg", CHUNK_NUMEL - 5, out, bounce)
        return out

    for bench in (lazy, eager):
        bench.step(ALL, 0)
        before = read_some(bench)
        bench.step({1}, 1)
    assert torch.equal(read_some(lazy), read_some(eager)) and not torch.equal(read_some(lazy), before)


def test_rules_other_than_adamw_miss_no_steps(make: MakeBench) -> None:
    """A commit cannot store the hyperparameters of other rules."""
    lazy = make(master_format(torch.float32, rule=UpdateRule("Lion", ("exp_avg",))))
    lazy.group = (("lr", 1e-3), ("betas", (0.9, 0.99)), ("weight_decay", 0.1))
    lazy.backward({1}, 0)
    lazy.finish_step()
    assert not lazy.experts_behind()
