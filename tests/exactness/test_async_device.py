"""The engine's waits are sufficient and necessary. A device double that delays copies shows both."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from async_device import AsyncDevice, WaitSite
from covering import slow_but
from engines import open_engine, resolved
from torch import Tensor

from hf_lohan.activations.tiers import Sizes
from hf_lohan.costs import GRAPH, INPUT, Placement
from hf_lohan.device import CpuDevice, Device
from hf_lohan.engine import OffloadEngine
from hf_lohan.huggingface.attention import run_layers_in_chunks
from hf_lohan.huggingface.offloaded_model import enable_recompute
from hf_lohan.optim import OffloadAdamW
from hf_lohan.planning import lay_out
from hf_lohan.testing.models import FAMILIES, tiny_batch, tiny_model

NUM_SEEDS = 20
NUM_QUICK_SEEDS = 1
"""Of these seeds, cases that cover each family and mode run by default. Other seeds are slow."""
NUM_STEPS = 4
DELAYS_S = (1e-3, 5e-3, 2e-2, 8e-2, 0.32)
"""The maximum delays of copies. The shortest shows most races. The longest shows all of them, even on a busy machine.
"""
MODES: dict[str, dict[str, Any]] = {
    "held": {"max_norm": 0.5, "num_backwards": 2, "recompute": True},
    "in_backward": {"max_norm": 0.0, "num_backwards": 1, "recompute": False},
    "swap": {"max_norm": 0.5, "num_backwards": 2, "recompute": True},
    "lent": {"max_norm": 0.0, "num_backwards": 1, "recompute": False},
}
"""The mode "lent" has one more slot, so updates in backward borrow weights from the slot that backward uses."""
IN_CHUNKS: dict[str, Any] = {"max_norm": 0.5, "num_backwards": 2, "recompute": True}
"""Of the modes that `MODES` does not have, in which layers run in chunks. The order of sums, and thus the bits, differ
from those in memory."""
SAVED_TENSORS = "swap of saved tensors"
"""The mode in which layers swap what autograd saves, as compiled layers do. It has the settings of `IN_CHUNKS`."""
SMALL: dict[str, Any] = {"cpu_memory": "3MiB", "gpu_memory": "1MiB", "_io_threads": 2, "experts": "with_layer"}
BOUND_MEMORY = ("drain",)
"""These waits only limit memory. Without them the forward does not wait until activations have left the device."""
SHOWN_APART = ("_free_copied", "push_top")
"""These runs rarely need these waits, because a buffer is rarely reused while a copy still runs. Other tests need them:
tests/updates/test_handover.py reuses a buffer at once, and in tests/device/test_host_stack.py compute writes while a
copy still runs.
"""
Outcome = dict[str, Tensor]


def train(
    model: Any,
    optimizer: Any,
    *,
    max_norm: float,
    num_backwards: int,
    clip: Any,
    engine: OffloadEngine | None = None,
    sizes: Sizes | None = None,
) -> None:
    for step in range(NUM_STEPS):
        if engine is not None and step and engine.config.activations == "swap":
            swap_here_and_there(engine, sizes)
        for number in range(num_backwards):
            if engine is not None:
                engine.announce_backward(is_final=number == num_backwards - 1)
            model(**tiny_batch(seed=100 * step + number)).loss.backward()
        if max_norm:
            clip(max_norm)
        optimizer.step()
        optimizer.zero_grad()


def swap_here_and_there(engine: OffloadEngine, sizes: Sizes | None) -> None:
    """Swap to RAM and to the SSD in turn. The last layer is needed first, so it goes to RAM. ``sizes``: what layers
    could swap, if they run in chunks, which are not traced."""
    memory = engine.planned_memory
    if sizes is None:
        sizes = {name: layer.sizes() for name, layer in memory.trace.items()}
    else:
        engine.activations.end_watching()
        memory.sizes = sizes
    places = itertools.cycle([Placement.CPU, Placement.SSD])
    mixture = {name: {what: next(places) for what in of_layer} for name, of_layer in sizes.items()}
    last = list(mixture)[-1]
    memory.set_placements({**mixture, last: dict.fromkeys(mixture[last], Placement.CPU)})


@functools.cache
def reference(family: str, mode: str) -> Outcome:
    """Return the weights after training with torch in memory."""
    settings = MODES[mode]
    model = _model(family, recompute=settings["recompute"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, fused=True)
    train(
        model,
        optimizer,
        max_norm=settings["max_norm"],
        num_backwards=settings["num_backwards"],
        clip=lambda max_norm: torch.nn.utils.clip_grad_norm_(list(model.parameters()), max_norm),
    )
    return {name: p.detach() for name, p in model.named_parameters()}


def _model(family: str, *, recompute: bool) -> Any:
    model = tiny_model(family).train()
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


@contextlib.contextmanager
def offloaded(family: str, mode: str, device: Device, folder: Path) -> Iterator[tuple[OffloadEngine, OffloadAdamW]]:
    """Offload a tiny model with as few slots and buffers as possible."""
    settings = MODES.get(mode, IN_CHUNKS)
    model = _model(family, recompute=settings["recompute"])
    prefetch_blocks, activations = 2 if mode == "lent" else 1, "swap" if "swap" in mode else "recompute"
    config = resolved(folder, **SMALL, prefetch_blocks=prefetch_blocks, activations=activations)
    layout = lay_out(model, config, working_dtype=torch.float32, hold_gradients=settings["max_norm"] > 0)
    engine = open_engine(model, layout, config, device)
    if settings["recompute"] and mode != "held":
        enable_recompute(model, engine)
    if mode == SAVED_TENSORS:
        engine.activations.compiled.update(dict.fromkeys(model.model.layers, lambda function: function))
    elif mode not in MODES:
        layers = {layer: f"model.layers.{number}" for number, layer in enumerate(model.model.layers)}
        run_layers_in_chunks(model, engine.activations, layers).cut(6)
    try:
        yield engine, OffloadAdamW(model.parameters(), lr=1e-3, weight_decay=0.1, engine=engine)
    finally:
        engine.close()


def run(family: str, mode: str, device: Device, folder: Path, sizes: Sizes | None = None) -> Outcome:
    settings = MODES.get(mode, IN_CHUNKS)
    with offloaded(family, mode, device, folder) as (engine, optimizer):
        train(
            engine.model,
            optimizer,
            max_norm=settings["max_norm"],
            num_backwards=settings["num_backwards"],
            clip=engine.clip_grad_norm,
            engine=engine,
            sizes=sizes,
        )
        swapper = engine.activations.swapper
        assert "swap" not in mode or 0 < swapper.spilled_bytes < swapper.swapped_bytes
        return {name: engine.parameters.read_parameter(name) for name, _ in engine.model.named_parameters()}


def same(ours: Outcome, reference: Outcome) -> bool:
    return all(torch.equal(ours[name], weight) for name, weight in reference.items())


@pytest.mark.covering(1)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", FAMILIES)
def test_cpu_device_is_exact_to_the_bit(family: str, mode: str, tmp_path: Path) -> None:
    assert same(run(family, mode, CpuDevice(), tmp_path), reference(family, mode))


def late(family: str, mode: str, seed: int, *, is_quick: bool) -> Any:
    return pytest.param(family, mode, seed, marks=[] if is_quick else pytest.mark.slow)


LATE = [
    late(family, mode, seed, is_quick=seed < NUM_QUICK_SEEDS)
    for family in FAMILIES
    for mode in ("held", "in_backward")
    for seed in range(NUM_SEEDS)
]
LATE += [
    late(FAMILIES[seed % len(FAMILIES)], mode, seed, is_quick=seed < NUM_QUICK_SEEDS * len(FAMILIES))
    for mode in ("swap", "lent")
    for seed in range(NUM_SEEDS)
]


@pytest.mark.covering(1)
@pytest.mark.parametrize(("family", "mode", "seed"), LATE)
def test_late_copies_change_no_bit(family: str, mode: str, seed: int, tmp_path: Path) -> None:
    device = AsyncDevice(seed, max_delay_s=5e-4)
    assert same(run(family, mode, device, tmp_path), reference(family, mode))
    assert device.num_races == 0


@pytest.fixture(scope="module")
def in_chunks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Outcome, Sizes]:
    """Return the weights after training in chunks on the CPU, and the bytes that whole layers could swap."""
    folder = tmp_path_factory.mktemp("chunks")
    outcome = run("llama", "chunks", CpuDevice(), folder / "cut")
    assert not same(outcome, reference("llama", "swap")), "not cut"
    with offloaded("llama", "swap", CpuDevice(), folder / "whole") as (engine, _):
        engine.model(**tiny_batch()).loss.backward()
        return outcome, {name: layer.sizes() for name, layer in engine.planned_memory.trace.items()}


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 10))])
@pytest.mark.parametrize("mode", slow_but(["chunks, swap"], ["chunks", "chunks, swap"]))
def test_late_copies_change_no_bit_of_chunks(
    mode: str, seed: int, in_chunks: tuple[Outcome, Sizes], tmp_path: Path
) -> None:
    outcome, sizes = in_chunks
    device = AsyncDevice(seed, max_delay_s=5e-4)
    assert same(run("llama", mode, device, tmp_path, sizes if "swap" in mode else None), outcome)
    assert device.num_races == 0


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 10))])
def test_late_copies_change_no_bit_of_saved_tensors(seed: int, tmp_path: Path) -> None:
    sizes = {f"model.layers.{number}": {INPUT: 1 << 16, GRAPH: 1 << 19} for number in range(3)}
    device = AsyncDevice(seed, max_delay_s=5e-4)
    assert same(run("llama", SAVED_TENSORS, device, tmp_path, sizes), reference("llama", "swap"))
    assert device.num_races == 0


@pytest.mark.slow
def test_every_wait_is_needed(tmp_path: Path) -> None:
    """If the engine skips any single wait, it gives a wrong weight, a NaN or an error."""
    needless: list[WaitSite] = []
    for mode in MODES:
        watching = AsyncDevice(0)
        run("llama", mode, watching, tmp_path)
        assert watching.wait_sites
        for site in sorted(watching.wait_sites, key=lambda site: (site.file, site.line)):
            if site.function in (*BOUND_MEMORY, *SHOWN_APART):
                continue
            attempts = range(len(DELAYS_S))
            if not any(goes_wrong_without(site, mode, attempt, tmp_path) for attempt in attempts):
                needless.append(site)
    assert not needless


def goes_wrong_without(site: WaitSite, mode: str, attempt: int, folder: Path) -> bool:
    """Return whether a run without this wait goes wrong. Later attempts delay copies more and show more races."""
    device = AsyncDevice(attempt, max_delay_s=DELAYS_S[attempt], ignored=frozenset([site]))
    try:
        return not same(run("llama", mode, device, folder), reference("llama", mode))
    except Exception:
        return True
