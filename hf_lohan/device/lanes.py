"""Lanes of device work, events between them, and device memory that lanes use."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor


class Lane(enum.Enum):
    """An ordered queue of device work. Lanes run concurrently. Only events order work of different lanes."""

    COMPUTE = "compute"
    H2D = "h2d"
    D2H = "d2h"
    D2H_ASIDE = "d2h aside"
    """From device to host as well, but for memory that is already filled. These copies do not wait for copies of
    gradients that the device has not computed yet."""

    @property
    def in_timeline(self) -> str:
        """The timeline's name for this lane."""
        return str(Lane.D2H.value if self is Lane.D2H_ASIDE else self.value)


COPY_LANES: tuple[Lane, ...] = (Lane.H2D, Lane.D2H, Lane.D2H_ASIDE)


class Event(ABC):
    """A point in a lane's queue. It is reached when all earlier work of the lane is done."""

    @abstractmethod
    def synchronize(self) -> None:
        """Block the calling host thread until the event is reached."""

    @abstractmethod
    def is_reached(self) -> bool:
        """Return whether the event is known to be reached. Does not wait."""


class Stamp(ABC):
    """A point in a lane's queue that measures when it was reached."""

    @abstractmethod
    def is_reached(self) -> bool:
        """Return whether all earlier work of the lane is done."""

    @abstractmethod
    def at_s(self) -> float:
        """Wait for the stamp and return when it was reached, on the clock of `time.perf_counter`."""


class DeviceMemory(ABC):
    """A device's memory, and the order of its uses."""

    torch_device: torch.device
    plans_addresses: bool = True
    """Whether `arena` plans addresses. Otherwise all tensors come from PyTorch's allocator."""

    @abstractmethod
    def empty(self, num_bytes: int) -> Tensor:
        """Allocate device memory: a uint8 tensor [num_bytes] with its own storage, aligned for any dtype."""

    @abstractmethod
    def span(self, memory: Tensor, start: int, num_bytes: int) -> Tensor:
        """Return a range of memory from `empty` as a uint8 tensor [num_bytes]. The tensor has its own storage, which
        keeps ``memory`` alive. Copies from or to this tensor are recorded in the arena (`DeviceArena.note_copy`)."""

    @abstractmethod
    def record(self, lane: Lane, *tensors: Tensor, reads: Sequence[Tensor] = ()) -> Event:
        """Return an event at the current end of `lane`. On COMPUTE, it marks the end of all uses of `tensors` and
        `reads`. `reads` were only read, so copies from them may begin earlier."""

    def compute_lane(self) -> object:
        """Return an identifier of the lane COMPUTE of the calling thread."""
        return None
