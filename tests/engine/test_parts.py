"""A parameter may be split into parts in several blocks, as fused experts are. Here the split is made by hand."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_lohan.checkpoint.optimizer_states import load_optimizer_states, save_optimizer_states
from hf_lohan.costs import SizeClass
from hf_lohan.device import BufferPool, CpuDevice
from hf_lohan.engine import ParameterAccess, drain_model, open_tiers
from hf_lohan.model import Block, ModelBlocks, discover_blocks, lay_out_block
from hf_lohan.planning import lay_out
from hf_lohan.ranks import Links
from hf_lohan.store import GRANULE_NUMEL
from hf_lohan.testing.models import tiny_model
from hf_lohan.updates.arrival import GradientArrivals
from hf_lohan.updates.gradients import GradientNorms
from hf_lohan.weights import SlotRing

NAME = "model.embed_tokens.weight"
NUMEL = 1500 * 64
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
OpenStored = Callable[..., Any]


def split(blocks: list[Block], *edges: int) -> list[Block]:
    """Return the same blocks with the embedding cut at these elements."""
    whole = next(block for block in blocks if block.slices[0].name == NAME)
    parameter = {NAME: whole.slices[0].parameter}
    parts = [
        lay_out_block(f"{whole.name}.{first}", SizeClass.OUTER, parameter, whole.master, parts={NAME: (first, last)})
        for first, last in zip((0, *edges), (*edges, NUMEL), strict=True)
    ]
    return [*(block for block in blocks if block is not whole), *reversed(parts)]


@pytest.fixture
def open_stored(make_config: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Return a function that drains a model into split blocks and returns the parts of an engine that loading and
    saving use.
    """
    opened: list[Any] = []
    numbers = itertools.count()

    def build(*edges: int, dtype: torch.dtype, **settings: Any) -> Any:
        def discover(*args: Any, **settings: Any) -> ModelBlocks:
            found = discover_blocks(*args, **settings)
            return ModelBlocks(split(found.blocks, *edges), found.needs, found.layers)

        monkeypatch.setattr(sys.modules["hf_lohan.model.stored_form"], "discover_blocks", discover)
        folder = str(tmp_path / f"store{next(numbers)}")
        config = make_config(cpu_memory="4MiB", gpu_memory="2MiB", ssd=folder, **settings)
        model = tiny_model("llama", vocab_size=1500)
        weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        layout = lay_out(model, config, working_dtype=dtype, hold_gradients=True)
        if opened:
            opened.pop().tiers.close()
        tiers = open_tiers(layout, config, CpuDevice())
        access = ParameterAccess(tiers.store, layout.blocks, tiers.states)
        drain_model(layout.blocks, access)
        slices = [part for block in layout.blocks for part in block.slices]
        opened.append(
            SimpleNamespace(
                layout=layout,
                tiers=tiers,
                parameters=access,
                weights=weights,
                parameter_slices=slices,
                step_counts=dict.fromkeys(slices, 0),
                forget_weights=lambda: None,
                links=Links.alone(),
            )
        )
        return opened[-1]

    yield build
    for stored in opened:
        stored.tiers.close()


def states_of(stored: Any) -> dict[str, Tensor]:
    """The weights, their masters and moments. How residuals are stored depends on the parts."""
    access = stored.parameters
    kinds = [kind for kind in ("param", *access.state_kinds(NAME)) if kind != "master_residual"]
    return {kind: access.read_flat(NAME, kind) for kind in kinds} | {"master": access.read_masters(NAME, 0, NUMEL)}


@DTYPES
def test_weights_and_states_of_parts_equal_those_of_the_whole(dtype: torch.dtype, open_stored: OpenStored) -> None:
    expected: dict[str, Tensor] = {}
    for edges in ((), (32 * 700,), (GRANULE_NUMEL, 32 * 1999)):
        stored = open_stored(*edges, dtype=dtype)
        access = stored.parameters
        assert len(access.parts[NAME]) == len(edges) + 1
        moments = torch.arange(NUMEL, dtype=torch.float32)
        access.write_state(NAME, "exp_avg", moments)
        access.write_state(NAME, "exp_avg_sq", -moments[32 * 5 :], first=32 * 5)
        found = states_of(stored)
        assert torch.equal(found["exp_avg"], moments)
        assert torch.equal(found["exp_avg_sq"][32 * 5 :], -moments[32 * 5 :])
        assert not found["exp_avg_sq"][: 32 * 5].any()
        for name, weight in stored.weights.items():
            assert access.read_parameter(name).shape == weight.shape
            if dtype == torch.float32:
                assert torch.equal(access.read_parameter(name), weight)
        expected = expected or found
        assert all(torch.equal(found[kind], state) for kind, state in expected.items())


@pytest.mark.covering(1)
@pytest.mark.parametrize("moments", ["float32", "int8"])
@DTYPES
def test_a_checkpoint_of_one_split_loads_into_another(
    dtype: torch.dtype, moments: str, open_stored: OpenStored, tmp_path: Path
) -> None:
    splits = [(), (32 * 700,), (GRANULE_NUMEL, 32 * 1999)]
    for saved_edges, edges in zip(splits, splits[1:] + splits[:1], strict=True):
        stored = open_stored(*saved_edges, dtype=dtype, optimizer_state_dtype=moments)
        access = stored.parameters
        for kind in access.state_kinds(NAME):
            numel = access.read_flat(NAME, kind).numel()
            access.write_state(NAME, kind, torch.arange(numel) % 100)
        for part in stored.step_counts:
            stored.step_counts[part] = 7
        expected = states_of(stored)
        folder = tmp_path / "-".join(map(str, ("checkpoint", *saved_edges)))
        save_optimizer_states(stored, folder)
        other = open_stored(*edges, dtype=dtype, optimizer_state_dtype=moments)
        load_optimizer_states(other, folder)
        found = states_of(other)
        assert all(torch.equal(found[kind], state) for kind, state in expected.items())
        assert set(other.step_counts.values()) == {7}
    index = folder / "lohan" / "optimizer_index.json"
    fields = json.loads(index.read_text())
    del fields["parameters"][NAME][1]
    index.write_text(json.dumps(fields))
    with pytest.raises(ValueError, match="lack elements of model"):
        load_optimizer_states(other, folder)


def test_another_split_has_another_fingerprint(open_stored: OpenStored) -> None:
    fingerprints = {
        open_stored(*edges, dtype=torch.float32).layout.identity.fingerprint for edges in ((), (32 * 700,), (32 * 701,))
    }
    assert len(fingerprints) == 3


def test_each_part_sends_its_slice_of_the_gradient() -> None:
    parameter = torch.nn.Parameter(torch.zeros(NUMEL, 1))
    edges = ((0, GRANULE_NUMEL + 32), (GRANULE_NUMEL + 32, NUMEL))
    blocks = [
        lay_out_block(f"part{first}", SizeClass.LAYER, {"p": parameter}, parts={"p": (first, last)})
        for first, last in edges
    ]
    chunks = [chunk for block in blocks for chunk in block.cut(GRANULE_NUMEL)]
    slices = [block.slices[0] for block in blocks]
    arrived: list[Any] = []
    norms = GradientNorms(slices)
    pipeline: Any = SimpleNamespace(
        measure_gradient=norms.set_first,
        holds_gradients=True,
        has_gradients=False,
        count_backward=lambda: 1,
        wait_for_ranks=nullcontext,
        held_back=lambda arrived: [],
        submit=lambda chunk, **_options: arrived.append(chunk),
    )
    pool = BufferPool(CpuDevice(), name="gradients", num_buffers=len(chunks), buffer_bytes=4 * GRANULE_NUMEL)
    arrivals = GradientArrivals(CpuDevice(), pool, chunks, pipeline)
    gradient = torch.randn(NUMEL, 1)
    for part in slices:
        arrivals.send_gradient(part, gradient)
    found = torch.empty(NUMEL)
    for chunk in arrived:
        (piece,) = chunk.pieces
        first = piece.param_slice.first + piece.start_in_slice
        found[first : first + piece.numel] = chunk.wait()[piece.start_in_chunk : piece.stop_in_chunk]
    assert torch.equal(found, gradient.flatten())
    torch.testing.assert_close(norms.total(), torch.linalg.vector_norm(gradient))


def test_a_slot_cannot_show_a_part(open_stored: OpenStored) -> None:
    layout = open_stored(32 * 700, dtype=torch.float32).layout
    ring = SlotRing(CpuDevice(), layout.plan)
    part = next(block for block in layout.blocks if block.slices[0].name == NAME)
    with pytest.raises(AssertionError, match="in several blocks"):
        ring.show(part)
