"""Updating in parts changes no bit, verifies all inputs and hashes all outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.optim.adamw import adamw

from hf_lohan.device import mapped_empty
from hf_lohan.files import CorruptionError, IoEngine, StorePath
from hf_lohan.optim import (
    TIE_CODES,
    AdamWGroup,
    MasterFormat,
    MomentDtype,
    Segment,
    join_master_,
    master_format,
    split_master_,
)
from hf_lohan.optim.update import adamw_in_tiles_
from hf_lohan.store import GRANULE_NUMEL, Checksums, ModelIdentity, RecordRead, RecordSpec, Store
from hf_lohan.threads import KernelThreads
from hf_lohan.updates.chunk_update import MIN_PART_NUMEL, update_in_parts

GROUP = AdamWGroup(lr=1e-2, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1)
OTHER = AdamWGroup(lr=1e-3, beta1=0.8, beta2=0.99, eps=1e-6, weight_decay=0.0)
PART_NUMEL = MIN_PART_NUMEL
NUMEL = 5 * PART_NUMEL + GRANULE_NUMEL + 2048
SEGMENTS = (
    Segment(0, 2 * PART_NUMEL + 7, GROUP, 1),  # ends within a part and within a vector
    Segment(2 * PART_NUMEL + 32, 2 * PART_NUMEL + 33, OTHER, 3),
    Segment(3 * PART_NUMEL - 64, 5 * PART_NUMEL, OTHER, 4),  # from the end of one part to the end of another
    Segment(5 * PART_NUMEL + 96, NUMEL - 3, GROUP, 2),
)
POSITION = 3 * PART_NUMEL
"""The chunk's offset in its block."""
FORMS: tuple[tuple[torch.dtype, MomentDtype], ...] = (
    (torch.float32, "float32"),
    (torch.bfloat16, "float32"),
    (torch.float32, "bfloat16"),
    (torch.bfloat16, "int8"),
)


@pytest.fixture(params=FORMS, ids=str)
def form(request: pytest.FixtureRequest) -> MasterFormat:
    return master_format(*request.param)


@pytest.fixture
def store(form: MasterFormat, tmp_path: Path) -> Iterator[Store]:
    """A store that has one block with random states."""
    numel = -(-NUMEL // form.align_numel) * form.align_numel
    specs = [
        RecordSpec("block", kind, str(form.state_dtype(kind)).removeprefix("torch."), form.numel(kind, numel))
        for kind in ("param", *form.state_kinds)
    ]
    engine = IoEngine(2, 1 << 20, 1 << 26)
    model = ModelIdentity("Tested", NUMEL, "0" * 64)
    generator = torch.Generator().manual_seed(0)
    with Store.create([StorePath(str(tmp_path / "store"), None)], specs, model=model, engine=engine) as store:
        for spec in specs:
            values = torch.randn(spec.numel, generator=generator).abs_() * 100
            dtype = getattr(torch, spec.dtype)
            limit = 127.0 if spec.itemsize == 1 else torch.inf
            store.write("block", spec.kind, 0, aligned(values.clamp_(max=limit).to(dtype))).wait()
        yield store
    engine.close()


def aligned(values: Tensor) -> Tensor:
    return mapped_empty(values.nbytes).view(values.dtype).copy_(values)


def gradient(store: Store) -> Tensor:
    numel = store.layout.record("block", "param").numel
    return torch.randn(numel, generator=torch.Generator().manual_seed(1))


def read_all(store: Store) -> tuple[dict[str, Tensor], list[RecordRead]]:
    records = {
        record.kind: mapped_empty(record.num_bytes).view(getattr(torch, record.dtype)) for record in store.records
    }
    reads = [store.read("block", kind, 0, out) for kind, out in records.items()]
    if "master_residual" in records:
        records[TIE_CODES] = store.tie_codes("block", 0, records["param"].numel())
    return records, reads


def in_parts(
    store: Store, form: MasterFormat, num_threads: int, clip: float = 1.0, *, of_zeros: bool = False
) -> tuple[dict[str, Tensor], dict[str, Checksums]]:
    """Return the updated records and their checksums. `of_zeros`: pass no gradient."""
    records, reads = read_all(store)
    for read in reads:
        read.wait_for_bytes()
    values = gradient(store)
    checksums = update_in_parts(
        KernelThreads(num_threads),
        form,
        records,
        None if of_zeros else values,
        reads,
        SEGMENTS,
        position=POSITION,
        clip_coefficient=clip,
        private=[mapped_empty(values.nbytes) for _ in range(form.num_private_buffers)],
        checksums_of=partial(store.checksums, "block"),
        unhashed=[TIE_CODES],
    )
    return records, checksums


def in_one_piece(store: Store, form: MasterFormat, clip: float) -> dict[str, Tensor]:
    """Update the whole chunk at once with torch's function. Encoded moments are updated segment by segment."""
    records, reads = read_all(store)
    for read in reads:
        read.wait()
    scaled = gradient(store) * clip
    if form.moment_codec is not None:
        for segment in SEGMENTS:
            workspace = mapped_empty(1 << 16)
            adamw_in_tiles_(records, scaled, [segment], form, position=POSITION, workspace=workspace)
        return records
    numel = scaled.numel()
    master = records["param"]
    if form.has_residual:
        master = torch.empty(numel)
        join_master_(master, records)
    for segment in SEGMENTS:
        part, group = slice(segment.start, segment.stop), segment.group
        adamw(
            [master[part]],
            [scaled[part]],
            [records["exp_avg"][part]],
            [records["exp_avg_sq"][part]],
            [],
            [torch.tensor(float(segment.step - 1))],
            fused=True,
            amsgrad=False,
            maximize=False,
            lr=group.lr,
            beta1=group.beta1,
            beta2=group.beta2,
            eps=group.eps,
            weight_decay=group.weight_decay,
        )
    if form.has_residual:
        split_master_(master, records)
    return records


@pytest.mark.covering(1)
@pytest.mark.parametrize("num_threads", [1, 2, 9])
@pytest.mark.parametrize("clip", [1.0, 0.3])
def test_parts_change_no_bit(store: Store, form: MasterFormat, num_threads: int, clip: float) -> None:
    before, reads = read_all(store)
    for read in reads:
        read.wait()
    records, checksums = in_parts(store, form, num_threads, clip)
    for kind, expected in in_one_piece(store, form, clip).items():
        found = records[kind]
        assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
        assert not torch.equal(found.view(torch.uint8), before[kind].view(torch.uint8))
        if kind == TIE_CODES:
            continue
        assert checksums[kind].tolist() == store.checksums("block", kind, expected).tolist()


def test_no_gradient_equals_a_gradient_of_zeros(store: Store, form: MasterFormat) -> None:
    records, checksums = in_parts(store, form, 2, of_zeros=True)
    for kind, expected in in_one_piece(store, form, 0.0).items():
        assert torch.equal(records[kind].view(torch.uint8), expected.view(torch.uint8)), kind
        if kind == TIE_CODES:
            continue
        assert checksums[kind].tolist() == store.checksums("block", kind, expected).tolist()


@pytest.mark.parametrize("granule", [0, 5, NUMEL // GRANULE_NUMEL])
def test_every_granule_of_every_input_is_verified(
    store: Store, form: MasterFormat, granule: int, flip: Callable[[str, int], None]
) -> None:
    for record in store.records:
        first = form.numel(record.kind, granule * GRANULE_NUMEL)
        flip(record.kind, first * record.itemsize + 3)
        with pytest.raises(CorruptionError, match=f"{record.kind} of block is damaged from element {first} on"):
            in_parts(store, form, 2)
        flip(record.kind, first * record.itemsize + 3)
    in_parts(store, form, 2)


@pytest.fixture
def flip(store: Store) -> Callable[[str, int], None]:
    """Return a function that flips a bit in a byte of a record on disk."""

    def flipped(kind: str, byte: int) -> None:
        for path, extent in store.extents("block", kind) or []:
            if extent.record_byte_offset <= byte < extent.record_byte_offset + extent.num_bytes:
                with open(path, "r+b") as stream:
                    offset = extent.file_offset + byte - extent.record_byte_offset
                    stream.seek(offset)
                    changed = stream.read(1)[0] ^ 4
                    stream.seek(offset)
                    stream.write(bytes([changed]))

    return flipped
