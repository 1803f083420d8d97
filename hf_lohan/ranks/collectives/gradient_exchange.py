"""Averages each chunk's gradient over all ranks, for the rank that owns the chunk.

A rank publishes a chunk's gradient as soon as it is complete, in any order. On each node, the rank with the owner's
local rank is the chunk's *collector*. The ranks of a node tell the collector the offset of their gradient in shared
memory. A collector of another node sums these gradients, and sends the sum when the owner asks for it (`node_sums`), so
no rank needs memory for sums that arrive early. At the end of the backward, each rank announces the chunks for which it
has no gradient.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hf_lohan.ranks.collectives.block_codec import GRADIENTS_WITHIN, BlockCodec
from hf_lohan.ranks.collectives.coded_lane import MeasuredCodec
from hf_lohan.ranks.collectives.node_sums import DTYPES, ChunkName, NodeSums, TableRows
from hf_lohan.ranks.collectives.rank_order_sum import (
    CodedValues,
    DeviceSums,
    Gradient,
    NodeSum,
    ValuesOnDevice,
    numel_of,
    sum_gradients_,
)
from hf_lohan.ranks.transport.device_transport import GRADIENTS_OF_DEVICES
from hf_lohan.ranks.transport.failures import RankFailedError, RanksDisagreeError
from hf_lohan.ranks.transport.links import Links
from hf_lohan.ranks.transport.messages import Kind, PayloadReader
from hf_lohan.ranks.transport.shared_region import SharedRegion

logger = logging.getLogger(__name__)

_CODECS = tuple(GRADIENTS_WITHIN.values())
"""A published gradient has one of `DTYPES`, or is coded by one of these. A message has the index in the two lists
joined."""
_ON_DEVICE = -1
"""The offset of a gradient in memory of a device."""
_SMALL_BITS = 62
"""Number of slice bits that fit a number of a message."""


@dataclass(frozen=True)
class GradientPart:
    """One rank's gradient of a chunk."""

    rank: int
    values: Gradient | ValuesOnDevice | None
    """Gradient [numel], in memory that this rank or its device can read; None without a gradient."""
    slice_bits: int
    """Bit mask of the parameters that have a gradient. `values` are zero for all others."""


@dataclass(eq=False)
class _ChunkParts:
    """The arrived gradients of one chunk."""

    parts: dict[int, GradientPart] = field(default_factory=dict)
    """Gradients by rank of this node."""
    nodes: dict[int, tuple[int, int]] = field(default_factory=dict)
    """At the owner, the number of elements (0 without a gradient) and the slice bits, by node."""
    is_announced: bool = False
    """At the owner, whether `on_complete` was called. On other ranks, whether the owner knows that this node is
    complete."""

    def in_rank_order(self) -> list[GradientPart]:
        return [self.parts[rank] for rank in sorted(self.parts)]


class CompleteGradient:
    """A chunk's gradient that all ranks have published. It must be released, even if it was not summed."""

    def __init__(
        self,
        exchange: GradientExchange,
        step: int,
        key: int,
        parts: list[GradientPart],
        nodes: dict[int, tuple[int, int]],
    ) -> None:
        self._exchange = exchange
        self._nodes = [node for node, (numel, _) in sorted(nodes.items()) if numel]
        self.step = step
        self.key = key
        self.parts = parts
        """The gradients of this node's ranks, in rank order."""
        self.is_summed = any(isinstance(part.values, ValuesOnDevice) for part in parts)
        """Whether devices have written the sum of this node to the memory that `place` of the exchange returned."""
        self.numel = max(numel for numel, _ in nodes.values())
        """Elements of the gradient; 0 if no rank has one."""
        self.slice_bits = 0
        """Bit mask of the parameters that have a gradient on any rank."""
        for _, bits in nodes.values():
            self.slice_bits |= bits

    def sum_into(self, out: Tensor) -> Tensor:
        """Write the average over all ranks to `out`, float32 [numel]. Each part is multiplied by float32(1 / number of
        ranks). Parts are summed in rank order in each node, and these sums in the order of nodes. `out` may share
        memory with one part as `sum_gradients_` allows. From the third node on, this part is copied first. If
        `is_summed`, `out` has the sum of this node. This waits for other nodes, so do not call it on a receiving
        thread."""
        exchange = self._exchange
        values = None if self.is_summed else _values_of(self.parts)
        if self._nodes == [exchange.ranks.node]:
            return out if values is None else sum_gradients_(out, values, exchange.ranks.num_ranks)
        exchange.sums.sum_nodes((self.step, self.key), out, values, self._nodes)
        self._nodes = []  # other nodes released their gradients after sending the sum
        return out

    def release(self) -> None:
        """Return the buffers to their ranks."""
        self._exchange._release(self.step, self.key, self.parts, self._nodes)


class GradientExchange:
    """One rank's side of the exchange. One thread calls `publish`, `end_backward` and `abandon`."""

    def __init__(
        self,
        links: Links,
        owners: Mapping[int, int],
        region: SharedRegion | None,
        *,
        completed: Callable[[CompleteGradient], object],
        release: Callable[[object], object],
        abandoned: Callable[[int, int], object] = lambda step, rank: None,
        coded: MeasuredCodec | None = None,
        rows: Mapping[int, TableRows] | None = None,
        sums: DeviceSums | None = None,
        place: Callable[[int, int], Tensor | None] = lambda step, key: None,
        gaps_of: Callable[[int], Sequence[tuple[int, int]]] = lambda key: (),
    ) -> None:
        """`owners`: the owner of each chunk by its key, equal on all ranks. `region`: shared memory with all gradients
        that another rank of this node sums. The callbacks run on any thread and must not wait. `completed` gets a chunk
        of this rank that all ranks have published. `release` gets a published buffer that may be used again.
        `abandoned` gets a step and the rank that abandoned it. `coded`: the codec of sums between nodes. ``rows``:
        see `NodeSums`. ``sums``: adds gradients in memory of devices. ``place`` and ``gaps_of``: see
        `DeviceSums.start`."""
        self.ranks = links.ranks
        self._links = links
        self._owners = dict(owners)
        ranks = links.ranks
        self._collectors = {key: ranks.rank_at(ranks.node, owner % ranks.num_local) for key, owner in owners.items()}
        self._own = {key for key, owner in owners.items() if owner == ranks.rank}
        self._region = region
        self._completed = completed
        self._release_buffer = release
        self._abandoned = abandoned
        self._step = 0
        self._published: set[int] = set()
        """Keys that were published in this step."""
        self._buffers: dict[ChunkName, object] = {}
        """Published buffers that are not released."""
        self._chunks: dict[ChunkName, _ChunkParts] = defaultdict(_ChunkParts)
        self._abandoned_steps: set[int] = set()
        self._complete: dict[int, set[int]] = defaultdict(set)
        """By step, the keys of this rank's complete chunks."""
        self.sums = NodeSums(links, self._on_sum_sent, coded, rows)
        self._on_device: dict[ChunkName, Gradient] = {}
        """This rank's gradients in memory of its device, whose buffers are not released."""
        self._awaited_sums: set[ChunkName] = set()
        """Sums of this rank's chunks that devices have not added yet, of steps that no rank has dropped."""
        self._pulled_sum: ChunkName | None = None
        """The sum that devices add for the owner on another node, which has asked for it."""
        self._device_sums = sums
        if sums is not None:
            sums.start(
                self._local_owner_of,
                self._values_on_device,
                self._parts_on_devices,
                place,
                self._on_added,
                needs_sum=lambda: bool(self._awaited_sums) or self._pulled_sum is not None,
                is_owner=self._own.__contains__,
                gaps_of=gaps_of,
            )
        links.set_handler(Kind.CHUNK, self._on_chunk)
        links.set_handler(Kind.NO_GRADIENT, self._on_no_gradient)
        links.set_handler(Kind.BACKWARD_ABANDONED, lambda peer, numbers, payload: self._drop_step(numbers[0], peer))
        links.set_handler(Kind.RELEASE, self._on_release)
        links.set_handler(Kind.NODE_READY, self._on_node_ready)
        links.set_handler(Kind.PULL, self._on_pull)

    @property
    def step(self) -> int:
        """Number of backwards that have ended or were abandoned. It is equal on all ranks at the same point."""
        return self._step

    def publish(
        self,
        key: int,
        gradient: Tensor,
        slice_bits: int,
        buffer: object,
        codec: BlockCodec | None = None,
        *,
        is_on_device: bool = False,
    ) -> None:
        """Give a chunk's complete gradient to its collector. The gradient is contiguous, on the host, and zero for
        parameters that `slice_bits` excludes. It must not change until `release` is called with `buffer`. With `codec`,
        one of `GRADIENTS_WITHIN`, it is coded in its memory (`CodedValues.in_place_of`). With ``is_on_device``, it is
        memory of the device, which the host knows to be filled. It is so on all ranks or on none."""
        flat = gradient.view(-1)
        with self._links.lock:
            step = self._step
            assert key not in self._published, f"chunk {key} was already published in this step"
            self._published.add(key)
            is_dropped = step in self._abandoned_steps
            if not is_dropped:
                self._buffers[step, key] = buffer
                if is_on_device:
                    self._on_device[step, key] = _as_coded(flat, codec)
        if is_dropped:
            self._release_buffer(buffer)
            return
        collector = self._collectors[key]
        if collector == self.ranks.rank:
            values = ValuesOnDevice(flat.numel(), flat.dtype, codec) if is_on_device else _as_coded(flat, codec)
            self._record_part(step, key, GradientPart(collector, values, slice_bits))
            return
        offset = self._region.offset_of(flat) if self._region is not None and not is_on_device else None
        if is_on_device:
            offset = _ON_DEVICE
        if offset is None:
            raise ValueError(
                f"the gradient of chunk {key} is not in the memory that the ranks of this node share, so rank "
                f"{collector} cannot read it; take its buffer from this memory"
            )
        small, large = _pack_bits(slice_bits)
        form = DTYPES.index(flat.dtype) if codec is None else len(DTYPES) + _CODECS.index(codec)
        numbers = (step, key, offset, flat.numel(), form, *small)
        self._links.send(collector, Kind.CHUNK, *numbers, payload=large)

    def end_backward(self) -> int:
        """Tell the collectors of unpublished chunks that this rank has no gradient. This does not wait, so other ranks
        soon get their buffers back. Returns the step, for `wait_until_complete`. Later calls of `publish` belong to the
        next step."""
        with self._links.lock:
            without = self._owners.keys() - self._published
        step = self._next_step()
        self._send_no_gradient(step, without)
        return step

    def exclude(self, keys: Collection[int]) -> None:
        """Tell the collectors already now that this rank will have no gradient of these chunks in the step, so that
        other ranks soon get their buffers back. None of them was published."""
        with self._links.lock:
            assert self._published.isdisjoint(keys), "an excluded chunk was published"
            self._published.update(keys)
        self._send_no_gradient(self._step, keys)

    def _send_no_gradient(self, step: int, without: Collection[int]) -> None:
        for collector in {self._collectors[key] for key in without}:
            keys = sorted(key for key in without if self._collectors[key] == collector)
            if collector != self.ranks.rank:
                payload = torch.tensor(keys, dtype=torch.int64).numpy().tobytes()
                self._links.send(collector, Kind.NO_GRADIENT, step, payload=payload)
                continue
            for key in keys:
                self._record_part(step, key, GradientPart(collector, None, 0))

    def wait_until_complete(self, step: int, *, before: str = "") -> bool:
        """Wait until `completed` has been called for all chunks of this rank in a step. Returns False if the step was
        abandoned. For `before` and the errors see `Links.wait_for`."""

        def is_over() -> bool:
            return step in self._abandoned_steps or self._complete[step] == self._own

        def missing() -> set[int]:
            return self._missing(step)

        self._links.wait_for(is_over, f"the gradients of backward {step}", peers=missing, before=before)
        with self._links.lock:
            for ended in [ended for ended in self._complete if ended <= step]:
                del self._complete[ended]
            return step not in self._abandoned_steps

    def _missing(self, step: int) -> set[int]:
        """Return the ranks of this node and the collectors of other nodes for which the step waits."""
        return set[int]().union(*(self._missing_for((step, key)) for key in self._own - self._complete[step]))

    def _missing_for(self, name: ChunkName) -> set[int]:
        """Return the ranks for which a chunk of this rank waits."""
        ranks, chunk = self.ranks, self._chunks.get(name, _ChunkParts())
        missing = {rank for rank in ranks.on_this_node if rank not in chunk.parts}
        if chunk.is_announced and self._device_sums is not None:
            missing.update(self._device_sums.transport.choosing_rank())
        missing.update(
            ranks.rank_at(node, ranks.local_rank) for node in range(ranks.num_nodes) if node not in chunk.nodes
        )
        return missing - {ranks.rank}

    def holders(self) -> set[int]:
        """Return the ranks for which the buffers wait that this rank has published. Gradients on devices also wait for
        the rank that orders their sums."""
        with self._links.lock:
            holders = set[int]()
            for step, key in self._buffers:
                own = key in self._own
                holders.update(self._missing_for((step, key)) if own else {self._owners[key], self._collectors[key]})
            if self._on_device and self._device_sums is not None:
                holders.update(self._device_sums.transport.choosing_rank())
        return holders - {self.ranks.rank}

    def abandon(self) -> None:
        """Abandon a backward that ended with an error. All ranks drop the chunks that some rank has not published, and
        get their buffers back by `release`. If a rank has failed, buffers come back immediately, because no rank
        continues. Later calls of `publish` belong to the next step."""
        step = self._next_step()
        with suppress(RankFailedError):
            self._links.send_all(Kind.BACKWARD_ABANDONED, step)
            self._drop_step(step, self.ranks.rank)
            return
        with self._links.lock:
            buffers, self._buffers = list(self._buffers.values()), {}
            self._on_device.clear()
            self._chunks.clear()
        for buffer in buffers:
            self._release_buffer(buffer)

    def close(self) -> None:
        for kind in (Kind.CHUNK, Kind.NO_GRADIENT, Kind.BACKWARD_ABANDONED, Kind.RELEASE, Kind.NODE_READY, Kind.PULL):
            self._links.remove_handler(kind)
        self.sums.close()

    # Messages from the ranks of this node.

    def _on_chunk(self, peer: int, numbers: tuple[int, ...], payload: PayloadReader | None) -> None:
        step, key, offset, numel, form, *bits = numbers
        dtype, codec = (DTYPES[form], None) if form < len(DTYPES) else (torch.float32, _CODECS[form - len(DTYPES)])
        values: Gradient | ValuesOnDevice = ValuesOnDevice(numel, dtype, codec)
        if offset != _ON_DEVICE:
            assert self._region is not None
            memory = self._region.bytes[offset : offset + numel * dtype.itemsize].view(dtype)
            values = _as_coded(memory, codec)
        self._record_part(step, key, GradientPart(peer, values, _unpack_bits(bits, payload)))

    def _on_no_gradient(self, peer: int, numbers: tuple[int, ...], payload: PayloadReader | None) -> None:
        assert payload is not None
        for key in torch.frombuffer(bytearray(payload.bytes()), dtype=torch.int64).tolist():
            self._record_part(numbers[0], key, GradientPart(peer, None, 0))

    def _record_part(self, step: int, key: int, part: GradientPart) -> None:
        """Record the gradient of a chunk from one rank of this node."""
        ranks = self.ranks
        with self._links.lock:
            is_dropped = step in self._abandoned_steps
            if not is_dropped:
                chunk = self._chunks[step, key]
                chunk.parts[part.rank] = part
                self._refuse_unequal(key, chunk)
                if len(chunk.parts) < ranks.num_local:
                    return
                numel = max(0 if part.values is None else numel_of(part.values) for part in chunk.parts.values())
                bits = 0
                for of_rank in chunk.parts.values():
                    bits |= of_rank.slice_bits
                chunk.is_announced = self._owners[key] != ranks.rank
                if chunk.is_announced and numel == 0:
                    del self._chunks[step, key]
        if is_dropped:
            self._give_back(step, key, [part])
        elif self._owners[key] == ranks.rank:
            self._note_sum_of_node(step, key, ranks.node, numel, bits)
        else:
            small, large = _pack_bits(bits)
            self._links.send(self._owners[key], Kind.NODE_READY, step, key, numel, *small, payload=large)

    def _refuse_unequal(self, key: int, chunk: _ChunkParts) -> None:
        with_values = [part for part in chunk.parts.values() if part.values is not None]
        for part in with_values[1:]:
            ours, theirs = with_values[0].values, part.values
            assert ours is not None
            assert theirs is not None
            if isinstance(ours, ValuesOnDevice) != isinstance(theirs, ValuesOnDevice):
                raise RanksDisagreeError(
                    f"of the gradients of chunk {key}, one of rank {with_values[0].rank} and rank {part.rank} is on "
                    "the device and the other in RAM; call the same number of backwards on all ranks, or set "
                    "transport to host"
                )
            if (numel_of(ours), _dtype_of(ours)) != (numel_of(theirs), _dtype_of(theirs)):
                raise RanksDisagreeError(
                    f"rank {with_values[0].rank} has {numel_of(ours)} elements of {_dtype_of(ours)} in chunk {key}, "
                    f"and rank {part.rank} has {numel_of(theirs)} of {_dtype_of(theirs)}; load the same model on all "
                    "ranks"
                )

    # Messages from other nodes.

    def _on_node_ready(self, peer: int, numbers: tuple[int, ...], payload: PayloadReader | None) -> None:
        step, key, numel, *bits = numbers
        self._note_sum_of_node(step, key, self.ranks.of_rank(peer).node, numel, _unpack_bits(bits, payload))

    def _note_sum_of_node(self, step: int, key: int, node: int, numel: int, bits: int) -> None:
        """Record, at the owner, that a node is complete."""
        with self._links.lock:
            is_dropped = step in self._abandoned_steps
            if not is_dropped:
                chunk = self._chunks[step, key]
                chunk.nodes[node] = (numel, bits)
                if len(chunk.nodes) < self.ranks.num_nodes:
                    return
                chunk.is_announced = True
                is_on_device = any(isinstance(part.values, ValuesOnDevice) for part in chunk.parts.values())
                if is_on_device:
                    self._awaited_sums.add((step, key))
        if is_dropped:
            self._release(step, key, [], [node] if numel else [])
        elif is_on_device:
            assert self._device_sums is not None
            self._device_sums.order(step, key)
        else:
            self._complete_chunk(step, key, chunk)

    def _complete_chunk(self, step: int, key: int, chunk: _ChunkParts) -> None:
        self._completed(CompleteGradient(self, step, key, chunk.in_rank_order(), chunk.nodes))
        with self._links.lock:
            self._complete[step].add(key)
            self._links.notify()

    # Gradients that devices add.

    def _local_owner_of(self, key: int) -> int:
        return self._owners[key] % self.ranks.num_local

    def _values_on_device(self, step: int, key: int) -> Gradient:
        return self._on_device[step, key]

    def _parts_on_devices(self, step: int, key: int) -> list[tuple[int, ValuesOnDevice]]:
        """Return the gradients of a chunk that this rank collects, by local rank, in their order."""
        return [
            (self.ranks.of_rank(part.rank).local_rank, part.values)
            for part in self._chunks[step, key].in_rank_order()
            if isinstance(part.values, ValuesOnDevice)
        ]

    def _on_added(self, step: int, key: int) -> None:
        with self._links.lock:
            self._awaited_sums.discard((step, key))
            if self._pulled_sum == (step, key):
                self._pulled_sum = None
                self._links.notify()
        if key in self._own:
            self._complete_chunk(step, key, self._chunks[step, key])

    def _on_pull(self, peer: int, numbers: tuple[int, ...], payload: PayloadReader | None) -> None:
        """Send this node's sum to the owner, which asks for it."""
        step, key = numbers
        values = _values_of(parts := self._chunks[step, key].in_rank_order())
        num_on_device = sum(isinstance(part.values, ValuesOnDevice) for part in parts)
        if num_on_device:
            self.sums.send((step, key), lambda: [self._added_on_device(step, key)], peer, num_on_device)
        else:
            self.sums.send((step, key), lambda: values, peer, len(values))

    def _added_on_device(self, step: int, key: int) -> NodeSum:
        """Have devices add the gradients of a chunk for another node, and wait for it. Their memory holds one such sum,
        so it is called when the sum before is sent. Until then gradients wait in their buffers, as in RAM."""
        assert self._device_sums is not None
        sums, transport = self._device_sums, self._device_sums.transport
        with self._links.lock:
            self._pulled_sum = step, key
        sums.order(step, key)

        def is_over() -> bool:
            return self._pulled_sum is None or transport.has_ended

        self._links.wait_for(is_over, GRADIENTS_OF_DEVICES, peers=transport.choosing_rank)
        if self._pulled_sum is not None:
            transport.raise_error(GRADIENTS_OF_DEVICES)
        return sums.sum_for_other_node(step, key)

    def _on_sum_sent(self, name: tuple[int, int]) -> None:
        with self._links.lock:
            chunk = self._chunks.pop(name)
        self._give_back(*name, chunk.in_rank_order())

    # Returned buffers.

    def _release(self, step: int, key: int, parts: list[GradientPart], nodes: list[int]) -> None:
        """Release a chunk at the owner. `nodes` still hold their gradients of the chunk."""
        with self._links.lock:
            self._chunks.pop((step, key), None)
        self._give_back(step, key, parts)
        for node in nodes:
            if node != self.ranks.node:
                self._links.send(self.ranks.rank_at(node, self.ranks.local_rank), Kind.RELEASE, step, key)

    def _give_back(self, step: int, key: int, parts: list[GradientPart]) -> None:
        for part in parts:
            if part.values is None:
                continue
            if part.rank == self.ranks.rank:
                self._give_back_own(step, key)
            else:
                with suppress(RankFailedError):  # after a failure no rank continues
                    self._links.send(part.rank, Kind.RELEASE, step, key)

    def _give_back_own(self, step: int, key: int) -> None:
        with self._links.lock:
            if (step, key) not in self._buffers:  # after a failure `abandon` has released all buffers
                return
            buffer = self._buffers.pop((step, key))
            self._on_device.pop((step, key), None)
        self._release_buffer(buffer)

    def _on_release(self, peer: int, numbers: tuple[int, ...], payload: PayloadReader | None) -> None:
        step, key = numbers
        if peer in self.ranks.on_this_node:
            self._give_back_own(step, key)
        else:  # the owner does not need this node's sum
            self._on_sum_sent((step, key))

    # Ends of steps.

    def _next_step(self) -> int:
        """Begin the next step. Returns the step that ends."""
        with self._links.lock:
            self._step, self._published = self._step + 1, set()
            return self._step - 1

    def _drop_step(self, step: int, rank: int) -> None:
        with self._links.lock:
            if step in self._abandoned_steps:
                return
            self._abandoned_steps.add(step)
            dropped = {
                name: chunk for name, chunk in self._chunks.items() if name[0] == step and not chunk.is_announced
            }
            for name in dropped:
                del self._chunks[name]
            self._awaited_sums = {name for name in self._awaited_sums if name[0] != step}
            self._links.notify()
        for (_, key), chunk in dropped.items():
            self._release(step, key, chunk.in_rank_order(), [node for node, (numel, _) in chunk.nodes.items() if numel])
        if rank != self.ranks.rank:
            logger.info("rank %d abandoned backward %d", rank, step)
            self._abandoned(step, rank)


def _as_coded(values: Tensor, codec: BlockCodec | None) -> Gradient:
    return values if codec is None else CodedValues.in_place_of(values, codec)


def _values_of(parts: list[GradientPart]) -> list[Gradient]:
    """Return the gradients that the host can read."""
    return [part.values for part in parts if isinstance(part.values, Tensor | CodedValues)]


def _dtype_of(gradient: Gradient | ValuesOnDevice) -> torch.dtype:
    return torch.float32 if isinstance(gradient, CodedValues) else gradient.dtype


def _pack_bits(bits: int) -> tuple[tuple[int, ...], bytes]:
    """Pack a few bits as a number of a message, and more as its payload."""
    if bits < 1 << _SMALL_BITS:
        return (bits,), b""
    return (), bits.to_bytes(-(-bits.bit_length() // 8), "little")


def _unpack_bits(numbers: list[int], payload: PayloadReader | None) -> int:
    return int.from_bytes(payload.bytes(), "little") if payload is not None else numbers[0]
