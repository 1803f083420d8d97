"""The byte layout of records in files. This module opens no files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

from hf_lohan.files import SECTOR_BYTES, Extent, StorePath

GRANULE_NUMEL = 16 * 1024
"""Elements in a granule of a small model's records."""
MAX_GRANULE_NUMEL = 256 * 1024
"""Elements in a granule of a large model's records. Larger granules keep the version tables small, and above 64 KiB
`xxhash` releases the GIL while it hashes."""
RECORD_ALIGN_NUMEL = 2048
"""Records are padded to a multiple of this, which is whole sectors for dtypes of at least two bytes."""
DEFAULT_STRIPE_BYTES = 4 << 20
_STATE_KINDS = (
    *("exp_avg", "exp_avg_sq", "moment_scales"),
    *("momentum_buffer", "square_avg", "grad_avg", "sum", "variance"),
)
KINDS = ("param", "codes", "scales", "master_residual", *_STATE_KINDS, "gradient", "activation")
DTYPE_BYTES = {
    **dict.fromkeys(("float64", "int64"), 8),
    **dict.fromkeys(("float32", "int32"), 4),
    **dict.fromkeys(("bfloat16", "float16", "int16"), 2),
    **dict.fromkeys(("int8", "uint8", "bool", "float8_e4m3fn", "float8_e5m2"), 1),
}
PARAMS_PER_ELEMENT = {"moment_scales": 16}
"""Maps kinds with several parameters for each element to this number. Their granules are smaller by this factor,
so that equal granule numbers belong to the same parameters."""


def granules_of(numel: int, granule_numel: int) -> int:
    """Return the number of granules of ``numel`` elements. The last one may be short."""
    return -(-numel // granule_numel)


@dataclass(frozen=True)
class RecordSpec:
    """One block's flat tensor of one kind. Raises ValueError if it cannot be stored."""

    block: str
    kind: str
    dtype: str
    numel: int
    versioned_numel: int = -1
    """Number of leading elements that have a second home in a store with two homes; default: all. The other elements
    are frozen weights, which no step writes."""
    granule_numel: int = 0
    """Elements in a granule. By default these belong to `GRANULE_NUMEL` parameters."""
    first: int = field(default=0, repr=False)
    """First element of the block's flat tensor in this record. It is 0 with a single rank."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"record {self.block!r} has the kind {self.kind!r}; choose one of {', '.join(KINDS)}")
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"record {self.block!r} has dtype {self.dtype!r}; choose one of {', '.join(DTYPE_BYTES)}")
        if self.granule_numel < 1:
            object.__setattr__(self, "granule_numel", GRANULE_NUMEL // PARAMS_PER_ELEMENT.get(self.kind, 1))
        if self.granule_bytes % SECTOR_BYTES:
            raise ValueError(
                f"record {self.block!r} has granules of {self.granule_numel} elements; choose whole sectors of "
                f"{SECTOR_BYTES} bytes"
            )
        if self.numel < 1 or self.numel % self.align_numel:
            raise ValueError(
                f"record {self.block!r} has numel {self.numel}; pad it to a multiple of {self.align_numel}"
            )
        if self.first < 0 or self.first % self.granule_numel:
            raise ValueError(
                f"record {self.block!r} begins at element {self.first}; let it begin at a multiple of "
                f"{self.granule_numel}"
            )
        if self.versioned_numel < 0:
            object.__setattr__(self, "versioned_numel", self.numel)
        if self.versioned_numel > self.numel or self.versioned_numel % self.align_numel:
            raise ValueError(
                f"record {self.block!r} has versioned_numel {self.versioned_numel} of {self.numel}; pad it to a "
                f"multiple of {self.align_numel}"
            )

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return DTYPE_BYTES[self.dtype]

    @property
    def num_bytes(self) -> int:
        return self.numel * self.itemsize

    @property
    def granule_bytes(self) -> int:
        return self.granule_numel * self.itemsize

    @property
    def num_granules(self) -> int:
        """Number of granules. The last one may be short."""
        return granules_of(self.numel, self.granule_numel)

    @property
    def align_numel(self) -> int:
        """The record's numel is a multiple of this, which is whole sectors."""
        if self.kind in PARAMS_PER_ELEMENT:
            return SECTOR_BYTES // self.itemsize
        return max(RECORD_ALIGN_NUMEL, SECTOR_BYTES // self.itemsize)


@dataclass(frozen=True)
class StoreLayout:
    """Records that are striped over the paths. The records form one run of bytes, which is cut into rows of
    ``stripe_bytes``. Each path stores its share of each row, in whole sectors and in proportion to its capacity. The
    last row may be shorter, and is divided in the same proportion, so the files have no padding. A path gets at most
    one sector per row more than its exact share."""

    records: tuple[RecordSpec, ...]
    paths: tuple[StorePath, ...]
    stripe_bytes: int = DEFAULT_STRIPE_BYTES

    def __post_init__(self) -> None:
        if self.stripe_bytes < SECTOR_BYTES or self.stripe_bytes % SECTOR_BYTES:
            raise ValueError(f"stripe_bytes is {self.stripe_bytes}; choose a positive multiple of {SECTOR_BYTES}")
        if len(self._records_at) != len(self.records):
            raise ValueError("two records of a store have the same block and kind; give every block its own name")
        assert all(path.capacity_bytes is not None for path in self.paths), "resolve capacities first"

    @cached_property
    def total_bytes(self) -> int:
        """Bytes of all records, and of all files together."""
        return sum(record.num_bytes for record in self.records)

    @cached_property
    def file_bytes(self) -> tuple[int, ...]:
        """Exact size of the file on each path."""
        num_rows = self.total_bytes // self.stripe_bytes
        return tuple(num_rows * row + tail for row, tail in zip(self._row_shares, self._tail_shares, strict=True))

    def has(self, block: str, kind: str) -> bool:
        return (block, kind) in self._records_at

    def offset_in(self, block: str, kind: str, element: int) -> int:
        """Return the offset in the record of an element of the block's flat tensor."""
        return element - self.record(block, kind).first

    def record(self, block: str, kind: str) -> RecordSpec:
        """Return the record. Raises KeyError if it does not exist."""
        return self._locate(block, kind)[0]

    def extents(self, block: str, kind: str, start_byte: int, num_bytes: int) -> list[Extent]:
        """Return the extents of ``num_bytes`` of a record from ``start_byte`` on, in record order."""
        record, record_start = self._locate(block, kind)
        assert 0 <= start_byte <= start_byte + num_bytes <= record.num_bytes, "the range leaves its record"
        start = record_start + start_byte
        merged: list[Extent] = []
        for run in self._runs(start, start + num_bytes):
            last = merged[-1] if merged else None
            # Runs are in record order, so runs that are adjacent in the file are adjacent in the record.
            if last and (last.path_index, last.file_offset + last.num_bytes) == run[:2]:
                merged[-1] = last._replace(num_bytes=last.num_bytes + run.num_bytes)
            else:
                merged.append(run._replace(record_byte_offset=run.record_byte_offset - record_start))
        return merged

    def second_home(self) -> StoreLayout:
        """Return the layout of the second home, which has only the elements with a second home."""
        versioned = [record for record in self.records if record.versioned_numel]
        records = tuple(replace(record, numel=record.versioned_numel) for record in versioned)
        return StoreLayout(records, self.paths, self.stripe_bytes)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> StoreLayout:
        """Return the layout of `to_json`'s result. Raises KeyError, TypeError or ValueError for other content."""
        records = tuple(RecordSpec(**record) for record in fields["records"])
        paths = tuple(StorePath(**path) for path in fields["paths"])
        numels = [
            number
            for record in records
            for number in (record.numel, record.versioned_numel, record.granule_numel, record.first)
        ]
        if not all(type(number) is int for number in (*numels, *(path.capacity_bytes for path in paths))):
            raise TypeError("a size is not an integer")
        return cls(records, paths, fields["stripe_bytes"])

    @cached_property
    def _records_at(self) -> dict[tuple[str, str], tuple[RecordSpec, int]]:
        starts = accumulate((record.num_bytes for record in self.records), initial=0)
        return {
            (record.block, record.kind): (record, start) for record, start in zip(self.records, starts, strict=False)
        }

    def _locate(self, block: str, kind: str) -> tuple[RecordSpec, int]:
        try:
            return self._records_at[block, kind]
        except KeyError:
            raise KeyError(f"the store has no {kind} record of block {block!r}") from None

    @cached_property
    def _row_shares(self) -> tuple[int, ...]:
        return self._shares(self.stripe_bytes)

    @cached_property
    def _tail_shares(self) -> tuple[int, ...]:
        return self._shares(self.total_bytes % self.stripe_bytes)

    def _shares(self, row_bytes: int) -> tuple[int, ...]:
        """Split ``row_bytes`` into whole sectors per path. The remaining sectors go to the paths with the largest
        remainders."""
        capacities = [path.capacity_bytes or 0 for path in self.paths]
        if not any(capacities):  # `check_sizes` raises an error with numbers
            capacities = [1] * len(capacities)
        num_sectors, total = row_bytes // SECTOR_BYTES, sum(capacities)
        shares = [num_sectors * capacity // total for capacity in capacities]
        neediest = sorted(range(len(shares)), key=lambda i: -(num_sectors * capacities[i] % total))
        for index in neediest[: num_sectors - sum(shares)]:
            shares[index] += 1
        return tuple(share * SECTOR_BYTES for share in shares)

    def _runs(self, start: int, stop: int) -> Iterator[Extent]:
        """Iterate over contiguous runs of store bytes ``start:stop``, row by row. ``record_byte_offset`` counts from
        the store's start."""
        if len(self.paths) == 1:  # a single path's shares are whole rows
            if start < stop:
                yield Extent(0, start, start, stop - start)
            return
        num_full_rows = self.total_bytes // self.stripe_bytes
        for row in range(start // self.stripe_bytes, -(-stop // self.stripe_bytes)):
            share_start = row * self.stripe_bytes
            shares = self._row_shares if row < num_full_rows else self._tail_shares
            for path_index, share_bytes in enumerate(shares):
                first, last = max(start, share_start), min(stop, share_start + share_bytes)
                if first < last:
                    file_offset = row * self._row_shares[path_index] + first - share_start
                    yield Extent(path_index, file_offset, first, last - first)
                share_start += share_bytes
