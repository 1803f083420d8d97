"""Predicts the RAM that this process takes while it follows a plan, and keeps it from growing by holes in the heap.

The prediction is measured where that is possible: all pools and copies are in RAM when a plan is made, and the holes
are those of the first step.
"""

from __future__ import annotations

from hf_lohan.device import available_host_memory_bytes
from hf_lohan.hardware import anonymous_memory_bytes
from hf_lohan.threads import return_freed_memory

_FEW_HOLES_BYTES = 384 << 20
"""Holes that the first step may leave in any case, because to return them in each step made a step 5% longer."""
_LITTLE_SHARE = 40
"""1 / `_LITTLE_SHARE` of the RAM of a process is little."""


class ProcessMemory:
    """The RAM of this process.

    Freed tensors leave holes in the heap. glibc before 2.38 needs a larger hole for a tensor of the same size, to align
    it, so holes grow to up to twice the tensors. Steps without holes would be longer, because new tensors would take
    new pages. So the first step may leave holes as large as the tensors together, or `_FEW_HOLES_BYTES` if that is
    more. Later steps may leave a little more.
    """

    def __init__(self, activation_ram_bytes: int, num_local: int) -> None:
        """Measure the process, in which ``activation_ram_bytes`` of RAM are allocated for activations. ``num_local``:
        number of ranks of this machine."""
        return_freed_memory()  # of the model's load and of the plan
        self._beside_bytes = anonymous_memory_bytes() - activation_ram_bytes
        self._free_bytes = available_host_memory_bytes() // num_local + activation_ram_bytes
        self._tensors_bytes = self._needed_bytes = self._shared_bytes = 0
        self._peak_bytes = self._first_step_bytes = 0
        """Largest number of bytes that the process took at any time, and only when a block began, in the first step."""
        self._is_first_step = True
        self._returned_to_bytes = 0
        """Bytes that the process took when free memory was last returned."""

    def follow_plan(self, *, activation_ram_bytes: int, tensors_bytes: int, shared_bytes: int) -> None:
        """Expect the memory of a plan. ``tensors_bytes``: tensors in the heap, at the peak of a step. ``shared_bytes``:
        this rank's part of the RAM that ranks share."""
        self._tensors_bytes, self._shared_bytes = tensors_bytes, shared_bytes
        self._needed_bytes = self._beside_bytes + activation_ram_bytes + tensors_bytes
        self._first_step_bytes, self._is_first_step = 0, True

    def note_peak(self, num_bytes: int) -> None:
        """Note the largest number of bytes that the process has taken so far. Blocks take more than at their begin."""
        self._peak_bytes = num_bytes

    def end_step(self) -> None:
        self._is_first_step = False

    @property
    def expected_bytes(self) -> int:
        """RAM that the process should take at the peak of a step, with its part of shared RAM, in bytes."""
        first_bytes = max(self._needed_bytes, self._first_step_bytes, self._peak_bytes)
        return first_bytes + (self._little_bytes // 2 if self._leaves_holes else 0) + self._shared_bytes

    @property
    def _little_bytes(self) -> int:
        """Bytes by which the process may grow after the first step."""
        return self._needed_bytes // _LITTLE_SHARE

    @property
    def _leaves_holes(self) -> bool:
        return self._tensors_bytes >= self._little_bytes

    def return_holes(self) -> None:
        """Have glibc return its free memory if there are too many holes. Call this before each block of a pass."""
        if not self._leaves_holes:
            return
        now_bytes = anonymous_memory_bytes()
        if self._is_first_step:
            self._first_step_bytes = max(self._first_step_bytes, now_bytes)
            left_bytes = self._free_bytes - (self._needed_bytes - self._beside_bytes)
            most_bytes = self._needed_bytes + max(0, min(max(self._tensors_bytes, _FEW_HOLES_BYTES), left_bytes // 2))
        else:
            most_bytes = max(self._needed_bytes, self._first_step_bytes) + self._little_bytes
        if now_bytes > max(most_bytes, self._returned_to_bytes + self._little_bytes):
            return_freed_memory()
            self._returned_to_bytes = anonymous_memory_bytes()
