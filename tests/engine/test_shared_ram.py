"""Swapped activations and held gradients share the same RAM."""

from __future__ import annotations

import errno
import gc
import os
import threading
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from async_device import AsyncDevice
from clip_norms import CLIPS, LETS_THROUGH
from engines import EngineFactory, PlannedError, TwinsFactory
from torch import Tensor

from hf_lohan.activations.tiers import placed_bytes
from hf_lohan.costs import Placement
from hf_lohan.costs.search.candidate_memory import held_beside
from hf_lohan.device import CpuDevice, Event, Lane
from hf_lohan.engine import OffloadEngine
from hf_lohan.files import FileBackend, StorageError
from hf_lohan.huggingface.offloaded_model import enable_recompute
from hf_lohan.optim import OffloadAdamW
from hf_lohan.testing.models import tiny_batch, tiny_model
from hf_lohan.updates.gradients import ChunkGradient, HeldGradients

SWAP = {"gpu_memory": "1MiB", "activations": "swap", "_resident_records": "none", "durability": "step"}
ALL_FIT: dict[str, Any] = {"num_layers": 6, "cpu_memory": "6MiB"}
FEW_FIT: dict[str, Any] = {"num_layers": 10, "cpu_memory": "5MiB"}
BOTH = pytest.mark.parametrize("room", [ALL_FIT, FEW_FIT], ids=["all_fit", "few_fit"])
NUM_STEPS = 3


class CountingFiles(FileBackend):
    """Counts the bytes that are written to each file. While `broken` is named, writes to that file fail."""

    def __init__(self) -> None:
        self.written: Counter[str] = Counter()
        self.broken = ""
        self._names: dict[int, str] = {}

    def open(self, path: str, flags: int) -> int:
        fd = super().open(path, flags)
        self._names[fd] = os.path.basename(path)
        return fd

    def write(self, fd: int, offset: int, views: Sequence[memoryview]) -> int:
        name = self._names[fd]
        if name == self.broken:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        num_bytes = super().write(fd, offset, views)
        self.written[name] += num_bytes
        return num_bytes


class Sharing:
    """Twins whose activations are swapped to RAM that gradients share."""

    def __init__(self, make_twins: TwinsFactory, room: dict[str, Any], **settings: Any) -> None:
        self.files = CountingFiles()
        factory = partial(tiny_model, "llama", num_layers=room["num_layers"])
        settings = {**SWAP, "cpu_memory": room["cpu_memory"], "backend": self.files, **settings}
        self.twins = make_twins(model_factory=factory, recompute=True, **settings)
        self.engine: OffloadEngine = self.twins.engine
        self.ram = self.engine.tiers.shared_ram
        self.num_backwards = 0

    @property
    def fixed_bytes(self) -> int:
        """The bytes of gradients that have no buffers."""
        return sum(record.num_bytes for record in self.engine.layout.spill_records())

    def backward(self, *, is_final: bool = True, **shape: int) -> None:
        self.engine.announce_backward(is_final=is_final)
        self.twins.backward(self.num_backwards, **{"batch_size": 1, "sequence_length": 64, **shape})
        self.num_backwards += 1

    def step(self, max_norm: float, **shape: int) -> None:
        self.backward(**shape)
        self.twins.clip(max_norm)
        self.twins.step()

    def spilled_bytes(self) -> int:
        """Return the bytes of gradients that went to the SSD since the last call."""
        self.engine.wait_for_updates()  # by now all spilled gradients were written and read
        num_bytes, self.files.written["gradients.bin"] = self.files.written["gradients.bin"], 0
        return num_bytes

    def assert_activations_had_their_room(self, num_steps: int) -> None:
        """Check that gradients took no room from activations in `num_steps` equal batches."""
        in_ram, on_ssd = placed_bytes(self.engine.planned_memory.sizes, self.engine.activations._placements)
        swapper = self.engine.activations.swapper
        assert swapper.swapped_bytes == num_steps * (in_ram + on_ssd)
        assert swapper.spilled_bytes == num_steps * on_ssd

    def assert_equal(self) -> None:
        """Check that weights are bitwise equal and that the shared RAM is empty."""
        self.twins.assert_equal()
        self.engine.activations.swapper.wait_until_idle()
        assert (self.ram.bytes_in_use, self.ram.top_bytes_in_use) == (0, 0)
        assert 0 < self.ram.high_water_bytes <= self.ram.num_bytes <= self.engine.layout.activation_ram_bytes


@pytest.mark.covering(0)
@pytest.mark.parametrize("max_norm", [CLIPS, LETS_THROUGH])
@pytest.mark.parametrize("clip", ["defer", "speculate"])
@BOTH
def test_fewer_gradients_go_to_the_ssd(
    room: dict[str, Any], clip: str, max_norm: float, make_twins: TwinsFactory
) -> None:
    """The first step has no shared RAM, so all gradients without buffers are spilled."""
    sharing = Sharing(make_twins, room, _clip=clip)
    sharing.step(max_norm)
    before_bytes = sharing.spilled_bytes()
    for _ in range(NUM_STEPS):
        sharing.step(max_norm)
    spilled_bytes = sharing.spilled_bytes() / NUM_STEPS
    sharing.assert_equal()
    engine, ram_bytes = sharing.engine, sharing.ram.num_bytes
    assert before_bytes == sharing.fixed_bytes
    in_ram, _ = placed_bytes(engine.planned_memory.sizes, engine.activations._placements)
    assert before_bytes + in_ram > ram_bytes > in_ram > 0  # together they do not fit
    if room is ALL_FIT:
        assert spilled_bytes == 0
    else:
        assert 0 < spilled_bytes <= before_bytes - ram_bytes + 2 * engine.layout.plan.buffer_bytes
    sharing.assert_activations_had_their_room(NUM_STEPS)


@BOTH
def test_the_planned_number_of_gradients_is_held(room: dict[str, Any], make_twins: TwinsFactory) -> None:
    sharing = Sharing(make_twins, room)
    for _ in range(2):
        sharing.spilled_bytes()
        sharing.step(CLIPS)
    layout = sharing.engine.layout
    held = held_beside(
        layout.held_gradients(),
        {name: np.array([float(num_bytes)]) for name, num_bytes in sharing.ram.marks.items()},
        num_held_chunks=layout.num_held_chunks,
        ram_bytes=sharing.ram.num_bytes,
    )
    assert abs(sharing.fixed_bytes - held.item() - sharing.spilled_bytes()) <= layout.plan.buffer_bytes


@pytest.mark.covering(0)
@pytest.mark.parametrize("clip", ["defer", "speculate"])
@pytest.mark.parametrize("is_announced", [True, False], ids=["announced", "unannounced"])
@BOTH
def test_summed_gradients_use_the_shared_ram_after_the_last_backward(
    room: dict[str, Any], is_announced: bool, clip: str, make_twins: TwinsFactory
) -> None:
    """Only the last of several backwards may put gradients there. A backward that is not announced may be the last."""
    sharing = Sharing(make_twins, room, _clip=clip)
    sharing.step(CLIPS)
    sharing.spilled_bytes()
    max_norms = CLIPS, LETS_THROUGH, CLIPS
    for max_norm in max_norms:
        sharing.backward(is_final=not is_announced)
        if is_announced:
            sharing.engine._pipeline.wait_for_norms()
            assert sharing.ram.top_bytes_in_use == 0
        sharing.backward()
        sharing.twins.clip(max_norm)
        sharing.twins.step()
    sharing.assert_equal()
    assert sharing.spilled_bytes() < 2 * len(max_norms) * sharing.fixed_bytes


SHAPES = [(1, 64), (2, 64), (1, 16), (3, 64), (1, 7), (1, 64), (4, 64), (1, 64)]


@BOTH
def test_batches_of_any_shape_equal_stock(room: dict[str, Any], make_twins: TwinsFactory) -> None:
    """Activations of a larger batch that find no room go to the SSD or are recomputed."""
    sharing = Sharing(make_twins, room)
    for batch_size, sequence_length in SHAPES:
        sharing.step(CLIPS, batch_size=batch_size, sequence_length=sequence_length)
    sharing.assert_equal()


SEEDS = [pytest.param(seed, marks=[] if seed in (0, 5) else pytest.mark.slow) for seed in range(10)]
"""The quick seeds cover each room and each way to clip."""


@pytest.mark.covering(0)
@pytest.mark.parametrize("seed", SEEDS)
def test_late_copies_change_no_bit(seed: int, make_twins: TwinsFactory) -> None:
    device = AsyncDevice(seed, max_delay_s=5e-4)
    sharing = Sharing(make_twins, [ALL_FIT, FEW_FIT][seed % 2], device=device, _clip=["defer", "speculate"][seed // 5])
    for number in range(NUM_STEPS):
        sharing.step([CLIPS, LETS_THROUGH][number % 2])
    sharing.assert_equal()
    assert device.num_races == 0
    sharing.assert_activations_had_their_room(NUM_STEPS - 1)
    assert 0 < sharing.spilled_bytes() < NUM_STEPS * sharing.fixed_bytes


class LateGradients(CpuDevice):
    """Copies to the host are slow, so activations leave the device before gradients arrive."""

    def record(self, lane: Lane, *tensors: Tensor, reads: Sequence[Tensor] = ()) -> Event:
        return LateEvent() if lane is Lane.D2H else super().record(lane, *tensors, reads=reads)


class LateEvent(Event):
    """The gradient thread waits a while for this event, the computing thread does not."""

    def synchronize(self) -> None:
        if threading.current_thread().name == "lohan-gradients":
            time.sleep(5e-3)

    def is_reached(self) -> bool:
        return True


def test_late_gradients_leave_room_for_activations(make_twins: TwinsFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """RAM that is free when a late gradient arrives may be needed by the next forward."""
    sharing = Sharing(make_twins, FEW_FIT, device=LateGradients())
    move = HeldGradients._move_to_shared_ram
    used_together: list[int] = []
    was_free: list[bool] = []

    def watched_move(held: HeldGradients, gradient: ChunkGradient) -> bool:
        marks = dict(sharing.ram.marks)
        names = [block.name for block in sharing.engine.layout.blocks]
        before = names[: names.index(gradient.chunk.block.name) + 1]
        needed_bytes = max(marks.get(name, 0) for name in before)
        room_bytes = sharing.ram.num_bytes - sharing.ram.bytes_in_use - sharing.ram.top_bytes_in_use
        if has_moved := move(held, gradient):
            used_together.append(needed_bytes + sharing.ram.top_bytes_in_use)
        else:
            was_free.append(gradient.values.nbytes <= room_bytes)
        return has_moved

    monkeypatch.setattr(HeldGradients, "_move_to_shared_ram", watched_move)
    for _ in range(NUM_STEPS):
        sharing.step(CLIPS, sequence_length=40)
    sharing.assert_equal()
    assert used_together and max(used_together) <= sharing.ram.num_bytes
    assert any(was_free)  # some gradients did arrive late
    sharing.assert_activations_had_their_room(NUM_STEPS - 1)


@pytest.mark.covering(0)
@pytest.mark.parametrize("keeps", [True, False], ids=["kept", "widened"])
def test_gradients_of_bfloat16_weights_equal_those_without_shared_ram(
    keeps: bool, build_engine: EngineFactory, tmp_path: Path
) -> None:
    """The reference recomputes activations, so it has no shared RAM."""

    def weights(activations: str) -> tuple[dict[str, Tensor], OffloadEngine]:
        model = tiny_model("llama", num_layers=10).train()
        engine = build_engine(
            model,
            dtype=torch.bfloat16,
            sums_gradients=not keeps,
            **{**SWAP, "activations": activations, "cpu_memory": "2MiB", "ssd": str(tmp_path / activations)},
        )
        model.config.dtype = torch.bfloat16
        enable_recompute(model, engine)
        optimizer = OffloadAdamW(model.parameters(), lr=1e-3, engine=engine)
        for seed in range(NUM_STEPS):
            model(**tiny_batch(seed=seed, batch_size=1)).loss.backward()
            engine.clip_grad_norm(CLIPS)
            optimizer.step()
            optimizer.zero_grad()
        return {name: engine.parameters.read_parameter(name) for name, _ in model.named_parameters()}, engine

    (sharing, engine), (recomputing, other) = weights("swap"), weights("recompute")
    assert engine.layout.plan.spilled_blocks and not other.tiers.shared_ram.num_bytes
    assert engine.tiers.shared_ram.high_water_bytes > 0
    assert engine.tiers.shared_ram.top_bytes_in_use == 0
    for name, weight in sharing.items():
        assert torch.equal(weight, recomputing[name]), name


# Faults.


@pytest.mark.covering(0)
@pytest.mark.parametrize("error", [PlannedError, KeyboardInterrupt])
@pytest.mark.parametrize("when", ["forward", "backward", "clip", "step"])
@BOTH
def test_an_error_in_a_step_frees_the_shared_ram(
    room: dict[str, Any], when: str, error: type[BaseException], make_twins: TwinsFactory
) -> None:
    """The shared RAM has gradients of the previous or the current step when the error is raised."""
    sharing = Sharing(make_twins, room)
    for _ in range(2):
        sharing.step(CLIPS)
    twins, engine = sharing.twins, sharing.engine

    def breaks(_module: Any, _args: Any, output: Tensor) -> None:
        if when == "forward":
            raise error
        output.register_hook(raise_planned)

    def raise_planned(*_: Any, **__: Any) -> Any:
        raise error

    for seed in range(2):
        if when in ("forward", "backward"):
            hook = twins.model.model.layers[2].mlp.register_forward_hook(breaks)
            with pytest.raises(error):
                twins.model(**tiny_batch(seed=seed)).loss.backward()
            hook.remove()
            twins.optimizer.zero_grad()
            continue
        twins.model(**tiny_batch(seed=seed)).loss.backward()
        with pytest.MonkeyPatch.context() as patch:
            if when == "clip":
                patch.setattr(engine._pipeline, "total_norm", raise_planned)
                with pytest.raises(error):
                    engine.clip_grad_norm(CLIPS)
            else:
                patch.setattr(engine._pipeline, "finish_step", raise_planned)
                with pytest.raises(error):
                    engine.step()
        twins.optimizer.zero_grad()
    gc.collect()  # an exception has references to its frames
    engine.wait_for_updates()
    engine.activations.swapper.wait_until_idle()
    assert (sharing.ram.bytes_in_use, sharing.ram.top_bytes_in_use) == (0, 0)
    sharing.spilled_bytes()
    for _ in range(2):
        sharing.step(CLIPS)
    sharing.assert_equal()
    assert sharing.spilled_bytes() < 2 * sharing.fixed_bytes


def test_dropped_losses_change_no_number(make_twins: TwinsFactory, no_collector: None) -> None:
    """Gradients of the previous step are applied while activations of the dropped loss leave the device."""
    sharing = Sharing(make_twins, ALL_FIT, device=AsyncDevice(1))
    for _ in range(3):
        sharing.step(CLIPS)
        loss = sharing.twins.model(**tiny_batch(batch_size=1, sequence_length=64)).loss
        del loss
    sharing.assert_equal()


def test_a_failure_of_the_gradients_file_is_raised(make_twins: TwinsFactory) -> None:
    """Every waiting thread gets the error, and `close` does not wait."""
    sharing = Sharing(make_twins, FEW_FIT)
    for _ in range(2):
        sharing.step(CLIPS)
    sharing.files.broken = "gradients.bin"
    with pytest.raises(StorageError, match=r"gradients\.bin"):
        for _ in range(2):
            sharing.step(CLIPS)
    sharing.engine.close()


def test_gradients_get_all_shared_ram_if_nothing_is_swapped(make_twins: TwinsFactory) -> None:
    """A plan may swap nothing."""
    sharing = Sharing(make_twins, ALL_FIT)
    sharing.step(CLIPS)
    sharing.spilled_bytes()
    memory = sharing.engine.planned_memory
    memory.set_placements({})
    assert sharing.ram.num_bytes > 0
    for _ in range(2):
        sharing.step(CLIPS)
    assert sharing.spilled_bytes() == 0
    memory.set_placements({name: dict.fromkeys(layer.sizes(), Placement.CPU) for name, layer in memory.trace.items()})
    for _ in range(3):
        sharing.step(CLIPS)
    assert sharing.spilled_bytes() == 0
    sharing.assert_equal()
