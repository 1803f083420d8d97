"""Averages each chunk's gradient over all ranks, for the rank that owns the chunk, in rounds.

A rank publishes a chunk's gradient as soon as it is complete, in any order. In a round, all ranks send each other lists
of gradients published since the last round. So all ranks see the same complete chunks, in the same order. On each node,
the rank with the owner's local rank is the chunk's *collector*. The collector adds the gradients of its node (in shared
memory or on devices) in rank order, and the owner adds the sums of nodes in their order. A rank that enters the next
round has read all gradients of the last round. So the buffers of these are free when the next round has ended.

One thread of each rank takes part in rounds and adds. It enters a round when this rank has news or has read gradients
in the last round. It also enters when the rank's computation waits for other ranks, after the rank has sent news of the
step. *No wait is circular.* Within a round all operations have one order, so only its beginning waits for
computation. A chunk waits only for ranks that still compute. These ranks send news of the chunk when they have its
gradient, or at the end of their backward. All other ranks enter the round, because they have news or wait. While the
computation of a rank waits, other threads of the rank serve other ranks, for example by sending weights.
"""

from __future__ import annotations

import json
import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from hf_lohan.ranks.collectives.block_codec import GRADIENTS_WITHIN, BlockCodec
from hf_lohan.ranks.collectives.coded_lane import MeasuredCodec
from hf_lohan.ranks.collectives.node_sums import ChunkOfNodes, NodeSums, PartsOfNode, TableRows
from hf_lohan.ranks.collectives.rank_order_sum import (
    CodedValues,
    DeviceSums,
    Gradient,
    NodeSum,
    ValuesOnDevice,
    sum_gradients_,
)
from hf_lohan.ranks.transport.failures import RankFailedError, RanksDisagreeError
from hf_lohan.ranks.transport.lanes import LaneClosedError
from hf_lohan.ranks.transport.links import Links
from hf_lohan.ranks.transport.shared_region import SharedRegion
from hf_lohan.threads import Owner, raised_anew, start_thread

logger = logging.getLogger(__name__)

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_CODECS = tuple(GRADIENTS_WITHIN.values())
"""Codecs of gradients. Uncoded gradients have a dtype of `_DTYPES`. A form is an index in `_DTYPES + _CODECS`."""
_SHORTEST_REST_S, _LONGEST_REST_S = 0.002, 0.05
"""Seconds that a rank without news pauses after a round without news."""
_CLOSES_WITHIN_S = 2.0
_ChunkName = tuple[int, int]
"""(step, key) of a chunk."""
_News = list[Any]
"""A step, an event, and the event's details. Events are a gradient (see `_ToldPart`), keys without a gradient, and the
end or the abandonment of the backward."""


class _ToldPart(NamedTuple):
    """One rank's message about its gradient of a chunk."""

    place: int | None
    """Offset of the gradient in shared memory, -1 if it is in memory of the rank's device; None without a gradient."""
    numel: int = 0
    form: int = 0
    slice_bits: int = 0
    """Bit mask of the parameters that have a gradient. The values are zero for all others."""

    @property
    def is_on_device(self) -> bool:
        return self.place == _ON_DEVICE

    @property
    def dtype(self) -> torch.dtype:
        return _DTYPES[self.form] if self.codec is None else torch.float32

    @property
    def codec(self) -> BlockCodec | None:
        return _CODECS[self.form - len(_DTYPES)] if self.form >= len(_DTYPES) else None


_ON_DEVICE, _OF_COLLECTOR = -1, -2
_WITHOUT = _ToldPart(None)
_Told = dict[int, _ToldPart]
"""The messages of ranks about one chunk, by rank."""


class MeanPlace(Protocol):
    """Memory for a chunk's average."""

    @property
    def values(self) -> Tensor:
        """float32 [numel]. This may be the memory of this rank's gradient, as `sum_gradients_` allows."""


@dataclass(frozen=True)
class CompleteGradient:
    """A chunk's average over all ranks."""

    step: int
    key: int
    slice_bits: int
    """Bit mask of the parameters that have a gradient on any rank."""
    place: MeanPlace | None
    """Memory with the average; None if no rank has a gradient, or if the average is unwanted."""


@dataclass(frozen=True, eq=False)
class _Published:
    """This rank's gradient of a chunk."""

    values: Gradient
    buffer: object


@dataclass(eq=False)
class _Step:
    """The messages of all ranks about a step. They are equal on all ranks after the same round."""

    chunks: dict[int, _Told] = field(default_factory=lambda: defaultdict(dict))
    """The messages about incomplete chunks, by key."""
    complete: set[int] = field(default_factory=set)
    ended: set[int] = field(default_factory=set)
    """Ranks that publish nothing more."""
    is_abandoned: bool = False


class GradientExchange:
    """One rank's side of the exchange. One thread calls `publish` and `exclude`. Another thread calls the methods that
    end a step. Steps are counted from 0 on, and a number means the same step on all ranks."""

    def __init__(
        self,
        links: Links,
        owners: Mapping[int, int],
        region: SharedRegion | None,
        *,
        completed: Callable[[CompleteGradient], object],
        release: Callable[[object], object],
        place: Callable[[int, int], MeanPlace | None],
        failed: Callable[[BaseException], object] = lambda error: None,
        coded: MeasuredCodec | None = None,
        rows: Mapping[int, TableRows] | None = None,
        sums: DeviceSums | None = None,
        gaps_of: Callable[[int], Sequence[tuple[int, int]]] = lambda key: (),
    ) -> None:
        """All ranks make it together. `owners`: the owner of each chunk by its key, equal on all ranks. `region`:
        shared memory with all gradients that another rank of this node sums. The callbacks run on any thread and must
        not wait. ``place`` gets the step and key of a chunk of this rank, and returns memory for its average, or None
        if it is unwanted. `completed` gets a chunk of this rank that all ranks have published. `release` gets a
        published buffer that may be used again. ``failed`` gets the error that ends the exchange. `coded`: the codec of
        sums between nodes. ``rows``: see `NodeSums`. ``sums``: adds gradients in memory of devices. ``gaps_of``: see
        `DeviceSums.add`."""
        self.ranks = ranks = links.ranks
        self._links = links
        self._owner = Owner()
        self._owners = dict(owners)
        self._collectors = {key: ranks.rank_at(ranks.node, owner % ranks.num_local) for key, owner in owners.items()}
        self._num_own = sum(owner == ranks.rank for owner in owners.values())
        self._region = region
        self._completed, self._release, self._place, self._failed = completed, release, place, failed
        self._device_sums, self._gaps_of = sums, gaps_of
        self._lane = links.open("gradients")
        self._node_sums = NodeSums(links, coded, rows) if ranks.num_nodes > 1 else None
        # Enter the lock itself and not the condition, which an interrupt may stop halfway.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        """Guards the attributes below."""
        self._step = 0
        self._told: set[int] = set()
        """Keys that were published or excluded in this step."""
        self._has_ended = False
        """Whether this rank publishes nothing more in this step."""
        self._num_complete = 0
        """Number of this rank's complete chunks of this step."""
        self._news: list[_News] = []
        self._published: dict[_ChunkName, _Published] = {}
        """Gradients whose buffers are not released."""
        self._abandoned: set[int] = set()
        """Steps that some rank has abandoned."""
        self._open_steps: set[int] = set()
        """Steps that have not ended on all ranks, and of which this rank has published news."""
        self._error: BaseException | None = None
        self._is_closed = False
        self._awaited: list[int] = []
        """The ranks without news of a chunk of which this rank has news."""
        # Only the thread uses the attributes below.
        self._steps: dict[int, _Step] = defaultdict(_Step)
        self._read: list[_ChunkName] = []
        """Chunks that were complete in the last round. All ranks have read them when the next round has ended."""
        links.watch.on_waiting(self._wake)
        self._thread = start_thread(self._run, "lohan-gradient-rounds", beside_kernels=False)

    def waiting(self) -> AbstractContextManager[None]:
        """Return a context in which the computing thread waits for buffers."""
        return self._links.watch.waiting(self._lane.name, needs=lambda: self._awaited)

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
        complete in memory of the device. All ranks have the gradient on their devices, or none has."""
        flat = gradient.view(-1)
        place: int | None = _ON_DEVICE if is_on_device else _OF_COLLECTOR
        if not is_on_device and self._collectors[key] != self.ranks.rank:
            place = self._region.offset_of(flat) if self._region is not None else None
        if place is None:
            raise ValueError(
                f"the gradient of chunk {key} is not in the memory that the ranks of this node share, so rank "
                f"{self._collectors[key]} cannot read it; take its buffer from this memory"
            )
        form = _DTYPES.index(flat.dtype) if codec is None else len(_DTYPES) + _CODECS.index(codec)
        values = flat if codec is None else CodedValues.in_place_of(flat, codec)
        with self._lock:
            assert key not in self._told, f"chunk {key} was already published in this step"
            self._told.add(key)
            is_wanted = self._step not in self._abandoned
            if is_wanted:
                self._published[self._step, key] = _Published(values, buffer)
                self._tell("gradient", key, place, flat.numel(), form, slice_bits)
        if not is_wanted:
            self._release(buffer)

    def has_told(self, key: int) -> bool:
        """Return whether this rank has told others if it has a gradient of a chunk in this step."""
        return self._has_ended or key in self._told

    def exclude(self, keys: Collection[int]) -> None:
        """Tell other ranks before the end of the backward that this rank will have no gradient of these chunks in the
        step, so that other ranks soon get their buffers back. None of the chunks was published."""
        with self._lock:
            if not self._has_ended:
                assert self._told.isdisjoint(keys), "an excluded chunk was published"
                self._told.update(keys)
                self._tell("none", *keys)

    def end_backward(self) -> None:
        """Tell other ranks that this rank has no gradient of unpublished chunks. Other ranks then soon get their
        buffers back. Returns without waiting."""
        self._end("end")

    def abandon(self) -> None:
        """Abandon the step. All ranks drop the chunks that some rank has not published, and get their buffers back by
        `release`. If a rank has failed, buffers are released immediately, because no rank continues. If `end_backward`
        was called before, only this rank drops the step."""
        with self._lock:
            self._abandoned.add(self._step)
            self._end("abandon")
        if self._error is not None:
            self._release_all(list(self._published))

    def is_wanted(self, step: int) -> bool:
        """Return False if this rank knows that the step was abandoned."""
        return step not in self._abandoned

    def begin_next(self) -> None:
        """Begin the next step if this step has ended or was abandoned."""
        with self._lock:
            if self._has_ended:
                self._step, self._told, self._has_ended, self._num_complete = self._step + 1, set(), False, 0

    def _end(self, what: str) -> None:
        with self._lock:
            if not self._has_ended:
                self._tell(what)  # first, because this method is called again if an interrupt ends it
                self._has_ended = True

    def _tell(self, what: str, *details: int) -> None:
        self._open_steps.add(self._step)
        self._news.append([self._step, what, *details])
        self._changed.notify_all()

    def wait_until_complete(self) -> bool:
        """Wait until `completed` has been called for all chunks of this rank in the step, which has ended. Returns
        False if the step was abandoned. Raises the errors of `RankLane.run`."""

        def is_over() -> bool:
            return self._step in self._abandoned or self._num_complete == self._num_own

        with self.waiting(), self._lock:
            self._changed.wait_for(lambda: is_over() or self._error is not None)
            if not is_over():
                assert self._error is not None
                raise raised_anew(self._error)
            return self._step not in self._abandoned

    def close(self) -> None:
        """Leave all later rounds. Before that, wait a moment for rounds of a step that has not ended. A rank that waits
        for this rank later gets an error. Does nothing in a forked process."""
        if not self._owner.is_here or self._is_closed:
            return
        with self.waiting(), self._lock:
            self._changed.wait_for(
                lambda: not (self._news or self._read or self._open_steps) or self._error is not None, _CLOSES_WITHIN_S
            )
            self._is_closed = True
            self._changed.notify_all()
        self._links.watch.forget_waiting(self._wake)
        for lane in (self._lane, self._node_sums, self._device_sums):
            if lane is not None:
                lane.close()
        self._thread.join()

    # Rounds. The thread calls the methods below.

    def _run(self) -> None:
        try:
            rest_s = 0.0
            while (news := self._next_news(rest_s)) is not None:
                has_news = self._take_round(news)
                rest_s = 0.0 if has_news else min(max(2 * rest_s, _SHORTEST_REST_S), _LONGEST_REST_S)
        except BaseException as error:
            if not self._is_closed:
                self._note_error(error)

    def _note_error(self, error: BaseException) -> None:
        with self._lock:
            self._error = error
            self._changed.notify_all()
            abandoned = [name for name in self._published if name[0] in self._abandoned]
        self._release_all(abandoned)
        self._failed(error)  # before other ranks report this failure
        if not isinstance(error, RankFailedError | LaneClosedError):
            self._links.fail(error)

    def _wake(self) -> None:
        with self._lock:
            self._changed.notify_all()

    def _next_news(self, rest_s: float) -> list[_News] | None:
        """Wait until this rank enters a round, at least ``rest_s`` if it has no news. Returns news; None if closed."""

        def enters() -> bool:
            listens = bool(self._open_steps) and self._links.watch.is_waiting
            return bool(self._news or self._read) or listens

        with self._lock, self._links.watch.idle(self._lane.name):
            self._changed.wait_for(lambda: self._is_closed or self._news, rest_s)
            self._changed.wait_for(lambda: self._is_closed or enters())
            if self._is_closed:
                return None
            news, self._news = self._news, []
            return news

    def _take_round(self, news: list[_News]) -> bool:
        """Tell other ranks the news, and add the chunks that are then complete. Returns whether any rank had news, or
        has read gradients of the last round."""
        told = self._lane.agree("gradients", json.dumps(news).encode() if news else b"")
        read, self._read = self._read, []
        self._release_all(read)
        touched: dict[_ChunkName, None] = {}
        for rank, packed in enumerate(told):
            for step, what, *details in json.loads(packed or b"[]"):
                touched.update(dict.fromkeys((step, key) for key in self._note(rank, step, what, details)))
        self._drop_abandoned()
        complete = {name: parts for name in touched if (parts := self._pop_complete(*name)) is not None}
        self._note_awaited()  # before sums, because sums may take long and do not wait for computation
        for batch in self._batches(complete):
            self._add(batch)
        self._read = list(complete)
        self._forget_ended()
        return bool(read or any(told))

    def _note(self, rank: int, step: int, what: str, details: list[int]) -> list[int]:
        """Record a rank's news. Returns the keys of chunks that may be complete now."""
        of_step = self._steps[step]
        if what == "gradient":
            key, *told = details
            of_step.chunks[key][rank] = _ToldPart(*told)
            return [key]
        if what == "none":
            keys = details
        else:
            of_step.ended.add(rank)
            if what == "abandon":
                of_step.is_abandoned = True
                if rank != self.ranks.rank:
                    logger.info("rank %d abandoned backward %d", rank, step)
            keys = [key for key in self._owners if key not in of_step.complete]
        for key in keys:
            of_step.chunks[key].setdefault(rank, _WITHOUT)
        return keys

    def _drop_abandoned(self) -> None:
        abandoned = {step for step, of_step in self._steps.items() if of_step.is_abandoned}
        if not abandoned:
            return
        for step in abandoned:
            self._steps[step].chunks.clear()
        with self._lock:
            self._abandoned |= abandoned
            self._changed.notify_all()
            dropped = [
                name
                for name in self._published
                if name[0] in abandoned and name[1] not in self._steps[name[0]].complete
            ]
        self._release_all(dropped)

    def _pop_complete(self, step: int, key: int) -> _Told | None:
        of_step = self._steps[step]
        if len(of_step.chunks.get(key, ())) < self.ranks.num_ranks:
            return None
        of_step.complete.add(key)
        parts = of_step.chunks.pop(key)
        return {rank: parts[rank] for rank in sorted(parts) if parts[rank].place is not None}

    def _forget_ended(self) -> None:
        ended = [step for step, of_step in self._steps.items() if len(of_step.ended) == self.ranks.num_ranks]
        for step in ended:
            del self._steps[step]
        with self._lock:
            self._open_steps.difference_update(ended)
            self._changed.notify_all()

    def _note_awaited(self) -> None:
        told = [parts for of_step in self._steps.values() for parts in of_step.chunks.values()]
        open_parts = [parts for parts in told if self.ranks.rank in parts]
        self._awaited = [rank for rank in self.ranks.others if any(rank not in parts for parts in open_parts)]

    def _release_all(self, names: Sequence[_ChunkName]) -> None:
        with self._lock:
            released = [self._published.pop(name) for name in names if name in self._published]
        for published in released:
            self._release(published.buffer)

    # Sums.

    def _batches(self, complete: Mapping[_ChunkName, _Told]) -> Iterator[dict[_ChunkName, _Told]]:
        """Yield batches of chunks with different owners, so that all links are busy. If devices add gradients, they
        exchange a batch at once, and each rank of a node collects one chunk of the batch."""
        by_devices = any(part.is_on_device for parts in complete.values() for part in parts.values())
        num_owners = self.ranks.num_local if by_devices else self.ranks.num_ranks
        of_owners: dict[int, list[_ChunkName]] = defaultdict(list)
        for name in complete:
            of_owners[self._owners[name[1]] % num_owners].append(name)
        for names in zip_longest(*of_owners.values()):
            yield {name: complete[name] for name in names if name is not None}

    def _add(self, batch: Mapping[_ChunkName, _Told]) -> None:
        """Add the chunks that this rank collects. It owns at most one of them."""
        ranks = self.ranks
        collected = [name for name in batch if self._collectors[name[1]] == ranks.rank]
        own = next((name for name in collected if self._owners[name[1]] == ranks.rank), None)
        here: dict[_ChunkName, _Told] = {}
        for name, parts in batch.items():
            self._refuse_unequal(name[1], parts)
            here[name] = {rank: part for rank, part in parts.items() if rank in ranks.on_this_node}
        on_devices = {name: parts for name, parts in here.items() if any(part.is_on_device for part in parts.values())}
        place = self._place(*own) if own is not None and batch[own] else None
        added = None
        if on_devices:
            by_device = next((name for name in collected if name in on_devices), None)
            added = self._add_on_devices(on_devices, by_device, place if by_device == own else None)
        between = []
        for name in collected:
            owner, nodes = self._owners[name[1]], _by_node(batch[name], ranks.num_local)
            numel = max((part.numel for part in batch[name].values()), default=0)
            out = place.values if name == own and place is not None else None
            if name == own and numel and out is None:
                out = torch.empty(numel)  # other ranks may send their part of a sum that is unwanted here
            is_added = name in on_devices
            values: list[Gradient | NodeSum] = [added] if added is not None and is_added else []
            if not is_added:
                values += [self._values_of(name, rank, part) for rank, part in here[name].items()]
            if set(nodes) - {ranks.of_rank(owner).node}:
                between.append(ChunkOfNodes(name[1], owner, numel, nodes, values, out, is_added=is_added))
            elif out is not None and not is_added:
                sum_gradients_(out, [value for value in values if not isinstance(value, NodeSum)], ranks.num_ranks)
        if between:
            assert self._node_sums is not None
            self._node_sums.add(between)
        if own is not None:
            bits = 0
            for part in batch[own].values():
                bits |= part.slice_bits
            self._completed(CompleteGradient(*own, bits, place))
            with self._lock:
                self._num_complete += own[0] == self._step  # this rank may have abandoned the chunk's step
                self._changed.notify_all()

    def _add_on_devices(
        self, chunks: Mapping[_ChunkName, _Told], own: _ChunkName | None, place: MeanPlace | None
    ) -> NodeSum | None:
        """Let the devices of this node's ranks add their gradients of chunks."""
        assert self._device_sums is not None
        ranks = self.ranks
        sends: list[tuple[int, Gradient]] = []
        receives: list[tuple[int, Gradient | ValuesOnDevice]] = []
        for name, parts in chunks.items():
            for rank, part in parts.items():
                if name == own and rank != ranks.rank:
                    receives.append(
                        (ranks.of_rank(rank).local_rank, ValuesOnDevice(part.numel, part.dtype, part.codec))
                    )
                elif name == own:
                    receives.append((ranks.local_rank, self._published[name].values))
                elif rank == ranks.rank:
                    collector = ranks.of_rank(self._collectors[name[1]]).local_rank
                    sends.append((collector, self._published[name].values))
        is_owner = own is not None and self._owners[own[1]] == ranks.rank
        gaps = self._gaps_of(own[1]) if own is not None else ()
        out = place.values if place is not None else None
        return self._device_sums.add(sends, receives, is_owner=is_owner, place=out, gaps=gaps)

    def _values_of(self, name: _ChunkName, rank: int, part: _ToldPart) -> Gradient:
        if rank == self.ranks.rank:
            return self._published[name].values
        assert self._region is not None
        assert part.place is not None
        memory = self._region.bytes[part.place : part.place + part.numel * part.dtype.itemsize].view(part.dtype)
        return memory if part.codec is None else CodedValues.in_place_of(memory, part.codec)

    def _refuse_unequal(self, key: int, parts: _Told) -> None:
        first_of: dict[int, int] = {}
        for rank, part in parts.items():
            first = first_of.setdefault(self.ranks.of_rank(rank).node, rank)
            if parts[first].is_on_device != part.is_on_device:
                raise RanksDisagreeError(
                    f"only one of ranks {first} and {rank} has its gradient of chunk {key} on the device, and the "
                    "other has it in RAM; call the same number of backwards on all ranks, or set transport to host"
                )
            if (parts[first].numel, parts[first].dtype) != (part.numel, part.dtype):
                raise RanksDisagreeError(
                    f"rank {first} has {parts[first].numel} elements of {parts[first].dtype} in chunk {key}, and rank "
                    f"{rank} has {part.numel} of {part.dtype}; load the same model on all ranks"
                )


def _by_node(parts: _Told, num_local: int) -> dict[int, PartsOfNode]:
    """Return the gradients by node, in the order of nodes. Only nodes with a gradient are included."""
    of_nodes: dict[int, list[_ToldPart]] = defaultdict(list)
    for rank, part in parts.items():
        of_nodes[rank // num_local].append(part)
    return {node: PartsOfNode(len(of_node), of_node[0].dtype) for node, of_node in of_nodes.items()}
