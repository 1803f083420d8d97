"""What is said when the device has no memory left: what the plan counted on, what is there, and what to change."""

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
_ADVICE_OF_TORCH = " If reserved but unallocated memory is large"
_TOLD = "_lohan_told"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the device had no memory for something."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)


class OutOfMemoryAnswer:
    """Writes into an error of torch, once, what a user can do about it. Its class stays, and so does what it begins
    with: programs look at these (`auto_find_batch_size` does)."""

    def __init__(
        self,
        config: OffloadConfig,
        latest: Callable[[], tuple[PlannedStep | None, StepShape | None]] = lambda: (None, None),
    ) -> None:
        """``latest``: what is followed, and the shape of the batch that came last."""
        self._config = config
        self._latest = latest

    @contextmanager
    def given(self) -> Iterator[None]:
        """Within, errors get the answer."""
        try:
            yield
        except RuntimeError as error:
            self.give(error)
            raise

    def give_what_is_handled(self) -> None:
        """For a hook that is called because of an error, and not told of it."""
        error = sys.exc_info()[1]
        if error is not None:
            self.give(error)

    def give(self, error: BaseException) -> None:
        if not is_out_of_memory(error) or getattr(error, _TOLD, False):
            return
        setattr(error, _TOLD, True)
        measured = str(error).partition(_ADVICE_OF_TORCH)[0].strip()
        if not measured.startswith(_SIGNS[0]):  # what cuBLAS or a driver says
            measured = f"{_SIGNS[0]} {measured}"
        planned, seen = self._latest()
        error.args = (
            f"{measured} {self._counted_on(planned)} {self._what_to_change(planned, seen, missing_bytes(measured))} No "
            "committed step is lost: the next run goes on from it.",
        )

    def _counted_on(self, planned: PlannedStep | None) -> str:
        if planned is None:
            gpu_memory = self._config.gpu_memory
            allowed = format_bytes(gpu_memory) if isinstance(gpu_memory, int) else str(gpu_memory)
            return f"No step is planned yet; gpu_memory is {allowed}."
        parts = planned.plan.prediction.tier_bytes["gpu"]
        named = ", ".join(f"{name.replace('_', ' ')} {format_bytes(size)}" for name, size in parts.items() if size)
        return (
            f"The plan counts on {format_bytes(sum(parts.values()))} ({named}) of the "
            f"{format_bytes(planned.hardware.device.memory_bytes)} that were free when it was made, for batches of "
            f"{_worded(planned.shape)} tokens."
        )

    def _what_to_change(self, planned: PlannedStep | None, seen: StepShape | None, missing: int) -> str:
        smaller = "use a smaller batch size or shorter sequences"
        if planned is None:
            return f"End what else uses the device, lower gpu_memory, or {smaller}."
        shape = planned.shape
        if seen is not None and seen.batch_size * seen.sequence_length > shape.batch_size * shape.sequence_length:
            lower = self._lower(planned, missing)
            return f"This batch has {_worded(seen)} tokens: give all batches one length, or {lower}{smaller}."
        if self._config.activations == "keep":
            return f"Set activations to auto, or {smaller}."
        what = f"{self._lower(planned, missing)}{smaller}, or end what else uses the device."
        return what[0].upper() + what[1:]

    def _lower(self, planned: PlannedStep, missing: int) -> str:
        """The largest `gpu_memory` that may help, where it bounds activations that are kept."""
        parts = planned.plan.prediction.tier_bytes["gpu"]
        kept = parts["activations"]
        if not kept:
            return ""
        lower = parts["slots"] + max(0, kept - max(missing, kept // 8))
        return f"set gpu_memory to {lower >> 20}MiB, so that less is kept there, or "


def missing_bytes(message: str) -> int:
    """What torch says that it tried to allocate."""
    found = _TRIED.search(message)
    return int(float(found["number"]) * UNIT_BYTES[found["unit"].lower()]) if found else 0


def _worded(shape: StepShape) -> str:
    return f"{shape.batch_size} x {shape.sequence_length}"
