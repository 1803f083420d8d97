"""What goes over a connection: a head of fixed size, then the payload that it announces."""

from __future__ import annotations

import enum
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

MAX_NUMBERS = 8
_MAGIC = b"LOHR"
_HEAD = struct.Struct(f"<4sBBHQ{MAX_NUMBERS}qQ")
_CRC = struct.Struct("<I")
HEAD_BYTES = _HEAD.size + _CRC.size
_MOST_PAYLOAD_BYTES = 1 << 50
_MOST_BYTES_AT_ONCE = 1 << 28
"""Of a payload for which memory is taken when it comes: small figures of all ranks."""


class Channel(enum.IntEnum):
    """One connection to each peer. Messages of one channel arrive in the order in which they were sent."""

    CONTROL = 0
    """Small ones, whose handlers never wait."""
    WEIGHTS = 1
    GRADIENTS = 2

    def __str__(self) -> str:
        return self.name.lower()


class Kind(enum.IntEnum):
    """What a message says. Each kind has one handler on a rank."""

    HELLO = 1
    """The first of each channel: who this is."""
    BYE = 2
    """The last of each channel, if all is well."""
    FAILED = 3
    """Numbers: the rank where it began, whether that is the sender. Payload: a sentence."""
    GATHER = 4
    BROADCAST = 5
    CHUNK = 10
    """A rank's part of a chunk's gradient is complete."""
    RELEASE = 11
    """It has been summed: its buffer may be used again."""
    NO_GRADIENT = 12
    """A rank has none of some chunks in a backward."""
    BACKWARD_ABANDONED = 13
    NODE_READY = 14
    """All parts of a chunk that one box has are complete."""
    PULL = 15
    """Their sum is wanted now."""
    PIECE = 16
    """Some of that sum."""
    FILLED = 20
    """A rank's range of a block's weights is in the memory that a box shares."""
    TAKEN = 21
    """A rank has copied a block from there."""
    WEIGHTS_PART = 22
    """A rank's shard of a block's weights, for another node."""
    LOAD_IN_DOUBT = 23
    """A rank's shard of a load has a wrong checksum. Numbers: the load, its block."""
    PREPARED = 30
    """A commit is durable on a rank."""


class DamagedHeadError(ValueError):
    """What arrived is not the head of the message that was to come."""


@dataclass(frozen=True, slots=True)
class Head:
    """Of one message."""

    kind: int
    channel: Channel
    sequence_number: int
    """Of the channel: a message that was lost or came twice shows."""
    numbers: tuple[int, ...] = ()
    payload_bytes: int = 0

    def pack(self) -> bytes:
        if len(self.numbers) > MAX_NUMBERS:
            raise ValueError(f"a message has {len(self.numbers)} numbers; send at most {MAX_NUMBERS}")
        padded = (*self.numbers, *[0] * (MAX_NUMBERS - len(self.numbers)))
        packed = _HEAD.pack(
            _MAGIC, self.channel, len(self.numbers), self.kind, self.sequence_number, *padded, self.payload_bytes
        )
        return packed + _CRC.pack(zlib.crc32(packed))

    @classmethod
    def unpack(cls, packed: bytes | bytearray | memoryview) -> Head:
        """Raises DamagedHeadError if it is none."""
        told_crc = _CRC.unpack_from(packed, _HEAD.size)[0]
        crc = zlib.crc32(packed[: _HEAD.size])
        magic, channel, num_numbers, kind, sequence_number, *numbers, payload_bytes = _HEAD.unpack_from(packed)
        if magic != _MAGIC or crc != told_crc:
            raise DamagedHeadError(
                f"its head is damaged (begins with {bytes(magic)!r}, crc {crc:08x}, not {told_crc:08x})"
            )
        if payload_bytes > _MOST_PAYLOAD_BYTES:
            raise DamagedHeadError(f"it announces {payload_bytes:,} bytes, more than any message has")
        return cls(kind, Channel(channel), sequence_number, tuple(numbers[:num_numbers]), payload_bytes)

    @property
    def name(self) -> str:
        """Of its kind, for people."""
        return Kind(self.kind).name if self.kind in Kind._value2member_map_ else f"kind {self.kind}"


def memory_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError(
            f"a tensor on {tensor.device}, contiguous: {tensor.is_contiguous()}, cannot be sent; copy it to host memory"
        )
    array: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


class PayloadReader:
    """The bytes behind a head. They are read while the message's handler runs; what it leaves is dropped."""

    def __init__(self, num_bytes: int, receive_into: Callable[[memoryview], None]) -> None:
        self.num_bytes = num_bytes
        self._receive_into = receive_into
        self._num_left = num_bytes

    def read_into(self, tensor: Tensor) -> None:
        """Fill a contiguous CPU tensor with the next bytes."""
        self._read(memory_of(tensor))

    def bytes(self) -> bytes:
        """All that is left. Raises DamagedHeadError where that is more than such a message ever has."""
        if self._num_left > _MOST_BYTES_AT_ONCE:
            raise DamagedHeadError(
                f"it announces {self._num_left:,} bytes, and one of its kind has at most {_MOST_BYTES_AT_ONCE:,}"
            )
        content = bytearray(self._num_left)
        self._read(memoryview(content))
        return bytes(content)

    def skip_rest(self) -> None:
        """Read and discard the remaining bytes."""
        scratch = memoryview(bytearray(min(self._num_left, 1 << 20)))
        while self._num_left:
            self._read(scratch[: self._num_left])

    def _read(self, view: memoryview) -> None:
        if len(view) > self._num_left:
            raise ValueError(f"{len(view)} bytes of a payload are wanted, of which {self._num_left} are left")
        if len(view):
            self._receive_into(view)
        self._num_left -= len(view)
