"""Decides which loads ranks carry out together, and lends shards to ranks that load something else.

Ranks that pass the same layers order equal lists of loads, and carry them out together (`LockstepLoader`). A batch
without images, or layers that are skipped at random, make the lists differ. No rank knows this before it happens.
Forwards, backwards, recomputation, evaluations and reads in a forward are all only loads here.

*Periods.* `SlotRing.num_changes` divides a run into periods, in which no rank's committed weights change. Ranks begin
each period with common loads, numbered from 0. A rank begins the first when all ranks have finished their loads of
earlier periods. So the shared memory is empty then, and all have said what they had loaded.

*The cut.* With the announcement of its shard, a rank says which block the load has. A rank that finds another block
under one of its numbers, or that orders no load where another rank waits for one, declares a cut. It does the second
if it has ended that pass, or waits for other ranks. All loads from the lowest cut of a period on are lent. No rank can
have finished one of them, because that takes an equal announcement of every rank. A wrong cut costs time and no bits.

*Lent loads.* A rank asks each rank for its shard, piece by piece, and copies the pieces to its own slot. Each rank
lends on a separate thread. It reads the weights of the asking rank's period. An update in a backward begins when no
rank needs the chunk any more, and a guess is undone first, so reads never see a later version.

*No wait is circular.* A lender waits for its drive, for its updates, and for its own last step's end. Updates need only
gradients that all ranks have published, and commits that all ranks requested before (`StepCommits`). Common loads
before the cut are ordered on all ranks, and need no computing thread: a slot is free when its load is ordered, except
for an update that borrows it, which gives it back. So every load ends, and ranks wait for each other only in gradients
and at a step's end. There a rank that has no gradient of a block says so before its backward
(`GradientReduction.exclude`), so ranks publish in one order. A rank that fails or dies ends all waits, because each
goes through `Links`.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from hf_lohan.device import Device, Event, Lane
from hf_lohan.files import StorageError
from hf_lohan.model import Block, ranges
from hf_lohan.planner.record_traffic import PARAM
from hf_lohan.ranks import Channel, Handler, Kind, Links, PayloadReader, RanksDisagreeError
from hf_lohan.store import RecordRead
from hf_lohan.threads import start_thread
from hf_lohan.updates import WeightChange
from hf_lohan.weights.load_order import first_of_period, period_of
from hf_lohan.weights.node_shards import NodeShards
from hf_lohan.weights.source import Decoder, RecordReader

_WAITS_S = 0.1
"""Seconds that a rank waits for others before it lends what they want."""
_BETWEEN_PASSES_S = 5.0
"""Seconds between two passes after which a rank lends what others want for their next pass."""
_AT_LAST_S = 30.0
"""Seconds without any load after which a rank lends in any case."""
_UNKNOWN = -1
UNKNOWN_PLACE = -1
"""The place of a load in the memory of another node."""


@dataclass(frozen=True)
class Standing:
    """What a rank's loader knows of its own loads."""

    next_number: int
    """Number of the next load that is ordered."""
    has: Callable[[int], bool]
    """Returns whether a load with this number was ordered."""
    is_idle: bool = False
    """Whether all ordered loads are finished."""
    is_between_passes: bool = False
    num_ended: int = 0
    """Number of passes that have ended."""
    computing_thread: int = 0


@dataclass(frozen=True)
class _Wanted:
    """A load for which another rank waits."""

    block: int
    place: int
    num_ended: int
    """Number of passes that the rank had ended when it ordered the load."""
    since_s: float


class JointOrder:
    """One rank's knowledge of the loads that all ranks have in common. The links' lock guards it."""

    def __init__(
        self,
        links: Links,
        changes: Changes,
        begin_period: Callable[[int, bool], None],
        notify: Callable[[], None],
    ) -> None:
        """``begin_period`` is called with the number of the first load of a period that all ranks begin, and with
        whether they had equal loads before. ``notify`` wakes the loading thread."""
        self._links = links
        self._changes = changes
        self._begin_period = begin_period
        self._notify = notify
        self._period = 0
        self._announced_period = 0
        self._cuts: dict[int, int] = {}
        """By period, the number of the first lent load."""
        self._undeclared: list[int] = []
        """Cuts of this rank that the others do not know yet."""
        self._own: dict[int, tuple[int, int]] = {}
        """By number, block and place of the period's common loads that this rank has begun."""
        self._wanted: defaultdict[int, dict[int, _Wanted]] = defaultdict(dict)
        """By number and rank, the loads that other ranks have announced."""
        self._summaries: defaultdict[int, dict[int, tuple[int, ...]]] = defaultdict(dict)
        """By period and rank, what the rank had loaded before the period."""
        self.handlers: Mapping[Kind, Handler] = {
            Kind.LOADS_DIFFER: lambda _rank, numbers, _payload: self.note_cut(*numbers),
            Kind.LOAD_PERIOD: self._on_period,
            Kind.LOAD_WANTED: self._on_wanted,
        }

    # Called by the loading thread.

    def is_common(self, number: int) -> bool:
        """Return whether all ranks carry out the load together, as far as this rank knows."""
        return number < self._cuts.get(period_of(number), number + 1)

    def may_begin(self, number: int, num_ended: int, is_drained: Callable[[], bool]) -> bool:
        """Return whether the common load may use the shared memory. In a new period, this announces once that this
        rank's earlier loads are over, if they are. Raises RanksDisagreeError if the period begins after another change
        of weights on another rank."""
        period, own_rank = period_of(number), self._links.ranks.rank
        if period == self._period:
            return True
        if self._announced_period < period:
            if not is_drained():
                return False
            change = self._changes.change_before(period)
            with self._links.lock:
                digest = zlib.crc32(repr(list(self._own.items())).encode())
                has_cut = int(any(cut >= self._period for cut in self._cuts))
                summary = self._period, len(self._own), digest, has_cut, _UNKNOWN if change is None else int(change)
                self._summaries[period][own_rank] = summary
                self._announced_period = period
            self._links.send_all(Kind.LOAD_PERIOD, period, *summary, num_ended)
        with self._links.lock:
            if self.not_begun(period):
                return False
            self._refuse_other_change(period)
            summaries = set(self._summaries[period].values())
            are_equal = len(summaries) == 1 and not any(has_cut for *_, has_cut, _ in summaries)
            self._begin_period(first_of_period(period), are_equal)
            self._period = period
            self._own.clear()
            self._cuts = {cut: first for cut, first in self._cuts.items() if cut >= period}
            for number in [number for number in self._wanted if period_of(number) < period]:
                del self._wanted[number]
            for earlier in [earlier for earlier in self._summaries if earlier <= period]:
                del self._summaries[earlier]
        return True

    def _refuse_other_change(self, period: int) -> None:
        own_rank = self._links.ranks.rank
        changes = {rank: summary[-1] for rank, summary in sorted(self._summaries[period].items())}
        other = next((rank for rank, change in changes.items() if change != changes[own_rank]), None)
        if other is not None and _UNKNOWN not in (changes[own_rank], changes[other]):
            raise RanksDisagreeError(
                f"rank {own_rank} {WeightChange(changes[own_rank]).words}, and rank {other} "
                f"{WeightChange(changes[other]).words} instead; all ranks must take the same steps; look for code that "
                "only some of them run"
            )

    def not_begun(self, period: int) -> list[int]:
        """Return the ranks that have not finished their loads before this period, as far as this rank knows."""
        return [rank for rank in range(self._links.ranks.num_ranks) if rank not in self._summaries[period]]

    def begin(self, number: int, block: int, place: int) -> None:
        """Note that this rank begins a common load. The caller holds the lock."""
        self._own[number] = block, place
        for wanted in self._wanted.pop(number, {}).values():
            self._compare(number, wanted)

    def has_begun(self, number: int) -> bool:
        return number in self._own

    def find_missing(self, standing: Standing) -> int | None:
        """Return the number of a load that other ranks wait for and that this rank does not order; None if there is
        none. The caller holds the lock."""
        now_s = time.monotonic()
        for number in sorted(self._wanted):
            if not self.is_common(number) or standing.has(number):
                continue
            if period_of(number) < period_of(standing.next_number):
                return number
            if not standing.is_idle or not self._wanted[number]:
                continue
            waits_since_s = self._links.waits_since(standing.computing_thread)
            waited_s = now_s - min(wanted.since_s for wanted in self._wanted[number].values())
            if waited_s > _AT_LAST_S:
                return number
            if period_of(number) > period_of(standing.next_number):
                continue  # this rank has not ended its step yet
            ended = min(wanted.num_ended for wanted in self._wanted[number].values())
            if ended < standing.num_ended or (standing.is_between_passes and waited_s > _BETWEEN_PASSES_S):
                return number
            if waits_since_s is not None and min(now_s - waits_since_s, waited_s) > _WAITS_S:
                return number
        return None

    def cut(self, number: int) -> None:
        """Declare that loads from this number on are lent. The caller holds the lock."""
        if self.is_common(number):
            self._cuts[period_of(number)] = number
            self._undeclared.append(number)
            self._notify()

    def note_cut(self, number: int) -> None:
        """Note a cut that another rank has declared."""
        with self._links.lock:
            if self.is_common(number):
                self._cuts[period_of(number)] = number
            self._notify()

    def declare_cuts(self) -> bool:
        """Tell the others this rank's new cuts. Returns whether there were any."""
        with self._links.lock:
            cuts, self._undeclared = self._undeclared, []
        for number in cuts:
            self._links.send_all(Kind.LOADS_DIFFER, number)
        return bool(cuts)

    @property
    def has_undeclared(self) -> bool:
        return bool(self._undeclared)

    # Called by receiving threads.

    def note_wanted(self, rank: int, number: int, block: int, place: int, num_ended: int) -> None:
        """Note which load another rank has begun."""
        with self._links.lock:
            wanted = _Wanted(block, place, num_ended, time.monotonic())
            if number in self._own:
                self._compare(number, wanted)
            else:
                earlier = self._wanted[number].get(rank, wanted)
                self._wanted[number][rank] = replace(wanted, since_s=earlier.since_s)
            self._notify()

    def _compare(self, number: int, wanted: _Wanted) -> None:
        if wanted.block != _UNKNOWN:
            block, place = self._own[number]
            if block != wanted.block or wanted.place not in (place, UNKNOWN_PLACE):
                self.cut(number)

    def _on_period(self, rank: int, numbers: tuple[int, ...], _payload: PayloadReader | None) -> None:
        period, *summary, num_ended = numbers
        with self._links.lock:
            self._summaries[period][rank] = tuple(summary)
            number = first_of_period(period)
            if number not in self._own:
                self._wanted[number].setdefault(rank, _Wanted(_UNKNOWN, UNKNOWN_PLACE, num_ended, time.monotonic()))
            self._notify()

    def _on_wanted(self, rank: int, numbers: tuple[int, ...], _payload: PayloadReader | None) -> None:
        self.note_wanted(rank, *numbers)


class NewWeights(Protocol):
    """Interface to updates, for reads of a shard. See `GradientPipeline`."""

    def settle(self, block: Block) -> None: ...

    def copy_new(self, block: Block, start: int, out: Tensor) -> list[tuple[int, int]] | None: ...


class Changes(Protocol):
    """Interface to the counts of changes. See `SlotRing`."""

    @property
    def num_changes(self) -> int: ...

    def is_unchanged_since(self, block: Block, num_changes: int) -> bool: ...

    def change_before(self, num_changes: int) -> WeightChange | None: ...


@dataclass(eq=False)
class _LentLoad:
    """A load of this rank from the shards that other ranks lend."""

    number: int
    block: Block
    weights: Tensor
    turn: int = 0
    """Which of `_TURNS` is in progress."""
    missing: dict[int, int] = field(default_factory=dict)
    """By rank, the number of bytes of the turn that have not arrived."""
    error: Exception | None = None


_KINDS = (PARAM, "scales", "codes")
_TURNS = ((PARAM, "scales"), ("codes",))
"""Kinds of records that are lent together. Codes are decoded with the scales of all ranks."""


@dataclass(frozen=True)
class _ShardPiece:
    """Elements [start, stop) of a record, or bytes of packed weights."""

    kind: str
    start: int
    stop: int
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return (self.stop - self.start) * self.dtype.itemsize


class StaleError(RanksDisagreeError):
    """A rank has changed a block whose earlier weights another rank wants."""


class Lender:
    """A thread that carries out requests of other ranks for weights, each when this rank has ended the steps before."""

    def __init__(self, links: Links, changes: Changes, name: str) -> None:
        """``name``: of the thread, which starts with the first request."""
        self._links = links
        self._changes = changes
        self._name = name
        self._requests: deque[tuple[int, Callable[[], None]]] = deque()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def submit(self, period: int, lend: Callable[[], None]) -> None:
        """Call ``lend`` on the thread when this rank has the weights of the period."""
        with self._links.lock:
            self._requests.append((period, lend))
            if self._thread is None and not self._is_closed:
                self._thread = start_thread(self._run, self._name, beside_kernels=False)
            self._links.notify()

    def close(self) -> None:
        """End the thread, without the requests that wait."""
        with self._links.lock:
            self._is_closed = True
            self._links.notify()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            while True:
                self._links.wait_for(lambda: self._is_closed or self._next(), "requests", peers=[])
                with self._links.lock:
                    request = self._next()
                    if request is None:
                        return
                    self._requests.remove(request)
                request[1]()
        except Exception as error:
            if not self._is_closed:
                self._links.fail(error)

    def _next(self) -> tuple[int, Callable[[], None]] | None:
        """Return the first request for weights that this rank has already. The caller holds the lock."""
        if self._is_closed:
            return None
        here = self._changes.num_changes
        return next((request for request in self._requests if request[0] <= here), None)


def stale_error(rank: int, block: Block) -> StaleError:
    return StaleError(
        f"rank {rank} ends a step with step() or zero_grad(), which changes {block.name}, while another rank still "
        "reads the weights of before it, between clip_grad_norm_() and step(); read weights before clip_grad_norm_() "
        "or after step(), or let all ranks wait for each other before step() (accelerator.wait_for_everyone())"
    )


class LentShards:
    """Lends this rank's shards to other ranks, and borrows theirs, for one load at a time."""

    def __init__(
        self,
        device: Device,
        store: RecordReader,
        new_weights: NewWeights,
        changes: Changes,
        links: Links,
        blocks: Sequence[Block],
        parts: NodeShards,
        decoder: Decoder | None,
        *,
        piece_bytes: int,
        notify: Callable[[], None],
    ) -> None:
        """``piece_bytes``: bytes of one read and message. ``notify`` is called when a load advances."""
        self._device = device
        self._store = store
        self._new_weights = new_weights
        self._changes = changes
        self._links = links
        self._rank = links.ranks.rank
        self._blocks = blocks
        self._number_of = {block: number for number, block in enumerate(blocks)}
        self._parts = parts
        self._decoder = decoder
        self._decoding = threading.Lock()
        self._piece_bytes = piece_bytes
        self._notify = notify
        self._load: _LentLoad | None = None
        self._lender = Lender(links, changes, "lohan-lent-shards")
        self._memory: dict[str, Tensor] = {}
        """By user, page-aligned memory for one piece, which is allocated at the first lent load."""
        self.handlers: Mapping[Kind, Handler] = {
            Kind.SHARD_WANTED: self._on_request,
            Kind.SHARD: self._on_shard,
        }

    # Called by the loading thread.

    @property
    def load(self) -> _LentLoad | None:
        """The load in progress."""
        return self._load

    def begin_load(self, number: int, block: Block, weights: Tensor, free: Event | None) -> None:
        """Ask for all shards of a block, and copy this rank's own to ``weights`` on the device, after ``free``."""
        if free is not None:
            self._device.wait(Lane.H2D, free)
        self._begin_turn(_LentLoad(number, block, weights))

    def _begin_turn(self, load: _LentLoad) -> None:
        for rank in self._links.ranks.others:
            num_bytes = sum(piece.num_bytes for piece in self._pieces(load.block, rank, load.turn))
            if num_bytes:
                load.missing[rank] = num_bytes
        others = list(load.missing)
        with self._links.lock:
            self._load = load
        for rank in others:
            self._links.send(rank, Kind.SHARD_WANTED, load.number, self._number_of[load.block], load.turn)
        try:
            for piece in self._pieces(load.block, self._rank, load.turn):
                content = self._memory_for(piece, "own")
                self._read(load.block, piece, content)
                self._copy(load, piece.kind, piece.start, content)
        except (StorageError, StaleError) as error:
            load.error = error

    def missing_ranks(self) -> list[int]:
        """Return the ranks whose shards have not arrived. The caller holds the lock."""
        return [] if self._load is None else sorted(self._load.missing)

    def finish_load(self, *, is_wanted: bool) -> Event | None:
        """Return the event of the load's end; None if shards are missing. Raises the error of a load that is wanted.
        After an error this also waits for the other shards, because they would overwrite the slot's next block."""
        load = self._load
        assert load is not None
        with self._links.lock:
            ends_run = is_wanted and isinstance(load.error, StorageError)  # of this rank
            if load.missing and not ends_run:
                return None
        if load.error is None and load.block.packed_slices and load.turn + 1 < len(_TURNS):
            load.turn += 1
            self._begin_turn(load)
            return self.finish_load(is_wanted=is_wanted)
        with self._links.lock:
            self._load = None
        if load.error is not None and is_wanted:
            raise load.error
        return self._device.record(Lane.H2D)

    def close(self) -> None:
        with self._links.lock:
            self._load = None
        self._lender.close()

    # Shards that arrive.

    def _on_shard(self, rank: int, numbers: tuple[int, ...], payload: PayloadReader | None) -> None:
        number, block_number, kind_number, start, has_failed = numbers
        assert payload is not None
        with self._links.lock:
            load = self._load
        if load is None or load.number != number or load.block is not self._blocks[block_number]:
            return  # the load was given up
        if has_failed:
            with self._links.lock:
                load.error = RanksDisagreeError(payload.bytes().decode())
                del load.missing[rank]  # the rank sends no more of this shard
        else:
            kind = _KINDS[kind_number]
            dtype = load.block.master.working_dtype if kind == PARAM else torch.uint8
            piece = _ShardPiece(kind, start, start + payload.num_bytes // dtype.itemsize, dtype)
            content = self._memory_for(piece, f"rank {rank}")
            payload.read_into(content)
            self._copy(load, kind, start, content)
            with self._links.lock:
                load.missing[rank] -= payload.num_bytes
                if not load.missing[rank]:
                    del load.missing[rank]
        self._notify()

    def _copy(self, load: _LentLoad, kind: str, start: int, content: Tensor) -> None:
        with self._decoding:
            if kind == PARAM:
                self._device.copy(Lane.H2D, load.weights[start : start + content.numel()], content)
            else:
                assert self._decoder is not None, f"{load.block} has packed weights"
                if kind == "scales":
                    self._decoder.take_scales(start, content)
                else:
                    self._decoder.decode(load.block, load.weights, start, content)
            copied = self._device.record(Lane.H2D)
        copied.synchronize()

    # Shards that others ask for.

    def _on_request(self, rank: int, numbers: tuple[int, ...], _payload: PayloadReader | None) -> None:
        number, block_number, turn = numbers
        self._lender.submit(period_of(number), partial(self._lend, rank, number, block_number, turn))

    def _lend(self, rank: int, number: int, block_number: int, turn: int) -> None:
        block = self._blocks[block_number]
        for piece in self._pieces(block, self._rank, turn):
            content = self._memory_for(piece, "lent")
            head = Kind.SHARD, number, block_number, _KINDS.index(piece.kind), piece.start
            try:
                self._read(block, piece, content)
                if not self._changes.is_unchanged_since(block, period_of(number)):
                    raise stale_error(self._rank, block)
            except (StorageError, StaleError) as error:
                text = f"{error}" or repr(error)  # an empty payload is none
                self._links.send(rank, *head, 1, payload=text.encode(), channel=Channel.WEIGHTS)
                return
            self._links.send(rank, *head, 0, payload=content, channel=Channel.WEIGHTS)

    # Reads.

    def _pieces(self, block: Block, rank: int, turn: int) -> Iterator[_ShardPiece]:
        """Yield the pieces of a rank's shard, which are whole granules and whole coded pieces."""
        for part in block.fetched_parts(*block.rank_ranges[rank]):
            if part.kind not in _TURNS[turn]:
                continue
            dtype, unit = torch.uint8, block.packed_granule_bytes
            if part.kind == PARAM:
                dtype, unit = block.master.working_dtype, self._parts.whole_numel(block.granule_numel)
            step = max(1, self._piece_bytes // dtype.itemsize // unit) * unit
            for low, high in ranges(part.stop - part.start, step):
                yield _ShardPiece(part.kind, part.start + low, part.start + high, dtype)

    def _read(self, block: Block, piece: _ShardPiece, content: Tensor) -> None:
        """Fill ``content`` with the weights of this rank's last step, with which all ranks compute. A read that fails
        is repeated once, because an update may have written meanwhile."""
        for is_last in (False, True):
            try:
                rest: list[tuple[int, int]] | None = [(piece.start, piece.stop)]
                if piece.kind == PARAM:
                    self._new_weights.settle(block)
                    rest = self._new_weights.copy_new(block, piece.start, content)
                if rest is None:
                    raise stale_error(self._rank, block)
                reads = []
                for low, high in rest:
                    view = content[low - piece.start : high - piece.start]
                    reads.append(self._store.read(block.name, piece.kind, low, view, is_urgent=True))
                _wait_for_all(reads)
                break
            except StorageError:
                if is_last:
                    raise
        if piece.kind == PARAM:
            self._parts.round_piece(block, content)

    def _memory_for(self, piece: _ShardPiece, user: str) -> Tensor:
        """Return memory for the content of a piece, until the same user's next call."""
        memory = self._memory.get(user)
        if memory is None or memory.numel() < piece.num_bytes:
            memory = self._memory[user] = self._device.host_empty(max(self._piece_bytes, piece.num_bytes))
        return memory[: piece.num_bytes].view(piece.dtype)


def _wait_for_all(reads: Sequence[RecordRead]) -> None:
    """Wait for all reads, so that none writes to its memory any more, and raise the first error."""
    errors = []
    for read in reads:
        try:
            read.wait()
        except StorageError as error:
            errors.append(error)
    if errors:
        raise errors[0]
