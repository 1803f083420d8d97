"""Computes 64-bit xxh3 hashes of pieces of device memory, bitwise equal to xxhash. The content stays on the device.

`accumulate` computes eight accumulators of each piece on the tensor's device: on CUDA with one Triton kernel, if Triton
is installed, and otherwise with torch operations. `finish` computes the hashes from the accumulators in host memory.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

from hf_lohan.device import Device, DeviceHasher, Lane

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

BLOCK_BYTES = 1024
"""Size of a block of xxh3. Each piece is a whole number of blocks."""
_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_PRIME32_1, _PRIME64_1 = 0x9E3779B1, 0x9E3779B185EBCA87
_START = (
    *(0xC2B2AE3D, _PRIME64_1, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9),
    *(0x85EBCA77C2B2AE63, 0x85EBCA77, 0x27D4EB2F165667C5, _PRIME32_1),
)
_AVALANCHE = 0x165667919E3779F9
_LOW = 0xFFFFFFFF
_SWAPPED = (1, 0, 3, 2, 5, 4, 7, 6)
_STRIPES, _LANES = 16, 8
_WORDS_AT_ONCE = (4 << 20) // 8
"""Number of words that torch operations process at a time. They make several temporary tensors of this size."""


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


def _secret_words(first_byte: int, count: int) -> list[int]:
    step = range(first_byte, first_byte + 8 * count, 8)
    return [_signed(int.from_bytes(_SECRET[at : at + 8], "little")) for at in step]


# 24 words of the secret, 8 words for the last stripe, the start, the prime and the mask. The Triton kernel uses it too.
_TABLE = (
    _secret_words(0, 24)
    + _secret_words(len(_SECRET) - 64 - 7, _LANES)
    + [_signed(word) for word in _START]
    + [_PRIME32_1, _LOW]
)


def table_on(device: torch.device) -> Tensor:
    """Return the constants of the hash on a device. May wait for the device."""
    return torch.tensor(_TABLE, dtype=torch.int64, device=device)


def accumulate(content: Tensor, piece_bytes: int, table: Tensor) -> Tensor:
    """Return the accumulators of each piece of ``content`` as int64 [pieces, 8]. ``content`` is uint8 [num_bytes] on
    any device. The last piece may be short, but has whole blocks. Does not wait for the device."""
    assert content.numel() % BLOCK_BYTES == 0 and piece_bytes % BLOCK_BYTES == 0, "pieces are whole blocks of xxh3"
    words = content.view(torch.int64)
    whole = content.numel() // piece_bytes
    cut = whole * (piece_bytes // 8)
    kernel = _accumulate_in_triton if triton is not None and content.device.type == "cuda" else _accumulate
    parts = [words[:cut].view(whole, -1)] if whole else []
    parts += [words[cut:].view(1, -1)] if cut < words.numel() else []
    found = [kernel(part, table) for part in parts]
    return torch.cat(found) if len(found) > 1 else found[0]


def _accumulate(pieces: Tensor, table: Tensor) -> Tensor:
    """Return the accumulators of pieces of equal size, int64 [pieces, words]."""
    number = torch.arange(_STRIPES, device=table.device)[:, None] + torch.arange(_LANES, device=table.device)
    secret, scramble, of_last = table[number], table[16:24], table[24:32]
    blocks = pieces.view(len(pieces), -1, _STRIPES, _LANES)
    sums = torch.empty(len(pieces), blocks.shape[1], _LANES, dtype=torch.int64, device=pieces.device)
    at_once = max(1, _WORDS_AT_ONCE // pieces.shape[1])
    for first in range(0, len(pieces), at_once):
        part, into = blocks[first : first + at_once], sums[first : first + at_once]
        mixed = _mixed(part, secret)
        torch.sum(mixed, dim=2, out=into)
        # The last stripe uses another part of the secret.
        into[:, -1] += _mixed(part[:, -1, -1], of_last) - mixed[:, -1, -1]
    state = table[32:40].expand(len(pieces), _LANES).clone()
    for block in range(blocks.shape[1] - 1):
        state += sums[:, block]
        state ^= _shifted(state, 47) ^ scramble
        state *= _PRIME32_1
    return state + sums[:, -1]


def _accumulate_in_triton(pieces: Tensor, table: Tensor) -> Tensor:
    out = torch.empty(len(pieces), _LANES, dtype=torch.int64, device=pieces.device)
    kernel: Any = _accumulate_kernel
    with torch.accelerator.device_index(pieces.device.index):
        kernel[(len(pieces),)](pieces, table, out, pieces.shape[1] // (_STRIPES * _LANES), num_warps=1)
    return out


if triton is not None:

    @triton.jit
    def _accumulate_kernel(words, table, out, num_blocks):
        piece = tl.program_id(0).to(tl.int64)
        stripe, lane = tl.arange(0, 16)[:, None], tl.arange(0, 8)[None, :]
        lanes = tl.arange(0, 8)
        secret = tl.load(table + stripe + lane)
        scramble = tl.load(table + 16 + lanes)
        prime, low = tl.load(table + 40), tl.load(table + 41)
        state = tl.load(table + 32 + lanes)
        block = words + piece * num_blocks * 128
        for _ in range(num_blocks - 1):
            keyed = tl.load(block + stripe * 8 + lane) ^ secret
            neighbour = tl.load(block + stripe * 8 + (lane ^ 1))
            state += tl.sum((keyed & low) * ((keyed >> 32) & low) + neighbour, axis=0)
            state = (state ^ ((state >> 47) & 0x1FFFF) ^ scramble) * prime
            block += 128
        # The last block is not scrambled, and its last stripe uses another part of the secret.
        of_last = tl.load(table + 24 + lane)
        keyed = tl.load(block + stripe * 8 + lane) ^ tl.where(stripe == 15, of_last, secret)
        neighbour = tl.load(block + stripe * 8 + (lane ^ 1))
        state += tl.sum((keyed & low) * ((keyed >> 32) & low) + neighbour, axis=0)
        tl.store(out + piece * 8 + lanes, state)


def _mixed(words: Tensor, secret: Tensor) -> Tensor:
    keyed = words ^ secret
    return (keyed & _LOW) * _shifted(keyed, 32) + words[..., list(_SWAPPED)]


def _shifted(words: Tensor, bits: int) -> Tensor:
    """Shift words to the right as unsigned integers."""
    return (words >> bits) & ((1 << (64 - bits)) - 1)


def finish(accumulators: Tensor, num_bytes: int, piece_bytes: int) -> Tensor:
    """Return the hashes of the pieces of ``num_bytes`` as int64 [pieces]. The bits are those of unsigned integers."""
    last_bytes = num_bytes - (len(accumulators) - 1) * piece_bytes
    lengths = [piece_bytes] * (len(accumulators) - 1) + [last_bytes]
    hashes = torch.tensor([_signed(size * _PRIME64_1 % (1 << 64)) for size in lengths], dtype=torch.int64)
    keyed = accumulators.cpu() ^ torch.tensor(_secret_words(11, _LANES), dtype=torch.int64)
    for first in range(0, _LANES, 2):
        hashes += _folded_product(keyed[:, first], keyed[:, first + 1])
    hashes ^= _shifted(hashes, 37)
    hashes *= _AVALANCHE
    return hashes ^ _shifted(hashes, 32)


def _folded_product(one: Tensor, other: Tensor) -> Tensor:
    """Multiply unsigned words to 128 bits. Return the exclusive or of both halves of the product."""
    low, high = one & _LOW, _shifted(one, 32)
    other_low, other_high = other & _LOW, _shifted(other, 32)
    cross, cross_back = low * other_high, high * other_low
    middle = _shifted(low * other_low, 32) + (cross & _LOW) + (cross_back & _LOW)
    upper = high * other_high + _shifted(cross, 32) + _shifted(cross_back, 32) + _shifted(middle, 32)
    return (one * other) ^ upper


class Xxh3Hasher(DeviceHasher):
    """Hashes device memory on the stream of a lane. Each lane has its own buffers. A lock lets threads take turns."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._table = table_on(device.torch_device)
        self._locks = {lane: threading.Lock() for lane in Lane}
        self._buffers: dict[Lane, tuple[Tensor, Tensor]] = {}

    def covers(self, tensor: Tensor) -> bool:
        return not tensor.is_cpu

    def can_hash(self, tensor: Tensor) -> bool:
        return tensor.data_ptr() % 8 == 0 and tensor.storage_offset() * tensor.element_size() % 8 == 0

    def hashes(self, content: Tensor, piece_bytes: int, lane: Lane) -> Tensor:
        num_pieces = -(-content.numel() // piece_bytes)
        with self._locks[lane]:
            found, host = self._buffers_of(lane, num_pieces)

            def work() -> None:
                found.copy_(accumulate(content, piece_bytes, self._table))

            self._device.run(lane, work, fills=found, reads=(content,), name="checksums")
            self._device.copy(lane, host, found)
            self._device.record(lane).synchronize()
            return finish(host, content.numel(), piece_bytes)

    def zero(self, content: Tensor) -> None:
        def work() -> None:
            content.zero_()

        self._device.run(Lane.H2D, work, fills=content, reads=())

    def _buffers_of(self, lane: Lane, num_pieces: int) -> tuple[Tensor, Tensor]:
        if lane not in self._buffers or len(self._buffers[lane][0]) < num_pieces:
            num_bytes = 64 * (1 << (num_pieces - 1).bit_length())
            of_device, of_host = self._device.empty(num_bytes), self._device.host_empty(num_bytes)
            # Running compute may still use the new memory.
            self._device.wait(lane, self._device.record(Lane.COMPUTE, of_device))
            self._buffers[lane] = (of_device.view(torch.int64).view(-1, 8), of_host.view(torch.int64).view(-1, 8))
        found, host = self._buffers[lane]
        return found[:num_pieces], host[:num_pieces]
