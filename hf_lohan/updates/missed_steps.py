"""Postpones steps whose gradient is zero. Knows which chunks are behind, by which steps, and with which hyperparameters
they will take these steps.

A chunk catches up at its next update (`ChunkUpdater`), or in memory for a reader (`UpToDateRecords`). A late step gives
the same bits, because it uses the hyperparameters and the number of the original step.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import astuple, replace
from functools import partial
from threading import Lock, RLock
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from safetensors.numpy import load, save
from torch import Tensor

from hf_lohan.costs.step.expert_costs import MOST_STEPS_BEHIND
from hf_lohan.device import mapped_empty
from hf_lohan.files import Extent
from hf_lohan.model import PARAM_ALIGN_NUMEL, Block, Chunk, ParamSlice, round_up
from hf_lohan.optim import TIE_CODES, TIE_RUN_NUMEL, AdamWGroup, Segment, replay_, within
from hf_lohan.store import RecordRead, Store, StoreLayout

GroupOf: TypeAlias = Callable[[ParamSlice], Hashable]
"""A function that returns a parameter's hyperparameters, in the form that its block's update rule uses."""
StepCounts: TypeAlias = dict[ParamSlice, int]
"""Number of optimizer steps of each parameter, as torch's `step`. A parameter without a gradient skips a step."""
StepSettings: TypeAlias = tuple[Hashable, int]
"""Hyperparameters and number of one step."""

MISSED_STEPS_NAME = "missed_steps.safetensors"
"""Name of the file in a commit that holds the result of `MissedSteps.packed`."""


class MissedSteps:
    """The missed steps of one store's chunks. Step numbers are relative: numbering starts again whenever the store
    is opened or returns to its last commit. Only the worker's thread changes this. Any thread may read."""

    def __init__(
        self,
        blocks: Sequence[Block],
        chunks: Iterable[Chunk],
        lazy: Set[Block] = frozenset(),
        *,
        most: int = MOST_STEPS_BEHIND,
        from_share: float = 0.0,
    ) -> None:
        """`blocks`: all blocks, always in the same order for one store. `lazy`: blocks that may fall behind, by at
        most `most` steps. They may do so only while at least the fraction `from_share` of them gets no gradient per
        step, on average. Chunks that are already behind in the store's commit may stay behind, whether or not their
        block is in `lazy`."""
        self._blocks = list(blocks)
        self._chunks: dict[Block, list[Chunk]] = {}
        for chunk in chunks:
            self._chunks.setdefault(chunk.block, []).append(chunk)
        self._lazy = {block for block in lazy if block.master.rule.may_be_late}
        self._num_lazy_chunks = sum(len(self._chunks.get(block, ())) for block in self._lazy)
        self._most = most
        self._from_share = from_share
        self._left_out_share: float | None = None
        """Moving average of the fraction of lazy chunks without a gradient. The newest step has weight 1/2, the step
        before it 1/4, and so on."""
        self._lock = Lock()
        self._now = 0
        """The last step that counts."""
        self._history: dict[int, dict[str, StepSettings]] = {}
        """Settings by step and parameter name. Contains only parameters with at least one part that missed the step."""
        self._applied: dict[Chunk, int] = {}
        """For each chunk that is behind: the last step that its records include."""
        self._caught_up: dict[Chunk, int] = {}
        """Entries of `_applied` that were removed by updates of the step in progress."""
        self._added: list[Chunk] | None = None
        """Chunks that the step in progress added to `_applied`; None before it is decided."""

    # Missed steps.

    def is_behind(self, chunk: Chunk) -> bool:
        """Return whether the chunk's records lack finished steps."""
        return chunk in self._applied

    def is_block_behind(self, block: Block) -> bool:
        """Return whether a part of a block's records lacks finished steps."""
        return any(chunk in self._applied for chunk in self._chunks.get(block, ()))

    def chunks(self, block: Block) -> Sequence[Chunk]:
        """Return a block's chunks that may be behind."""
        return self._chunks.get(block, ())

    def steps(self, chunk: Chunk) -> list[list[Segment]]:
        """Return the segments of each step that the chunk has missed."""
        with self._lock:
            return self._steps(chunk, self._now)

    def steps_before(self, chunk: Chunk) -> list[list[Segment]]:
        """Return `steps` without the step in progress, even if it is decided."""
        with self._lock:
            return self._steps(chunk, self._now - (self._added is not None))

    def _steps(self, chunk: Chunk, last: int) -> list[list[Segment]]:
        applied = self._applied.get(chunk, last)
        settings = [self._history[step] for step in range(applied + 1, last + 1) if step in self._history]
        steps = [segments_of(chunk, partial(_settings_in, by_name)) for by_name in settings]
        return [segments for segments in steps if segments]

    # The step in progress. Called on the worker's thread.

    def decide_step(
        self, of_zeros: Iterable[Chunk], others: Set[Chunk], group_of: GroupOf, step_counts: StepCounts
    ) -> tuple[list[Chunk], list[Chunk], set[ParamSlice]]:
        """Decide that the step counts. `of_zeros`: chunks whose gradient is zero in this step. `others`: chunks with
        another gradient. Returns the chunks of `of_zeros` that are updated now, more chunks that must catch up now, and
        the parameters that miss the step."""
        with self._lock:
            step, by_name, added = self._now + 1, dict[str, StepSettings](), list[Chunk]()
            eager: list[Chunk] = []
            missed: set[ParamSlice] = set()
            zeros = list(of_zeros)
            self._note_share(zeros)
            for chunk in zeros:
                if self._may_miss(chunk, step) and self._note_settings(chunk, by_name, group_of, step_counts):
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
            if by_name:
                self._history[step] = by_name
            return eager, late, missed

    def _may_miss(self, chunk: Chunk, step: int) -> bool:
        is_lazy = chunk.block in self._lazy and (self._left_out_share or 0.0) >= self._from_share
        return is_lazy and step - self._applied.get(chunk, self._now) <= self._most

    def _note_share(self, zeros: Iterable[Chunk]) -> None:
        if self._num_lazy_chunks:
            share = sum(chunk.block in self._lazy for chunk in zeros) / self._num_lazy_chunks
            before = share if self._left_out_share is None else self._left_out_share
            self._left_out_share = (before + share) / 2

    def _note_settings(
        self, chunk: Chunk, by_name: dict[str, StepSettings], group_of: GroupOf, step_counts: StepCounts
    ) -> bool:
        """Record a step's settings. Returns whether the parameters' step counts in this chunk equal those of their
        parts in other chunks."""
        for part in (piece.param_slice for piece in chunk.pieces if _is_trained(piece.param_slice)):
            number = step_counts[part] + 1
            if part.name not in by_name:
                by_name[part.name] = (group_of(part), number)
            elif by_name[part.name][1] != number:
                return False
        return True

    @property
    def added(self) -> set[Block]:
        """The blocks that fell behind with the decided step."""
        return {chunk.block for chunk in self._added or ()}

    def catch_up(self, chunk: Chunk) -> None:
        """Record that the chunk's records have all missed steps, or will have them before anyone reads them."""
        with self._lock:
            if chunk in self._applied:
                self._caught_up[chunk] = self._applied.pop(chunk)

    def undo(self) -> None:
        """Record that updates of the step in progress were undone."""
        with self._lock:
            self._applied.update(self._caught_up)
            self._caught_up.clear()

    def abandon_step(self) -> None:
        """Forget the step in progress, even if it was decided. Updates that were not undone stay."""
        with self._lock:
            if self._added is not None:
                for chunk in self._added:
                    self._applied.pop(chunk, None)
                self._history.pop(self._now, None)
                self._now, self._added = self._now - 1, None

    def end_step(self) -> None:
        """End the step after all its updates are queued."""
        with self._lock:
            self._caught_up.clear()
            self._added = None
            oldest = min(self._applied.values(), default=self._now)
            for step in [step for step in self._history if step <= oldest]:
                del self._history[step]

    # Commits.

    def packed(self) -> bytes | None:
        """Return the content of a commit's file; None if no block is behind. The file has the number of steps that each
        block is behind (int32), and the settings of these steps."""
        with self._lock:
            if not self._applied:
                return None
            behind = np.zeros(len(self._blocks), np.int32)
            for index, block in enumerate(self._blocks):
                applied = {self._applied.get(chunk, self._now) for chunk in self._chunks.get(block, ())}
                assert len(applied) <= 1, f"parts of {block.name} are at different steps"
                behind[index] = self._now - applied.pop() if applied else 0
            steps = range(self._now - int(behind.max()) + 1, self._now + 1)
            names = sorted({name for by_name in self._history.values() for name in by_name})
            groups: dict[Hashable, int] = {}
            number, group = np.zeros((2, len(steps), len(names)), np.int32)
            for row, step in enumerate(steps):
                for column, name in enumerate(names):
                    settings = self._history.get(step, {}).get(name)
                    if settings is not None:
                        group[row, column] = groups.setdefault(settings[0], len(groups))
                        number[row, column] = settings[1]
            values = np.array([_to_numbers(settings) for settings in groups], np.float64)
            arrays: dict[str, npt.NDArray[Any]] = {"behind": behind, "number": number, "group": group, "groups": values}
            return save(arrays, {"names": json.dumps(names)})

    def restore(self, packed: bytes | None) -> None:
        """Restore the missed steps from a result of `packed`."""
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
            groups = [_from_numbers(row) for row in arrays["groups"].tolist()]
            self._now = len(arrays["number"])
            for row in range(self._now):
                entries = zip(names, arrays["number"][row].tolist(), arrays["group"][row].tolist(), strict=True)
                self._history[row + 1] = {name: (groups[group], number) for name, number, group in entries if number}
            for block, behind in zip(self._blocks, arrays["behind"].tolist(), strict=True):
                if behind:
                    self._applied.update(dict.fromkeys(self._chunks[block], self._now - behind))

    def forget_block(self, block: Block) -> None:
        """Record that the block's records have all missed steps. No step may be in progress."""
        with self._lock:
            for chunk in self._chunks.get(block, ()):
                self._applied.pop(chunk, None)


def _settings_in(by_name: Mapping[str, StepSettings], part: ParamSlice) -> StepSettings | None:
    return by_name.get(part.name)


def _is_trained(part: ParamSlice) -> bool:
    return part.trainable and part.parameter.requires_grad


def _to_numbers(group: Hashable) -> list[float]:
    assert isinstance(group, AdamWGroup), "hyperparameters of another optimizer"
    return [float(number) for number in astuple(group)]


def _from_numbers(numbers: Sequence[float]) -> AdamWGroup:
    lr, beta1, beta2, eps, weight_decay, decays_weights, *seed = numbers  # commits of older versions have no seed
    return AdamWGroup(lr, beta1, beta2, eps, weight_decay, bool(decays_weights), *map(int, seed))


def segments_of(chunk: Chunk, settings_of: Callable[[ParamSlice], StepSettings | None]) -> list[Segment]:
    """Return runs of neighbouring parameters with equal settings. Parameters without settings are left out. A run
    ends after a parameter whose size is not a multiple of the kernel's vector length. torch updates the leftover
    elements one by one, and rounds them differently. If updates round weights, each parameter is a run."""
    rounds_weights = chunk.block.master.rounds_weights
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
            segment, part = Segment(piece.start_in_chunk, piece.stop_in_chunk, *settings), piece.param_slice
            if rounds_weights:
                segment = replace(segment, parameter=part.name, origin=part.start - part.first)
            segments.append(segment)
        joins = piece.stop_in_chunk % PARAM_ALIGN_NUMEL == 0 and not rounds_weights
    return segments


_REPLAY_NUMEL = 1 << 16
"""Number of elements that catch up at once for a reader. They fit a core's cache, and are at least one granule."""


class UpToDateRecords:
    """Records with all steps applied. Reads like `Store`, and applies missed steps to the read values in its own
    memory, because the owners of the pools' buffers may wait for the reader. It does not write to the store, so a step
    can still be undone after a read. Any thread may read. Before a write, wait for all updates."""

    def __init__(self, store: Store, blocks: Sequence[Block], missed: MissedSteps) -> None:
        self._store = store
        self.missed = missed
        self._block = {block.name: block for block in blocks}
        self._lock = RLock()
        """Lock of the memory."""
        self._rows: list[Tensor] = []

    @property
    def layout(self) -> StoreLayout:
        """The store's layout."""
        return self._store.layout

    def extents(self, block: str, kind: str) -> list[tuple[str, Extent]] | None:
        """See `RecordFiles.extents`. Also returns None if the block is behind."""
        return None if self._is_behind(block) else self._store.extents(block, kind)

    def read(self, block: str, kind: str, start_numel: int, out: Tensor, *, is_urgent: bool = False) -> RecordRead:
        """See `RecordFiles.read`. If the block is behind, this returns after the values have arrived."""
        if not self._is_behind(block):
            return self._store.read(block, kind, start_numel, out, is_urgent=is_urgent)
        self._fill(block, kind, start_numel, out, is_urgent=is_urgent)
        return RecordRead.of_memory()

    def reads_to_device(self, block: str, kind: str) -> bool:
        """See `RecordFiles.reads_to_device`. Missed steps are applied in host memory."""
        return self._store.reads_to_device(block, kind) and not self._is_behind(block)

    def read_unaligned(self, block: str, kind: str, start_numel: int, out: Tensor, bounce: Tensor) -> None:
        """See `RecordFiles.read_unaligned`."""
        if self._is_behind(block):
            self._fill(block, kind, start_numel, out)
        else:
            self._store.read_unaligned(block, kind, start_numel, out, bounce)

    def write_unaligned(
        self, block: str, kind: str, start_numel: int, source: Tensor, bounce: Tensor, *, may_tear: bool = True
    ) -> None:
        """See `RecordFiles.write_unaligned`. A block that is behind first catches up in the store, because its missed
        steps apply to the old values."""
        if self._is_behind(block):
            self._catch_up(self._block[block])
        self._store.write_unaligned(block, kind, start_numel, source, bounce, may_tear=may_tear)

    def tie_codes(self, block: str, start_numel: int, numel: int) -> Tensor:
        """See `RecordFiles.tie_codes`."""
        if not self._is_behind(block):
            return self._store.tie_codes(block, start_numel, numel)
        codes = torch.empty(-(-numel // TIE_RUN_NUMEL), dtype=torch.int16)
        self._fill(block, TIE_CODES, start_numel // TIE_RUN_NUMEL, codes)
        return codes

    def set_tie_codes(self, block: str, start_numel: int, numel: int, codes: Tensor) -> None:
        """See `RecordFiles.set_tie_codes`. The block first catches up, as in `write_unaligned`."""
        if self._is_behind(block):
            self._catch_up(self._block[block])
        self._store.set_tie_codes(block, start_numel, numel, codes)

    def _is_behind(self, block: str) -> bool:
        return self.missed.is_block_behind(self._block[block])

    def _fill(self, name: str, kind: str, start: int, out: Tensor, *, is_urgent: bool = False) -> None:
        block = self._block[name]
        form = block.master
        ratio = form.params_per_element(kind)
        first, last = start * ratio, (start + out.numel()) * ratio
        with self._lock:
            for chunk, low, high in self._pieces(block, kind, first, last):
                records = self._caught_up(block, chunk, (kind,), low, high, is_urgent=is_urgent)
                begin, end = max(low, first), min(high, last)
                source = slice((begin - low) // ratio, -((low - end) // ratio))
                out[(begin - first) // ratio : -((first - end) // ratio)].copy_(records[kind][source])

    def _pieces(self, block: Block, kind: str, first: int, last: int) -> Iterator[tuple[Chunk | None, int, int]]:
        """Yield (chunk, start, stop) of whole granules that cover parameters [first, last) of the block. Parameters
        outside chunks have no states, and their chunk is None."""
        granule = block.granule_numel
        step = max(_REPLAY_NUMEL, granule) // granule * granule
        chunks = sorted(self.missed.chunks(block), key=lambda chunk: chunk.start)
        edge = chunks[-1].stop if chunks else 0
        kind = "master_residual" if kind == TIE_CODES else kind
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
        """Return up-to-date records of the chunk's parameters [start, stop), by kind. They include at least ``kinds``,
        and are valid until the next call."""
        form = block.master
        missed = self.missed.steps(chunk) if chunk is not None else []
        wanted = ("param", *form.state_kinds) if missed else kinds
        rows = self._memory(block)
        records: dict[str, Tensor] = {}
        reads: list[RecordRead] = []
        try:
            if form.has_residual and (missed or TIE_CODES in kinds):
                records[TIE_CODES] = self._store.tie_codes(block.name, start, stop - start)
            for row, kind in zip(rows, (kind for kind in wanted if kind != TIE_CODES), strict=False):
                first, last = form.elements(kind, start, stop)
                dtype = form.state_dtype(kind)
                records[kind] = row[: (last - first) * dtype.itemsize].view(dtype)
                reads.append(self._store.read(block.name, kind, first, records[kind], is_urgent=is_urgent))
            for read in reads:
                read.wait()
        except BaseException:
            for read in reads:  # other reads may still write to the memory
                with suppress(Exception):
                    read.wait_for_bytes()
            raise
        if chunk is not None and missed:
            steps = [within(step, start - chunk.start, stop - chunk.start) for step in missed]
            replay_(records, steps, form, position=start, private=rows[len(wanted) :][: form.num_private_buffers])
        return records

    def _memory(self, block: Block) -> list[Tensor]:
        """Return a uint8 row for each kind and each private buffer."""
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
                if (codes := records.pop(TIE_CODES, None)) is not None:
                    self._store.set_tie_codes(block.name, low, high - low, codes)
                for kind, values in records.items():
                    first, _ = block.master.elements(kind, low, high)
                    self._store.write(block.name, kind, first, values).wait()
            self.missed.forget_block(block)
