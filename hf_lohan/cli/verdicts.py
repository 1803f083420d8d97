"""What to think of the facts and of the measured rates, line by line. Pure: facts in, verdicts out."""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

from hf_lohan.hardware import MachineFacts, PathFacts
from hf_lohan.planner import HardwareProfile
from hf_lohan.wording import count, format_bytes, gb_per_s

_LOCAL = frozenset({"ext4", "ext3", "ext2", "xfs", "btrfs", "f2fs", "zfs", "bcachefs"})
_IN_RAM = frozenset({"tmpfs", "ramfs", "rootfs"})
_LAYERED = frozenset({"overlay", "aufs", "fuse.fuse-overlayfs"})
_SHARED = ("nfs", "cifs", "smb", "9p", "drvfs", "virtiofs", "afs", "fuse.")
_CLUSTER = ("ceph", "lustre", "gpfs", "beegfs", "glusterfs")
"""How the names of what is reached through a network or a server begin."""
_GIB = 1 << 30
_STORE_BYTES_PER_PARAM = 24
"""Two versions of weight, master and both moments."""
_HIGH_LOAD_FRACTION = 0.5
_WORN_PERCENT, _WORN_OUT_PERCENT = 80, 100
_SLOW_LINK_BYTES_PER_S, _FAST_LINK_BYTES_PER_S = 6e9, 20e9
"""Below what PCIe 3 x16 gives unpinned, or x8 pinned; what PCIe 4 x16 gives."""
_DUPLEX_FRACTION = 1.2
"""Of one direction alone: what both at once reach on a link that carries both."""
_SLOW_READ_BYTES_PER_S, _FAST_READ_BYTES_PER_S = 0.6e9, 3e9
_SLOW_WRITE_BYTES_PER_S, _FAST_WRITE_BYTES_PER_S = 0.5e9, 2e9
"""What SATA gives at most; what a good NVMe drive gives."""
_TOGETHER_FRACTION = 0.75
_MIXED_FRACTION = 0.6
_FAST_GPU_FLOPS_PER_S = 50e12


class Verdict(enum.Enum):
    """How a line is."""

    GOOD = "good"
    COULD_BE_BETTER = "could be better"
    BAD = "bad"
    NOT_KNOWN = "not known"


@dataclass(frozen=True, slots=True)
class Check:
    """One line of `lohan doctor`."""

    name: str
    value: str
    verdict: Verdict
    advice: str = ""
    """What to do; "" where nothing is to be done."""
    subject: str = ""
    """The SSD path that it is about; "" for the machine."""


def machine_checks(facts: MachineFacts) -> list[Check]:
    """The lines on everything but the drives."""
    checks = [_device(facts), _pinned(facts), _gpudirect(facts), _threads(facts), _load(facts), _memory(facts)]
    checks.append(_container(facts))
    if facts.device_type == "cpu":
        checks.insert(1, _bf16_units(facts))
    if facts.is_wsl:
        advice = "train under Linux itself: WSL pins only part of the RAM and its drives are files or shares of Windows"
        checks.append(Check("system", "WSL", Verdict.COULD_BE_BETTER, advice))
    return checks


def path_checks(facts: PathFacts) -> list[Check]:
    """The lines on one SSD path."""
    if facts.problem:
        advice = "choose a directory that this user can write, or fix its permissions"
        return [Check("access", f"cannot be written ({facts.problem})", Verdict.BAD, advice, facts.path)]
    checks = [_file_system(facts), _direct(facts), _room(facts), _wear(facts), _reflink(facts)]
    return [replace(check, subject=facts.path) for check in checks]


def _device(facts: MachineFacts) -> Check:
    value = f"{facts.device_name}, {format_bytes(facts.device_memory_bytes)} free"
    if facts.device_type == "cpu":
        advice = "use a GPU; if there is one, install its driver and a torch built for it"
        return Check("device", value, Verdict.COULD_BE_BETTER, advice)
    return Check("device", value, Verdict.GOOD)


def _bf16_units(facts: MachineFacts) -> Check:
    name = "bfloat16 on the CPU"
    if facts.bf16_units:
        return Check(name, ", ".join(facts.bf16_units), Verdict.GOOD)
    advice = "train in float32: without such units bfloat16 is emulated, and slower"
    return Check(name, "no units for it", Verdict.COULD_BE_BETTER, advice)


def _pinned(facts: MachineFacts) -> Check:
    name = "pinned memory"
    if facts.device_type == "cpu":
        return Check(name, "not needed", Verdict.GOOD)
    if facts.is_pinned:
        return Check(name, "available", Verdict.GOOD)
    advice = "raise the memlock limit (ulimit -l unlimited); copies run unpinned, at a fraction of the speed"
    return Check(name, "refused", Verdict.BAD, advice)


def _gpudirect(facts: MachineFacts) -> Check:
    name = "GPUDirect Storage"
    if facts.device_type == "cpu":
        return Check(name, f"not needed ({facts.gpudirect_problem})", Verdict.GOOD)
    if not facts.gpudirect_problem:
        return Check(name, "available", Verdict.GOOD)
    # Nothing to do about it: a run moves everything through pinned memory.
    return Check(name, f"not available ({facts.gpudirect_problem}), and not needed", Verdict.GOOD)


def _threads(facts: MachineFacts) -> Check:
    name, value = "CPU threads", f"{facts.cpu_threads} on {facts.usable_cpus} usable CPUs"
    quota = facts.cpu_quota
    if quota is not None and quota < min(facts.cpu_threads, facts.usable_cpus):
        advice = f"set cpu_threads to {max(1, int(quota))} or raise the quota: threads beyond it are held up in turns"
        return Check(name, f"{value}, the container's quota is {quota:g}", Verdict.COULD_BE_BETTER, advice)
    if facts.cpu_threads > facts.usable_cpus:
        advice = f"set cpu_threads to {facts.usable_cpus} or auto: more threads than CPUs wait for each other"
        return Check(name, value, Verdict.COULD_BE_BETTER, advice)
    if facts.cpu_threads < facts.usable_cpus:
        advice = "set cpu_threads to auto: the optimizer uses every core it gets"
        return Check(name, value, Verdict.COULD_BE_BETTER, advice)
    if facts.omp_num_threads == "1" and facts.usable_cpus > 1:
        advice = "unset it: a run sets its own threads, but other libraries keep to this one"
        return Check(name, f"{value}, OMP_NUM_THREADS is 1", Verdict.COULD_BE_BETTER, advice)
    return Check(name, value, Verdict.GOOD)


def _load(facts: MachineFacts) -> Check:
    name, value = "other load", f"{facts.load:.1f} of {facts.usable_cpus} CPUs in the last minute"
    if facts.load > _HIGH_LOAD_FRACTION * facts.usable_cpus:
        advice = "wait or end what takes the cores, then measure with --no-cache: rates are too low meanwhile"
        return Check(name, value, Verdict.COULD_BE_BETTER, advice)
    return Check(name, value, Verdict.GOOD)


def _memory(facts: MachineFacts) -> Check:
    available, budget = format_bytes(facts.available_memory_bytes), format_bytes(facts.cpu_memory)
    value = f"{available} free of {format_bytes(facts.memory_bytes)}, budget {budget}"
    if facts.cpu_memory > facts.available_memory_bytes:
        advice = f"lower cpu_memory below {available} or end what takes the rest: else the run is killed or swapped out"
        return Check("memory", value, Verdict.BAD, advice)
    if facts.available_memory_bytes < facts.memory_bytes // 4 and facts.memory_limit_bytes is None:
        advice = "end what takes the rest: what stays in RAM need not pass through the drives"
        return Check("memory", value, Verdict.COULD_BE_BETTER, advice)
    return Check("memory", value, Verdict.GOOD)


def _container(facts: MachineFacts) -> Check:
    name, limit = "container limit", facts.memory_limit_bytes
    if limit is None or limit >= facts.memory_bytes:
        return Check(name, "none on memory", Verdict.GOOD)
    value = f"{format_bytes(limit)} of {format_bytes(facts.memory_bytes)} memory"
    if facts.cpu_memory > limit:
        advice = f"lower cpu_memory below {format_bytes(limit)} or raise the limit: the run would be killed"
        return Check(name, value, Verdict.BAD, advice)
    advice = "raise the container's memory limit: what stays in RAM need not pass through the drives"
    return Check(name, value, Verdict.COULD_BE_BETTER, advice)


def _file_system(facts: PathFacts) -> Check:
    name, kind = "file system", facts.file_system
    if kind in _IN_RAM:
        advice = "choose a directory on a drive: this one is in RAM"
        return Check(name, kind, Verdict.BAD, advice)
    if kind in _LAYERED:
        advice = "mount a directory of the host's drive and use that: this one is a container's layer"
        return Check(name, kind, Verdict.COULD_BE_BETTER, advice)
    if kind.startswith((*_SHARED, *_CLUSTER)):
        advice = "choose a directory on a drive of this machine: this one is reached through a network or a server"
        return Check(name, kind, Verdict.BAD, advice)
    if kind in _LOCAL:
        return Check(name, kind, Verdict.GOOD)
    return Check(name, kind or "the kernel does not tell", Verdict.NOT_KNOWN)


def _direct(facts: PathFacts) -> Check:
    name = "O_DIRECT"
    if facts.is_direct:
        return Check(name, "works", Verdict.GOOD)
    advice = "choose ext4 or XFS: without it all bytes pass through the page cache, which takes RAM and CPU time"
    return Check(name, "refused", Verdict.BAD, advice)


def _room(facts: PathFacts) -> Check:
    name = "room"
    usable = min(facts.free_bytes, facts.capacity) if facts.capacity != "auto" else facts.free_bytes
    value = f"{format_bytes(usable)}, {count(usable / _STORE_BYTES_PER_PARAM)} parameters in two versions"
    if facts.capacity != "auto" and facts.capacity > facts.free_bytes:
        advice = f"lower its capacity ({format_bytes(facts.capacity)}), or free space if no store is there yet"
        return Check(name, value, Verdict.COULD_BE_BETTER, advice)
    if usable < _GIB:
        return Check(name, value, Verdict.BAD, "free space or choose another path")
    if usable < 32 * _GIB:
        return Check(name, value, Verdict.COULD_BE_BETTER, "free space or add a path: this is little for a large model")
    return Check(name, value, Verdict.GOOD)


def _wear(facts: PathFacts) -> Check:
    name = "drive wear"
    if facts.wear_percent is None:
        return Check(name, f"not readable: {facts.wear_problem}", Verdict.NOT_KNOWN)
    value = f"{facts.wear_percent}% of its rated writes"
    if facts.wear_percent >= _WORN_OUT_PERCENT:
        return Check(name, value, Verdict.BAD, "replace the drive; until then keep checkpoints on another")
    if facts.wear_percent >= _WORN_PERCENT:
        advice = "plan for a new drive; more cpu_memory keeps more records off it"
        return Check(name, value, Verdict.COULD_BE_BETTER, advice)
    return Check(name, value, Verdict.GOOD)


def _reflink(facts: PathFacts) -> Check:
    name = "reflinks"
    if facts.can_reflink:
        return Check(name, "work: checkpoints here take no copying", Verdict.GOOD)
    advice = "choose XFS or Btrfs if checkpoints are frequent: on those they share the store's blocks"
    return Check(name, "none: checkpoints are copied", Verdict.COULD_BE_BETTER, advice)


def rate_checks(profile: HardwareProfile, dtype: str, *, update_bytes: float = 12.0) -> list[Check]:
    """The lines on what was measured, `dtype` being that of the products; an update reads `update_bytes` of a parameter
    (its weight, master and moments), and writes as many."""
    checks = [_compute(profile, dtype), *_links(profile)]
    for ssd in profile.ssd:
        advice = "use an NVMe drive on four lanes, or add one as a further path"
        reads = _graded("reads", ssd.read_bytes_per_s, _SLOW_READ_BYTES_PER_S, _FAST_READ_BYTES_PER_S, advice)
        advice = "use an NVMe drive that keeps its rate when its cache is full, or add one as a further path"
        writes = _graded("writes", ssd.write_bytes_per_s, _SLOW_WRITE_BYTES_PER_S, _FAST_WRITE_BYTES_PER_S, advice)
        checks += [replace(check, subject=ssd.path) for check in (reads, writes)]
    if len(profile.ssd) > 1:
        checks.append(_together(profile))
    if profile.ssd_mixed_bytes_per_s is not None:
        checks.append(_mixed(profile, profile.ssd_mixed_bytes_per_s))
    return [*checks, _optimizer(profile, update_bytes)]


def _compute(profile: HardwareProfile, dtype: str) -> Check:
    device = profile.device
    value = f"{device.flops_per_s / 1e12:.3g} TFLOP/s in {dtype}"
    if device.memory_bytes_per_s:
        value += f", elementwise {gb_per_s(device.memory_bytes_per_s)}"
    if device.shares_cpu:
        return Check("compute", value, Verdict.COULD_BE_BETTER, "use a GPU: a CPU's step is bound by its products")
    if device.flops_per_s < _FAST_GPU_FLOPS_PER_S:
        advice = "see that nothing else uses the GPU and that it is not throttled"
        return Check("compute", value, Verdict.COULD_BE_BETTER, advice)
    return Check("compute", value, Verdict.GOOD)


def _links(profile: HardwareProfile) -> list[Check]:
    h2d, d2h, both = profile.h2d_bytes_per_s, profile.d2h_bytes_per_s, profile.duplex_bytes_per_s
    if profile.device.shares_cpu:
        value = f"{gb_per_s(h2d)} to it, {gb_per_s(d2h)} from it"
        return [Check("copies to the device", f"{value}: the CPU's own memory", Verdict.GOOD)]
    advice = "see that the GPU sits in a slot of 16 lanes (nvidia-smi -q, Link Width) and that memory is pinned"
    checks = [
        _graded(name, rate, _SLOW_LINK_BYTES_PER_S, _FAST_LINK_BYTES_PER_S, advice)
        for name, rate in (("host to device", h2d), ("device to host", d2h))
    ]
    if both is not None and both < _DUPLEX_FRACTION * min(h2d, d2h):
        advice = "none is needed: plans count with it (some links and virtual machines carry one direction at a time)"
        checks.append(Check("both ways at once", gb_per_s(both), Verdict.COULD_BE_BETTER, advice))
    elif both is not None:
        checks.append(Check("both ways at once", gb_per_s(both), Verdict.GOOD))
    return checks


def _together(profile: HardwareProfile) -> Check:
    read, write = profile.ssd_read_bytes_per_s, profile.ssd_write_bytes_per_s
    value = f"{gb_per_s(read)} read, {gb_per_s(write)} written"
    alone = (sum(ssd.read_bytes_per_s for ssd in profile.ssd), sum(ssd.write_bytes_per_s for ssd in profile.ssd))
    if read < _TOGETHER_FRACTION * alone[0] or write < _TOGETHER_FRACTION * alone[1]:
        advice = "put the paths on drives of their own with lanes of their own, and give faster ones more capacity"
        return Check("all paths together", value, Verdict.COULD_BE_BETTER, advice)
    return Check("all paths together", value, Verdict.GOOD)


def _mixed(profile: HardwareProfile, mixed: float) -> Check:
    name = "reads and writes mixed"
    in_turns = 2 / (1 / profile.ssd_read_bytes_per_s + 1 / profile.ssd_write_bytes_per_s)
    if mixed < _MIXED_FRACTION * in_turns:
        advice = "none is needed: plans count with it; a drive with more cache suffers less"
        return Check(name, gb_per_s(mixed), Verdict.COULD_BE_BETTER, advice)
    return Check(name, gb_per_s(mixed), Verdict.GOOD)


def _optimizer(profile: HardwareProfile, update_bytes: float) -> Check:
    cpu = profile.cpu
    value, update_s = f"{cpu.optimizer_params_per_s / 1e6:,.0f} M parameters/s", 1 / cpu.optimizer_params_per_s
    if cpu.checksum_bytes_per_s:
        value += f", checksums {gb_per_s(cpu.checksum_bytes_per_s)}"
        update_s += 2 * update_bytes / cpu.checksum_bytes_per_s  # of what is read and what is written
    drives = 1 / (update_bytes / profile.ssd_read_bytes_per_s + update_bytes / profile.ssd_write_bytes_per_s)
    if 1 / update_s < drives:
        advice = f"give the run more cores or faster memory: the drives could feed {drives / 1e6:,.0f} M parameters/s"
        return Check("optimizer", value, Verdict.COULD_BE_BETTER, advice)
    return Check("optimizer", f"{value}; the drives feed {drives / 1e6:,.0f} M/s", Verdict.GOOD)


def _graded(name: str, rate: float, slow: float, fast: float, advice: str) -> Check:
    if rate >= fast:
        return Check(name, gb_per_s(rate), Verdict.GOOD)
    return Check(name, gb_per_s(rate), Verdict.BAD if rate < slow else Verdict.COULD_BE_BETTER, advice)
