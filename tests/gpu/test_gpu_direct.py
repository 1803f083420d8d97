"""Training with weights and activations that go past host memory, on the double: its device memory is host memory, so a
double of libcufile can move it."""

from __future__ import annotations

import ctypes
import errno
from pathlib import Path
from typing import Any

import pytest
import torch
from cufile_double import FakeCuFile
from trainer_runs import Outcome, assert_same_bits, train

import hf_lohan.engine.tiers
from hf_lohan.annexes.gpu_direct import trials
from hf_lohan.annexes.gpu_direct.cufile import CuFileBackend, CuFileLibrary
from hf_lohan.annexes.gpu_direct.trials import CuFileIo, GpuDirectTrial, TrialRates, hasher_for, try_folder
from hf_lohan.config import ConfigError
from hf_lohan.device import device_for
from hf_lohan.files import StorageError
from hf_lohan.hardware.direct_io import DirectIo
from hf_lohan.testing.models import tiny_model

BATCH = {"per_device_train_batch_size": 16}
SPILLS = {"activations": "swap", "cpu_memory": "2MiB", "_resident_records": "none"}


class Library(FakeCuFile):
    """Moves bytes in a stream of its own for each call, which waits for no other stream. So the double of CUDA finds
    the races that a drive would have if the host did not wait."""

    def copy_to_device(self, address: int, content: bytearray) -> None:
        _copy(address, (ctypes.c_char * len(content)).from_buffer(content), len(content), kind=1)

    def copy_from_device(self, content: bytearray, address: int) -> None:
        _copy((ctypes.c_char * len(content)).from_buffer(content), address, len(content), kind=2)


def _copy(to: Any, source: Any, num_bytes: int, kind: int) -> None:
    runtime, stream = ctypes.CDLL("libcudart.so.13"), ctypes.c_void_p()
    assert runtime.cudaStreamCreateWithFlags(ctypes.byref(stream), 1) == 0  # it waits for no other stream
    copy = runtime.cudaMemcpyAsync
    copy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
    assert copy(to, source, num_bytes, kind, stream) == 0
    assert runtime.cudaStreamSynchronize(stream) == 0
    assert runtime.cudaStreamDestroy(stream) == 0


@pytest.fixture
def use(double: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Replace libcufile and the trial by a double."""

    def with_library(library: FakeCuFile) -> FakeCuFile:
        def opened(config: Any, device: Any) -> DirectIo:
            if config.gpu_direct is not True:
                return DirectIo()
            return CuFileIo(
                hasher=hasher_for(device), backend=CuFileBackend(CuFileLibrary(library), device.enter_thread)
            )

        monkeypatch.setattr(hf_lohan.engine.tiers, "open_direct_io", opened)
        return library

    return with_library


def run(folder: Path, family: str, *, direct: bool, offload: dict[str, Any], **settings: Any) -> Outcome:
    model = tiny_model(family, **settings.pop("model", {}))
    return train(folder, model, offload={**offload, "gpu_direct": direct}, **{**BATCH, **settings})


CASES: dict[str, dict[str, Any]] = {
    "weights": {"offload": {"_resident_records": "none", "cpu_memory": "8MiB", "activations": "recompute"}},
    "spilled": {"offload": SPILLS},
    "accumulated": {"offload": SPILLS, "gradient_accumulation_steps": 2},
    "in backward": {"offload": SPILLS, "max_grad_norm": 0.0},
    "bfloat16": {"offload": SPILLS, "bf16": True},
    "chunked layers": {"offload": {**SPILLS, "chunks.layers": 64}},
    "experts": {"family": "mixtral", "offload": {**SPILLS, "experts": "streamed"}},
}


QUICK = {"weights", "spilled", "bfloat16", "experts"}


@pytest.mark.parametrize(
    "case", [case if case in QUICK else pytest.param(case, marks=pytest.mark.slow) for case in CASES]
)
def test_training_has_the_same_bits(tmp_path: Path, use: Any, case: str) -> None:
    settings = dict(CASES[case])
    family = settings.pop("family", "llama")
    expected = run(tmp_path / "off", family, direct=False, **settings)
    library = use(Library(short=[4096, 9000, -1, 20000] * 5, max_delay_s=2e-3, seed=1))
    assert_same_bits(run(tmp_path / "on", family, direct=True, **settings), expected)
    assert library.moved_bytes["cuFileRead"] > 0
    assert (library.moved_bytes["cuFileWrite"] > 0) == (settings["offload"] is not CASES["weights"]["offload"])
    assert not library.is_open and not library.files and not library.memory


@pytest.mark.parametrize(("call", "code"), [("cuFileWrite", errno.EIO)])
def test_a_failed_transfer_ends_the_run(tmp_path: Path, use: Any, call: str, code: int) -> None:
    counted = use(Library())
    run(tmp_path / "whole", "llama", direct=True, offload=SPILLS, max_steps=2)
    use(Library(errors={(call, counted.calls[call] // 2): code}))
    with pytest.raises(StorageError, match=f"{call} failed.*set gpu_direct: false"):
        run(tmp_path / "failed", "llama", direct=True, offload=SPILLS, max_steps=2)


class _Flipping(Library):
    """Changes a bit of each read."""

    def copy_to_device(self, address: int, content: bytearray) -> None:
        content[len(content) // 2] ^= 4
        super().copy_to_device(address, content)


def test_checksums_of_device_memory_find_a_flipped_bit(tmp_path: Path, use: Any) -> None:
    use(_Flipping())
    with pytest.raises(StorageError, match=r"is damaged from element .* \(wrong checksum\)"):
        run(tmp_path / "run", "llama", direct=True, offload=SPILLS)


def test_the_trial_measures_both_ways(tmp_path: Path, double: Any) -> None:
    library, device = Library(), device_for("cuda")
    backend = CuFileBackend(CuFileLibrary(library), device.enter_thread)
    trial = try_folder(device, backend, str(tmp_path), num_bytes=20 << 20)
    assert not trial.problem and trial.direct is not None and trial.through_host is not None
    assert min(trial.direct.read_bytes_per_s, trial.through_host.write_bytes_per_s) > 0
    assert library.moved_bytes == {"cuFileRead": 3 * (20 << 20), "cuFileWrite": 3 * (20 << 20)}
    assert not list(tmp_path.iterdir())
    failed = try_folder(
        device, CuFileBackend(CuFileLibrary(_Flipping()), device.enter_thread), str(tmp_path), num_bytes=1 << 20
    )
    assert failed.problem == "the bytes that were read differ from the bytes that were written"
    backend.close_library()


def _rates(read: float, write: float) -> TrialRates:
    return TrialRates(read, write, 0.1)


@pytest.mark.parametrize(
    ("direct", "is_taken"), [(_rates(3e9, 3e9), True), (_rates(3e9, 1e9), False), (_rates(1e9, 3e9), False)]
)
def test_auto_takes_it_only_where_it_is_faster(
    tmp_path: Path, double: Any, monkeypatch: pytest.MonkeyPatch, direct: TrialRates, is_taken: bool
) -> None:
    trial = GpuDirectTrial(folder="/d", mechanism="p2pdma", direct=direct, through_host=_rates(2e9, 2e9))
    monkeypatch.setattr(trials, "why_not", lambda *args, **kwargs: ("", (trial,)))
    monkeypatch.setattr(trials, "open_direct_library", lambda: CuFileLibrary(Library()))
    from engines import resolved

    device = device_for("cuda")
    assert (trials.open_direct_io(resolved(tmp_path), device) is not None) == is_taken
    assert trials.open_direct_io(resolved(tmp_path, gpu_direct=True), device) is not None
    assert trials.open_direct_io(resolved(tmp_path, gpu_direct=False), device) is None


def test_a_machine_that_cannot_is_refused_before_anything_is_written(tmp_path: Path, double: Any) -> None:
    with pytest.raises(ConfigError, match=r"gpu_direct: true cannot be used, because .*; set gpu_direct to auto"):
        run(tmp_path / "run", "llama", direct=True, offload={"ssd": str(tmp_path / "store")})
    assert not (tmp_path / "store").exists()


def test_hashes_on_cuda_have_the_bits_of_xxhash(double: Any) -> None:
    from hf_lohan.device import Lane
    from hf_lohan.store import checksums

    content = torch.randint(0, 256, (5 * 16384 + 4096,), dtype=torch.uint8)
    found = hasher_for(device_for("cuda")).hashes(content.cuda(), 16384, Lane.D2H_ASIDE)
    assert [one % (1 << 64) for one in found.tolist()] == checksums(content, 16384).tolist()
