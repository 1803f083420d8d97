"""Messages. A message is a head of fixed size and then a payload, whose size is in the head."""

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
_HEAD_MAGIC = b"LOHR"
_HEAD = struct.Struct(f"<4sBBHQ{MAX_NUMBERS}qQ")
_CRC = struct.Struct("<I")
HEAD_BYTES = _HEAD.size + _CRC.size
_MOST_PAYLOAD_BYTES = 1 << 50
_MOST_BYTES_AT_ONCE = 1 << 28
"""Limit in bytes for a payload that is received into new memory."""


class Channel(enum.IntEnum):
    """One connection to each peer. Messages of one channel arrive in the order in which they were sent."""

    CONTROL = 0
    """Small messages. Their handlers never wait."""
    WEIGHTS = 1
    GRADIENTS = 2
    TOKENS = 3
    """Rows of tokens on their way to the ranks that own their experts, and back. Rows of embeddings."""

    def __str__(self) -> str:
        return self.name.lower()


class Kind(enum.IntEnum):
    """The kinds of messages. A rank has one handler for each kind."""

    HELLO = 1
    """The first message of each channel, which names the sender."""
    BYE = 2
    """The last message of each channel, if the run ends well."""
    FAILED = 3
    """Numbers: the rank where the failure began, and whether it is the sender. Payload: a sentence."""
    GATHER = 4
    BROADCAST = 5
    CHUNK = 10
    """A rank's gradient of a chunk is complete."""
    RELEASE = 11
    """A gradient of a chunk has been summed, so its buffer may be used again."""
    NO_GRADIENT = 12
    """A rank has no gradient of some chunks in a backward."""
    BACKWARD_ABANDONED = 13
    NODE_READY = 14
    """The gradients of a chunk are complete on all ranks of a node."""
    PULL = 15
    """The owner of a chunk asks a node for its sum."""
    PIECE = 16
    """A piece of a node's sum."""
    FILLED = 20
    """A rank's shard of a block's weights is in the memory that the node's ranks share."""
    TAKEN = 21
    """A rank has copied a block from the shared memory."""
    WEIGHTS_PART = 22
    """A rank's shard of a block's weights, for another node."""
    LOADS_DIFFER = 23
    """The ranks do not carry out this load together, nor a later one of its period. Numbers: the load."""
    LOAD_PERIOD = 24
    """A rank begins its first common load of a period. Numbers: see `JointOrder`."""
    LOAD_WANTED = 25
    """A rank waits for others in a common load. Numbers: the load, its block, its place and its pass."""
    SHARD_WANTED = 26
    """A rank asks for a shard of a block. Numbers: its load and the block."""
    SHARD = 27
    """A piece of a shard that a rank asked for. Numbers: its load, the block, the first element, and whether there is
    an error, which the payload then describes."""
    ROWS_WANTED = 28
    """A rank asks for rows of the table of embeddings. Numbers: the request, its period, and the offset of the rows in
    the memory of the rank's node. Payload: the numbers of the rows."""
    ROWS = 29
    """The sender's part of the rows of a request, for another node, or the news that they are in the memory of the
    node. Numbers: the request, and whether there is an error, which the payload then describes."""
    PREPARED = 30
    """A commit is durable on a rank."""
    STORE_PIECE = 31
    """A piece of a store of another number of ranks, which is resharded."""
    EXCHANGE = 32
    """A rank's device takes part in an exchange of its node's devices. Numbers: see `DeviceTransport`."""
    EXCHANGE_READY = 33
    """A rank is ready for an exchange of its node's devices. Numbers: the group's token, and the exchange's name."""
    EXCHANGE_ORDER = 34
    """The exchanges that the devices of a node carry out next. Numbers: the group's token. Payload: their names."""
    EXPERT_CALL = 40
    """A rank calls the experts of a layer. Numbers: the call. Payload: its numbers of rows, by expert of the
    receiver."""
    EXPERT_ROWS = 41
    """The rows of a call, for the experts of the receiver. The first number is the rank whose rows they are."""
    EXPERT_RESULTS = 42
    """What the sender's experts made of the receiver's rows."""
    EXPERT_NODE_ROWS = 43
    """The sender's rows for the experts of all ranks on the receiver's node."""
    EXPERT_LENT = 44
    """The weights of an expert of the sender are in the memory that the node's ranks share. Numbers: the expert."""
    EXPERT_RETURNED = 45
    """The sender no longer reads the weights that the receiver lent."""
    EXPERT_GRADIENT = 46
    """A gradient of an expert of the receiver is in the shared memory. Numbers: the expert."""
    EXPERT_GRADIENT_TAKEN = 47
    """The sender has added the receiver's last gradient."""

    ROW_MEETING = 50
    """A rank is at a meeting of the ranks that share a row's tokens. Numbers: the meeting's number. Payload: the length
    of its name, the name, and what the rank gives the others."""


class DamagedHeadError(ValueError):
    """Received bytes are not the head of the next message."""


@dataclass(frozen=True, slots=True)
class Head:
    """The head of one message."""

    kind: int
    channel: Channel
    sequence_number: int
    """Number of the message in its channel, which detects lost and repeated messages."""
    numbers: tuple[int, ...] = ()
    payload_bytes: int = 0

    def pack(self) -> bytes:
        if len(self.numbers) > MAX_NUMBERS:
            raise ValueError(f"a message has {len(self.numbers)} numbers; send at most {MAX_NUMBERS}")
        padded = (*self.numbers, *[0] * (MAX_NUMBERS - len(self.numbers)))
        packed = _HEAD.pack(
            _HEAD_MAGIC, self.channel, len(self.numbers), self.kind, self.sequence_number, *padded, self.payload_bytes
        )
        return packed + _CRC.pack(zlib.crc32(packed))

    @classmethod
    def unpack(cls, packed: bytes | bytearray | memoryview) -> Head:
        """Return the head in these bytes. Raises DamagedHeadError."""
        sent_crc = _CRC.unpack_from(packed, _HEAD.size)[0]
        crc = zlib.crc32(packed[: _HEAD.size])
        magic, channel, num_numbers, kind, sequence_number, *numbers, payload_bytes = _HEAD.unpack_from(packed)
        if magic != _HEAD_MAGIC or crc != sent_crc:
            raise DamagedHeadError(
                f"its head is damaged (begins with {bytes(magic)!r}, and has crc {crc:08x}, not {sent_crc:08x})"
            )
        if payload_bytes > _MOST_PAYLOAD_BYTES:
            raise DamagedHeadError(f"it announces {payload_bytes:,} bytes, which is more than any message has")
        return cls(kind, Channel(channel), sequence_number, tuple(numbers[:num_numbers]), payload_bytes)

    @property
    def name(self) -> str:
        """Name of the message's kind, for errors."""
        return Kind(self.kind).name if self.kind in Kind._value2member_map_ else f"kind {self.kind}"


def memory_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError(
            f"cannot send a tensor on {tensor.device} (contiguous: {tensor.is_contiguous()}); copy it to host memory"
        )
    array: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


class PayloadReader:
    """The payload of a message, for the message's handler. Bytes that the handler does not read are discarded."""

    def __init__(self, num_bytes: int, receive_into: Callable[[memoryview], None]) -> None:
        self.num_bytes = num_bytes
        self._receive_into = receive_into
        self._num_left = num_bytes

    def read_into(self, tensor: Tensor) -> None:
        """Fill a contiguous CPU tensor with the next bytes."""
        self._read(memory_of(tensor))

    def bytes(self) -> bytes:
        """Return all remaining bytes. Raises DamagedHeadError if their number is above the limit."""
        if self._num_left > _MOST_BYTES_AT_ONCE:
            raise DamagedHeadError(
                f"it announces {self._num_left:,} bytes, but a message of its kind has at most {_MOST_BYTES_AT_ONCE:,}"
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
            raise ValueError(f"cannot read {len(view)} bytes of a payload that has {self._num_left} left")
        if len(view):
            self._receive_into(view)
        self._num_left -= len(view)
