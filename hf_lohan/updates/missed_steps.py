"""Steps with a gradient of zeros that were not taken yet: which chunks are behind, by which steps, and with which
hyperparameters these are to be taken.

What is behind is caught up when its update comes (`ChunkUpdater`) and where somebody reads it (`UpToDateRecords`). Such
a step is the same whenever it is taken, if its hyperparameters and its number are those that it had.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from functools import partial
from threading import Lock, RLock
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from safetensors.numpy import load, save
from torch import Tensor

from hf_lohan.device import mapped_empty
from hf_lohan.files import Extent
from hf_lohan.model import PARAM_ALIGN_NUMEL, Block, Chunk, ParamSlice, round_up
from hf_lohan.optim import AdamWGroup, Segment, replay_, within
from hf_lohan.planner.costs.expert_costs import MOST_STEPS_BEHIND
from hf_lohan.store import RecordRead, Store, StoreLayout

GroupOf: TypeAlias = Callable[[ParamSlice], Hashable]
"""A parameter's hyperparameters, as its block's rule has them."""
StepCounts: TypeAlias = dict[ParamSlice, int]
"""How many optimizer steps each parameter has taken: torch's `step`. One without a gradient skips a step."""
StepSettings: TypeAlias = tuple[Hashable, int]
"""Hyperparameters of one step, and its number."""

MISSED_STEPS_NAME = "missed_steps.safetensors"
"""What `MissedSteps.packed` makes, beside the records of a commit."""


class MissedSteps:
    """Of the chunks of one store. Steps are counted here from where the store was opened or went back to.

    The worker's thread changes it; readers may ask on any thread.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        chunks: Iterable[Chunk],
        lazy: Set[Block] = frozenset(),
        *,
        most: int = MOST_STEPS_BEHIND,
        from_share: float = 0.0,
    ) -> None:
        """`blocks`: all, in one order for one store; `lazy`: those that may be `most` steps behind, and no more, while
        steps leave out so large a share of them. What was behind when the store was committed may be so in any case."""
        self._blocks = list(blocks)
        self._chunks: dict[Block, list[Chunk]] = {}
        for chunk in chunks:
            self._chunks.setdefault(chunk.block, []).append(chunk)
        self._lazy = {block for block in lazy if block.master.rule.may_be_late}
        self._num_lazy_chunks = sum(len(self._chunks.get(block, ())) for block in self._lazy)
        self._most = most
        self._from_share = from_share
        self._left_out_share: float | None = None
        """Of the chunks of `lazy`, in the last steps: each counts for half as much as the one behind it."""
        self._lock = Lock()
        self._now = 0
        """The last step that counts."""
        self._history: dict[int, dict[str, StepSettings]] = {}
        """By step and name, of parameters of which some part missed it."""
        self._applied: dict[Chunk, int] = {}
        """The last step that is in the records of those that are behind."""
        self._caught_up: dict[Chunk, int] = {}
        """What updates of the step in progress have taken out of these."""
        self._added: list[Chunk] | None = None
        """What the step in progress has put there, once that is decided."""

    # What is missed.

    def is_behind(self, chunk: Chunk) -> bool:
        """Whether its records lack steps that count."""
        return chunk in self._applied

    def behind(self, block: Block) -> bool:
        """Whether some of a block's records do."""
        return any(chunk in self._applied for chunk in self._chunks.get(block, ()))

    def chunks(self, block: Block) -> Sequence[Chunk]:
        """What may be behind of a block."""
        return self._chunks.get(block, ())

    def steps(self, chunk: Chunk) -> list[list[Segment]]:
        """What the chunk has missed: what each such step updates."""
        with self._lock:
            return self._steps(chunk, self._now)

    def steps_before(self, chunk: Chunk) -> list[list[Segment]]:
        """Without the step in progress, also if that is decided."""
        with self._lock:
            return self._steps(chunk, self._now - (self._added is not None))

    def _steps(self, chunk: Chunk, last: int) -> list[list[Segment]]:
        applied = self._applied.get(chunk, last)
        settings = [self._history[step] for step in range(applied + 1, last + 1) if step in self._history]
        found = [segments_of(chunk, partial(_named, of_step)) for of_step in settings]
        return [segments for segments in found if segments]

    # The step in progress, on the worker's thread.

    def decide(
        self, of_zeros: Iterable[Chunk], others: Set[Chunk], group_of: GroupOf, step_counts: StepCounts
    ) -> tuple[list[Chunk], list[Chunk], set[ParamSlice]]:
        """The step counts, and `of_zeros` have a gradient of zeros in it; `others` have one that is not. Returns what
        of the former takes its step now, what else is to catch up now, and the parameters whose step is missed."""
        with self._lock:
            step, of_step, added = self._now + 1, dict[str, StepSettings](), list[Chunk]()
            eager: list[Chunk] = []
            missed: set[ParamSlice] = set()
            zeros = list(of_zeros)
            self._note_share(zeros)
            for chunk in zeros:
                if self._may_miss(chunk, step) and self._note(chunk, of_step, group_of, step_counts):
                    if chunk not in self._applied:
                        self._applied[chunk] = self._now
                        added.append(chunk)
                    missed.update(piece.param_slice for piece in chunk.pieces if _is_trained(piece.param_slice))
                else:
                    eager.append(chunk)
            elsewhere = {*zeros, *others}
            late = [
                chunk
                for chunk, applied in self._applied.items()
                if chunk not in elsewhere and step - applied > self._most
            ]
            self._now, self._added = step, added
            if of_step:
                self._history[step] = of_step
            return eager, late, missed

    def _may_miss(self, chunk: Chunk, step: int) -> bool:
        is_lazy = chunk.block in self._lazy and (self._left_out_share or 0.0) >= self._from_share
        return is_lazy and step - self._applied.get(chunk, self._now) <= self._most

    def _note_share(self, zeros: Iterable[Chunk]) -> None:
        if self._num_lazy_chunks:
            share = sum(chunk.block in self._lazy for chunk in zeros) / self._num_lazy_chunks
            before = share if self._left_out_share is None else self._left_out_share
            self._left_out_share = (before + share) / 2

    def _note(self, chunk: Chunk, of_step: dict[str, StepSettings], group_of: GroupOf, step_counts: StepCounts) -> bool:
        """Whether its parameters take the very step that other parts of them take."""
        for part in (piece.param_slice for piece in chunk.pieces if _is_trained(piece.param_slice)):
            number = step_counts[part] + 1
            if part.name not in of_step:
                of_step[part.name] = (group_of(part), number)
            elif of_step[part.name][1] != number:
                return False
        return True

    @property
    def added(self) -> set[Block]:
        """The blocks that are behind since the step was decided, and were not before."""
        return {chunk.block for chunk in self._added or ()}

    def catch_up(self, chunk: Chunk) -> None:
        """Its records have all that it missed, or are about to."""
        with self._lock:
            if chunk in self._applied:
                self._caught_up[chunk] = self._applied.pop(chunk)

    def undo(self) -> None:
        """Updates of the step in progress were undone."""
        with self._lock:
            self._applied.update(self._caught_up)
            self._caught_up.clear()

    def abandon(self) -> None:
        """The step in progress does not count, also if that was decided. What of it is not undone stays."""
        with self._lock:
            if self._added is not None:
                for chunk in self._added:
                    self._applied.pop(chunk, None)
                self._history.pop(self._now, None)
                self._now, self._added = self._now - 1, None

    def end_step(self) -> None:
        """All of the step's updates are on their way."""
        with self._lock:
            self._caught_up.clear()
            self._added = None
            oldest = min(self._applied.values(), default=self._now)
            for step in [step for step in self._history if step <= oldest]:
                del self._history[step]

    # Commits.

    def packed(self) -> bytes | None:
        """What goes with a commit: for each block by how many steps it is behind (int32), and these steps. None if all
        have all."""
        with self._lock:
            if not self._applied:
                return None
            behind = np.zeros(len(self._blocks), np.int32)
            for index, block in enumerate(self._blocks):
                found = {self._applied.get(chunk, self._now) for chunk in self._chunks.get(block, ())}
                assert len(found) <= 1, f"parts of {block.name} are at different steps"
                behind[index] = self._now - found.pop() if found else 0
            steps = range(self._now - int(behind.max()) + 1, self._now + 1)
            names = sorted({name for of_step in self._history.values() for name in of_step})
            groups: dict[Hashable, int] = {}
            number, group = np.zeros((2, len(steps), len(names)), np.int32)
            for row, step in enumerate(steps):
                for column, name in enumerate(names):
                    settings = self._history.get(step, {}).get(name)
                    if settings is not None:
                        group[row, column] = groups.setdefault(settings[0], len(groups))
                        number[row, column] = settings[1]
            values = np.array([_numbers(settings) for settings in groups], np.float64)
            arrays: dict[str, npt.NDArray[Any]] = {"behind": behind, "number": number, "group": group, "groups": values}
            return save(arrays, {"names": json.dumps(names)})

    def restore(self, packed: bytes | None) -> None:
        """What `packed` made of it; None: all have all."""
        with self._lock:
            self._now = 0
            self._added = None
            for known in (self._history, self._applied, self._caught_up):
                known.clear()
            if packed is None:
                return
            arrays = load(packed)
            head_bytes = int.from_bytes(packed[:8], "little")
            names = json.loads(json.loads(packed[8 : 8 + head_bytes])["__metadata__"]["names"])
            groups = [_settings(row) for row in arrays["groups"].tolist()]
            self._now = len(arrays["number"])
            for row in range(self._now):
                found = zip(names, arrays["number"][row].tolist(), arrays["group"][row].tolist(), strict=True)
                self._history[row + 1] = {name: (groups[group], number) for name, number, group in found if number}
            for block, behind in zip(self._blocks, arrays["behind"].tolist(), strict=True):
                if behind:
                    self._applied.update(dict.fromkeys(self._chunks[block], self._now - behind))

    def forget(self, block: Block) -> None:
        """The block's records have all that it missed; no step is in progress."""
        with self._lock:
            for chunk in self._chunks.get(block, ()):
                self._applied.pop(chunk, None)


def _named(of_step: Mapping[str, StepSettings], part: ParamSlice) -> StepSettings | None:
    return of_step.get(part.name)


def _is_trained(part: ParamSlice) -> bool:
    return part.trainable and part.parameter.requires_grad


def _numbers(settings: Hashable) -> list[float]:
    assert isinstance(settings, AdamWGroup), "hyperparameters of another optimizer"
    group = settings
    return [group.lr, group.beta1, group.beta2, group.eps, group.weight_decay, float(group.decays_weights)]


def _settings(numbers: Sequence[float]) -> AdamWGroup:
    """The inverse of `_numbers`."""
    lr, beta1, beta2, eps, weight_decay, decays_weights = numbers
    return AdamWGroup(lr, beta1, beta2, eps, weight_decay, bool(decays_weights))


def segments_of(chunk: Chunk, settings_of: Callable[[ParamSlice], StepSettings | None]) -> list[Segment]:
    """Runs of neighbouring parameters with equal settings. Parameters without any are left out.

    A run ends behind a parameter that is no whole number of vectors: its last elements are rounded as scalars are, in
    torch's kernel as in ours.
    """
    segments: list[Segment] = []
    joins = False
    for piece in chunk.pieces:
        settings = settings_of(piece.param_slice)
        if settings is None:
            joins = False
            continue
        last = segments[-1] if segments else None
        if joins and last is not None and (last.group, last.step) == settings:
            segments[-1] = Segment(last.start, piece.stop_in_chunk, *settings)
        else:
            segments.append(Segment(piece.start_in_chunk, piece.stop_in_chunk, *settings))
        joins = piece.stop_in_chunk % PARAM_ALIGN_NUMEL == 0
    return segments


_REPLAY_NUMEL = 1 << 16
"""What is caught up at once for a reader: it fits a core's cache. A granule, where that is larger."""


class UpToDateRecords:
    """Reads as `Store` does, and has what is behind take its missed steps on the way: in memory of its own, for the
    pools' buffers are those of who may wait for the reader. The store stays as it is, so that no step that reads it is
    harder to undo.

    Reading is for any thread; writing for who has waited for all updates.
    """

    def __init__(self, store: Store, blocks: Sequence[Block], missed: MissedSteps) -> None:
        self._store = store
        self.missed = missed
        """Which are behind."""
        self._block = {block.name: block for block in blocks}
        self._lock = RLock()
        """Of the memory."""
        self._rows: list[Tensor] = []

    @property
    def layout(self) -> StoreLayout:
        """That of the store."""
        return self._store.layout

    def extents(self, block: str, kind: str) -> list[tuple[str, Extent]] | None:
        """See `RecordFiles.extents`; None also where the files are behind."""
        return None if self._is_behind(block) else self._store.extents(block, kind)

    def read(self, block: str, kind: str, start_numel: int, out: Tensor, *, is_urgent: bool = False) -> RecordRead:
        """See `RecordFiles.read`. What is behind is there when this returns."""
        if not self._is_behind(block):
            return self._store.read(block, kind, start_numel, out, is_urgent=is_urgent)
        self._fill(block, kind, start_numel, out, is_urgent=is_urgent)
        return RecordRead.of_memory()

    def read_unaligned(self, block: str, kind: str, start_numel: int, out: Tensor, bounce: Tensor) -> None:
        """See `RecordFiles.read_unaligned`."""
        if self._is_behind(block):
            self._fill(block, kind, start_numel, out)
        else:
            self._store.read_unaligned(block, kind, start_numel, out, bounce)

    def write_unaligned(self, block: str, kind: str, start_numel: int, source: Tensor, bounce: Tensor) -> None:
        """See `RecordFiles.write_unaligned`. A block that is behind takes its missed steps first, for good: they are of
        what it was before."""
        if self._is_behind(block):
            self._catch_up(self._block[block])
        self._store.write_unaligned(block, kind, start_numel, source, bounce)

    def _is_behind(self, block: str) -> bool:
        return self.missed.behind(self._block[block])

    def _fill(self, name: str, kind: str, start: int, out: Tensor, *, is_urgent: bool = False) -> None:
        block = self._block[name]
        form = block.master
        ratio = form.params_per_element(kind)
        first, last = start * ratio, (start + out.numel()) * ratio
        with self._lock:
            for chunk, low, high in self._pieces(block, kind, first, last):
                records = self._caught_up(block, chunk, (kind,), low, high, is_urgent=is_urgent)
                begin, end = max(low, first), min(high, last)
                source = slice((begin - low) // ratio, (end - low) // ratio)
                out[(begin - first) // ratio : (end - first) // ratio].copy_(records[kind][source])

    def _pieces(self, block: Block, kind: str, first: int, last: int) -> Iterator[tuple[Chunk | None, int, int]]:
        """(chunk, start, stop) of whole granules that cover parameters [first, last) of the block. What is in no chunk
        has no states."""
        granule = block.granule_numel
        step = max(_REPLAY_NUMEL, granule) // granule * granule
        chunks = sorted(self.missed.chunks(block), key=lambda chunk: chunk.start)
        edge = chunks[-1].stop if chunks else 0
        record = self._store.layout.record(block.name, kind)
        end = (record.first + record.numel) * block.master.params_per_element(kind)
        rest: list[tuple[Chunk | None, int, int]] = [(None, edge, end)]
        for chunk, start, stop in [*((chunk, chunk.start, chunk.stop) for chunk in chunks), *rest]:
            low = max(start, first // granule * granule)
            high = min(stop, round_up(last, granule))
            while low < high:
                yield chunk, low, min(low + step, high)
                low += step

    def _caught_up(
        self, block: Block, chunk: Chunk | None, kinds: Sequence[str], start: int, stop: int, *, is_urgent: bool = False
    ) -> dict[str, Tensor]:
        """Records, of ``kinds`` or more, of parameters [start, stop), which are the chunk's. Valid until the next."""
        form = block.master
        missed = self.missed.steps(chunk) if chunk is not None else []
        wanted = ("param", *form.state_kinds) if missed else kinds
        rows = self._memory(block)
        records: dict[str, Tensor] = {}
        reads: list[RecordRead] = []
        try:
            for row, kind in zip(rows, wanted, strict=False):
                first, last = form.elements(kind, start, stop)
                dtype = form.state_dtype(kind)
                records[kind] = row[: (last - first) * dtype.itemsize].view(dtype)
                reads.append(self._store.read(block.name, kind, first, records[kind], is_urgent=is_urgent))
            for read in reads:
                read.wait()
        except BaseException:
            for read in reads:  # the others still write into the memory
                with suppress(Exception):
                    read.wait_for_bytes()
            raise
        if chunk is not None and missed:
            own = [within(step, start - chunk.start, stop - chunk.start) for step in missed]
            replay_(records, own, form, position=start, private=rows[len(wanted) :][: form.num_private_buffers])
        return records

    def _memory(self, block: Block) -> list[Tensor]:
        """A row of uint8 for each kind and each private buffer of a piece."""
        form = block.master
        num_rows = 1 + len(form.state_kinds) + form.num_private_buffers
        num_bytes = torch.float32.itemsize * max(_REPLAY_NUMEL, block.granule_numel)
        if len(self._rows) < num_rows or self._rows[0].numel() < num_bytes:
            self._rows = [mapped_empty(num_bytes) for _ in range(num_rows)]
        return self._rows

    def _catch_up(self, block: Block) -> None:
        with self._lock:
            for chunk, low, high in self._pieces(block, "param", 0, block.state_numel):
                if chunk is None or not self.missed.is_behind(chunk):
                    continue
                records = self._caught_up(block, chunk, (), low, high)
                for kind, values in records.items():
                    first, _ = block.master.elements(kind, low, high)
                    self._store.write(block.name, kind, first, values).wait()
            self.missed.forget(block)
