"""Under the next forward, updates have the first blocks' old weights from their slots, and leave the new ones there."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from engines import TwinsFactory
from torch import Tensor

from hf_lohan.engine import OffloadEngine
from hf_lohan.planner import SizeClass
from hf_lohan.store import RecordRead
from hf_lohan.testing.models import tiny_batch, tiny_model

SETTINGS = {"hold_gradients": True, "resident_records": "none", "clip": "defer"}


def first_layers(engine: OffloadEngine) -> list[str]:
    layers = [block.name for block in engine.layout.blocks if block.size_class is SizeClass.LAYER]
    return layers[: engine.layout.plan.num_slots[SizeClass.LAYER]]


def count_reads(engine: OffloadEngine, monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[str, str, bool]]:
    """By block, kind, and whether an update reads."""
    reads: Counter[tuple[str, str, bool]] = Counter()
    store = engine.tiers.store
    read_of_store = store.read

    def read(block: str, kind: str, start_numel: int, out: Tensor, *, is_urgent: bool = False) -> RecordRead:
        reads[block, kind, threading.current_thread().name == "lohan-gradients"] += out.numel()
        return read_of_store(block, kind, start_numel, out, is_urgent=is_urgent)

    monkeypatch.setattr(store, "read", read)
    return reads


@pytest.mark.parametrize("prefetch_blocks", [1, 2])
def test_the_first_blocks_are_read_neither_to_update_nor_to_use_them(
    prefetch_blocks: int, make_twins: TwinsFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    twins = make_twins(
        model_factory=lambda: tiny_model("llama", num_layers=6).train(), prefetch_blocks=prefetch_blocks, **SETTINGS
    )
    twins.train(2, max_norm=0.5)
    twins.losses(1)  # under it the second step's updates run, so that the next ones find nothing left of them
    twins.engine.settle()
    reads = count_reads(twins.engine, monkeypatch)
    twins.train(2, max_norm=0.5)
    twins.engine.settle()
    first = first_layers(twins.engine)
    assert len(first) == 1 + prefetch_blocks
    numel_of = {block.name: block.numel for block in twins.engine.layout.blocks}
    for name, numel in numel_of.items():
        assert reads[name, "exp_avg", True] == 2 * numel
        if name in first:
            assert reads[name, "param", True] == 0
        elif ".layers." in name:
            assert reads[name, "param", True] == 2 * numel
    twins.assert_equal()


def test_what_has_no_gradient_stays_as_it_is_in_the_slot(
    make_twins: TwinsFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is neither read again nor lost."""

    def half_frozen() -> Any:
        model = tiny_model("llama", num_layers=4).train()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("mlp" not in name)
        return model

    twins = make_twins(model_factory=half_frozen, **SETTINGS)
    for seed in range(3):
        twins.train(1, first_seed=seed, max_norm=0.5)
    twins.engine.settle()
    reads = count_reads(twins.engine, monkeypatch)
    twins.losses(3)
    first = first_layers(twins.engine)
    assert first and not any(reads[name, "param", False] for name in first)
    twins.assert_equal()


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("num_interrupts", [1, 2])
def test_an_interrupted_step_leaves_no_slot_waiting(
    num_interrupts: int, when: str, make_twins: TwinsFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last interrupts come while the first is being recovered from."""
    twins = make_twins(model_factory=lambda: tiny_model("llama", num_layers=4).train(), **SETTINGS)
    twins.train(2, max_norm=0.5)
    twins.engine.settle()
    thread, ring = twins.engine._pipeline._thread, twins.engine._ring
    call = thread.call
    num_calls = 0

    def interrupted(command: Callable[[], Any]) -> Any:
        """The step is measured, then decided."""
        nonlocal num_calls
        num_calls += 1
        if num_calls == 1:
            return call(command)
        if num_calls == 2 and when == "after":
            call(command)
            assert any(slot.is_loading for slot in ring._all()), "nothing is being renewed"
        raise KeyboardInterrupt

    twins.model(**tiny_batch(seed=5)).loss.backward()
    with monkeypatch.context() as patch:
        patch.setattr(thread, "call", interrupted)
        for _ in range(num_interrupts):
            with pytest.raises(KeyboardInterrupt):
                twins.optimizer.step()
    twins.train(2, first_seed=7, max_norm=0.5)
    twins.assert_equal()


def test_a_dropped_step_that_is_interrupted_is_dropped(
    make_twins: TwinsFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    twins = make_twins(model_factory=lambda: tiny_model("llama", num_layers=4).train(), **SETTINGS)
    twins.train(1)
    thread = twins.engine._pipeline._thread
    twins.model(**tiny_batch(seed=5)).loss.backward()

    def interrupted(command: Callable[[], Any]) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(thread, "call", interrupted)
        twins.optimizer.zero_grad()
    twins.train(2, first_seed=7)
    twins.assert_equal()
