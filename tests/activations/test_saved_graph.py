"""Tensors that a compiled layer saves come back bit for bit, and tensors in one memory are swapped once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from swapper_bench import SwapperBench

from hf_lohan.activations.layer_frame import LayerFrame
from hf_lohan.activations.saved_graph import SavedGraph, SavedView
from hf_lohan.costs import GRAPH, INPUT, LayerPlacements, Placement

SWAPPED: LayerPlacements = {INPUT: Placement.CPU, GRAPH: Placement.CPU}


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[SwapperBench]:
    bench = SwapperBench(tmp_path, ram_bytes=1 << 20)
    yield bench
    bench.close()


def frame_of(bench: SwapperBench, placements: LayerPlacements = SWAPPED) -> LayerFrame:
    def begin_backward(frame: LayerFrame) -> None:
        frame.is_in_backward = True

    return LayerFrame(
        "layer", placements, bench.swapper, bench.device, on_forward=lambda: None, on_backward=begin_backward
    )


def test_views_of_one_tensor_are_swapped_once(bench: SwapperBench) -> None:
    """Queries, keys and values of GPT-2 are parts of one product."""
    frame, product = frame_of(bench), torch.randn(4, 48)
    graph = SavedGraph(frame, torch.randn(4, 16), [])
    views = [part.view(4, 2, 8).transpose(0, 1) for part in product.split(16, dim=1)]
    packed = [graph.pack(view) for view in views]
    assert len(frame.swapped) == 1 and bench.swapper.swapped_bytes == product.nbytes == graph.num_bytes
    expected = [view.clone(memory_format=torch.preserve_format) for view in views]
    strides = [view.stride() for view in views]
    del graph
    bench.settle()
    product.zero_()  # a write after it was stored is not an error, and has no effect
    frame.swapped[0].may_change = True
    for _ in range(2):  # a second backward loads all again
        loaded = [view.load() for view in packed if isinstance(view, SavedView)]
        assert [tensor.stride() for tensor in loaded] == strides
        assert all(map(torch.equal, loaded, expected))
        assert len({tensor.untyped_storage().data_ptr() for tensor in loaded}) == 1
    assert frame.is_in_backward


def test_what_belongs_to_all_layers_stays(bench: SwapperBench) -> None:
    frame, hidden, positions = frame_of(bench), torch.randn(4, 1024), torch.randn(4, 1024)
    graph = SavedGraph(frame, hidden, [positions])
    scales = torch.randn(4)  # small
    sparse = torch.randn(64, 64).to_sparse()
    for tensor in (positions, positions[1:], scales, sparse):
        assert graph.pack(tensor) is tensor
    assert not frame.stored and graph.num_bytes == 0
    assert isinstance(graph.pack(hidden.view(2, 2048)), SavedView)
    assert graph.num_bytes == 0  # the input has a place of its own


@pytest.mark.parametrize("placements", [{INPUT: Placement.GPU, GRAPH: Placement.GPU}, SWAPPED])
def test_what_has_no_room_stays_and_counts(bench: SwapperBench, placements: LayerPlacements) -> None:
    frame, large = frame_of(bench, placements), torch.randn(1 << 19)
    graph = SavedGraph(frame, torch.randn(4), [])
    assert graph.pack(large) is large and graph.pack(large[1:])._base is large
    assert not frame.stored and graph.num_bytes == large.nbytes


def test_a_write_before_the_tensor_has_left_is_an_error(bench: SwapperBench) -> None:
    frame, made = frame_of(bench), torch.randn(64)
    view = SavedGraph(frame, torch.randn(64), []).pack(made)
    made.add_(1)
    assert isinstance(view, SavedView)
    with pytest.raises(RuntimeError, match="was changed in place outside its layer while it was swapped out"):
        view.load()
