"""GPUDirect Storage: every call and error of libcufile through the double, the refusal of the real library without a
driver, and kvikio as the reference."""

from __future__ import annotations

import errno
import importlib.util
import json
import mmap
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cufile_double import CALLS, FakeCuFile
from torch import Tensor

from hf_lohan.annexes.gpu_direct.cufile import ERROR_TEXTS, CuFileBackend, CuFileLibrary, error_text
from hf_lohan.files import DataFile, FileBackend, IoEngine, StorageError, Transfer
from hf_lohan.files.data_file import DeviceIoError, DeviceSpan, sector_view

SECTOR = 4096
NUM_BYTES = 16 * SECTOR


def noise(num_bytes: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=generator)


def host_memory(num_bytes: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8)


class Bench:
    """A file of `NUM_BYTES` bytes behind a `CuFileBackend` over a double."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.double = FakeCuFile(**settings)
        self.backend = CuFileBackend(CuFileLibrary(self.double))
        self.file = DataFile(str(folder / "file"), self.backend, create=True)
        self.file.allocate(NUM_BYTES)
        if not self.file.is_direct:
            pytest.skip("the file system has no O_DIRECT")

    def content(self) -> Tensor:
        return torch.frombuffer(bytearray(Path(self.file.path).read_bytes()), dtype=torch.uint8)

    def close(self) -> None:
        self.file.close()
        self.backend.close_library()


BenchFactory = Callable[..., Bench]


@pytest.fixture
def make_bench(tmp_path: Path) -> Iterator[BenchFactory]:
    benches: list[Bench] = []

    def make(**settings: Any) -> Bench:
        benches.append(Bench(tmp_path, **settings))
        return benches[-1]

    yield make
    for bench in benches:
        bench.close()
        assert not bench.double.is_open and not bench.double.files and not bench.double.memory


def test_device_memory_is_written_and_read_back(make_bench: BenchFactory) -> None:
    bench, source = make_bench(), noise(NUM_BYTES)
    bench.file.write(0, [DeviceSpan(source)])
    assert torch.equal(bench.content(), source)
    landing = torch.zeros(NUM_BYTES, dtype=torch.uint8)
    bench.file.read(0, [DeviceSpan(landing)])
    assert torch.equal(landing, source)
    assert bench.double.moved_bytes == {"cuFileRead": NUM_BYTES, "cuFileWrite": NUM_BYTES}
    assert (bench.backend.direct_read_bytes, bench.backend.direct_write_bytes) == (NUM_BYTES, NUM_BYTES)
    assert bench.double.calls["cuFileHandleRegister"] == 1  # once for a file


def test_bytes_within_an_allocation_are_addressed(make_bench: BenchFactory) -> None:
    bench, memory = make_bench(), noise(NUM_BYTES + 3 * 512)
    assert bench.backend.register_memory(memory.data_ptr(), memory.numel())
    span = DeviceSpan(memory[512:])[SECTOR : 3 * SECTOR]
    assert (span.base, span.offset, span.nbytes) == (memory.data_ptr(), 512 + SECTOR, 2 * SECTOR)
    bench.file.write(5 * SECTOR, [span])
    assert torch.equal(bench.content()[5 * SECTOR : 7 * SECTOR], memory[512 + SECTOR : 512 + 3 * SECTOR])


def test_host_and_device_memory_in_one_transfer(make_bench: BenchFactory) -> None:
    bench, source = make_bench(), noise(NUM_BYTES)
    host = host_memory(2 * SECTOR)
    host.copy_(source[6 * SECTOR : 8 * SECTOR])
    views = [DeviceSpan(source[: 6 * SECTOR]), sector_view(host), DeviceSpan(source[8 * SECTOR :])]
    bench.file.write(0, views)
    assert torch.equal(bench.content(), source)
    assert bench.double.moved_bytes["cuFileWrite"] == NUM_BYTES - 2 * SECTOR
    first, middle, last = (
        torch.zeros(6 * SECTOR, dtype=torch.uint8),
        host_memory(2 * SECTOR),
        torch.zeros(8 * SECTOR, dtype=torch.uint8),
    )
    bench.file.read(0, [DeviceSpan(first), sector_view(middle), DeviceSpan(last)])
    assert torch.equal(torch.cat([first, middle, last]), source)


@pytest.mark.parametrize(
    "short", [[SECTOR], [SECTOR, 3 * SECTOR, 2 * SECTOR], [5000, 9000, -1, 12345], [NUM_BYTES - 1]]
)
def test_short_transfers_go_on_at_a_sector(make_bench: BenchFactory, short: list[int]) -> None:
    bench, source = make_bench(short=[*short, -1, -1, *short]), noise(NUM_BYTES)
    landing = torch.zeros(NUM_BYTES, dtype=torch.uint8)
    bench.file.write(0, [DeviceSpan(source)])
    assert torch.equal(bench.content(), source)
    bench.file.read(0, [DeviceSpan(landing)])
    assert torch.equal(landing, source)
    assert bench.double.calls["cuFileWrite"] > 1
    assert bench.file.is_direct


def test_less_than_a_sector_is_an_error(make_bench: BenchFactory) -> None:
    bench = make_bench(short=[SECTOR - 1])
    with pytest.raises(StorageError, match="moved 4095 bytes, which is less than a sector; set gpu_direct: false"):
        bench.file.read(0, [DeviceSpan(noise(NUM_BYTES))])
    assert bench.file.is_direct  # other transfers keep O_DIRECT


def test_a_file_that_was_cut_off_is_an_error(make_bench: BenchFactory) -> None:
    bench = make_bench()
    os.truncate(bench.file.path, 3 * SECTOR)
    with pytest.raises(StorageError, match=f"read ended after {3 * SECTOR} of {NUM_BYTES} bytes"):
        bench.file.read(0, [DeviceSpan(noise(NUM_BYTES))])


@pytest.mark.parametrize(("start", "size"), [(0, SECTOR + 512), (512, SECTOR), (0, 100)])
def test_unaligned_transfers_are_refused_before_the_call(make_bench: BenchFactory, start: int, size: int) -> None:
    bench = make_bench()
    with pytest.raises(AssertionError, match="whole sectors"):
        bench.file.write(start, [DeviceSpan(noise(size))])
    assert not bench.double.calls["cuFileWrite"]
    # The double refuses them too, so that a missing check would show.
    bench.file.write(0, [DeviceSpan(noise(SECTOR))])
    (handle,) = bench.double.files
    assert bench.double.cuFileWrite(handle, noise(size).data_ptr(), size, start, 0) == -5022


@pytest.mark.parametrize("code", [errno.EIO, errno.EINVAL, errno.ENOSPC, 5008, 5011, 5036])
@pytest.mark.parametrize("call", ["cuFileRead", "cuFileWrite"])
def test_a_failed_transfer_names_file_offset_and_reason(make_bench: BenchFactory, call: str, code: int) -> None:
    bench = make_bench(errors={(call, 2): code}, short=[4 * SECTOR])
    move = bench.file.read if call == "cuFileRead" else bench.file.write
    with pytest.raises(StorageError) as caught:
        move(0, [DeviceSpan(noise(NUM_BYTES))])
    assert f"{bench.file.path} at byte {4 * SECTOR}" in str(caught.value)
    if code == errno.ENOSPC:
        assert caught.value.errno == errno.ENOSPC and "free some space" in str(caught.value)
    else:
        assert caught.value.errno == errno.EIO
        reason = error_text(call, code) if code > 5000 else f"{call} failed ({os.strerror(code)})"
        assert f"{reason.removesuffix(')')}" in str(caught.value)
    assert bench.file.is_direct
    move(0, [DeviceSpan(noise(NUM_BYTES))])  # the next one works


def test_a_file_that_cannot_be_registered(make_bench: BenchFactory) -> None:
    bench = make_bench(errors={("cuFileHandleRegister", 1): 5008})
    with pytest.raises(StorageError, match=r"cuFileHandleRegister failed with 5008 \(this file's file system or drive"):
        bench.file.write(0, [DeviceSpan(noise(SECTOR))])
    bench.file.write(0, [DeviceSpan(noise(SECTOR))])
    assert len(bench.double.files) == 1


def test_a_file_without_o_direct_is_refused(make_bench: BenchFactory) -> None:
    bench = make_bench()
    bench.backend.set_buffered(bench.file._fd)
    with pytest.raises(StorageError, match=r"5020 \(the file was not opened with O_DIRECT\)"):
        bench.file.write(0, [DeviceSpan(noise(SECTOR))])


@pytest.mark.parametrize("call", ["cuFileDriverClose_v2", "cuFileBufDeregister"])
def test_errors_while_closing_do_not_end_a_run(tmp_path: Path, call: str) -> None:
    bench = Bench(tmp_path, errors={(call, 1): 5030})
    memory = noise(SECTOR)
    assert bench.backend.register_memory(memory.data_ptr(), SECTOR)
    bench.close()
    assert bench.double.calls[call] == 1


def test_memory_that_cannot_be_registered_still_moves(make_bench: BenchFactory) -> None:
    bench, source = make_bench(errors={("cuFileBufRegister", 1): 5036}), noise(NUM_BYTES)
    assert not bench.backend.register_memory(source.data_ptr(), NUM_BYTES)
    bench.file.write(0, [DeviceSpan(source)])
    assert torch.equal(bench.content(), source)


@pytest.mark.parametrize("code", [5001, 5011])
def test_a_driver_that_does_not_open_says_why(code: int) -> None:
    with pytest.raises(DeviceIoError) as caught:
        CuFileLibrary(FakeCuFile(errors={("cuFileDriverOpen", 1): code}))
    assert str(code) in caught.value.text and ERROR_TEXTS[code] in caught.value.text
    assert ("CUDA error 700" in caught.value.text) == (code == 5011)


def test_each_call_is_made_and_each_error_has_a_text(tmp_path: Path) -> None:
    bench, memory = Bench(tmp_path), noise(NUM_BYTES)
    bench.backend.register_memory(memory.data_ptr(), NUM_BYTES)
    bench.file.write(0, [DeviceSpan(memory)])
    bench.file.read(0, [DeviceSpan(memory)])
    bench.close()
    assert {call: bench.double.calls[call] for call in CALLS} == dict.fromkeys(CALLS, 1)
    assert set(ERROR_TEXTS) == set(range(5001, 5051)) - {5021, 5032}  # numbers that cufile.h leaves out
    assert "the number is not known" in error_text("cuFileRead", 5999)


@pytest.mark.parametrize("seed", range(3))
def test_the_engine_moves_pieces_of_device_memory_at_once(tmp_path: Path, seed: int) -> None:
    double = FakeCuFile(short=[SECTOR, 8000, 3 * SECTOR, -1, 5000] * 3, max_delay_s=2e-3, seed=seed)
    backend = CuFileBackend(CuFileLibrary(double))
    engine = IoEngine(4, 2 * SECTOR, 1 << 20, backend)
    sources = [noise(NUM_BYTES, seed=number) for number in range(4)]
    landings = [torch.zeros_like(source) for source in sources]
    files = [engine.open_file(str(tmp_path / f"{number}"), create=True) for number in range(2)]
    for file in files:
        file.allocate(2 * NUM_BYTES)

    def transfers(memory: list[Tensor]) -> list[Transfer]:
        return [
            Transfer(files[number % 2], number // 2 * NUM_BYTES, (DeviceSpan(of_one),))
            for number, of_one in enumerate(memory)
        ]

    engine.write(transfers(sources)).wait()
    engine.read(transfers(landings), is_urgent=True).wait()
    assert all(map(torch.equal, sources, landings))
    assert engine.read_bytes == engine.write_bytes == 4 * NUM_BYTES
    assert double.calls["cuFileWrite"] >= 4 * NUM_BYTES // (2 * SECTOR)
    for file in files:
        file.close()
    engine.close()
    backend.close_library()
    assert not double.is_open


def test_threads_enter_the_device_once(tmp_path: Path) -> None:
    entered: list[str] = []
    backend = CuFileBackend(CuFileLibrary(FakeCuFile()), enter_thread=lambda: entered.append("here"))
    file = DataFile(str(tmp_path / "file"), backend, create=True)
    file.allocate(NUM_BYTES)
    file.write(0, [sector_view(host_memory(SECTOR))])
    assert not entered
    for _ in range(3):
        file.write(0, [DeviceSpan(noise(SECTOR))])
    assert entered == ["here"]
    file.close()


def test_other_backends_refuse_device_memory(tmp_path: Path) -> None:
    file = DataFile(str(tmp_path / "file"), FileBackend(), create=True)
    file.allocate(NUM_BYTES)
    for move in (file.read, file.write):
        with pytest.raises(StorageError, match="this backend moves no device memory"):
            move(0, [DeviceSpan(noise(SECTOR))])
    file.close()


# libcufile's settings.


class _SettingsSeen(FakeCuFile):
    def cuFileDriverOpen(self) -> Any:
        with open(os.environ["CUFILE_ENV_PATH_JSON"], encoding="utf-8") as file:
            self.settings = json.load(file)
        self.forced = os.environ.get("CUFILE_FORCE_COMPAT_MODE")
        return super().cuFileDriverOpen()


def test_compatibility_mode_is_forbidden_and_the_rest_is_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = tmp_path / "cufile.json"
    theirs.write_text('{\n  // a comment\n "properties": {"allow_compat_mode": true, "max_direct_io_size_kb": 4096}}\n')
    monkeypatch.setenv("CUFILE_ENV_PATH_JSON", str(theirs))
    monkeypatch.setenv("CUFILE_FORCE_COMPAT_MODE", "true")
    double = _SettingsSeen()
    CuFileLibrary(double).close()
    assert double.settings["properties"] == {
        "allow_compat_mode": False,
        "use_pci_p2pdma": True,
        "max_direct_io_size_kb": 4096,
    }
    assert double.forced is None
    assert (os.environ["CUFILE_ENV_PATH_JSON"], os.environ["CUFILE_FORCE_COMPAT_MODE"]) == (str(theirs), "true")
    monkeypatch.setenv("CUFILE_ENV_PATH_JSON", str(tmp_path / "none.json"))
    with pytest.raises(DeviceIoError, match=r"CUFILE_ENV_PATH_JSON names .*none\.json, which cannot be read"):
        CuFileLibrary(FakeCuFile())


# The real libraries.


def test_the_real_libcufile_refuses_a_machine_without_driver(tmp_path: Path) -> None:
    if os.path.exists("/proc/driver/nvidia-fs") or os.path.exists("/dev/nvidia0"):
        pytest.skip("this machine has an NVIDIA driver")
    script = (
        "from hf_lohan.annexes.gpu_direct.cufile import CuFileLibrary\n"
        "from hf_lohan.files.data_file import DeviceIoError\n"
        "try:\n    CuFileLibrary()\nexcept DeviceIoError as error:\n    print(error.text)\n"
    )
    run = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert not list(tmp_path.iterdir()), "libcufile writes its log elsewhere"
    if "cannot be loaded" in run.stdout:
        assert run.stdout.strip().endswith("install nvidia-cufile")
        pytest.skip("libcufile is not installed")
    assert "cuFileDriverOpen failed with 50" in run.stdout, run.stdout + run.stderr


_ON_FAKE_CUDA = """
import ctypes, sys
fake = ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)
import torch
from hf_lohan.files import DataFile
from hf_lohan.annexes.gpu_direct.cufile import CuFileBackend, KvikioLibrary
from hf_lohan.files.data_file import DeviceSpan
fake.fake_device_alloc.restype, fake.fake_device_alloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
size = 64 * 4096
memory = (ctypes.c_uint8 * size).from_address(fake.fake_device_alloc(size))
device = torch.frombuffer(memory, dtype=torch.uint8)
backend = CuFileBackend(KvikioLibrary(allows_host_copies=True))
file = DataFile(sys.argv[2], backend, create=False)
file.read(0, [DeviceSpan(device[: 5 * 4096])])
file.read(5 * 4096, [DeviceSpan(device[5 * 4096 :])])
expected = torch.frombuffer(bytearray(open(sys.argv[2], "rb").read()), dtype=torch.uint8)
assert torch.equal(device, expected), "kvikio read other bytes"
device.bitwise_xor_(0x5A)
file.write(8 * 4096, [DeviceSpan(device[8 * 4096 : 24 * 4096])])
expected[8 * 4096 : 24 * 4096] ^= 0x5A
found = torch.frombuffer(bytearray(open(sys.argv[2], "rb").read()), dtype=torch.uint8)
assert torch.equal(found, expected), "kvikio wrote other bytes"
print("equal", backend.direct_read_bytes, backend.direct_write_bytes)
file.close()
"""


def test_kvikio_moves_what_the_backend_wrote(tmp_path: Path) -> None:
    if importlib.util.find_spec("kvikio") is None:
        pytest.skip("kvikio is not installed")
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler for the double of libcuda")
    library = tmp_path / "libcuda.so.1"
    source = Path(__file__).with_name("fake_libcuda.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-w", "-o", library, source], check=True)
    file = DataFile(str(tmp_path / "file"), FileBackend(), create=True)
    file.allocate(64 * SECTOR)
    content = host_memory(64 * SECTOR)
    content.copy_(noise(64 * SECTOR))
    file.write(0, [sector_view(content)])
    file.close()
    environment = os.environ | {"LD_LIBRARY_PATH": f"{tmp_path}:{os.environ.get('LD_LIBRARY_PATH', '')}"}
    command = [sys.executable, "-c", _ON_FAKE_CUDA, str(library), file.path]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert run.stdout.strip() == f"equal {64 * SECTOR} {16 * SECTOR}", run.stdout + run.stderr
