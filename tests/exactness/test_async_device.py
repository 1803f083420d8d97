"""The engine's waits are sufficient and necessary, as a device shows whose copies run late."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_lohan.config import OffloadConfig
from hf_lohan.device import CpuDevice, Device
from hf_lohan.engine import OffloadEngine, ParameterAccess, drain_model, open_tiers
from hf_lohan.engine.planned_memory import PlannedMemory
from hf_lohan.huggingface.attachment import enable_recompute
from hf_lohan.optim import OffloadAdamW
from hf_lohan.planner import Placement
from hf_lohan.planning import lay_out
from hf_lohan.testing.async_device import AsyncDevice, WaitSite
from hf_lohan.testing.models import FAMILIES, tiny_batch, tiny_model

NUM_SEEDS = 20
NUM_QUICK_SEEDS = 2
"""Of each family and mode. Tests with other seeds are slow."""
NUM_STEPS = 4
DELAYS_S = (1e-3, 5e-3, 2e-2, 8e-2, 0.32)
"""The longest delays of copies. The first shows most races, the last shows all of them on a busy machine, too."""
MODES: dict[str, dict[str, Any]] = {
    "held": {"max_norm": 0.5, "num_backwards": 2, "recompute": True},
    "in_backward": {"max_norm": 0.0, "num_backwards": 1, "recompute": False},
    "swap": {"max_norm": 0.5, "num_backwards": 2, "recompute": True},
    "lent": {"max_norm": 0.0, "num_backwards": 1, "recompute": False},
}
"""In "lent" there is one more slot, so updates in backward borrow the weights from the slot that backward uses."""
BOUND_MEMORY = ("drain",)
"""Without these waits the numbers are right, but the forward does not wait for activations to leave the device."""
SHOWN_APART = ("_free_copied", "push_top")
"""Waits that these runs hardly need, because a buffer is rarely reused in time. Other tests show them:
tests/updates/test_handover.py reuses a buffer at once, and in tests/device/test_host_stack.py a copy still runs while
compute writes."""
Outcome = dict[str, Tensor]


def train(
    model: Any, optimizer: Any, *, max_norm: float, num_backwards: int, clip: Any, engine: OffloadEngine | None = None
) -> None:
    for step in range(NUM_STEPS):
        if engine is not None and step and engine.config.activations == "swap":
            swap_here_and_there(engine.planned_memory)
        for number in range(num_backwards):
            if engine is not None:
                engine.announce_backward(is_final=number == num_backwards - 1)
            model(**tiny_batch(seed=100 * step + number)).loss.backward()
        if max_norm:
            clip(max_norm)
        optimizer.step()
        optimizer.zero_grad()


def swap_here_and_there(memory: PlannedMemory) -> None:
    """Swap in turn to RAM and to the SSD. The last layer, which is needed at once, goes to RAM."""
    places = itertools.cycle([Placement.CPU, Placement.SSD])
    mixture = {name: {what: next(places) for what in layer.sizes()} for name, layer in memory.trace.items()}
    last = list(mixture)[-1]
    memory.set_placements({**mixture, last: dict.fromkeys(mixture[last], Placement.CPU)})


@pytest.fixture(scope="module")
def references() -> dict[tuple[str, str], Outcome]:
    """The weights of every family and mode, trained by torch in memory."""
    outcomes = {}
    for family in FAMILIES:
        for mode, settings in MODES.items():
            model = _model(family, recompute=settings["recompute"])
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, fused=True)
            parameters = list(model.parameters())
            train(
                model,
                optimizer,
                max_norm=settings["max_norm"],
                num_backwards=settings["num_backwards"],
                clip=lambda max_norm, parameters=parameters: torch.nn.utils.clip_grad_norm_(parameters, max_norm),
            )
            outcomes[family, mode] = {name: p.detach() for name, p in model.named_parameters()}
    return outcomes


def _model(family: str, *, recompute: bool) -> Any:
    model = tiny_model(family).train()
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


@contextlib.contextmanager
def offloaded(family: str, mode: str, device: Device, folder: Path) -> Iterator[tuple[OffloadEngine, OffloadAdamW]]:
    """Offload a tiny model with as few slots and buffers as possible."""
    settings = MODES[mode]
    model = _model(family, recompute=settings["recompute"])
    config = OffloadConfig.load(
        {"cpu_memory": "3MiB", "gpu_memory": "1MiB", "ssd": str(folder), "io_threads": 2, "experts": "with_layer"},
        prefetch_blocks=2 if mode == "lent" else 1,
        activations="swap" if mode == "swap" else "recompute",
    ).resolve(host_memory_bytes=1 << 30, device_memory_bytes=1 << 30, num_cpus=2, default_ssd_path=str(folder))
    layout = lay_out(model, config, working_dtype=torch.float32, hold_gradients=settings["max_norm"] > 0)
    tiers = open_tiers(layout, config, device)
    drain_model(layout.blocks, ParameterAccess(tiers.store, layout.blocks, tiers.states))
    engine = OffloadEngine(model, layout, tiers, config)
    if mode == "swap":
        enable_recompute(model, engine)
    try:
        yield engine, OffloadAdamW(model.parameters(), lr=1e-3, weight_decay=0.1, engine=engine)
    finally:
        engine.close()


def run(family: str, mode: str, device: Device, folder: Path) -> Outcome:
    settings = MODES[mode]
    with offloaded(family, mode, device, folder) as (engine, optimizer):
        train(
            engine.model,
            optimizer,
            max_norm=settings["max_norm"],
            num_backwards=settings["num_backwards"],
            clip=engine.clip_grad_norm,
            engine=engine,
        )
        return {name: engine.parameters.read_parameter(name) for name, _ in engine.model.named_parameters()}


def same(ours: Outcome, reference: Outcome) -> bool:
    return all(torch.equal(ours[name], weight) for name, weight in reference.items())


@pytest.mark.covering(1)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", FAMILIES)
def test_cpu_device_is_exact_to_the_bit(
    family: str, mode: str, references: dict[tuple[str, str], Outcome], tmp_path: Path
) -> None:
    assert same(run(family, mode, CpuDevice(), tmp_path), references[family, mode])


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


@pytest.mark.parametrize(("family", "mode", "seed"), LATE)
def test_late_copies_change_no_bit(
    family: str, mode: str, seed: int, references: dict[tuple[str, str], Outcome], tmp_path: Path
) -> None:
    device = AsyncDevice(seed, max_delay_s=5e-4)
    assert same(run(family, mode, device, tmp_path), references[family, mode])
    assert device.num_races == 0


@pytest.mark.slow
def test_every_wait_is_needed(references: dict[tuple[str, str], Outcome], tmp_path: Path) -> None:
    """Without any one of its waits, the engine gives a wrong weight, a NaN or an error."""
    needless: list[WaitSite] = []
    for mode in MODES:
        watching = AsyncDevice(0)
        run("llama", mode, watching, tmp_path)
        assert watching.wait_sites
        for site in sorted(watching.wait_sites, key=lambda site: (site.file, site.line)):
            if site.function in (*BOUND_MEMORY, *SHOWN_APART):
                continue
            attempts = range(len(DELAYS_S))
            if not any(goes_wrong_without(site, mode, attempt, references, tmp_path) for attempt in attempts):
                needless.append(site)
    assert not needless


def goes_wrong_without(
    site: WaitSite, mode: str, attempt: int, references: dict[tuple[str, str], Outcome], folder: Path
) -> bool:
    """Return whether a run shows that the wait is missing. Later attempts delay copies more and show more races."""
    device = AsyncDevice(attempt, max_delay_s=DELAYS_S[attempt], ignored=frozenset([site]))
    try:
        return not same(run("llama", mode, device, folder), references["llama", mode])
    except Exception:
        return True
