"""Allocates the memory of a plan for activations and copies of records, and gives advice if memory runs out."""

from __future__ import annotations

import logging
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

from hf_lohan.activations import LayerTrace
from hf_lohan.activations.swapper import SPILL_BLOCK, SPILL_KIND
from hf_lohan.activations.tiers import ActivationTiers, Sizes, placed_bytes, swap_everything
from hf_lohan.config import AUTO, OffloadConfig, ResolvedConfig
from hf_lohan.costs import GRAPH, ActivationPlacements, BudgetError
from hf_lohan.device import BufferPool
from hf_lohan.device.host_stack import CACHE_LINE_BYTES
from hf_lohan.engine.process_memory import ProcessMemory
from hf_lohan.engine.tiers import Tiers
from hf_lohan.files import CapacityError
from hf_lohan.planning import OffloadLayout, PlannedStep, StepShape
from hf_lohan.planning.layout import NUM_ACTIVATION_STAGING_BUFFERS
from hf_lohan.store import GRANULE_NUMEL, RECORD_ALIGN_NUMEL, RecordFiles, RecordSpec
from hf_lohan.wording import UNIT_BYTES, format_bytes

logger = logging.getLogger(__name__)

HEADROOM = 1.25
"""Memory is allocated for this multiple of the planned batch, because later batches may be longer."""
_MOST_IN_GRAPH = 64
"""More tensors than a compiled layer saves."""
_SPILL_NAME = "activations"
_SIGNS = ("CUDA out of memory.", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
_TRIED = re.compile(r"Tried to allocate (?P<number>[\d.]+) (?P<unit>[KMG]iB)")
_TORCH_ADVICE = " If reserved but unallocated memory is large"
_HAS_ADVICE = "_lohan_has_advice"


class PlannedMemory:
    """Allocates the memory for activations and for copies of records once, and decides where activations are stored.

    The plan is made before the first layer runs. Without a plan, the first step recomputes everything and is traced,
    and the placements are chosen after it.
    """

    def __init__(
        self,
        activations: ActivationTiers,
        config: ResolvedConfig,
        tiers: Tiers,
        layout: OffloadLayout,
        on_decided: Callable[[OffloadLayout], None] = lambda _layout: None,
    ) -> None:
        """``on_decided`` is called once, with the layout that the run follows."""
        self._activations = activations
        self._mode = mode = config.activations
        self._must_fit = config.device_memory != AUTO
        self._planned: PlannedStep | None = None
        self.last_shape: StepShape | None = None
        """Shape of the last training forward, or None if its batch had no token ids. It covers the batches of all
        ranks."""
        self.own_shape: StepShape | None = None
        """Like `last_shape`, but of this rank's batch alone."""
        self.out_of_memory = OutOfMemoryAdvice(config, lambda: (self._planned, self.last_shape))
        """Adds advice to errors of a step."""
        self._tiers = tiers
        self.layout = layout
        """Layout of the RAM according to the plan, or for a run without a plan until a plan exists."""
        self._on_decided = on_decided
        self._has_copies = False
        self.num_together = 1
        """Largest number of micro-batches so far whose forwards all ran before the first backward."""
        self.trace: Mapping[str, LayerTrace] = activations.watch() if mode != "keep" else {}
        """Traces of the layers in the first step."""
        self.sizes: Sizes = {}
        """Bytes that one micro-batch could swap. Empty until they are known."""
        self._num_chunks = 1
        """Largest number of chunks in which a layer runs. Each chunk has its own tensors."""
        self.process: ProcessMemory | None = None
        """The RAM of this process; None without a plan."""
        self._staging: BufferPool | None = None
        self._spill_files: RecordFiles | None = None

    @property
    def has_plan(self) -> bool:
        return self._planned is not None

    def follow_plan(self, planned: PlannedStep) -> None:
        """Follow a plan from the next layer on."""
        self._planned = planned
        self._activations.end_watching()
        if not self._has_copies:
            self.layout = planned.layout
            self.allocate_copies()
        if self.process is None:
            self.process = ProcessMemory(self._activation_ram_bytes, self._tiers.links.ranks.num_local)
        self._make_room_for_keys(planned.layout)
        self.sizes = planned.activation_bytes
        self._num_chunks = max((layer.num_chunks for layer in planned.profile.layers), default=1)
        if self._mode in ("auto", "inputs", "swap"):
            plan = planned.plan
            self._activations.set_windows(fetch_ahead=plan.fetch_ahead, layers_leaving=plan.layers_leaving)
            self.set_placements(plan.activations)
        on_device = planned.plan.prediction.tier_bytes["gpu"]
        tensors_bytes = on_device["activations"] + on_device["working_set"]
        self.process.follow_plan(
            activation_ram_bytes=self._activation_ram_bytes,
            tensors_bytes=tensors_bytes if self._tiers.device.memory_is_host else 0,
            shared_bytes=self._tiers.own_shared_bytes + self.layout.shared_key_bytes,
        )

    @property
    def _activation_ram_bytes(self) -> int:
        """RAM that is allocated for activations."""
        staging = self._staging
        return self._tiers.shared_ram.num_bytes + (staging.num_buffers * staging.buffer_bytes if staging else 0)

    def _make_room_for_keys(self, layout: OffloadLayout) -> None:
        """Leave more RAM to keys and values if shared rows are longer than earlier rows. Raises RuntimeError if
        activations of an earlier forward are still in this RAM."""
        if (rows := self._tiers.row_memory) is None:
            return
        ram, staging = self._tiers.shared_ram, self._staging
        is_longer = layout.shared_key_bytes > self.layout.shared_key_bytes
        shrinks = is_longer and ram.num_bytes > layout.activation_ram_bytes
        leaves_ssd = is_longer and staging is not None and staging.buffer_bytes > layout.activation_staging_bytes
        is_on_ssd = leaves_ssd and self._activations.swapper.ssd_bytes_in_use
        if is_on_ssd or (shrinks and (ram.bytes_in_use or ram.top_bytes_in_use)):
            raise RuntimeError(
                "the rows of this forward are longer than all earlier rows, and need "
                f"{format_bytes(layout.shared_key_bytes)} of RAM for keys and values, but this RAM still has "
                "activations of a forward without a backward; call backward on the loss of that forward first, or "
                "delete the loss, or run the longest rows first"
            )
        rows.expect(layout.shared_key_bytes * rows.links.ranks.num_ranks)
        if is_longer:
            self.layout = layout
        if leaves_ssd:
            self._leave_ssd()
            self._staging = None
        if shrinks:
            ram.reallocate(layout.activation_ram_bytes)

    def allocate_copies(self) -> None:
        """Allocate the memory for copies of records, unless this was done. Called when a plan is made, or at the first
        use of a model without a plan."""
        if self._has_copies:
            return
        self.layout = self.layout.decided()
        try:
            self._on_decided(self.layout)
        except Exception as error:  # the other ranks wait for this rank
            self._tiers.links.fail(error)
            raise
        names = [(record.block, record.kind) for record in self.layout.resident_records]
        self._tiers.store.ram.allocate_copies(names, self._tiers.device.host_empty)
        self._has_copies = True
        if names:
            logger.info("copies of records take %s of RAM", format_bytes(self.layout.resident_bytes))

    def expect_micro_batches(self, num_together: int) -> bool:
        """Expect that this many forwards run before the first backward, and return whether that is a new maximum. In
        that case placements are chosen again, because earlier steps may have had fewer micro-batches."""
        if num_together <= self.num_together:
            return False
        self.num_together = num_together
        if self.trace and not self._activations.is_watching:
            self._swap_traced_layers()
        return True

    def begin_step(self) -> None:
        """Choose the placements if the last step was traced. Called at the first forward after a step."""
        if self.process is not None:
            self.process.end_step()
        if self._end_watching():
            self._swap_traced_layers()

    @property
    def saved_share(self) -> float:
        """The bytes that compiled layers saved in the last forward, in units of the planned bytes. 1.0 if they saved
        nothing, or if this rank's last batch did not have the planned shape."""
        planned, shape, saved = self._planned, self.own_shape, self._activations.graph_bytes
        if planned is None or shape is None or shape.size != planned.shape.size:
            return 1.0
        planned_bytes = sum(self.sizes.get(name, {}).get(GRAPH, 0) for name in saved)
        return sum(saved.values()) / planned_bytes if planned_bytes else 1.0

    def _end_watching(self) -> bool:
        """End tracing and return whether a whole step was traced. A forward without a backward does not count."""
        if not self._activations.is_watching or not any(layer.recomputed for layer in self.trace.values()):
            return False
        self._activations.end_watching()
        self.sizes = {name: layer.sizes() for name, layer in self.trace.items()}
        return True

    def _swap_traced_layers(self) -> None:
        if self._mode == "swap":
            self.set_placements(swap_everything(self.sizes, self.layout.activation_ram_bytes // self.num_together))

    def set_placements(self, placements: ActivationPlacements) -> None:
        """Follow `placements` from now on. Memory is allocated once, for the first placements that need it."""
        self._end_watching()
        ram_bytes, ssd_bytes = (self.num_together * num_bytes for num_bytes in placed_bytes(self.sizes, placements))
        all_bytes = self.num_together * sum(sum(sizes.values()) for sizes in self.sizes.values())
        room_bytes, gradient_bytes = int(all_bytes * HEADROOM), self._gradient_bytes()
        wanted_bytes = min(self.layout.activation_ram_bytes, room_bytes + gradient_bytes)
        if ram_bytes or ssd_bytes or gradient_bytes:
            self._grow_ram(wanted_bytes)
        if ssd_bytes or (ram_bytes and self._tiers.shared_ram.num_bytes < wanted_bytes):
            # Activations would stay on the device if neither RAM nor SSD has room for them.
            self._grow_ssd(room_bytes)
        self._activations.set_placements(placements)
        logger.info(
            "of %s that the layers keep for backward, %s are swapped to RAM and %s to the SSD",
            format_bytes(all_bytes),
            format_bytes(ram_bytes),
            format_bytes(ssd_bytes),
        )

    def _gradient_bytes(self) -> int:
        """Return the RAM that gradients would use if none were moved to the SSD."""
        if not self.layout.holds_gradients:
            share = self._planned.plan.parked_share if self._planned is not None else 0.0
            return math.ceil(share * (self.layout.gradient_bytes + len(self.layout.chunks()) * CACHE_LINE_BYTES))
        if not self.layout.held_gradients():
            return 0
        num_chunks = len(self.layout.chunks()) - self.layout.num_held_chunks
        return sum(record.num_bytes for record in self.layout.spill_records()) + num_chunks * CACHE_LINE_BYTES

    def _grow_ram(self, num_bytes: int) -> None:
        """Grow the RAM to at least this size. RAM in use cannot grow. Activations that do not fit go to the SSD."""
        ram = self._tiers.shared_ram
        if num_bytes > ram.num_bytes and not (ram.bytes_in_use or ram.top_bytes_in_use):
            ram.reallocate(num_bytes)

    def _grow_ssd(self, num_bytes: int) -> None:
        swapper = self._activations.swapper
        if num_bytes <= swapper.ssd_bytes or swapper.ssd_bytes_in_use:
            return
        if self.layout.activation_staging_bytes < GRANULE_NUMEL:
            self._do_without_ssd("cpu_memory leaves no buffers to swap activations to the SSD")
            return
        unit = max(GRANULE_NUMEL, RECORD_ALIGN_NUMEL)
        # Each tensor begins at a granule, so it may take up to one granule more than its bytes.
        num_names = sum(_MOST_IN_GRAPH if name == GRAPH else 1 for sizes in self.sizes.values() for name in sizes)
        num_tensors = self.num_together * num_names * self._num_chunks
        numel = -(-(num_bytes + num_tensors * GRANULE_NUMEL) // unit) * unit
        record = RecordSpec(SPILL_BLOCK, SPILL_KIND, "uint8", numel)
        try:
            self._leave_ssd()  # the record of shorter batches is too small
            self._spill_files = files = self._tiers.store.scratch([record], _SPILL_NAME)
        except CapacityError as error:
            self._do_without_ssd(f"there is no room to swap activations to the SSD: {error}")
            return
        self._staging = self._staging or BufferPool(
            self._tiers.device,
            name="activation staging",
            num_buffers=NUM_ACTIVATION_STAGING_BUFFERS,
            buffer_bytes=self.layout.activation_staging_bytes,
        )
        files.use_device(self._tiers.direct.hasher)
        swapper.use_ssd(files, self._staging, numel, self._tiers.direct.hasher)

    def _leave_ssd(self) -> None:
        if self._spill_files is not None:
            self._activations.swapper.leave_ssd()
            self._spill_files.close()
            self._spill_files = None

    def _do_without_ssd(self, reason: str) -> None:
        if self._must_fit:
            raise BudgetError(
                f"{reason}, so that layers' inputs would stay on the device beyond device_memory; raise cpu_memory, "
                "give the SSDs more room, or set device_memory to auto"
            )
        logger.warning("%s; activations are recomputed, and layers' inputs stay on the device", reason)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the error says that the device is out of memory."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)


class OutOfMemoryAdvice:
    """Adds advice to an error of torch. The error keeps its class and the beginning of its text, by which programs such
    as `auto_find_batch_size` recognize it."""

    def __init__(
        self,
        config: OffloadConfig,
        latest: Callable[[], tuple[PlannedStep | None, StepShape | None]] = lambda: (None, None),
    ) -> None:
        """``latest`` returns the current plan and the shape of the last batch."""
        self._config = config
        self._latest = latest

    @contextmanager
    def added_to_errors(self) -> Iterator[None]:
        """Add the advice to errors that are raised within this context."""
        try:
            yield
        except RuntimeError as error:
            self.add_to(error)
            raise

    def add_to_current_error(self) -> None:
        """Add the advice to the error that is being handled, in a hook that does not get the error as an argument."""
        error = sys.exc_info()[1]
        if error is not None:
            self.add_to(error)

    def add_to(self, error: BaseException) -> None:
        """Add the advice to an error, but only once."""
        if not is_out_of_memory(error) or getattr(error, _HAS_ADVICE, False):
            return
        setattr(error, _HAS_ADVICE, True)
        measured = str(error).partition(_TORCH_ADVICE)[0].strip()
        if not measured.startswith(_SIGNS[0]):  # an error of cuBLAS or the driver
            measured = f"{_SIGNS[0]} {measured}"
        planned, seen = self._latest()
        advice = self._what_to_change(planned, seen, missing_bytes(measured))
        counts = self._plan_counts_on(planned)
        error.args = (f"{measured} {counts} {advice} The next run continues from the last committed step.",)

    def _plan_counts_on(self, planned: PlannedStep | None) -> str:
        if planned is None:
            gpu_memory = self._config.gpu_memory
            allowed = format_bytes(gpu_memory) if isinstance(gpu_memory, int) else str(gpu_memory)
            return f"No step is planned yet; gpu_memory is {allowed}."
        parts = planned.plan.prediction.tier_bytes["gpu"]
        named = ", ".join(f"{name.replace('_', ' ')} {format_bytes(size)}" for name, size in parts.items() if size)
        return (
            f"The plan needs {format_bytes(sum(parts.values()))} ({named}) of the "
            f"{format_bytes(planned.hardware.device.memory_bytes)} that were free when it was made, for batches of "
            f"{_shape_text(planned.shape)} tokens."
        )

    def _what_to_change(self, planned: PlannedStep | None, seen: StepShape | None, missing: int) -> str:
        smaller = "use a smaller batch size or shorter sequences"
        if planned is None:
            return f"End other programs on the device, lower gpu_memory, or {smaller}."
        shape = planned.shape
        if seen is not None and seen.batch_size * seen.sequence_length > shape.batch_size * shape.sequence_length:
            lower = self._lower(planned, missing)
            return f"This batch has {_shape_text(seen)} tokens; give all batches the same length, or {lower}{smaller}."
        if self._config.activations == "keep":
            return f"Set activations to auto, or {smaller}."
        what = f"{self._lower(planned, missing)}{smaller}, or end other programs on the device."
        return what[0].upper() + what[1:]

    def _lower(self, planned: PlannedStep, missing: int) -> str:
        """Return advice to lower `gpu_memory` by enough to help, if activations are kept on the device."""
        parts = planned.plan.prediction.tier_bytes["gpu"]
        kept = parts["activations"]
        if not kept:
            return ""
        lower = parts["slots"] + max(0, kept - max(missing, kept // 8))
        return f"set gpu_memory to {lower >> 20}MiB, so that fewer activations are kept on the device, or "


def missing_bytes(message: str) -> int:
    """Return the bytes that torch tried to allocate, from its message."""
    match = _TRIED.search(message)
    return int(float(match["number"]) * UNIT_BYTES[match["unit"].lower()]) if match else 0


def _shape_text(shape: StepShape) -> str:
    return f"{shape.batch_size} x {shape.sequence_length}"
