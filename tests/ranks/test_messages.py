"""Heads of messages, and their payloads."""

from __future__ import annotations

import pytest
import torch

from hf_lohan.ranks import HEAD_BYTES, Channel, Kind, PayloadReader
from hf_lohan.ranks.transport.messages import DamagedHeadError, Head, memory_of

HEAD = Head(Kind.CHUNK, Channel.GRADIENTS, 2**40, (1, -(2**63), 2**63 - 1), payload_bytes=2**50)


def test_a_packed_head_is_unpacked() -> None:
    packed = HEAD.pack()
    assert len(packed) == HEAD_BYTES
    assert Head.unpack(packed) == HEAD


def test_any_flipped_bit_of_a_head_is_detected() -> None:
    for bit in range(8 * HEAD_BYTES):
        packed = bytearray(HEAD.pack())
        packed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(DamagedHeadError, match="damaged"):
            Head.unpack(packed)


def test_a_ninth_number_is_refused() -> None:
    with pytest.raises(ValueError, match="9 numbers; send at most 8"):
        Head(Kind.CHUNK, Channel.CONTROL, 0, tuple(range(9))).pack()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64, torch.bool])
def test_memory_of_shares_the_bytes_of_a_tensor(dtype: torch.dtype) -> None:
    tensor = torch.zeros(3, 5, dtype=dtype)
    memory_of(tensor)[-dtype.itemsize] = 1
    assert int(torch.count_nonzero(tensor.view(torch.uint8) if dtype != torch.bool else tensor)) == 1
    assert len(memory_of(torch.zeros(0, dtype=dtype))) == 0
    assert len(memory_of(torch.zeros((), dtype=dtype))) == dtype.itemsize


def test_memory_with_gaps_cannot_be_sent() -> None:
    with pytest.raises(ValueError, match="contiguous: False"):
        memory_of(torch.zeros(4, 4)[:, 1])


def test_a_payload_is_read_in_parts_up_to_its_end() -> None:
    content = memoryview(bytes(range(10)))
    position = 0

    def receive_into(view: memoryview) -> None:
        nonlocal position
        view[:] = content[position : position + len(view)]
        position += len(view)

    reader = PayloadReader(10, receive_into)
    first = torch.zeros(4, dtype=torch.uint8)
    reader.read_into(first)
    assert first.tolist() == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="cannot read 7 bytes of a payload that has 6 left"):
        reader.read_into(torch.zeros(7, dtype=torch.uint8))
    assert reader.bytes() == bytes(range(4, 10))
    reader.skip_rest()
    assert position == 10
