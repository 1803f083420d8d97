"""GPUs that send weights and gradients to each other by NCCL. With one GPU, only the refusals and one rank's lanes are
tested."""

from __future__ import annotations

import multiprocessing
import socket
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

import pytest
import torch

from hf_lohan.device import Device, DeviceGroup, Lane, device_for, num_gpus
from hf_lohan.ranks import GRADIENTS_WITHIN, DeviceLane, DeviceSums
from hf_lohan.ranks.collectives.rank_order_sum import (
    SUM_PIECE_NUMEL,
    CodedValues,
    NodeSum,
    ValuesOnDevice,
    add_on_device,
    sum_gradients_,
)
from hf_lohan.testing.thread_ranks import run_ranks

NUMEL = 1 << 20


def test_a_gpu_has_an_identity_and_does_not_send_to_itself() -> None:
    device = device_for("cuda:0")
    assert device.identity == device_for("cuda:0").identity
    reason = device.why_no_group([device.identity])
    assert "without NCCL" in reason or reason == "several ranks compute on GPU 0, and NCCL needs a GPU for each rank"
    assert device.why_no_group([]) in ("", "this torch was built without NCCL")


class OwnMemory(DeviceGroup):
    """A group whose other member is in this process, and has filled `theirs` on the device."""

    def __init__(self, theirs: torch.Tensor) -> None:
        self.theirs = theirs
        self.sent = torch.zeros_like(theirs)

    def exchange(self, sends: Any, receives: Any) -> None:
        for _, sent in sends:
            self.sent.copy_(sent, non_blocking=True)
        for _, received in receives:
            received.copy_(self.theirs, non_blocking=True)

    def abort(self) -> None:
        return


def open_lane(links: Any, device: Device, group: DeviceGroup) -> DeviceLane:
    with mock.patch.object(type(device), "open_group", lambda *_: group):
        return DeviceLane.open(links, device, "tests")


def test_an_exchange_follows_the_copy_of_the_own_shard_and_precedes_compute() -> None:
    """Work of the lane H2D is in order: the copy of the shard, and the exchange, which other work waits for."""
    device = device_for("cuda:0")
    host = device.host_empty(NUMEL).fill_(7)
    slot = device.empty(2 * NUMEL)
    theirs = torch.full((NUMEL,), 9, dtype=torch.uint8, device=device.torch_device)
    device.wait(Lane.H2D, device.record(Lane.COMPUTE, theirs, slot))
    group = OwnMemory(theirs)

    def run(links: Any) -> None:
        lane = open_lane(links, device, group)
        if links.ranks.rank == 0:
            device.copy(Lane.H2D, slot[:NUMEL], host)
            parts = [(0, NUMEL), (NUMEL, 2 * NUMEL)]

            def fill() -> None:
                device.run(Lane.H2D, lambda: lane.fill_from_all(slot, parts), fills=slot, reads=(slot[:NUMEL],))
                device.record(Lane.H2D).synchronize()

            lane.run("its shard of a test", fill)
            device.wait(Lane.COMPUTE, device.record(Lane.H2D))
        else:
            lane.run("its shard of a test", lambda: None)
        links.barrier("the end")
        lane.close()

    run_ranks(2, run)
    assert slot.cpu().tolist() == [7] * NUMEL + [9] * NUMEL
    assert group.sent.cpu().tolist() == [7] * NUMEL


def test_the_device_of_an_owner_adds_in_rank_order_and_copies_the_sum_to_the_host() -> None:
    """The gradients come by the lane D2H, and the sums leave by another one."""
    device, numel = device_for("cuda:0"), NUMEL + 1000
    generator = torch.Generator().manual_seed(0)
    own, theirs = (torch.randn(2, numel, generator=generator) for _ in range(2))
    group = OwnMemory(torch.empty(0, dtype=torch.uint8, device=device.torch_device))
    buffer = device.empty(4 * numel).view(torch.float32)
    places = [device.host_empty(4 * numel).view(torch.float32) for _ in own]

    def run(links: Any) -> None:
        lane = open_lane(links, device, group)
        sums = DeviceSums(device, lane, links.ranks, 4 * numel)
        for key in range(len(own)):
            if links.ranks.rank == 1:  # it has published its gradients
                lane.run("gradients that devices add", lambda: None)
                continue
            gradient = own[key].to(device.torch_device)
            group.theirs = theirs[key].to(device.torch_device).view(torch.uint8)
            device.wait(Lane.D2H, device.record(Lane.COMPUTE, gradient))
            device.copy(Lane.D2H, buffer, gradient)
            device.record(Lane.D2H).synchronize()
            torch.cuda.synchronize()  # the other member's memory
            parts = [(0, buffer), (1, ValuesOnDevice(numel, torch.float32))]
            sums.add([], parts, is_owner=True, place=places[key], gaps=())
        links.barrier("the end")
        lane.close()

    run_ranks(2, run)
    for key, place in enumerate(places):
        assert torch.equal(place, own[key] * 0.5 + theirs[key] * 0.5)


@pytest.mark.parametrize("word", ["int8", "int4"])
def test_a_device_adds_coded_gradients_as_the_host_does(word: str) -> None:
    """The sum for another node then reaches the host in pieces."""
    device, codec, numel = device_for("cuda:0"), GRADIENTS_WITHIN[word], 300_000
    generator = torch.Generator().manual_seed(0)
    messages = [torch.empty(codec.message_bytes(numel), dtype=torch.uint8) for _ in range(3)]
    for message in messages:
        codec.encode(torch.randn(numel, generator=generator), message)

    def coded(message: torch.Tensor) -> CodedValues:
        codes, scales = message.tensor_split([codec.codes_bytes(numel)])
        return CodedValues(codec, codes.view(torch.int8), scales.view(codec.scale_dtype), numel)

    expected = sum_gradients_(torch.empty(numel), [coded(message) for message in messages], 6)
    total, scratch = (device.empty(4 * numel).view(torch.float32) for _ in range(2))
    parts = [coded(message.to(device.torch_device)) for message in messages]
    torch.cuda.synchronize()
    device.run(Lane.D2H_ASIDE, lambda: add_on_device(total, parts, 6, scratch), fills=total, reads=())
    piece = device.host_empty(4 * SUM_PIECE_NUMEL).view(torch.float32)
    found = NodeSum(device, total, torch.float32, piece)
    starts = range(0, numel, SUM_PIECE_NUMEL)
    assert torch.equal(torch.cat([found.part(start, start + SUM_PIECE_NUMEL).clone() for start in starts]), expected)


def exchange(rank: int, num_ranks: int, port: int, connection: Connection) -> None:
    """One rank, with a GPU of its own, which fills its slot three times."""
    store = torch.distributed.TCPStore("127.0.0.1", port, num_ranks, rank == 0, timeout=timedelta(seconds=60))
    torch.distributed.init_process_group("nccl", store=store, rank=rank, world_size=num_ranks)
    device = device_for(f"cuda:{rank}")
    group = device.open_group(torch.distributed.PrefixStore("lohan/test", store), rank, num_ranks)
    edges = [member * NUMEL for member in range(num_ranks + 1)]
    slot = device.empty(edges[-1])
    own = slot[edges[rank] : edges[rank + 1]]
    others = [member for member in range(num_ranks) if member != rank]
    for number in range(3):
        host = device.host_empty(NUMEL).fill_(10 * number + rank)
        device.copy(Lane.H2D, own, host)
        receives = [(member, slot[edges[member] : edges[member + 1]]) for member in others]
        sends = [(member, own) for member in others]

        def work(sends: Any = sends, receives: Any = receives) -> None:
            group.exchange(sends, receives)

        device.run(Lane.H2D, work, fills=slot, reads=(own,))
        device.record(Lane.H2D).synchronize()
        connection.send([int(slot[edge].item()) for edge in edges[:-1]])
    group.abort()


def test_gpus_of_several_processes_fill_each_other_s_slots() -> None:
    num_ranks = min(4, num_gpus())
    if num_ranks < 2:
        pytest.skip(f"needs 2 GPUs that reach each other, and this machine has {num_ranks}")
    devices = [device_for(f"cuda:{rank}") for rank in range(num_ranks)]
    reason = devices[0].why_no_group([device.identity for device in devices[1:]])
    if reason:
        pytest.skip(reason)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(num_ranks)]
    processes = [
        context.Process(target=exchange, args=(rank, num_ranks, port, pipes[rank][1])) for rank in range(num_ranks)
    ]
    for process in processes:
        process.start()
    for ours, _ in pipes:
        for number in range(3):
            assert ours.poll(120)
            assert ours.recv() == [10 * number + rank for rank in range(num_ranks)]
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
