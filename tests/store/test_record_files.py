from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from data_files import EngineFactory
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from storage_doubles import FaultyBackend, FlippingBackend, GatedBackend, ShortBackend

from hf_lohan.device import mapped_empty
from hf_lohan.files import CorruptionError, IoEngine, StorageError, StorePath
from hf_lohan.store import RecordFiles, RecordSpec, StoreLayout

Values = Callable[[RecordSpec, int], torch.Tensor]
Records = tuple[RecordSpec, ...]


def new_files(root: Path, records: Records, engine: IoEngine, capacities: tuple[int, ...] = (5, 3, 1)) -> RecordFiles:
    directories = [root / str(i) for i in range(len(capacities))]
    for directory in directories:
        directory.mkdir(parents=True)
    paths = tuple(StorePath(str(d), c) for d, c in zip(directories, capacities, strict=True))
    return RecordFiles.create_files(StoreLayout(records, paths, 5 * 4096), list(map(str, directories)), "r.bin", engine)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("capacities", [(1,), (1, 1), (5, 3, 1)])
@pytest.mark.parametrize("max_bytes", [None, 4096, 9000])
def test_written_records_are_read(
    tmp_path: Path,
    make_engine: EngineFactory,
    records: Records,
    random_values: Values,
    capacities: tuple[int, ...],
    max_bytes: int | None,
) -> None:
    engine = make_engine(None if max_bytes is None else ShortBackend(max_bytes))
    with new_files(tmp_path, records, engine, capacities) as files:
        written = {record: random_values(record, record.numel) for record in records}
        requests = [files.write(r.block, r.kind, 0, values) for r, values in written.items()]
        for request in requests:
            request.wait()
        for record, values in written.items():
            for start in range(0, record.numel, 2048):
                out = random_values(record, min(4096, record.numel - start))
                files.read(record.block, record.kind, start, out).wait()
                assert torch.equal(bits(out), bits(values[start : start + out.numel()]))
        assert engine.write_bytes == files.size_bytes == sum(record.num_bytes for record in records)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_range_goes_through_a_bounce_buffer(
    tmp_path_factory: pytest.TempPathFactory,
    engine: IoEngine,
    records: Records,
    random_values: Values,
    data: st.DataObject,
) -> None:
    record = data.draw(st.sampled_from(records))
    start = data.draw(st.integers(0, record.numel))
    numel = data.draw(st.integers(0, record.numel - start))
    bounce = mapped_empty(data.draw(st.sampled_from([8192, 10000, 16384, 65536])))
    with new_files(tmp_path_factory.mktemp("disks"), records, engine) as files:
        values = random_values(record, record.numel)
        files.write(record.block, record.kind, 0, values).wait()
        # The tensor begins at its second element, so its address is not aligned either.
        source = random_values(record, numel + 1)[1:]
        files.write_unaligned(record.block, record.kind, start, source, bounce)
        values[start : start + numel] = source
        out = random_values(record, record.numel)
        files.read(record.block, record.kind, 0, out).wait()
        assert torch.equal(bits(out), bits(values))
        part = random_values(record, numel + 1)[1:]
        files.read_unaligned(record.block, record.kind, start, part, bounce)
        assert torch.equal(bits(part), bits(source))


def test_edges_are_read_only_where_they_are_partial(
    tmp_path: Path, engine: IoEngine, records: Records, random_values: Values
) -> None:
    record, bounce = records[2], mapped_empty(32768)
    with new_files(tmp_path, records, engine) as files:
        files.write_unaligned(record.block, record.kind, 4095, random_values(record, 2), bounce)
        assert engine.read_bytes == 0  # granules that were never written are known to be zeros
        files.write_unaligned(record.block, record.kind, 2048, random_values(record, 4096), bounce)
        assert engine.read_bytes == 0
        files.write_unaligned(record.block, record.kind, 3000, random_values(record, 2048), bounce)
        assert engine.read_bytes == 2 * 8192
        files.write_unaligned(record.block, record.kind, 3000, random_values(record, 10), bounce)
        assert engine.read_bytes == 3 * 8192
        with pytest.raises(AssertionError, match="at least one granule of 2048 elements"):
            files.write_unaligned(record.block, record.kind, 3000, random_values(record, 10), bounce[:8191])


def test_wrong_dtypes_and_alignments_are_refused(tmp_path: Path, engine: IoEngine, records: Records) -> None:
    with new_files(tmp_path, records, engine) as files:
        sector = mapped_empty(4096)
        with pytest.raises(AssertionError, match=r"param of layers\.0 is bfloat16, but the tensor is float16"):
            files.read("layers.0", "param", 0, sector.view(torch.float16))
        with pytest.raises(AssertionError, match=r"element 1 of param of layers\.0 is not the start of a granule"):
            files.read("layers.0", "param", 1, sector.view(torch.bfloat16))
        with pytest.raises(AssertionError, match=r"element 1024 of exp_avg of layers\.0 is not the end of a granule"):
            files.write("layers.0", "exp_avg", 0, sector.view(torch.float32))
        with pytest.raises(AssertionError, match="not sector-aligned"):
            files.read("layers.0", "param", 0, mapped_empty(8192)[512 : 512 + 4096].view(torch.bfloat16))
        with pytest.raises(AssertionError, match="leaves its record"):
            files.read("layers.0", "param", 8192, sector.view(torch.bfloat16))
        with pytest.raises(KeyError, match=r"no param record of block 'layers\.7'"):
            files.read("layers.7", "param", 0, sector.view(torch.bfloat16))
        assert files.has("layers.1", "exp_avg") and not files.has("layers.1", "exp_avg_sq")


def test_sync_covers_writes_in_flight_and_raises_their_errors(
    tmp_path: Path, make_engine: EngineFactory, records: Records
) -> None:
    backend = GatedBackend()
    with new_files(tmp_path, records, make_engine(backend)) as files:
        request = files.write("layers.0", "exp_avg", 0, mapped_empty(32768).view(torch.float32))
        backend.arrived.acquire()
        synced = threading.Thread(target=files.sync)
        synced.start()
        assert not request.done()
        backend.gate.set()
        synced.join()
        assert request.done()


def test_close_waits_for_requests(tmp_path: Path, make_engine: EngineFactory, records: Records) -> None:
    backend = GatedBackend()
    files = new_files(tmp_path, records, make_engine(backend))
    request = files.write("layers.0", "exp_avg", 0, mapped_empty(32768).view(torch.float32))
    backend.arrived.acquire()
    threading.Thread(target=backend.gate.set).start()
    files.close()
    files.close()
    request.wait()
    with pytest.raises(AssertionError, match="closed"):
        files.read("layers.0", "exp_avg", 0, mapped_empty(8192).view(torch.float32))


def test_a_failing_disk_is_named(tmp_path: Path, make_engine: EngineFactory, records: Records) -> None:
    engine = make_engine(FaultyBackend("write", 1, errno.ENOSPC))
    with new_files(tmp_path, records, engine) as files:
        request = files.write("layers.0", "exp_avg", 0, mapped_empty(32768).view(torch.float32))
        with pytest.raises(
            StorageError,
            match=r"cannot write .*r\.bin at byte \d+ \(No space left on device\): "
            r"it needs [\d,]+ bytes .* but [\d,]+ bytes .* are free",
        ):
            request.wait()


def test_empty_ranges_are_allowed(tmp_path: Path, engine: IoEngine, records: Records) -> None:
    with new_files(tmp_path, records, engine) as files:
        nothing = torch.empty(0, dtype=torch.float32)
        for start in (0, 1, 2048, 8192):
            files.read("layers.0", "exp_avg", start, nothing).wait()
            files.write("layers.0", "exp_avg", start, nothing).wait()
            files.write_unaligned("layers.0", "exp_avg", start, nothing, mapped_empty(8192))
        assert not files.versions.has_drafts and engine.write_bytes == engine.read_bytes == 0


@pytest.mark.parametrize("verb", ["read", "write"])
def test_bytes_changed_in_transfer_are_detected(
    tmp_path: Path, make_engine: EngineFactory, records: Records, random_values: Values, verb: str
) -> None:
    record = records[2]
    backend = FlippingBackend(verb, 2, bit=8 * 5000 + 3)
    with new_files(tmp_path, records, make_engine(backend, num_threads=1), (1,)) as files:
        values = random_values(record, record.numel)
        before = values.clone()
        files.write(record.block, record.kind, 0, values).wait()
        assert torch.equal(bits(values), bits(before))
        # Each call has 16 KiB. The second begins at granule 2 of this record, and two records of 16 KiB precede it.
        with pytest.raises(
            CorruptionError,
            match=r"exp_avg of layers\.0 is damaged from element 4096 on .*r\.bin at byte 49152: check the drive",
        ) as caught:
            files.read(record.block, record.kind, 0, random_values(record, record.numel)).wait()
        assert caught.value.path.endswith("r.bin") and caught.value.offset == 49152
        sound = random_values(record, 4096)
        files.read(record.block, record.kind, 0, sound).wait()
        assert torch.equal(bits(sound), bits(before[:4096]))


def test_a_failed_write_must_be_repeated_before_a_commit(
    tmp_path: Path, make_engine: EngineFactory, records: Records, random_values: Values
) -> None:
    record = records[2]
    with new_files(tmp_path, records, make_engine(FaultyBackend("write", 2, errno.EIO))) as files:
        values = random_values(record, record.numel)
        request = files.write(record.block, record.kind, 0, values)
        with pytest.raises(StorageError, match="Input/output"):
            request.wait()
        with pytest.raises(StorageError, match=r"exp_avg of layers\.0 is incomplete from element 0 on"):
            files.draft()
        files.write(record.block, record.kind, 0, values).wait()
        home, checksum, _ = files.draft()
        assert (home == 0).sum() == (checksum != 0).sum() == 4
