"""Reads and writes single parameters and their states in the store, by name."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, NoReturn, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from hf_lohan.costs.quantization import LARGEST_BLOCK
from hf_lohan.device import Buffer, BufferPool
from hf_lohan.engine.commits import has_steps
from hf_lohan.files import Extent, ForeignStoreError
from hf_lohan.model import Block, ParamSlice, ranges, round_up
from hf_lohan.optim.precision import decode_master_
from hf_lohan.quantize import PackedForm, Packer
from hf_lohan.ranks import Links, RankFailedError
from hf_lohan.store import RecordRead, RecordSpec, Store
from hf_lohan.updates import UpToDateRecords, master_pieces, read_masters, round_anew, write_masters

_MOST_DECODED_NUMEL = 1 << 20
"""Largest number of elements of packed weights that are packed or decoded at once."""


class Sliceable(Protocol):
    """A flat tensor, or a lazy slice of a file."""

    def __getitem__(self, part: slice, /) -> Tensor: ...


Residuals: TypeAlias = Callable[[int, int], tuple[Tensor, Tensor]]
"""Returns residuals (int16) and positions of ties (int64) of elements [start, stop) of a weight (`optim/precision`)."""


class Zeros:
    """A flat tensor of zeros of any length."""

    def __getitem__(self, part: slice, /) -> Tensor:
        return torch.zeros(part.stop - part.start)


class _Parts(dict[str, list[tuple[Block, ParamSlice]]]):
    """Maps a parameter's name to the block and slice of each of its parts."""

    def __missing__(self, name: str) -> NoReturn:
        raise KeyError(
            f"{name} is not in the store; a tied weight has the name of its first use, and parameters must be added or "
            "untied before the model is offloaded"
        )


def packed_weight_error(name: str, form: PackedForm) -> ValueError:
    return ValueError(
        f"{name} is packed in the store (quantize: {form.setting}), so it cannot be changed; load the model with "
        "quantize: none, or change the weight before it is loaded"
    )


def another_base_error(folder: str, name: str) -> ForeignStoreError:
    """Return the error for a model whose frozen weights differ from the run with steps in ``folder``.
    ``name``: the first weight that differs."""
    return ForeignStoreError(
        f"{folder} holds the steps of a run over another base: its frozen weights differ from those of this model, "
        f"first in {name}; load the base of that run to continue from there (and set the seed before, if some of its "
        "weights are drawn), give this run another output_dir or ssd path, or delete that store if its steps are no "
        "longer needed"
    )


class ParameterAccess:
    """Reads and writes parameters to load and save a model. Training moves whole chunks instead.

    Works piece by piece in buffers of the run's pool, so a parameter may be larger than the budget. With several ranks,
    each writes its shard. All ranks read together in the same order, and get the whole parameter.
    """

    def __init__(
        self,
        store: Store | UpToDateRecords,
        blocks: list[Block],
        pool: BufferPool,
        links: Links | None = None,
        *,
        packs: bool = False,
        keeps_steps_in: str | None = None,
    ) -> None:
        """``store`` reads and writes records. It is an `UpToDateRecords` if some records may lack steps.
        ``packs``: weights are packed as they are written. Without it a change of packed weights is refused.
        ``keeps_steps_in``: the store's folder, if writes may not change frozen weights of its committed steps."""
        self._packs = packs
        self._keeps_steps_in = keeps_steps_in
        self._packers: dict[ParamSlice, Packer] = {}
        self._store = store
        self._links = links or Links.alone()
        self._pool = pool
        self._piece_numel = pool.buffer_bytes // torch.float32.itemsize
        self.parts: dict[str, list[tuple[Block, ParamSlice]]] = _Parts()
        """The block and slice of each part of a parameter, in order, by its name. Most parameters have one part."""
        for block in blocks:
            for part in block.slices:
                self.parts.setdefault(part.name, []).append((block, part))
        for parts in self.parts.values():
            parts.sort(key=lambda located: located[1].first)

    @classmethod
    def to_load(cls, store: Store, blocks: list[Block], pool: BufferPool, links: Links) -> ParameterAccess:
        """Return an access that loads a model. The store has one version of frozen weights, so the frozen weights of
        another base would destroy the committed steps of an earlier run. The first weight that differs is refused with
        `ForeignStoreError` before it is written."""
        folder = store.paths[0].path if has_steps(store) else None
        return cls(store, blocks, pool, links, packs=True, keeps_steps_in=folder)

    def state_kinds(self, name: str) -> tuple[str, ...]:
        """Return the record kinds of this parameter besides `param`."""
        block, part = self.parts[name][0]
        return block.master.state_kinds if part.trainable else ()

    def extents(self, block: Block, kind: str) -> list[tuple[str, Extent]] | None:
        """Return the extents of a record in the files, or None if the files do not have its newest content."""
        return self._store.extents(block.name, kind)

    def state_dtype(self, name: str, kind: str) -> torch.dtype:
        """Return the dtype of one record kind of a parameter."""
        block, _ = self.parts[name][0]
        return block.master.state_dtype(kind)

    @property
    def piece_bytes(self) -> int:
        """Size of a piece in float32."""
        return self._piece_numel * torch.float32.itemsize

    def write_parameter(self, name: str, source: Tensor) -> None:
        """Store a weight of any dtype on any device. A bfloat16 store keeps trained float32 values exactly."""
        shape = self.parts[name][0][1].shape
        if source.shape != shape:
            raise ValueError(f"{name} has shape {tuple(source.shape)}, the store expects {tuple(shape)}; reshape it")
        self.write_elements(name, 0, source)

    @torch.no_grad()
    def write_elements(self, name: str, first: int, source: Tensor) -> None:
        """Same as `write_parameter`, for elements of a flattened weight from ``first`` on. Raises ValueError if
        ``source`` reaches beyond the parameter's end."""
        flat = source.detach().reshape(-1)
        last, numel = first + flat.numel(), self.parts[name][0][1].shape.numel()
        if first < 0 or last > numel:
            raise ValueError(f"{name} has {numel} elements, so elements {first} to {last} cannot be written")
        with self._refusing_another_base(name):
            self._write_parts(name, first, flat)

    def _write_parts(self, name: str, first: int, flat: Tensor) -> None:
        last = first + flat.numel()
        for block, part in self.parts[name]:
            begin, end = max(first, part.first), min(last, part.last)
            if begin < end and part.packed is not None:
                values = flat[begin - first : end - first]
                if self._packs:
                    self._pack(block, part, begin - part.first, values)
                else:
                    self._check_unchanged(name, begin, values, part.packed)
        for block, part, low, high, begin in self._own_parts(name, first, last):
            if part.packed is None:
                own = flat[begin - first : begin - first + high - low]
                with self._buffers(3 if block.master.has_residual else 2) as buffers:
                    for start, stop in self._pieces(high - low, block.master.working_dtype):
                        self._write_piece(block, part, low + start, own[start:stop], buffers)

    def takes_rows(self, name: str) -> bool:
        """Whether a weight may be written some rows at a time."""
        return all(part.packed is None or part.packed.takes_rows for _, part in self.parts[name])

    def _pack(self, block: Block, part: ParamSlice, first: int, values: Tensor) -> None:
        """Pack the elements of a part from ``first`` on and store them. Elements must be passed in order, and all at
        once if the form packs only whole weights."""
        form = part.packed
        assert form is not None
        begin, end = block.rank_ranges[self._links.ranks.rank]
        if begin == end:  # an expert of another rank
            return
        if not form.takes_rows:
            assert values.numel() == part.numel, f"{part.name} is packed in another order, so it must be written whole"
            values = form.stored_order(values)
        while values.numel():
            unit, offset = divmod(first, form.unit_numel)
            packer = self._packers.get(part) or self._packers.setdefault(part, form.packer())
            assert packer.num_taken == offset, f"elements of {part.name} are not written in order"
            taken = min(form.unit_numel - offset, self._most_decoded_numel, values.numel())
            byte, codes = packer.pack(values[:taken].to("cpu", block.master.working_dtype))
            self._write_bytes(block, "codes", part.codes_start + unit * form.unit_codes_bytes + byte, codes)
            if packer.is_complete:
                start = part.scales_start + unit * form.unit_scales_bytes
                self._write_bytes(block, "scales", start, packer.pack_scales())
                del self._packers[part]
            first, values = first + taken, values[taken:]

    def write_packed(self, name: str, kind: str, first: int, content: Tensor) -> None:
        """Store bytes of a weight that is packed already, from byte ``first`` of its ``kind`` ("codes" or "scales") on.
        Bytes are counted over all parts of the weight, without gaps between parts."""
        before = 0
        for block, part in self.parts[name]:
            assert part.packed is not None, f"{name} is not packed"
            of_codes = kind == "codes"
            start, stop = (part.codes_start, part.codes_stop) if of_codes else (part.scales_start, part.scales_stop)
            low, high = max(first, before), min(first + content.numel(), before + stop - start)
            if low < high:
                with self._refusing_another_base(name):
                    self._write_bytes(block, kind, start + low - before, content[low - first : high - first])
            before += stop - start

    def _write_bytes(self, block: Block, kind: str, start: int, content: Tensor) -> None:
        """Store this rank's part of bytes of packed weights, from byte ``start`` of the record on."""
        first, last = block.record_ranges(kind)[self._links.ranks.rank]
        low, high = max(start, first), min(start + content.numel(), last)
        if low < high:
            with self._buffers(1) as (bounce,):
                part = content[low - start : high - start]
                self._store.write_unaligned(block.name, kind, low, part, bounce.bytes, may_tear=self._may_tear)

    @property
    def _may_tear(self) -> bool:
        return self._keeps_steps_in is None

    @contextmanager
    def _refusing_another_base(self, name: str) -> Iterator[None]:
        """Within this context, the error of a refused write says whose steps would be lost."""
        try:
            yield
        except ForeignStoreError as error:
            assert self._keeps_steps_in is not None, "a write was refused"
            raise another_base_error(self._keeps_steps_in, name) from error

    def _read_bytes(self, block: Block, kind: str, start: int, out: Tensor) -> None:
        """Fill ``out`` with bytes of packed weights, from byte ``start`` of the record on. Ranks send their bytes."""
        for owner, (first, last) in enumerate(block.record_ranges(kind)):
            low, high = max(start, first), min(start + out.numel(), last)
            if low < high:
                of_owner = out[low - start : high - start]
                if owner == self._links.ranks.rank:
                    with self._buffers(1) as (bounce,):
                        self._store.read_unaligned(block.name, kind, low, of_owner, bounce.bytes)
                self._links.broadcast(of_owner, owner, f"{kind} of {block.name}")

    @property
    def _most_decoded_numel(self) -> int:
        """Number of elements that are packed or decoded at once."""
        return min(self._piece_numel, _MOST_DECODED_NUMEL) // LARGEST_BLOCK * LARGEST_BLOCK

    def _check_unchanged(self, name: str, first: int, values: Tensor, form: PackedForm) -> None:
        """Raise ValueError if these values of a packed weight differ from the store."""
        for start, piece in self.read_pieces(name, "param", first, first + values.numel()):
            given = values[start - first : start - first + piece.numel()]
            if not torch.equal(piece, given.to("cpu", piece.dtype)):
                raise packed_weight_error(name, form)

    def _read_packed(self, block: Block, part: ParamSlice, first: int, last: int) -> Iterator[tuple[int, Tensor]]:
        """Yield (start, piece) pairs of the decoded elements [first, last) of a packed part."""
        form = part.packed
        assert form is not None
        scales = torch.empty(form.scales_bytes(part.numel), dtype=torch.uint8)
        self._read_bytes(block, "scales", part.scales_start, scales)
        while first < last:
            begin, end = form.bytes_of(first, min(first + self._most_decoded_numel, last))
            codes = torch.empty(end - begin, dtype=torch.uint8)
            self._read_bytes(block, "codes", part.codes_start + begin, codes)
            low, high = form.elements(begin, end)
            piece = torch.empty(high - low, dtype=block.master.working_dtype)
            form.decode_(piece, low, codes, begin, scales)
            stop = min(high, last)
            yield first, piece[first - low : stop - low]
            first = stop

    def _pieces(self, numel: int, dtype: torch.dtype) -> Iterator[tuple[int, int]]:
        """Yield ranges [start, stop) of elements. Each range fits in a buffer."""
        return ranges(numel, self._piece_numel * torch.float32.itemsize // max(dtype.itemsize, torch.float32.itemsize))

    def _own_range(self, block: Block, start: int, stop: int) -> tuple[int, int]:
        """Return this rank's part of elements [start, stop) of a block, which may be empty."""
        first, last = block.rank_ranges[self._links.ranks.rank]
        low = min(max(start, first), stop)
        return low, max(low, min(stop, last))

    def _write_piece(self, block: Block, part: ParamSlice, offset: int, piece: Tensor, buffers: list[Buffer]) -> None:
        numel = piece.numel()
        bounce = buffers[0].bytes
        master = buffers[1].view(torch.float32 if block.master.has_residual else block.master.working_dtype, numel)
        master.copy_(piece)
        if not block.master.has_residual:
            self._store.write_unaligned(block.name, "param", offset, master, bounce, may_tear=self._may_tear)
            return
        working = buffers[2].view(torch.bfloat16, numel)
        residual = buffers[2].view(torch.int16, numel, start_byte=2 * self._piece_numel)
        memory = (master, working, residual, bounce)
        try:
            write_masters(self._store, block, offset, *memory, may_tear=self._may_tear, is_trained=part.trainable)
        except ForeignStoreError:
            # An older version of this library rounded frozen weights half up. These weights stay as they are.
            working.view(torch.int16).copy_((master.view(torch.int32) + 0x8000) >> 16)
            self._store.write_unaligned(block.name, "param", offset, working, bounce, may_tear=self._may_tear)

    def read_parameter(self, name: str) -> Tensor:
        """Return the working weight as a new host tensor of the parameter's shape."""
        return self.read_flat(name, "param").view(self.parts[name][0][1].shape)

    def read_flat(self, name: str, kind: str) -> Tensor:
        """Return one record kind of a parameter as a new flat host tensor in the stored dtype."""
        block, last = self.parts[name][-1]
        out = torch.empty(block.master.numel(kind, last.last), dtype=self.state_dtype(name, kind))
        for start, piece in self.read_pieces(name, kind):
            out[start : start + piece.numel()].copy_(piece)
        return out

    def read_elements(self, name: str, first: int, last: int) -> Tensor:
        """Return elements [first, last) of the flattened working weight as a new flat host tensor."""
        out = torch.empty(last - first, dtype=self.state_dtype(name, "param"))
        for start, piece in self.read_pieces(name, "param", first, last):
            out[start - first : start - first + piece.numel()].copy_(piece)
        return out

    def read_masters(self, name: str, first: int, last: int) -> Tensor:
        """Same as `read_elements`, for the float32 master. A frozen weight is its own master."""
        if "master_residual" not in self.state_kinds(name):
            return self.read_elements(name, first, last).to(torch.float32)
        out, rank = torch.empty(last - first), self._links.ranks.rank
        for block, part in self.parts[name]:
            low, high = max(first, part.first), min(last, part.last)
            for owner, (begin, end) in enumerate(block.rank_ranges):
                start, stop = max(part.start + low - part.first, begin), min(part.start + high - part.first, end)
                if start >= stop:
                    continue
                before = start - part.start + part.first - first
                of_owner = out[before : before + stop - start]
                with self._buffers(1) as (bounce,):
                    own = read_masters(self._store, block, start, stop, bounce.bytes) if owner == rank else None
                    for first_of_piece, last_of_piece in master_pieces(start, stop):
                        piece = of_owner[first_of_piece:last_of_piece]
                        if own is not None:
                            piece.copy_(next(own))
                        self._links.broadcast(piece, owner, f"masters of {block.name}")
        return out

    def read_pieces(
        self, name: str, kind: str, first: int = 0, last: int | None = None
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield (start, piece) pairs of one record kind of a parameter, or of its elements [first, last). A piece is
        valid until the next piece is read."""
        for block, part in self.parts[name]:
            low, high = max(first, part.first), part.last if last is None else min(last, part.last)
            if low < high and kind == "param" and part.packed is not None:
                for start, piece in self._read_packed(block, part, low - part.first, high - part.first):
                    yield part.first + start, piece
            elif low < high:
                before, _ = block.master.elements(kind, low, high)
                offset = part.start + low - part.first
                for start, piece in self._read_range(block, kind, offset, offset + high - low):
                    yield before + start, piece

    def _read_range(self, block: Block, kind: str, begin: int, end: int) -> Iterator[tuple[int, Tensor]]:
        """Yield (start, piece) pairs of the part of a record that belongs to the block's elements [begin, end)."""
        origin, _ = block.master.elements(kind, begin, end)
        for owner, (first, last) in enumerate(block.rank_ranges):
            low, high = max(begin, first), min(end, last)
            if low < high:
                first_element, last_element = block.master.elements(kind, low, high)
                for start, piece in self._read_from(owner, block, kind, first_element, last_element):
                    yield first_element - origin + start, piece

    def _read_from(self, owner: int, block: Block, kind: str, first: int, last: int) -> Iterator[tuple[int, Tensor]]:
        """Yield (start, piece) pairs of elements [first, last) of a record in ``owner``'s store."""
        links, tag = self._links, f"{kind} of {block.name}"
        if owner == links.ranks.rank:
            for start, piece in self.read_own(block, kind, first, last):
                links.broadcast(piece, owner, tag)
                yield start, piece
            return
        with self._buffers(1) as (landing,):
            dtype = block.master.state_dtype(kind)
            for start, stop in self._pieces(last - first, dtype):
                piece = landing.view(dtype, stop - start)
                links.broadcast(piece, owner, tag)
                yield start, piece

    def read_own(self, block: Block, kind: str, first: int, last: int) -> Iterator[tuple[int, Tensor]]:
        """Yield (start, piece) pairs of elements [first, last) of a record in this rank's store, without the other
        ranks. A piece is valid until the next piece is read."""
        record, dtype = self._store.layout.record(block.name, kind), block.master.state_dtype(kind)
        if first % record.granule_numel == 0:
            yield from self._read_ahead(record, dtype, first, last)
            return
        with self._buffers(2) as (bounce, landing):  # a small parameter shares a granule with others
            for start, stop in self._pieces(last - first, dtype):
                piece = landing.view(dtype, stop - start)
                self._store.read_unaligned(block.name, kind, first + start, piece, bounce.bytes)
                yield start, piece

    def _read_ahead(
        self, record: RecordSpec, dtype: torch.dtype, first: int, last: int
    ) -> Iterator[tuple[int, Tensor]]:
        """Same as `read_own`, but ``first`` must start a granule. Reads the next piece while the current is in use."""
        reading: deque[tuple[int, int, RecordRead, Tensor]] = deque()
        with self._buffers(2) as buffers:
            try:
                for number, (start, stop) in enumerate(self._pieces(last - first, dtype)):
                    read_stop = min(round_up(first + stop, record.granule_numel), record.first + record.numel)
                    landing = buffers[number % 2].view(dtype, read_stop - first - start)
                    read = self._store.read(record.block, record.kind, first + start, landing)
                    reading.append((start, stop, read, landing))
                    if len(reading) == len(buffers):
                        yield self._next_piece(reading)
                while reading:
                    yield self._next_piece(reading)
            finally:
                for _, _, read, _ in reading:  # a read that is no longer needed still writes to its buffer
                    with suppress(Exception):
                        read.wait_for_bytes()

    @staticmethod
    def _next_piece(reading: deque[tuple[int, int, RecordRead, Tensor]]) -> tuple[int, Tensor]:
        start, stop, read, landing = reading[0]
        read.wait()
        reading.popleft()  # after the wait: if an interrupt ends the wait, `_read_ahead` still finds the read
        return start, landing[: stop - start]

    def tie_codes(self, block: Block, first: int, last: int) -> Tensor:
        """Return the tie codes of residuals [first, last) in this rank's store. ``first`` begins a run of one code."""
        return self._store.tie_codes(block.name, first, last - first)

    def round_anew(self, blocks: list[Block]) -> int:
        """Round this rank's bfloat16 weights again (see `updates/masters`). Returns the number of changed weights."""
        num_changed = 0
        for block in blocks:
            first, last = self._own_range(block, 0, block.state_numel)
            if block.master.has_residual and first < last:
                with self._buffers(1) as (bounce,):
                    num_changed += round_anew(self._store, block, first, last, bounce.bytes)
        return num_changed

    @torch.no_grad()
    def write_residuals(self, name: str, source: Residuals, *, first: int, last: int) -> None:
        """Replace the residuals of the masters of elements [first, last) of a parameter. Element 0 of ``source`` is
        element ``first``."""
        for block, part, low, high, begin in self._own_parts(name, first, last):
            with self._buffers(3) as buffers:
                for start, stop in ranges(high - low, self._piece_numel):
                    residual, ties = source(begin - first + start, begin - first + stop)
                    working = buffers[1].view(torch.bfloat16, stop - start)
                    self._store.read_unaligned(block.name, "param", low + start, working, buffers[0].bytes)
                    master = torch.empty(stop - start)
                    decode_master_(master, working, residual, ties)
                    self._write_piece(block, part, low + start, master, buffers)

    def _own_parts(self, name: str, first: int, last: int) -> Iterator[tuple[Block, ParamSlice, int, int, int]]:
        """Yield (block, part, low, high, begin) for each block with elements [first, last) of a parameter. This rank
        has the block's elements [low, high). ``begin`` is the parameter's element at ``low``."""
        for block, part in self.parts[name]:
            begin, end = max(first, part.first), min(last, part.last)
            if begin < end:
                offset = part.start + begin - part.first
                low, high = self._own_range(block, offset, offset + end - begin)
                if low < high:
                    yield block, part, low, high, begin + low - offset

    @torch.no_grad()
    def write_state(self, name: str, kind: str, source: Sliceable, *, first: int = 0, last: int | None = None) -> None:
        """Store one state record (`exp_avg`, `master_residual`, ...) of a parameter, or of its elements [first, last).
        ``source`` begins at ``first``."""
        last = self.parts[name][-1][1].last if last is None else last
        for block, _, low, high, begin in self._own_parts(name, first, last):
            before, _ = block.master.elements(kind, begin - first, begin - first + high - low)
            self._write_elements(block, kind, *block.master.elements(kind, low, high), source, before)

    def _write_elements(self, block: Block, kind: str, first: int, last: int, source: Sliceable, before: int) -> None:
        """Write elements [first, last) of a record from ``source``, whose first ``before`` elements are skipped."""
        with self._buffers(2) as (bounce, landing):
            for start, stop in ranges(last - first, self._piece_numel):
                piece = landing.view(block.master.state_dtype(kind), stop - start)
                piece.copy_(source[before + start : before + stop])
                self._store.write_unaligned(block.name, kind, first + start, piece, bounce.bytes)

    @contextmanager
    def _buffers(self, count: int) -> Iterator[list[Buffer]]:
        with ExitStack() as stack:
            buffers = []
            for _ in range(count):
                buffer = self._pool.acquire()
                stack.callback(buffer.release)
                buffers.append(buffer)
            yield buffers


def drain_model(blocks: list[Block], parameters: ParameterAccess) -> None:
    """Write every parameter to the store, and then free their memory. After an error the model is unchanged.

    The parameters become empty tensors, which the engine replaces by placeholders.
    """
    drained = {part.name: part.parameter for block in blocks for part in block.slices}
    for name, parameter in drained.items():
        parameters.write_parameter(name, parameter)
    for parameter in drained.values():
        _free_parameter(parameter)


def _free_parameter(parameter: nn.Parameter) -> None:
    parameter.grad = None
    parameter.data = parameter.data.new_empty(0)


class CollectiveReads:
    """Reads weights with all ranks together, because each rank stores a part of every weight. Rank 0 (`leading`)
    chooses the order and sends it to the others (`follow_rank_0`). Reads as `ParameterAccess` does."""

    def __init__(self, access: Callable[[], ParameterAccess], links: Links) -> None:
        """`access` is called for each weight, because an engine waits for the weight's updates in this call."""
        self._access = access
        self._links = links

    @property
    def parts(self) -> dict[str, list[tuple[Block, ParamSlice]]]:
        return self._access().parts

    def read_parameter(self, name: str) -> Tensor:
        self._announce("read_parameter", name)
        return self._access().read_parameter(name)

    def read_elements(self, name: str, first: int, last: int) -> Tensor:
        self._announce("read_pieces", name, "param", first, last)
        return self._access().read_elements(name, first, last)

    def read_masters(self, name: str, first: int, last: int) -> Tensor:
        self._announce("read_masters", name, first, last)
        return self._access().read_masters(name, first, last)

    def read_pieces(
        self, name: str, kind: str, first: int = 0, last: int | None = None
    ) -> Iterator[tuple[int, Tensor]]:
        self._announce("read_pieces", name, kind, first, last)
        pieces = self._access().read_pieces(name, kind, first, last)
        try:
            while (piece := next(pieces, None)) is not None:
                yield piece
        finally:
            for _ in pieces:  # the other ranks read the rest even if this caller stops
                pass

    @contextmanager
    def leading(self) -> Iterator[None]:
        """On rank 0, lead the other ranks until the end of this context. An error is sent to them."""
        try:
            yield
        except BaseException as error:
            with suppress(RankFailedError):  # another rank may have ended because of this rank
                self._announce("failed", f"{type(error).__name__}: {error}")
            raise
        self._announce()

    def follow_rank_0(self) -> None:
        """On the other ranks, read what rank 0 reads. Raises RankFailedError if rank 0 failed."""
        while order := self._announce():
            method, *arguments = order
            if method == "failed":
                raise RankFailedError(f"rank 0 could not save the model: {arguments[0]}", 0)
            read = getattr(self._access(), method)(*arguments)
            for _ in read if method == "read_pieces" else ():
                pass

    def _announce(self, *order: str | int | None) -> list[Any]:
        """Send a method and its arguments from rank 0, and return them on all ranks."""
        told = self._links.all_gather("the next weight to save", json.dumps(order).encode())
        first: list[Any] = json.loads(told[0])
        return first
