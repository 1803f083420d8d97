"""CPU devices that send to each other by gloo, as GPUs do by NCCL. No setting chooses them outside tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from hf_lohan.compat.torch_private import begin_sends, default_process_group_store, gloo_group, wake_gloo
from hf_lohan.device import CpuDevice, DeviceGroup

_distributed: Any = torch.distributed
_STORE = _distributed.HashStore()
"""Connects ranks that are threads of this process."""


class _Coalesced:
    """Works that were begun together."""

    def __init__(self, works: list[Any]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


class _CoalescingGroup:
    """A gloo group that coalesces as NCCL does. All operations are begun at the end."""

    supports_coalescing = True

    def __init__(self, group: Any) -> None:
        self._group = group
        self._begin: list[Callable[[], Any]] = []

    def _start_coalescing(self) -> None:
        self._begin = []

    def send(self, *operation: Any) -> None:
        self._begin.append(partial(self._group.send, *operation))

    def recv(self, *operation: Any) -> None:
        self._begin.append(partial(self._group.recv, *operation))

    def _end_coalescing(self) -> _Coalesced | None:
        return _Coalesced([begin() for begin in self._begin]) if self._begin else None


class GlooGroup(DeviceGroup):
    def __init__(self, meeting: str, member: int, num_members: int) -> None:
        store = default_process_group_store() if torch.distributed.is_initialized() else _STORE
        self._group = gloo_group(_distributed.PrefixStore(meeting, store), member, num_members, "127.0.0.1")
        self._another = (member + 1) % num_members

    def exchange(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> None:
        for work in begin_sends(_CoalescingGroup(self._group), sends, receives):
            work.wait()

    def abort(self) -> None:
        wake_gloo(self._group, self._another)


@contextmanager
def gloo_between_cpus() -> Iterator[None]:
    """A context in which `transport: nccl` is allowed on CPU devices, and uses gloo."""

    def open_group(_device: CpuDevice, meeting: str, member: int, num_members: int) -> DeviceGroup:
        return GlooGroup(meeting, member, num_members)

    with mock.patch.multiple(CpuDevice, why_no_group=lambda _device, _identities: "", open_group=open_group):
        yield
