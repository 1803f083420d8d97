"""Adds advice to errors of a device without memory: what the plan counts on, and which setting to change."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from hf_lohan.config import OffloadConfig
from hf_lohan.planning import PlannedStep, StepShape
from hf_lohan.wording import UNIT_BYTES, format_bytes

_SIGNS = ("CUDA out of memory.", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
_TRIED = re.compile(r"Tried to allocate (?P<number>[\d.]+) (?P<unit>[KMG]iB)")
_TORCH_ADVICE = " If reserved but unallocated memory is large"
_HAS_ADVICE = "_lohan_has_advice"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the device had no memory for something."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)


class OutOfMemoryAdvice:
    """Adds to an error of torch what the user can do. The error keeps its class and its beginning, by which programs
    recognize it (`auto_find_batch_size` does)."""

    def __init__(
        self,
        config: OffloadConfig,
        latest: Callable[[], tuple[PlannedStep | None, StepShape | None]] = lambda: (None, None),
    ) -> None:
        """``latest``: returns the plan that is followed and the shape of the last batch."""
        self._config = config
        self._latest = latest

    @contextmanager
    def added_to_errors(self) -> Iterator[None]:
        """Errors that are raised within this context get the advice."""
        try:
            yield
        except RuntimeError as error:
            self.add_to(error)
            raise

    def add_to_current_error(self) -> None:
        """For a hook that is called because of an error but does not get it."""
        error = sys.exc_info()[1]
        if error is not None:
            self.add_to(error)

    def add_to(self, error: BaseException) -> None:
        """Once an error."""
        if not is_out_of_memory(error) or getattr(error, _HAS_ADVICE, False):
            return
        setattr(error, _HAS_ADVICE, True)
        measured = str(error).partition(_TORCH_ADVICE)[0].strip()
        if not measured.startswith(_SIGNS[0]):  # an error of cuBLAS or the driver
            measured = f"{_SIGNS[0]} {measured}"
        planned, seen = self._latest()
        advice = self._what_to_change(planned, seen, missing_bytes(measured))
        counts = self._plan_counts_on(planned)
        error.args = (f"{measured} {counts} {advice} No committed step is lost: the next run goes on from it.",)

    def _plan_counts_on(self, planned: PlannedStep | None) -> str:
        if planned is None:
            gpu_memory = self._config.gpu_memory
            allowed = format_bytes(gpu_memory) if isinstance(gpu_memory, int) else str(gpu_memory)
            return f"No step is planned yet; gpu_memory is {allowed}."
        parts = planned.plan.prediction.tier_bytes["gpu"]
        named = ", ".join(f"{name.replace('_', ' ')} {format_bytes(size)}" for name, size in parts.items() if size)
        return (
            f"The plan counts on {format_bytes(sum(parts.values()))} ({named}) of the "
            f"{format_bytes(planned.hardware.device.memory_bytes)} that were free when it was made, for batches of "
            f"{_shape_text(planned.shape)} tokens."
        )

    def _what_to_change(self, planned: PlannedStep | None, seen: StepShape | None, missing: int) -> str:
        smaller = "use a smaller batch size or shorter sequences"
        if planned is None:
            return f"End what else uses the device, lower gpu_memory, or {smaller}."
        shape = planned.shape
        if seen is not None and seen.batch_size * seen.sequence_length > shape.batch_size * shape.sequence_length:
            lower = self._lower(planned, missing)
            return f"This batch has {_shape_text(seen)} tokens: give all batches one length, or {lower}{smaller}."
        if self._config.activations == "keep":
            return f"Set activations to auto, or {smaller}."
        what = f"{self._lower(planned, missing)}{smaller}, or end what else uses the device."
        return what[0].upper() + what[1:]

    def _lower(self, planned: PlannedStep, missing: int) -> str:
        """Advice to lower `gpu_memory` so far that it may help, if activations are kept on the device."""
        parts = planned.plan.prediction.tier_bytes["gpu"]
        kept = parts["activations"]
        if not kept:
            return ""
        lower = parts["slots"] + max(0, kept - max(missing, kept // 8))
        return f"set gpu_memory to {lower >> 20}MiB, so that less is kept there, or "


def missing_bytes(message: str) -> int:
    """Bytes that torch tried to allocate, by its message."""
    match = _TRIED.search(message)
    return int(float(match["number"]) * UNIT_BYTES[match["unit"].lower()]) if match else 0


def _shape_text(shape: StepShape) -> str:
    return f"{shape.batch_size} x {shape.sequence_length}"
