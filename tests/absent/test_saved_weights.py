"""Autograd saves handles of weights, never the weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import Node

from hf_lohan.absent import StandIns, saved_weight_hooks
from hf_lohan.absent.saved_weights import WatchedTensor, WeightHandle
from hf_lohan.costs import SizeClass
from hf_lohan.engine import OffloadEngine, model_hooks
from hf_lohan.model import Block
from hf_lohan.testing.models import FAMILIES, tiny_batch, tiny_model


def nodes_of(loss: Tensor) -> set[Node]:
    seen: set[Node] = set()
    todo = [loss.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            todo += [function for function, _ in node.next_functions]
    return seen


def saved_tensors(node: Node) -> list[Tensor]:
    """Return the unpacked tensors that a node has saved."""
    values = [getattr(node, name) for name in dir(node) if name.startswith("_saved_")]
    flat = [v for value in values for v in (value if isinstance(value, tuple | list) else [value])]
    return [value for value in flat if isinstance(value, Tensor)]


def poison(engine: OffloadEngine) -> None:
    """Fill all slots with NaN and make the engine forget their contents. Only a leaked view reads the NaNs."""
    ring = engine._ring
    with ring.lock:  # the prefetch thread may be waiting for this lock to load for the backward
        assert ring.changed.wait_for(lambda: not any(slot.is_loading for slot in ring._all()), timeout=60)
        ring.forget(engine.layout.blocks)
        for slot in ring._all():
            assert slot.num_pins == 0
            slot.weights.fill_(float("nan"))


@pytest.mark.covering(1)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_no_view_of_a_slot_outlives_the_forward(family: str, recompute: bool, make_twins: Callable[..., Any]) -> None:
    twins = make_twins(family, recompute=recompute)
    losses = twins.losses(batch_seed=1)
    poison(twins.engine)
    for loss in losses:
        loss.backward()
    twins.step()
    twins.assert_equal()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_graph_saves_no_tensor_of_a_slot(
    family: str, build_engine: Callable[..., OffloadEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Handles unpack into decoys in this test, so a tensor of the graph that lies in a slot was saved directly."""
    packed: list[WatchedTensor | WeightHandle] = []
    decoys: dict[Block, Tensor] = {}

    def recording_hooks(stand_ins: StandIns, block_behind: Any, _fetch: Any, activations: Any) -> Any:
        def decoy(block: Block, _element: int) -> Tensor:
            return decoys.setdefault(block, torch.zeros(block.numel))

        hooks = saved_weight_hooks(stand_ins, block_behind, decoy, activations)
        pack = hooks.pack_hook

        def record(tensor: Tensor) -> WatchedTensor | WeightHandle:
            packed.append(pack(tensor))
            return packed[-1]

        return torch.autograd.graph.saved_tensors_hooks(record, hooks.unpack_hook)

    monkeypatch.setattr(model_hooks, "saved_weight_hooks", recording_hooks)
    engine = build_engine(tiny_model(family).train())
    loss = engine.model(**tiny_batch()).loss
    handles = [saved for saved in packed if isinstance(saved, WeightHandle)]
    layers = {block for block in engine.layout.blocks if block.size_class is SizeClass.LAYER}
    assert layers <= {handle.block for handle in handles}
    kept = [saved.tensor for saved in packed if isinstance(saved, WatchedTensor)]
    assert kept and all(engine._ring.block_behind(tensor) is None for tensor in kept)
    found = [tensor for node in nodes_of(loss) for tensor in saved_tensors(node)]
    assert len(found) >= len(handles)
    assert all(engine._ring.block_behind(tensor) is None for tensor in found)


def test_a_handle_finds_its_weight_in_any_slot(build_engine: Callable[..., OffloadEngine]) -> None:
    engine = build_engine(tiny_model("llama").train())
    ring, block = engine._ring, engine.layout.blocks[1]
    slot = engine._prefetcher.acquire(block)
    elsewhere = slot.weights + 1
    fetch = lambda _block, _element: elsewhere  # noqa: E731
    hooks = saved_weight_hooks(ring.stand_ins, ring.block_behind, fetch, engine.activations)
    part = block.slices[1]
    view = slot.weights[part.start : part.stop].view(part.shape).t()[3:]
    handle = hooks.pack_hook(view)
    assert isinstance(handle, WeightHandle)
    again = hooks.unpack_hook(handle)
    assert (again.shape, again.stride()) == (view.shape, view.stride())
    assert torch.equal(again, view + 1)
    ring.unpin(block)
    other = torch.randn(3)
    assert hooks.unpack_hook(hooks.pack_hook(other)).data_ptr() == other.data_ptr()
