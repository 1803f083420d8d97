"""The device's arena: tensors of a pass that repeats get planned places, which are given again only when all copies of
the tensor before are done."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from async_device import AsyncDevice
from torch import Tensor

from hf_lohan.compat.torch_private import StorageWeakRef
from hf_lohan.device import CpuDevice, Lane

MIB = 1 << 20


@pytest.fixture(params=[CpuDevice, AsyncDevice])
def device(request: pytest.FixtureRequest) -> Any:
    return request.param()


def run_pass(device: Any, sizes: list[int], *, num_alive: int = 2, name: str = "a") -> list[int]:
    """Allocate tensors of which the last ``num_alive`` exist at one time. Returns their addresses."""
    device.arena.begin_pass(name)
    alive: list[Tensor] = []
    addresses = []
    for number, size in enumerate(sizes):
        tensor = device.arena.empty((size // 4,), torch.float32)
        tensor.fill_(float(number))
        alive = [*alive, tensor][-num_alive:]
        assert all(bool((one == number - age).all()) for age, one in enumerate(reversed(alive)))
        addresses.append(tensor.data_ptr())
        del tensor
    alive.clear()
    return addresses


def test_an_equal_pass_gets_planned_places(device: Any) -> None:
    arena, sizes = device.arena, [MIB] * 6
    run_pass(device, sizes)
    assert arena.num_placed == 0 and arena.block_bytes == 0
    addresses = run_pass(device, sizes)
    assert arena.num_placed == len(sizes)
    assert arena.block_bytes == 3 * MIB
    assert len(set(addresses)) == 3
    assert all(address % 64 == 0 for address in addresses)
    arena.begin_pass(None)
    assert arena.block_bytes == 0
    run_pass(device, sizes)
    assert arena.num_placed == 2 * len(sizes)


def test_a_block_exists_from_its_first_tensor_to_its_last(device: Any) -> None:
    """Of five tensors of which two exist at a time, the first four take turns in two blocks. The fifth outlives the
    pass, so it has no place."""
    exist: list[int] = []
    blocks: list[StorageWeakRef] = []
    empty = device.empty

    def watched(num_bytes: int) -> Tensor:
        block: Tensor = empty(num_bytes)
        blocks.append(StorageWeakRef(block.untyped_storage()))
        return block

    device.empty = watched
    for _ in range(2):
        exist.clear()
        device.arena.begin_pass("a")
        for _ in range(5):
            tensor = device.arena.empty((MIB,), torch.uint8)
            exist.append(sum(not block.expired() for block in blocks))
    assert exist == [1, 2, 2, 2, 1]
    assert device.arena.num_placed == 4 and device.arena.block_bytes == 2 * MIB
    del tensor
    device.arena.begin_pass(None)
    assert all(block.expired() for block in blocks)


def test_without_planned_addresses_all_comes_from_pytorch(device: Any) -> None:
    device.plans_addresses = False
    for _ in range(3):
        run_pass(device, [MIB] * 3)
        assert device.arena.block_bytes == 0
    assert device.arena.num_placed == 0 and device.arena.num_unplaced == 9


def test_another_pass_is_not_placed_and_is_learnt(device: Any) -> None:
    arena = device.arena
    run_pass(device, [MIB, 2 * MIB])
    run_pass(device, [MIB, 3 * MIB])  # deviates at the second tensor
    assert arena.num_placed == 1
    run_pass(device, [MIB, 3 * MIB])
    assert arena.num_placed == 3
    run_pass(device, [MIB, 3 * MIB], name="b")
    assert arena.num_placed == 3
    for _ in range(2):
        run_pass(device, [4 * MIB, MIB])  # of another length
    assert arena.num_placed == 5
    run_pass(device, [MIB, 3 * MIB])
    assert arena.num_placed == 7
    arena.begin_pass(None)
    unplaced = arena.num_unplaced
    assert arena.empty((3, 0), torch.float32).shape == (3, 0)
    assert arena.num_unplaced == unplaced + 1


def test_a_tensor_that_outlives_its_pass_is_not_in_the_block_and_keeps_its_values(device: Any) -> None:
    arena = device.arena
    for _ in range(2):
        arena.begin_pass("a")
        longer = arena.empty((MIB // 4,), torch.float32).fill_(7)
        for _ in range(3):
            arena.empty((MIB // 4,), torch.float32).fill_(1)
    assert arena.num_placed == 3 and arena.block_bytes == MIB
    # In a third pass a tensor that died before lives on. Its block stays as long as it does.
    arena.begin_pass("a")
    kept = [arena.empty((MIB // 4,), torch.float32).fill_(number) for number in range(4)]
    arena.begin_pass("b")
    assert [bool((one == number).all()) for number, one in enumerate(kept)] == [True] * 4
    assert bool((longer == 7).all())


def test_strides_and_dtypes_are_kept_and_tensors_are_not_views(device: Any) -> None:
    arena = device.arena
    for _ in range(2):
        arena.begin_pass("a")
        tensor = arena.empty((2, 3, 4), torch.bfloat16, stride=(1, 8, 2))
        like = torch.empty_strided((2, 3, 4), (1, 8, 2), dtype=torch.bfloat16)
        assert (tensor.shape, tensor.stride(), tensor.dtype) == (like.shape, like.stride(), like.dtype)
        plain = arena.empty((2, 3, 4), torch.float32)
        assert plain.is_contiguous() and not plain._is_view()
        del tensor, plain
    assert arena.num_placed == 2


def test_a_place_is_given_again_only_after_the_copies_of_its_last_tensor() -> None:
    device = AsyncDevice(max_delay_s=0.05)
    arena, num_values = device.arena, MIB // 4
    copied = [torch.empty(num_values) for _ in range(8)]

    def one_pass(*, copies: bool) -> None:
        arena.begin_pass("a")
        for number, host in enumerate(copied):
            tensor = arena.empty((num_values,), torch.float32)
            tensor.fill_(float(number))
            if copies:
                device.wait(Lane.D2H, device.record(Lane.COMPUTE, tensor))
                device.copy(Lane.D2H, host, tensor)
            del tensor  # its copy has not run yet

    one_pass(copies=False)  # all tensors get one place
    for _ in range(3):
        one_pass(copies=True)
        device.record(Lane.D2H).synchronize()
        assert [float(host[0]) for host in copied] == list(range(8))
        assert [float(host[-1]) for host in copied] == list(range(8))
    assert arena.num_placed >= 3 and arena.block_bytes == MIB  # at least the first of each pass
    assert device.num_races == 0
