"""Host memory shared by several processes is pinned in each of them."""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing.connection import Connection

import torch

from hf_lohan.device import Lane, device_for

NUM_BYTES = 64 << 20


def double_it(fd_of_parent: str, connection: Connection) -> None:
    """Double the values, in another process with its own CUDA context."""
    device = device_for("cuda")
    fd = os.open(fd_of_parent, os.O_RDWR)
    host = device.host_shared(fd, NUM_BYTES)
    os.close(fd)
    values = device.empty(NUM_BYTES)
    device.copy(Lane.H2D, values, host)
    device.wait(Lane.COMPUTE, device.record(Lane.H2D))
    values.view(torch.float32).mul_(2)
    device.wait(Lane.D2H, device.record(Lane.COMPUTE, values))
    device.copy(Lane.D2H, host, values)
    device.record(Lane.D2H).synchronize()
    connection.send((host.is_pinned(), device.describe()["pinned_host_memory"]))


def test_memory_shared_by_two_processes_is_pinned_in_both() -> None:
    device = device_for("cuda")
    fd = os.memfd_create("lohan-test")
    os.ftruncate(fd, NUM_BYTES)
    host = device.host_shared(fd, NUM_BYTES)
    host.view(torch.float32).copy_(torch.arange(NUM_BYTES // 4))
    assert host.is_pinned()
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=double_it, args=(f"/proc/{os.getpid()}/fd/{fd}", theirs))
    process.start()
    assert ours.poll(120)
    assert ours.recv() == (True, True)
    process.join()
    on_device = device.empty(NUM_BYTES)
    device.copy(Lane.H2D, on_device, host)
    device.record(Lane.H2D).synchronize()
    assert torch.equal(on_device.cpu().view(torch.float32), 2 * torch.arange(NUM_BYTES // 4, dtype=torch.float32))
    address = host.data_ptr()
    del host
    again = device.host_shared(fd, NUM_BYTES)  # probably at the same address, which must have been unpinned
    assert again.is_pinned(), address
    os.close(fd)
