"""A tensor that is swapped out and swapped in with the same bits."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from hf_lohan.compat.torch_private import StorageWeakRef, aliases_count_versions, version_of
from hf_lohan.device import Event, HostRead
from hf_lohan.files import IoRequest


def alias_of(tensor: Tensor) -> Tensor:
    """Return a tensor with the same memory and version counter, without the autograd graph.

    In a dispatch mode, which runs below autograd, `detach` alone would give the alias a new version counter.
    """
    with aliases_count_versions():
        return tensor.detach()


def witness_of(tensor: Tensor) -> Tensor:
    """Return an empty tensor with the same version counter, which shows writes even after the tensor was freed."""
    witness = alias_of(tensor)
    witness.data = tensor.new_empty(0)
    return witness


def in_memory_order(tensor: Tensor) -> Tensor:
    """Return all elements of a dense tensor, flat and in memory order."""
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def storage_of(tensor: Tensor) -> StorageWeakRef:
    """Return a weak reference to the tensor's memory, equal for tensors that share it."""
    return StorageWeakRef(tensor.untyped_storage())


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a dense tensor, flat and in memory order."""
    return in_memory_order(tensor).view(torch.uint8)


def is_swappable(tensor: Tensor) -> bool:
    """Return whether a tensor is plain memory without gaps. Other tensors stay on the device."""
    return (
        tensor.layout is torch.strided
        and type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.numel() > 0
        and not tensor.is_complex()
        and not tensor.is_conj()
        and not tensor.is_neg()
        and _is_dense(tensor)
    )


def _is_dense(tensor: Tensor) -> bool:
    expected = 1
    for stride, size in sorted((t, s) for t, s in zip(tensor.stride(), tensor.size(), strict=True) if s != 1):
        if stride != expected:
            return False
        expected *= size
    return True


@dataclass(eq=False)
class SwappedTensor:
    """A tensor that is swapped out. Its space in RAM or on the SSD is freed with the last reference to this object.

    The swapper's thread sets the fields, unless noted.
    """

    new_landing: Callable[[], Tensor]
    """Allocates a tensor of the same size, strides and dtype on the device. Kernels depend on the strides."""
    num_bytes: int
    region: Tensor | None
    """The tensor's memory in RAM, uint8 [num_bytes]. None if it is on the SSD."""
    spill_start: int
    source: Tensor | None
    """The tensor's memory on the device. None when it is stored."""
    storage: StorageWeakRef
    """Identity of the memory on the device."""
    witness: Tensor
    """The tensor's witness (`witness_of`)."""
    version: int
    """The tensor's version when it was swapped out."""
    free: Callable[[HostRead | None], None]
    """Frees this space. The argument is the last copy from it, if any. A destructor may call this."""
    run_later: Callable[[Callable[[], object]], None]
    """Runs a function on the swapper's thread."""
    writes: list[IoRequest] = field(default_factory=list)
    direct_bytes: int = 0
    """Number of the tensor's first bytes that go to the SSD straight from the device."""
    stored: Event | None = None
    is_stored: threading.Event = field(default_factory=threading.Event)
    is_fetched: threading.Event = field(default_factory=threading.Event)
    is_prefetched: bool = False
    """Set by the computing thread."""
    may_change: bool = False
    """Whether the original tensor may be written to. Set by the computing thread."""
    landed: Tensor | None = None
    ready: Event | None = None
    last_read: HostRead | None = None
    """The last copy from RAM to the device."""
    error: BaseException | None = None

    def check_unchanged(self) -> None:
        """Raise RuntimeError if the tensor was written to before it was stored. Call it on the computing thread, so
        that no write is in progress."""
        if not self.may_change and version_of(self.witness) != self.version:
            raise RuntimeError(
                "a layer's input, or the output of a matrix product or attention, was changed in place outside its "
                "layer while it was swapped out, so its layer's backward could be wrong; set activations: recompute"
            )

    def __del__(self) -> None:
        was_read = self.last_read is not None or self.region is None
        if self.ready is None and was_read and all(request.done() for request in self.writes):
            self.free(self.last_read)
        else:  # copies to or from this space may still run
            self.run_later(partial(_free_when_quiet, self.writes, self.ready or self.stored, self.free))


def _free_when_quiet(writes: list[IoRequest], last: Event | None, free: Callable[[HostRead | None], None]) -> None:
    with contextlib.suppress(Exception):  # swap_in raises it
        for request in writes:
            with contextlib.suppress(Exception):
                request.wait()
        if last is not None:
            last.synchronize()
    free(None)
