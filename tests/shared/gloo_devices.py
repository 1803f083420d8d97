"""CPU devices that send to each other by gloo, as GPUs do by NCCL. No setting chooses them outside tests."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from hf_lohan.compat.torch_private import gloo_group
from hf_lohan.device import CpuDevice, DeviceGroup

_SLICE = timedelta(milliseconds=20)
_CONNECTS_WITHIN = timedelta(seconds=60)


class GlooGroup(DeviceGroup):
    """An exchange is one collective, which all members call. gloo cannot cancel it, and has memory of its own in it, so
    after `abort` it goes on without harm."""

    def __init__(self, store: Any, member: int, num_members: int) -> None:
        self._group = gloo_group(store, member, num_members, "127.0.0.1", _CONNECTS_WITHIN)
        self._num_members = num_members
        self._is_aborted = threading.Event()

    def exchange(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> None:
        sent, send_sizes = self._in_order_of_members(sends)
        received, sizes = self._in_order_of_members(receives)
        work = self._group.alltoall_base(received, sent, sizes, send_sizes)
        while not self._has_ended(work):
            if self._is_aborted.is_set():
                # gloo's destructor would wait for a transfer whose other end is gone.
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))
                raise RuntimeError("the group was aborted")
        for member in range(self._num_members):
            of_member = [tensor.view(-1).view(torch.uint8) for other, tensor in receives if other == member]
            parts = received.split(sizes)[member].split([tensor.numel() for tensor in of_member])
            for tensor, part in zip(of_member, parts, strict=True):
                tensor.copy_(part)

    def _in_order_of_members(self, tensors: Sequence[tuple[int, Tensor]]) -> tuple[Tensor, list[int]]:
        ordered = sorted(tensors, key=lambda pair: pair[0])
        sizes = [
            sum(tensor.nbytes for other, tensor in ordered if other == member) for member in range(self._num_members)
        ]
        empty = torch.empty(0, dtype=torch.uint8)
        return torch.cat([empty, *(tensor.view(-1).view(torch.uint8) for _, tensor in ordered)]), sizes

    def _has_ended(self, work: Any) -> bool:
        with suppress(RuntimeError):
            work.wait(_SLICE)
        if work.is_completed():
            work.wait()  # raises its error
            return True
        return False

    def abort(self) -> None:
        self._is_aborted.set()


@contextmanager
def gloo_between_cpus() -> Iterator[None]:
    """A context in which `ranks.transport: nccl` is allowed on CPU devices, and uses gloo."""

    def open_group(_device: CpuDevice, store: Any, member: int, num_members: int) -> DeviceGroup:
        return GlooGroup(store, member, num_members)

    with mock.patch.multiple(CpuDevice, why_no_group=lambda _device, _identities: "", open_group=open_group):
        yield
