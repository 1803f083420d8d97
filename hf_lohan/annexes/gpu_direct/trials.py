"""Decides by a trial whether a run uses GPUDirect Storage between drives and device memory.

NVIDIA's library must not be used before a fork, and may end the process that loads it. So the trial runs in a child
process: ``python -m hf_lohan.annexes.gpu_direct DEVICE FOLDER...``. It forbids compatibility mode. It writes 256 MiB
from the device to each folder, reads them back and compares them. It also measures transfers through host memory, and
compares checksums of the device and of the CPU.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cache
from itertools import pairwise
from statistics import median

import numpy as np
import torch
from torch import Tensor

from hf_lohan.annexes.gpu_direct.cufile import CuFileBackend, open_direct_library
from hf_lohan.config import ConfigError, ResolvedConfig
from hf_lohan.device import Device, DeviceHasher, Lane
from hf_lohan.device.factory import device_for
from hf_lohan.files import IoEngine, Transfer
from hf_lohan.files.data_file import DeviceIoError, DeviceSpan, sector_view
from hf_lohan.hardware.direct_io import DirectIo
from hf_lohan.hardware.paths import existing_directory
from hf_lohan.store import checksums
from hf_lohan.wording import gb_per_s

logger = logging.getLogger(__name__)

TRIAL_BYTES = 256 << 20
_PIECE_BYTES = 8 << 20
_NUM_THREADS = 4
_NUM_TURNS = 3
_TIMEOUT_S = 180.0
_GRANULE_BYTES = 512 << 10
_NVIDIA_FS = "/proc/driver/nvidia-fs"
_P2P_MEMORY = "/sys/bus/pci/devices"


@dataclass(frozen=True, slots=True)
class TrialRates:
    """Median rates of direct transfers, or of transfers through host memory, in one folder, with checksums."""

    read_bytes_per_s: float
    write_bytes_per_s: float
    cpu_s: float
    """CPU seconds of one turn."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuDirectTrial:
    """The result of the trial in one folder."""

    folder: str
    problem: str = ""
    """Why the trial failed, or ""."""
    mechanism: str = ""
    """"nvidia-fs" or "p2pdma"."""
    direct: TrialRates | None = None
    through_host: TrialRates | None = None

    @property
    def is_faster(self) -> bool:
        """Whether both directions are faster than through host memory."""
        ours, other = self.direct, self.through_host
        if self.problem or ours is None or other is None:
            return False
        return ours.read_bytes_per_s > other.read_bytes_per_s and ours.write_bytes_per_s > other.write_bytes_per_s

    def __str__(self) -> str:
        if self.direct is None or self.through_host is None:
            return self.problem or "not tried"
        rates = [
            f"{name}: reads {gb_per_s(way.read_bytes_per_s)}, writes {gb_per_s(way.write_bytes_per_s)}, "
            f"{way.cpu_s:.2f} CPU seconds"
            for name, way in ((self.mechanism, self.direct), ("through host memory", self.through_host))
        ]
        return "; ".join([*rates, "faster" if self.is_faster else "not faster, so `auto` does not use it"])


@dataclass(frozen=True)
class CuFileIo(DirectIo):
    """Transfers device memory directly to and from the drives."""

    backend: CuFileBackend = field(kw_only=True)

    def register(self, memory: Sequence[Tensor]) -> None:
        refused = [
            storage
            for storage in {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in memory}.values()
            if not self.backend.register_memory(storage.data_ptr(), storage.nbytes())
        ]
        if refused:
            logger.info(
                "%d slots cannot be pinned for GPUDirect, so weights are copied once more on the device", len(refused)
            )

    def close(self) -> None:
        self.backend.close_library()


def uses_direct_io(config: ResolvedConfig, device: Device) -> bool:
    """Return whether `open_direct_io` would open GPUDirect Storage. This may run a trial."""
    return _trials_if_used(config, device) is not None


def open_direct_io(config: ResolvedConfig, device: Device) -> CuFileIo | None:
    """Open GPUDirect Storage if ``config.gpu_direct`` is true, or if it is "auto" and a trial was faster. Raises
    ConfigError if it is true and the machine does not support it."""
    wanted, trials = config.gpu_direct, _trials_if_used(config, device)
    if trials is None:
        return None
    try:
        library = open_direct_library()
    except DeviceIoError as error:
        if wanted is True:
            raise ConfigError(f"gpu_direct: true cannot be used, because {error.text}; set it to false") from error
        logger.warning("GPUDirect Storage is not used, although its trial worked, because %s", error.text)
        return None
    for trial in trials:
        logger.info("weights and activations move to %s without host memory: %s", trial.folder, trial)
    return CuFileIo(hasher=hasher_for(device), backend=CuFileBackend(library, device.enter_thread))


def _trials_if_used(config: ResolvedConfig, device: Device) -> tuple[GpuDirectTrial, ...] | None:
    """Return the trials if GPUDirect Storage is used, and None otherwise."""
    wanted = config.gpu_direct
    if wanted is False:
        return None
    problem, trials = why_not(device, [ssd.path for ssd in config.ssd], tries_anyway=wanted is True)
    if problem:
        if wanted is True:
            raise ConfigError(f"gpu_direct: true cannot be used, because {problem}; set gpu_direct to auto or false")
        logger.info("GPUDirect Storage is not used, because %s", problem)
        return None
    slower = [trial for trial in trials if not trial.is_faster]
    if slower and wanted is not True:
        logger.info("GPUDirect Storage is not used, because %s is not faster: %s", slower[0].folder, slower[0])
        return None
    return trials


def why_not(
    device: Device, folders: Sequence[str], *, tries_anyway: bool = False
) -> tuple[str, tuple[GpuDirectTrial, ...]]:
    """Return why GPUDirect Storage cannot be used for these folders ("" if it can), and the trials. ``tries_anyway``:
    run the trial even on a machine that does not seem to support it."""
    if device.torch_device.type == "cpu":
        return "there is no GPU", ()
    name = str(device.describe()["name"])
    if not tries_anyway and (problem := _looks_impossible(name)):
        return problem, ()
    trials = _trials(device.torch_device.index or 0, tuple(existing_directory(folder) for folder in folders))
    failed = [trial for trial in trials if trial.problem]
    if not failed:
        return "", trials
    return f"{failed[0].problem} in {failed[0].folder}{_of_geforce(name)}", trials


def _looks_impossible(name: str) -> str:
    """Return why a trial would fail, or "" if this is not known without a trial."""
    if "geforce" in name.lower():
        return f"NVIDIA's drivers have no GPUDirect Storage for a GeForce ({name})"
    if not os.path.exists(_NVIDIA_FS) and not _has_p2pdma():
        return "the kernel module nvidia-fs is not loaded, and no device offers p2pdma"
    return ""


def _of_geforce(name: str) -> str:
    return f" (a GeForce has no GPUDirect Storage, and this is {name})" if "geforce" in name.lower() else ""


def _has_p2pdma() -> bool:
    """Return whether a PCI device offers memory to other devices. The GPU's driver offers it if it supports p2pdma."""
    try:
        devices = os.listdir(_P2P_MEMORY)
    except OSError:
        return False
    return any(os.path.exists(os.path.join(_P2P_MEMORY, device, "p2pmem")) for device in devices)


@cache
def _trials(device_index: int, folders: tuple[str, ...]) -> tuple[GpuDirectTrial, ...]:
    """Run the trial in a child process. This process keeps the result."""
    command = [sys.executable, "-m", "hf_lohan.annexes.gpu_direct", str(device_index), *folders]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return tuple(GpuDirectTrial(folder=folder, problem=f"the trial did not end ({error})") for folder in folders)
    try:
        return tuple(_trial_of(entry) for entry in json.loads(run.stdout.splitlines()[-1]))
    except (ValueError, IndexError, TypeError, KeyError):
        last = (run.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        problem = f"the trial ended with {run.returncode}: {last}"
        return tuple(GpuDirectTrial(folder=folder, problem=problem) for folder in folders)


def _trial_of(entry: dict[str, object]) -> GpuDirectTrial:
    rates = {
        name: TrialRates(**way) if isinstance(way := entry[name], dict) else None for name in ("direct", "through_host")
    }
    return GpuDirectTrial(
        folder=str(entry["folder"]), problem=str(entry["problem"]), mechanism=str(entry["mechanism"]), **rates
    )


# The child.


def hasher_for(device: Device) -> DeviceHasher:
    """Return the hasher for the memory of this device. Imports Triton, if it is installed."""
    from hf_lohan.annexes.gpu_direct.xxh3 import Xxh3Hasher

    return Xxh3Hasher(device)


def try_folder(device: Device, backend: CuFileBackend, folder: str, num_bytes: int = TRIAL_BYTES) -> GpuDirectTrial:
    """Write and read ``num_bytes`` in ``folder``, directly and through host memory, and compare the bytes."""
    hasher = hasher_for(device)
    engine = IoEngine(_NUM_THREADS, _PIECE_BYTES, 2 * num_bytes, backend)
    memory, landing = device.empty(num_bytes), device.empty(num_bytes)
    host = [device.host_empty(min(_PIECE_BYTES, num_bytes)) for _ in range(_NUM_THREADS)]
    generator = torch.Generator(device.torch_device).manual_seed(1)
    memory.copy_(torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, device=memory.device, generator=generator))
    device.record(Lane.COMPUTE, memory, landing).synchronize()
    found = hasher.hashes(memory, _GRANULE_BYTES, Lane.D2H).numpy().view(np.uint64)
    if not np.array_equal(found, checksums(memory.cpu(), _GRANULE_BYTES)):
        engine.close()
        return GpuDirectTrial(folder=folder, problem="the GPU computes different checksums than the CPU")
    ops_before = _nvidia_fs_ops()
    try:
        with _trial_file(folder) as path:
            file = engine.open_file(path, create=True)
            try:
                file.allocate(num_bytes)
                if not file.is_direct:
                    return GpuDirectTrial(folder=folder, problem="the file system has no O_DIRECT")

                def direct(verb: str) -> None:
                    tensor = memory if verb == "write" else landing
                    transfers = [Transfer(file, 0, (DeviceSpan(tensor),))]
                    if verb == "write":
                        hasher.hashes(tensor, _GRANULE_BYTES, Lane.D2H)
                    (engine.write if verb == "write" else engine.read)(transfers).wait()
                    if verb == "read":
                        hasher.hashes(tensor, _GRANULE_BYTES, Lane.D2H_ASIDE)

                def through_host(verb: str) -> None:
                    tensor = memory if verb == "write" else landing
                    _move_through_host(device, engine, tensor, host, verb, lambda at, view: Transfer(file, at, (view,)))

                rates: dict[str, list[tuple[float, float, float]]] = {"direct": [], "through_host": []}
                for _ in range(_NUM_TURNS):
                    for name, way in (("direct", direct), ("through_host", through_host)):
                        rates[name].append(_one_turn(way, landing, memory, device, file.sync, num_bytes))
            finally:
                file.close()
    except (OSError, RuntimeError) as error:
        return GpuDirectTrial(folder=folder, problem=str(error))
    finally:
        engine.close()
    return GpuDirectTrial(
        folder=folder,
        mechanism=_mechanism(has_counted=_nvidia_fs_ops() > ops_before),
        direct=_median_of(rates["direct"]),
        through_host=_median_of(rates["through_host"]),
    )


def _mechanism(*, has_counted: bool) -> str:
    """Return the mechanism that moved the bytes. Compatibility mode is forbidden, so without nvidia-fs it is p2pdma."""
    if has_counted:
        return "nvidia-fs"
    return "p2pdma" if not os.path.exists(_NVIDIA_FS) else "p2pdma, or nvidia-fs without statistics"


def _median_of(turns: Sequence[tuple[float, float, float]]) -> TrialRates:
    read_bytes_per_s, write_bytes_per_s, cpu_s = (median(column) for column in zip(*turns, strict=True))
    return TrialRates(read_bytes_per_s, write_bytes_per_s, cpu_s)


def _one_turn(
    way: Callable[[str], None],
    landing: Tensor,
    memory: Tensor,
    device: Device,
    sync: Callable[[], None],
    num_bytes: int,
) -> tuple[float, float, float]:
    """Return bytes per second of reading and of writing, and CPU seconds. Raises RuntimeError if bytes differ."""
    landing.zero_()
    device.record(Lane.COMPUTE, landing).synchronize()
    began_cpu_s, began_s = time.process_time(), time.perf_counter()
    way("write")
    sync()
    written_s = time.perf_counter()
    way("read")
    ended_s, cpu_s = time.perf_counter(), time.process_time() - began_cpu_s
    if not torch.equal(memory, landing):
        raise RuntimeError("the bytes that were read differ from the bytes that were written")
    return num_bytes / (ended_s - written_s), num_bytes / (written_s - began_s), cpu_s


def _move_through_host(
    device: Device,
    engine: IoEngine,
    tensor: Tensor,
    host: Sequence[Tensor],
    verb: str,
    transfer: Callable[[int, memoryview], Transfer],
) -> None:
    """Move a tensor through pinned buffers with checksums on the CPU, as a run does without GPUDirect."""
    lane = Lane.D2H if verb == "write" else Lane.H2D
    size = host[0].numel()
    busy: list[Callable[[], None]] = []
    for number, start in enumerate(range(0, tensor.numel(), size)):
        part = tensor[start : start + size]
        buffer = host[number % len(host)][: part.numel()]
        if len(busy) == len(host):
            busy.pop(0)()
        if verb == "write":
            device.copy(lane, buffer, part)
            device.record(lane).synchronize()
            checksums(buffer, _GRANULE_BYTES)
            busy.append(engine.write([transfer(start, sector_view(buffer))]).wait)
            continue
        request = engine.read([transfer(start, sector_view(buffer))])

        def land(request=request, buffer=buffer, part=part) -> None:  # type: ignore[no-untyped-def]
            request.wait()
            checksums(buffer, _GRANULE_BYTES)
            device.copy(lane, part, buffer)
            device.record(lane).synchronize()

        busy.append(land)
    for end in busy:
        end()


@contextmanager
def _trial_file(folder: str) -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix=".lohan-trial-", dir=folder) as inside:
        yield os.path.join(inside, "trial.bin")


def _nvidia_fs_ops() -> int:
    """Return the number of reads and writes of nvidia-fs so far, or 0 without nvidia-fs."""
    try:
        with open(f"{_NVIDIA_FS}/stats", encoding="utf-8") as file:
            lines = [line for line in file if line.startswith(("Reads", "Writes"))]
    except OSError:
        return 0
    words = [word for line in lines for word in line.replace("=", " ").replace(":", " ").split()]
    return sum(int(number) for name, number in pairwise(words) if name == "n" and number.isdigit())


def try_folders(arguments: Sequence[str]) -> None:
    device = device_for(torch.device("cuda", int(arguments[0])))
    try:
        backend = CuFileBackend(open_direct_library(), device.enter_thread)
        trials = [try_folder(device, backend, folder) for folder in arguments[1:]]
        backend.close_library()
    except DeviceIoError as error:
        trials = [GpuDirectTrial(folder=folder, problem=error.text) for folder in arguments[1:]]
    sys.stdout.write(json.dumps([asdict(trial) for trial in trials]) + "\n")
