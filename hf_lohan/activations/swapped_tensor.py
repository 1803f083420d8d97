"""A tensor that left the device, and comes back bit for bit."""

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


@dataclass(eq=False)
class TensorForm:
    """What is needed to make an equal tensor of its elements in memory order: strides count, since kernels choose by
    them."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> TensorForm:
        return cls(tensor.size(), tensor.stride(), tensor.dtype, tensor.device)

    def empty(self) -> Tensor:
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device)


def alias_of(tensor: Tensor) -> Tensor:
    """The same memory and the same version counter, so that writes are noticed on both, but no autograd graph.

    Below autograd, where dispatch modes run, `detach` alone gives the alias a version counter of its own.
    """
    with aliases_count_versions():
        return tensor.detach()


def witness_of(tensor: Tensor) -> Tensor:
    """Nothing but its version counter, which tells of writes also when the tensor itself is gone."""
    witness = alias_of(tensor)
    witness.data = tensor.new_empty(0)
    return witness


def in_memory_order(tensor: Tensor) -> Tensor:
    """All elements of a dense tensor, flat, as they lie in memory."""
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def storage_of(tensor: Tensor) -> StorageWeakRef:
    """Equal for tensors that share memory; it holds none."""
    return StorageWeakRef(tensor.untyped_storage())


def as_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a dense tensor, flat, as they lie in memory."""
    return in_memory_order(tensor).view(torch.uint8)


def is_swappable(tensor: Tensor) -> bool:
    """Whether a tensor is plain memory without gaps: others stay where they are."""
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
    """One tensor on its way out and back. Whoever holds it can have it back; when nobody does, its place is free.

    Set by the swapper's thread, except where said.
    """

    form: TensorForm
    num_bytes: int
    region: Tensor | None
    """Where it lies in RAM, uint8 [num_bytes]; None: on the SSD."""
    spill_start: int
    source: Tensor | None
    """Its memory on the device, until it is stored."""
    storage: StorageWeakRef
    """Names that memory, as long as anybody has it."""
    witness: Tensor
    """See `witness_of`."""
    version: int
    """Of the tensor when it was given away: whoever writes to it later must wait until it is stored."""
    free: Callable[[HostRead | None], None]
    """Frees its place, from which a copy may still read. May be called from a destructor."""
    later: Callable[[Callable[[], object]], None]
    """Runs something on the swapper's thread."""
    writes: list[IoRequest] = field(default_factory=list)
    stored: Event | None = None
    is_stored: threading.Event = field(default_factory=threading.Event)
    is_fetched: threading.Event = field(default_factory=threading.Event)
    is_expected: bool = False
    """Whether it was asked back already. Set by the compute thread."""
    may_change: bool = False
    """Whether its memory was seen to be safe to write to. Set by the compute thread."""
    landed: Tensor | None = None
    ready: Event | None = None
    last_read: HostRead | None = None
    """The copy that read it from RAM last."""
    error: BaseException | None = None

    def check_unchanged(self) -> None:
        """Raise RuntimeError if somebody wrote to the tensor who did not wait: nobody knows what was stored. Call it on
        the compute thread, where no operation is in the middle of writing."""
        if not self.may_change and version_of(self.witness) != self.version:
            raise RuntimeError(
                "a layer's input, or the output of a matrix product or attention, was changed in place outside its "
                "layer while it was swapped out, so its layer's backward could be wrong; set activations: recompute"
            )

    def __del__(self) -> None:
        was_read = self.last_read is not None or self.region is None
        if self.ready is None and was_read and all(request.done() for request in self.writes):
            self.free(self.last_read)
        else:  # dropped before its time: bytes are still on their way to or from its place
            self.later(partial(_free_when_quiet, self.writes, self.ready or self.stored, self.free))


def _free_when_quiet(writes: list[IoRequest], last: Event | None, free: Callable[[HostRead | None], None]) -> None:
    with contextlib.suppress(Exception):  # told to whoever wanted the tensor
        for request in writes:
            with contextlib.suppress(Exception):
                request.wait()
        if last is not None:
            last.synchronize()
    free(None)
