"""After a bit flips on the disk, a read gives the right data or an error with the position of the damage."""

from __future__ import annotations

import os
from pathlib import Path
from random import Random

import pytest
import torch

from hf_lohan.files import CorruptionError, ForeignStoreError, IoEngine, StorageError, StorePath
from hf_lohan.store import GRANULE_NUMEL, ModelIdentity, RecordSpec, Store, committed_log, last_commit
from hf_lohan.testing.stored_state import Content, aligned, content_of

pytestmark = pytest.mark.storm

MODEL = ModelIdentity("LlamaForCausalLM", 12345, "abc")
RECORDS = (
    RecordSpec("a", "param", "bfloat16", 2 * GRANULE_NUMEL - 2048),
    RecordSpec("a", "exp_avg", "float32", GRANULE_NUMEL),
    RecordSpec("tail", "param", "bfloat16", 2 * GRANULE_NUMEL, versioned_numel=GRANULE_NUMEL),
    RecordSpec("a", "exp_avg_sq", "uint8", GRANULE_NUMEL),
    RecordSpec("a", "moment_scales", "float32", 2 * GRANULE_NUMEL // 16),
)


@pytest.fixture
def paths(tmp_path: Path) -> list[StorePath]:
    return [StorePath(str(tmp_path / "a"), 10**7), StorePath(str(tmp_path / "b"), 5 * 10**6)]


@pytest.fixture
def content(paths: list[StorePath], engine: IoEngine) -> Content:
    """Create a store in `paths` with some current granules in each home and some in neither. Return its content."""
    random = Random(0)
    with Store.create(paths, RECORDS, model=MODEL, engine=engine, num_homes=2, stripe_bytes=20480) as store:
        for record in RECORDS:
            store.write(record.block, record.kind, 0, aligned(record, record.numel, random)).wait()
        store.commit(log_lines=b"one\n")
        for record in RECORDS[::2]:
            store.write(record.block, record.kind, 0, aligned(record, record.granule_numel, random)).wait()
        store.commit({"step": 2}, {"file": b"content"}, b"two\n")
        return content_of(store)


def flip(file: Path, byte: int, random: Random) -> None:
    with file.open("r+b") as stream:
        stream.seek(byte)
        flipped = stream.read(1)[0] ^ 1 << random.randrange(8)
        stream.seek(byte)
        stream.write(bytes([flipped]))


def current_bytes(store: Store) -> set[tuple[str, int]]:
    """Return the sectors with committed bytes."""
    return {
        (path, sector)
        for record in store.records
        for path, extent in store.extents(record.block, record.kind) or []
        for sector in range(extent.file_offset // 4096, (extent.file_offset + extent.num_bytes) // 4096)
    }


def damaged_granules(store: Store, content: Content) -> list[CorruptionError]:
    """Read all granules one by one. Each must be right or refused."""
    errors = []
    for record in store.records:
        for start in range(0, record.numel, record.granule_numel):
            out = aligned(record, min(record.granule_numel, record.numel - start))
            try:
                store.read(record.block, record.kind, start, out).wait()
            except CorruptionError as error:
                errors.append(error)
                assert f"{record.kind} of {record.block} is damaged from element {start} on" in str(error)
            else:
                start_byte = start * record.itemsize
                expected = content[record.block, record.kind][start_byte:][: out.numel() * record.itemsize]
                assert out.view(torch.uint8).numpy().tobytes() == expected
    return errors


@pytest.mark.parametrize("name", ["records-0.bin", "records-1.bin"])
def test_a_flipped_bit_of_a_committed_record_is_reported(
    paths: list[StorePath], content: Content, engine: IoEngine, name: str
) -> None:
    random, num_named = Random(1), 0
    for path in paths:
        file = Path(path.path) / name
        for sector in range(file.stat().st_size // 4096):
            sound = file.read_bytes()
            flip(file, sector * 4096 + random.randrange(4096), random)
            with Store.open(paths, model=MODEL, engine=engine) as store:
                errors = damaged_granules(store, content)
                is_current = (str(file), sector) in current_bytes(store)
                assert len(errors) == is_current
                num_named += len(errors)
                for error in errors:
                    assert error.path in [str(Path(path.path) / name) for path in paths]
                    assert error.offset is not None and error.offset % 4096 == 0
                    assert f"{error.path} at byte {error.offset}: check the drive" in str(error)
                    assert error.path != str(file) or error.offset <= sector * 4096
            file.write_bytes(sound)
    assert num_named > 0


def test_a_flipped_bit_of_a_commit_is_reported(paths: list[StorePath], content: Content, engine: IoEngine) -> None:
    random = Random(3)
    file = Path(paths[0].path) / "commit.safetensors"
    sound = file.read_bytes()
    for byte in range(0, len(sound), 3):
        flip(file, byte, random)
        for look in (
            lambda: Store.open(paths, model=MODEL, engine=engine),
            lambda: last_commit([path.path for path in paths]),
        ):
            with pytest.raises(StorageError, match=r"commit\.safetensors: check the drive"):
                look()
        file.write_bytes(sound)


def test_a_flipped_bit_of_the_log_is_reported(paths: list[StorePath], content: Content, engine: IoEngine) -> None:
    file = Path(paths[0].path) / "log.jsonl"
    for byte in range(file.stat().st_size):
        sound = file.read_bytes()
        flip(file, byte, Random(byte))
        with Store.open(paths, model=MODEL, engine=engine) as store:
            with pytest.raises(StorageError, match=r"wrong checksum in .*log\.jsonl"):
                _ = store.log
            assert content_of(store) == content
        with pytest.raises(StorageError, match="wrong checksum"):
            committed_log([path.path for path in paths])
        file.write_bytes(sound)
    assert committed_log([path.path for path in paths]) == b"one\ntwo\n"


def test_a_lost_write_is_detected(paths: list[StorePath], content: Content, engine: IoEngine) -> None:
    """The drive loses a write without an error."""
    file = Path(paths[0].path) / "records-0.bin"
    before = file.read_bytes()
    with Store.open(paths, model=MODEL, engine=engine) as store:
        record = RECORDS[0]  # current in home 1, so this goes to home 0
        store.write("a", "param", 0, aligned(record, GRANULE_NUMEL, Random(9))).wait()
        store.commit()
    file.write_bytes(before)
    with (
        Store.open(paths, model=MODEL, engine=engine) as store,
        pytest.raises(CorruptionError, match="param of a is damaged"),
    ):
        content_of(store)


@pytest.mark.parametrize("name", ["commit.safetensors", "manifest.json", "records-0.bin", "records-1.bin", "lock"])
def test_links_in_a_store_are_not_followed(
    tmp_path: Path, paths: list[StorePath], content: Content, engine: IoEngine, name: str
) -> None:
    file = Path(paths[0].path) / name
    outside = tmp_path / "outside"
    file.rename(outside)
    file.symlink_to(outside)
    before = outside.read_bytes()
    with pytest.raises(StorageError, match=rf"{name} \(Too many levels of symbolic links\)"):
        Store.open(paths, model=MODEL, engine=engine)
    assert outside.read_bytes() == before


@pytest.mark.parametrize("name", ["commit.safetensors", "log.jsonl", "records-0.bin", "records-1.bin", "gradients.bin"])
def test_foreign_files_are_kept(tmp_path: Path, engine: IoEngine, name: str) -> None:
    for make in (lambda: (tmp_path / name).write_text("precious"), lambda: (tmp_path / name).symlink_to("nowhere")):
        make()
        with pytest.raises(ForeignStoreError, match=f"holds {name} but no store; choose another"):
            Store.create([StorePath(str(tmp_path))], RECORDS, model=MODEL, engine=engine)
        assert [entry.name for entry in tmp_path.iterdir()] == [name]
        (tmp_path / name).unlink()


METADATA = ("manifest.json", "commit.safetensors", "log.jsonl", "model-0/config.json")


def checked(paths: list[StorePath], engine: IoEngine) -> str:
    """Return the one-line error of opening or verifying the store, or "" if it is whole."""
    try:
        last_commit([path.path for path in paths])
        committed_log([path.path for path in paths])
        with Store.open(paths, model=None, engine=engine, allow_torn=True) as store:
            return "; ".join(map(str, store.verify_files()))
    except (StorageError, ForeignStoreError) as error:
        return str(error)


@pytest.fixture
def complete_store(tmp_path: Path, engine: IoEngine) -> list[StorePath]:
    """A store with all kinds of files."""
    path = StorePath(str(tmp_path / "store"), 1 << 20)
    with Store.create([path], RECORDS, model=MODEL, engine=engine, num_homes=1) as store:
        store.commit({"step": 1}, {"journal": b"x" * 100}, b"a line\n", model_files={"config.json": b'{"a": 1}'})
    assert not checked([path], engine)
    return [path]


@pytest.mark.parametrize("name", METADATA)
def test_damaged_metadata_is_reported_in_one_line_with_its_name(
    name: str, complete_store: list[StorePath], engine: IoEngine
) -> None:
    file, random = Path(complete_store[0].path) / name, Random(name)
    whole = file.read_bytes()
    foreign = [
        *(b"", b"{}", b"[]", b"null", b"'x'", b"[" * 100_000, b"1e999", b"\xff" * 64),
        b"\x08" + bytes(7) + b"{}      ",
    ]
    flipped = []
    for _ in range(60):
        changed = bytearray(whole)
        changed[random.randrange(len(whole))] ^= 1 << random.randrange(8)
        flipped.append(bytes(changed))
    cut = [whole[: random.randrange(len(whole))] for _ in range(20)]
    for content in (*foreign, *flipped, *cut):
        file.write_bytes(content)
        found = checked(complete_store, engine)
        assert file.name in found and "\n" not in found, content[:60]


@pytest.mark.parametrize("name", METADATA)
@pytest.mark.parametrize("kind", ["pipe", "folder", "giant"])
def test_a_file_of_another_kind_is_refused_at_once(
    kind: str, name: str, complete_store: list[StorePath], engine: IoEngine
) -> None:
    file = Path(complete_store[0].path) / name
    file.unlink()
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "folder":
        file.mkdir()
    else:
        with file.open("wb") as stream:
            stream.truncate(1 << 40)
    assert file.name in checked(complete_store, engine)


def test_an_unmounted_path_is_named(tmp_path: Path, engine: IoEngine) -> None:
    paths = [StorePath(str(tmp_path / name), 1 << 20) for name in ("a", "b")]
    with Store.create(paths, RECORDS, model=MODEL, engine=engine) as store:
        store.commit()
    for missing in paths:
        folder = Path(missing.path)
        folder.rename(tmp_path / "away")
        folder.mkdir()
        with pytest.raises(StorageError, match=rf"no store in .*/{folder.name}: the other part .* mounted"):
            last_commit([path.path for path in paths])
        with pytest.raises(StorageError, match=rf"no store in .*/{folder.name}: the other part .* mounted"):
            Store.open_or_create(paths, RECORDS, model=MODEL, engine=engine, durability="checkpoint")
        folder.rmdir()
        (tmp_path / "away").rename(folder)
