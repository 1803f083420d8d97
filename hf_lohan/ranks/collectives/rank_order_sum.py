"""Averages the gradients of several ranks in a fixed order, so that the bits do not depend on the order of arrival.

Gradients may be coded. They are then decoded, scaled and added in one operation for each tile. With NCCL, devices send
gradients to the device of their chunk's owner, which adds them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from hf_lohan.costs.pool_plan import LINK_TILE_NUMEL
from hf_lohan.device import Device, Lane
from hf_lohan.ranks.collectives.block_codec import BlockCodec
from hf_lohan.ranks.collectives.block_operators import dequantize_, dequantize_sum_
from hf_lohan.ranks.transport.device_lane import DeviceLane
from hf_lohan.ranks.transport.topology import Ranks

SUM_TILE_NUMEL = 64 * 1024
"""Number of elements that are added at once. They stay in a core's cache."""
SUM_PIECE_NUMEL = 256 * 1024
"""Number of elements of a node's sum in one message."""


@dataclass(frozen=True, eq=False)
class CodedValues:
    """Codes and scales of ``num_values`` values, from the beginning of a block on."""

    codec: BlockCodec
    codes: Tensor
    scales: Tensor
    num_values: int

    @classmethod
    def in_place_of(cls, values: Tensor, codec: BlockCodec) -> CodedValues:
        """Return coded values in the memory of float32 ``values``, where codes are at the end and scales at the
        beginning. If values are decoded there in order, they overwrite no code of later values."""
        numel, memory = values.numel(), values.view(torch.uint8)
        codes = memory[memory.numel() - codec.codes_bytes(numel) :].view(torch.int8)
        scales = memory[: codec.scales_bytes(numel)].view(codec.scale_dtype)
        return cls(codec, codes, scales, numel)

    def part(self, start: int, stop: int) -> CodedValues:
        """Return the values [start, stop). ``start`` begins a block."""
        codec = self.codec
        first, scale = codec.codes_bytes(start), start // codec.block_numel
        stop = min(stop, self.num_values)
        codes = self.codes[first : first + codec.codes_bytes(stop - start)]
        num_scales = codec.scales_bytes(stop - start) // codec.scale_dtype.itemsize
        return CodedValues(codec, codes, self.scales[scale : scale + num_scales], stop - start)

    def clone(self) -> CodedValues:
        return CodedValues(self.codec, self.codes.clone(), self.scales.clone(), self.num_values)

    def with_own_scales(self) -> CodedValues:
        """Return these values with a copy of their scales, because decoding in place overwrites the scales first."""
        return CodedValues(self.codec, self.codes, self.scales.clone(), self.num_values)

    def zero_(self) -> None:
        """Make all values zero."""
        self.codes.fill_(0 if self.codec.num_bits == 8 else 8)
        self.scales.fill_(1)

    def decoded(self) -> Tensor:
        """Return the values in new memory, float32."""
        values = torch.empty(self.num_values, dtype=torch.float32)
        codec = self.codec
        dequantize_(self.codes, self.scales, codec.num_bits, codec.block_numel, values)
        return values


@dataclass(frozen=True)
class ValuesOnDevice:
    """Values in memory of a rank's device."""

    num_values: int
    dtype: torch.dtype
    codec: BlockCodec | None = None


Gradient: TypeAlias = Tensor | CodedValues


@dataclass(frozen=True, eq=False)
class NodeSum:
    """A node's sum in memory of its device. The host gets it in pieces."""

    device: Device
    values: Tensor
    dtype: torch.dtype
    piece: Tensor
    """Host memory for `SUM_PIECE_NUMEL` elements, float32."""

    @property
    def num_values(self) -> int:
        return self.values.numel()

    def part(self, start: int, stop: int) -> Tensor:
        """Return the values [start, stop) in new memory. Waits for their copy."""
        values = self.values[start:stop]
        piece = self.piece[: values.numel()]
        self.device.copy(Lane.D2H_ASIDE, piece, values)
        self.device.record(Lane.D2H_ASIDE).synchronize()
        return piece.to(self.dtype, copy=True)


def numel_of(gradient: Gradient | NodeSum | ValuesOnDevice) -> int:
    return gradient.numel() if isinstance(gradient, Tensor) else gradient.num_values


def part_of_gradient(gradient: Gradient | NodeSum, start: int, stop: int) -> Gradient:
    return gradient[start:stop] if isinstance(gradient, Tensor) else gradient.part(start, stop)


def sum_gradients_(out: Tensor, parts: Sequence[Gradient], num_ranks: int) -> Tensor:
    """Same as `sum_in_rank_order_`, but parts may be coded. One part may be coded in the memory of ``out``."""
    exact = [part for part in parts if isinstance(part, Tensor)]
    if len(exact) == len(parts):
        return sum_in_rank_order_(out, exact, num_ranks)
    parts = [part.with_own_scales() if isinstance(part, CodedValues) else part for part in parts]
    for start in range(0, out.numel(), SUM_TILE_NUMEL):
        goal = out[start : start + SUM_TILE_NUMEL]
        tiles = [part_of_gradient(part, start, start + goal.numel()) for part in parts]
        coded = [tile.clone() for tile in tiles if isinstance(tile, CodedValues)]
        if exact:  # a rank has added gradients of several backwards
            decoded = (tile.decoded() if isinstance(tile, CodedValues) else tile for tile in tiles)
            sum_in_rank_order_(total := torch.empty_like(goal), list(decoded), num_ranks)
            goal.copy_(total)
            continue
        _decode_and_add(goal, coded, num_ranks)
    return out


def sum_in_rank_order_(out: Tensor, parts: Sequence[Tensor], num_ranks: int, scratch: Tensor | None = None) -> Tensor:
    """Set `out` to the float32 sum of `parts` in their order. Each part is first multiplied by float32(1 / num_ranks).
    DDP computes the same with float32 gradients that are reduced in rank order. `out` is float32 [numel]. `parts` are
    [numel], float32 or a smaller type. One part may share memory with `out` if it begins where `out` begins or, with a
    smaller type, ends where `out` ends. ``scratch``: float32 memory of the same device, by default new memory. Raises
    ValueError if a part would be overwritten before it is read."""
    if not parts:
        raise ValueError("got no gradients to sum; pass at least one")
    overlaps = False
    for part in parts:
        if part.shape != out.shape:
            raise ValueError(f"a gradient of shape {list(part.shape)} cannot be added to {list(out.shape)} elements")
        if overlap(out, part):
            _refuse_overwriting(out, part)
            overlaps = True
    scale = 1.0 / num_ranks
    numel = out.numel()
    widened = torch.empty(min(SUM_TILE_NUMEL, numel), dtype=torch.float32) if scratch is None else scratch
    total = torch.empty_like(widened) if overlaps else None
    for start in range(0, numel, widened.numel()):
        stop = min(start + widened.numel(), numel)
        goal = out[start:stop]
        tile = goal if total is None else total[: stop - start]
        tile.copy_(parts[0][start:stop]).mul_(scale)
        for part in parts[1:]:
            # Multiply and add in two operations, because a fused operation rounds once and DDP rounds twice.
            tile.add_(widened[: stop - start].copy_(part[start:stop]).mul_(scale))
        if tile is not goal:
            goal.copy_(tile)
    return out


def overlap(one: Tensor, other: Tensor) -> bool:
    """Return whether two contiguous tensors share memory."""
    return one.data_ptr() < other.data_ptr() + other.nbytes and other.data_ptr() < one.data_ptr() + one.nbytes


def _decode_and_add(out: Tensor, tiles: Sequence[CodedValues], num_ranks: int) -> None:
    """Decode coded values and write their average to ``out``. They are added in rank order."""
    codec = tiles[0].codec
    dequantize_sum_(
        [tile.codes for tile in tiles],
        [tile.scales for tile in tiles],
        codec.num_bits,
        codec.block_numel,
        1.0 / num_ranks,
        out,
    )


def _refuse_overwriting(out: Tensor, part: Tensor) -> None:
    """Raise ValueError if writing a tile of `out` overwrites later elements of `part`."""
    # Element i of `out` ends at byte 4 (i + 1). Later elements of `part` may not begin before this byte.
    offset = part.data_ptr() - out.data_ptr()
    if offset < (out.itemsize - part.itemsize) * out.numel():
        raise ValueError(
            f"a gradient begins {offset} bytes after the memory for the sum and would be overwritten before it is "
            "read; sum into other memory, or let the gradient end where that memory ends"
        )


class DeviceSums:
    """Adds the gradients of a node's ranks on the device of each chunk's collector, in rank order. If this collector
    owns the chunk, it copies the sum to host memory. If not, it keeps the sum for the owner on another node. One thread
    of each rank uses it."""

    def __init__(self, device: Device, lane: DeviceLane, ranks: Ranks, buffer_bytes: int) -> None:
        """``buffer_bytes``: bytes of the largest chunk's gradient in float32."""
        self._device = device
        self._lane = lane
        self._ranks = ranks
        numel = buffer_bytes // torch.float32.itemsize
        self._received = [device.empty(buffer_bytes) for _ in range(ranks.num_local - 1)]
        self._total = device.empty(buffer_bytes).view(torch.float32)
        self._piece = self._total[:0]
        """Host memory for a piece of a sum that a rank of another node owns."""
        if ranks.num_nodes > 1:
            self._piece = device.host_empty(SUM_PIECE_NUMEL * torch.float32.itemsize).view(torch.float32)
        self._scratch = device.empty(min(numel, LINK_TILE_NUMEL) * torch.float32.itemsize).view(torch.float32)

    def add(
        self,
        sends: Sequence[tuple[int, Gradient]],
        parts: Sequence[tuple[int, Gradient | ValuesOnDevice]],
        *,
        is_owner: bool,
        place: Tensor | None,
        gaps: Sequence[tuple[int, int]],
    ) -> NodeSum | None:
        """Send this rank's gradients of chunks that other ranks collect, and add all gradients of the chunk that this
        rank collects. All ranks of the node call this. ``sends``: the gradients by local rank of their collector.
        ``parts``: the gradients by local rank, in their order. This rank's own gradients are complete in memory of its
        device. ``place``: host memory for the sum if this rank owns the chunk; None if it is unwanted. ``gaps``: the
        ranges of the chunk that are zero, and that no rank sends. If a rank of another node owns the chunk, returns the
        sum, which is valid until the next call. In this case the gradient of a single rank is not scaled."""
        receives: list[tuple[int, Gradient]] = []
        values = [self._room_for(part, member, receives) for member, part in parts]
        total = self._total[: numel_of(values[0]) if values else 0]
        is_single = len(values) == 1 and not is_owner

        def work() -> None:
            self._lane.exchange(_as_bytes(sends), _as_bytes(receives))
            if values:
                add_on_device(total, values, 1 if is_single else self._ranks.num_ranks, self._scratch)
            for start, stop in gaps if values else ():
                total[start:stop].zero_()

        def enqueue() -> None:
            reads = [memory for part in (*(part for _, part in sends), *values) for memory in memory_of(part)]
            self._device.run(Lane.D2H_ASIDE, work, fills=total, reads=reads, name="add gradients")
            if place is not None:
                self._device.copy(Lane.D2H_ASIDE, place, total)
            self._device.record(Lane.D2H_ASIDE).synchronize()

        self._lane.run("gradients that devices add", enqueue)
        if is_owner or not values:
            return None
        self._device.enter_thread()
        dtype = values[0].dtype if is_single and isinstance(values[0], Tensor) else torch.float32
        return NodeSum(self._device, total, dtype, self._piece)

    def close(self) -> None:
        """End an addition in progress with an error, and add no more."""
        self._lane.close()

    def _room_for(self, part: Gradient | ValuesOnDevice, member: int, receives: list[tuple[int, Gradient]]) -> Gradient:
        """Return a gradient of this rank, or memory for another rank's gradient, which is noted in ``receives``."""
        if not isinstance(part, ValuesOnDevice):
            return part
        memory = self._received[len(receives)][: part.num_values * part.dtype.itemsize].view(part.dtype)
        values = memory if part.codec is None else CodedValues.in_place_of(memory, part.codec)
        receives.append((member, values))
        return values


def memory_of(gradient: Gradient) -> list[Tensor]:
    """Return the memory of a gradient, as bytes."""
    memory = [gradient] if isinstance(gradient, Tensor) else [gradient.codes, gradient.scales]
    return [values.view(torch.uint8) for values in memory]


def _as_bytes(gradients: Sequence[tuple[int, Gradient]]) -> list[tuple[int, Tensor]]:
    return [(member, memory) for member, values in gradients for memory in memory_of(values)]


def add_on_device(out: Tensor, parts: Sequence[Gradient], num_ranks: int, scratch: Tensor) -> None:
    """Same as `sum_gradients_`, in device memory. All parts are coded or none, and none shares memory with ``out``."""
    exact = [part for part in parts if isinstance(part, Tensor)]
    if exact:
        sum_in_rank_order_(out, exact, num_ranks, scratch)
        return
    for start in range(0, out.numel(), LINK_TILE_NUMEL):
        goal = out[start : start + LINK_TILE_NUMEL]
        tiles = [part.part(start, start + goal.numel()) for part in parts if isinstance(part, CodedValues)]
        _decode_and_add(goal, tiles, num_ranks)
