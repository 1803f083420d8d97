"""Lanes in which the devices of a node's ranks send memory to each other, without host memory.

As in a `RankLane`, one thread of each rank carries out operations, in the same order on all ranks of the node. An
operation of a device group does not report why it takes long, and its waits have no timeout. So another thread enqueues
it and waits for the device. Meanwhile the thread that uses the lane asks `Watch`, and aborts the group if the operation
cannot end.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from threading import Event

import torch
from torch import Tensor

from hf_lohan.device import Device, DeviceGroup
from hf_lohan.ranks.transport.links import Links
from hf_lohan.threads import start_thread

_ENDS_WITHIN = timedelta(seconds=5)
"""Time in which an aborted operation ends."""


class _Work:
    """An operation that another thread carries out."""

    def __init__(self, enqueue: Callable[[], object]) -> None:
        self._enqueue = enqueue
        self._is_over = Event()
        self.error: BaseException | None = None

    def carry_out(self) -> None:
        try:
            self._enqueue()
        except BaseException as error:
            self.error = error
        self._is_over.set()

    def wait(self, timeout: timedelta) -> None:
        if not self._is_over.wait(timeout.total_seconds()):
            raise RuntimeError("the operation has not ended")

    def is_completed(self) -> bool:
        return self._is_over.is_set()


class DeviceLane:
    """One rank's device in a group of its node's devices. One thread of the rank calls `run`."""

    def __init__(self, links: Links, device: Device, name: str) -> None:
        """Only `open` calls this."""
        self._links, self._ranks = links, links.ranks
        self._lane = links.open_here(
            f"{name} of devices", carries="devices", connect=lambda *members: partial(device.open_group, *members)
        )
        self._group: DeviceGroup | None = None
        self._lost: RuntimeError | None = None
        """The error of an exchange that did not fill its memory."""
        self._work: _Work | None = None
        self._is_closed = False
        self._tasks: SimpleQueue[_Work | None] = SimpleQueue()
        thread_name = f"lohan-rank-{links.ranks.rank}-devices-{name}"
        self._thread = start_thread(
            partial(_carry_out, device, self._tasks), thread_name, beside_kernels=device.shares_cores
        )

    @classmethod
    def open(cls, links: Links, device: Device, name: str) -> DeviceLane:
        """Connect the devices of each node's ranks. All ranks call this together. Raises RankFailedError, or
        RuntimeError if the devices cannot be connected."""
        lane = cls(links, device, name)
        try:
            lane._run("the devices of a machine's ranks to connect", lane._connect)
        except BaseException:
            lane.close()
            raise
        return lane

    def _connect(self, open_group: Callable[[], DeviceGroup]) -> None:
        self._group = open_group()

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank's device sent to others."""
        return self._lane.sent_bytes

    def run(self, what: str, enqueue: Callable[[], object]) -> None:
        """Call ``enqueue`` on another thread, and wait for its end. All ranks of the node call this in the same order.
        ``enqueue`` calls `fill_from_all` or `exchange` in a lane of the device, and waits for the end. ``what``
        completes "rank 0 waited for ...". Raises the error of ``enqueue``, or RankFailedError, RankTimeoutError or
        RanksDisagreeError if memory of the device was not filled."""
        self._run(what, lambda _open_group: enqueue())

    def _run(self, what: str, enqueue: Callable[[Callable[[], DeviceGroup]], object]) -> None:
        def begin(open_group: Callable[[], DeviceGroup]) -> _Work:
            self._work = _Work(partial(enqueue, open_group))
            self._tasks.put(self._work)
            return self._work

        try:
            self._lane.run(what, begin)
            if self._lost is not None:
                self._lane.raise_if_closed()  # `close` aborts the group, which may end the operation first
                self._links.watch.raise_cause(what, self._lost, self._lane.members)
            if self._work is not None and self._work.error is not None:
                raise self._work.error
        except BaseException:
            self._abort()
            raise

    # Called by ``enqueue``.

    def fill_from_all(self, whole: Tensor, parts: Sequence[tuple[int, int]]) -> None:
        """Send this rank's part of ``whole``, memory of its device, to the node's other ranks, and receive their parts.
        ``parts``: the ranges [start, stop) by local rank."""
        views = [whole[start:stop].view(torch.uint8) for start, stop in parts]
        own, members = views[self._ranks.local_rank], range(self._ranks.num_local)
        others = [member for member in members if member != self._ranks.local_rank]
        sends = [(member, own) for member in others if own.numel()]
        self.exchange(sends, [(member, views[member]) for member in others if views[member].numel()])

    def exchange(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> None:
        """Send bytes to the devices of local ranks, and receive bytes from them. All ranks of the node call this, even
        if they send and receive nothing. `run` raises its errors. In this case the memory is not filled."""
        assert self._group is not None
        try:
            self._group.exchange(sends, receives)
        except RuntimeError as error:
            self._lost = error
        self._lane.sent_bytes += sum(sent.nbytes for _, sent in sends)

    # The end.

    def _abort(self) -> None:
        """End the operation in progress. Its memory may then be used again."""
        if self._group is not None:  # a connection in progress cannot be ended
            self._group.abort()
            if self._work is not None:
                with contextlib.suppress(RuntimeError):
                    self._work.wait(_ENDS_WITHIN)

    def close(self) -> None:
        """End an operation in progress with an error, and begin no other."""
        if not self._is_closed:
            self._is_closed = True
            self._lane.close()
            self._abort()
            self._tasks.put(None)


def _carry_out(device: Device, tasks: SimpleQueue[_Work | None]) -> None:
    device.enter_thread()
    while (work := tasks.get()) is not None:
        work.carry_out()
        del work  # frees its memory before the next operation


@dataclass(frozen=True)
class DeviceLanes:
    """The lanes of one rank's device, for the threads that load weights and exchange gradients."""

    weights: DeviceLane
    gradients: DeviceLane

    @classmethod
    def open(cls, links: Links, device: Device) -> DeviceLanes:
        """See `DeviceLane.open`."""
        return cls(DeviceLane.open(links, device, "weights"), DeviceLane.open(links, device, "gradients"))

    @property
    def sent_bytes(self) -> int:
        return self.weights.sent_bytes + self.gradients.sent_bytes

    def close(self) -> None:
        self.weights.close()
        self.gradients.close()
