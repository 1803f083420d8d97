"""Makes a check with a verdict from each fact and each measured rate of a machine. All functions are pure."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from hf_lohan.costs import HardwareProfile
from hf_lohan.device import GpuLink, LinkKind
from hf_lohan.hardware import MachineFacts, PathFacts
from hf_lohan.wording import count, format_bytes, gb_per_s

_LOCAL = frozenset({"ext4", "ext3", "ext2", "xfs", "btrfs", "f2fs", "zfs", "bcachefs"})
_IN_RAM = frozenset({"tmpfs", "ramfs", "rootfs"})
_LAYERED = frozenset({"overlay", "aufs", "fuse.fuse-overlayfs"})
_SHARED = ("nfs", "cifs", "smb", "9p", "drvfs", "virtiofs", "afs", "fuse.")
_CLUSTER = ("ceph", "lustre", "gpfs", "beegfs", "glusterfs")
"""Prefixes of the names of file systems on a network or a server."""
_GIB = 1 << 30
_STORE_BYTES_PER_PARAM = 24
"""Two versions of the weight, the master and both moments."""
_HIGH_LOAD_FRACTION = 0.5
_WORN_PERCENT, _WORN_OUT_PERCENT = 80, 100
_SLOW_LINK_BYTES_PER_S, _FAST_LINK_BYTES_PER_S = 6e9, 20e9
"""A slow link is below PCIe 3 x16 with unpinned memory, or PCIe 3 x8 with pinned memory. A fast link is PCIe 4 x16."""
_DUPLEX_FRACTION = 1.2
"""On a full-duplex link, both directions at once reach at least this multiple of one direction's rate."""
_SLOW_READ_BYTES_PER_S, _FAST_READ_BYTES_PER_S = 0.6e9, 3e9
_SLOW_WRITE_BYTES_PER_S, _FAST_WRITE_BYTES_PER_S = 0.5e9, 2e9
"""A slow drive writes no faster than SATA allows. A fast drive is a good NVMe drive."""
_TOGETHER_FRACTION = 0.75
_MIXED_FRACTION = 0.6
_FAST_GPU_FLOPS_PER_S = 50e12


class Verdict(enum.Enum):
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
    """Advice for the user, or ""."""
    subject: str = ""
    """The SSD path, or "" for the machine."""


GOOD, COULD_BE_BETTER, BAD, NOT_KNOWN = Verdict


def _check(name: str, value: str, *remarks: tuple[object, Verdict, str]) -> Check:
    """Return a check with the first of ``remarks`` (applies, verdict, advice) that applies, or else a good check."""
    applying = ((verdict, advice) for applies, verdict, advice in remarks if applies)
    return Check(name, value, *next(applying, (GOOD, "")))


def machine_checks(facts: MachineFacts) -> list[Check]:
    """Return the checks of the machine without its drives."""
    checks = [*_device(facts), _threads(facts), _load(facts), _memory(facts), _container(facts)]
    if facts.is_wsl:
        advice = "train in Linux itself, because WSL pins only part of the RAM and its drives are files of Windows"
        checks.append(Check("system", "WSL", COULD_BE_BETTER, advice))
    return checks


def path_checks(facts: PathFacts) -> list[Check]:
    """Return the checks of one SSD path."""
    if facts.problem:
        advice = "choose a directory that this user can write, or fix its permissions"
        return [Check("access", f"cannot be written ({facts.problem})", BAD, advice, facts.path)]
    through_cache = "choose ext4 or XFS, because without it all bytes pass through the page cache (RAM and CPU time)"
    copied = "choose XFS or Btrfs if checkpoints are frequent, because there they share the store's blocks"
    checks = [
        _file_system(facts),
        _check("O_DIRECT", "works" if facts.is_direct else "refused", (not facts.is_direct, BAD, through_cache)),
        _room(facts),
        _wear(facts),
        _check(
            "reflinks",
            "work, so checkpoints are not copied" if facts.can_reflink else "none, so checkpoints are copied",
            (not facts.can_reflink, COULD_BE_BETTER, copied),
        ),
    ]
    return [replace(check, subject=facts.path) for check in checks]


def _device(facts: MachineFacts) -> Iterator[Check]:
    value, problem = f"{facts.device_name}, {format_bytes(facts.device_memory_bytes)} free", facts.gpudirect_problem
    if facts.device_type == "cpu":
        advice = "use a GPU; if the machine has one, install its driver and a torch built for it"
        yield Check("device", value, COULD_BE_BETTER, advice)
        advice = "train in float32, because without such units bfloat16 is emulated and slower"
        units = ", ".join(facts.bf16_units)
        yield _check("bfloat16 on the CPU", units or "no units for it", (not units, COULD_BE_BETTER, advice))
        yield Check("links between GPUs", "none, because there is no GPU", GOOD)
        yield Check("pinned memory", "not needed", GOOD)
        yield Check("GPUDirect Storage", f"not needed ({problem})", GOOD)
        return
    yield Check("device", value, GOOD)
    yield Check("links between GPUs", _links_between(facts.gpu_links), GOOD)
    advice = "raise the memlock limit (ulimit -l unlimited); copies run unpinned, at a fraction of the speed"
    pinned = "available" if facts.is_pinned else "refused"
    yield _check("pinned memory", pinned, (not facts.is_pinned, BAD, advice))
    # This check gives no advice, because a run without GPUDirect Storage uses pinned memory instead.
    found = f"available ({facts.gpudirect_rates})" if facts.gpudirect_rates else "available"
    yield Check("GPUDirect Storage", f"not available ({problem}), and not needed" if problem else found, GOOD)


def _links_between(links: Sequence[GpuLink]) -> str:
    """Return a text with each kind of link and its pairs of GPUs. GPUs have the indices that torch uses."""
    pairs = {kind: [f"{link.first}-{link.second}" for link in links if link.kind is kind] for kind in LinkKind}
    found = [f"{kind.value} ({', '.join(pairs[kind])})" for kind in LinkKind if pairs[kind]]
    return "; ".join(found) or "none, because there is one GPU"


def _threads(facts: MachineFacts) -> Check:
    threads, cpus, quota = facts.cpu_threads, facts.usable_cpus, facts.cpu_quota
    value = f"{threads} on {cpus} usable CPUs"
    if quota is not None and quota < min(threads, cpus):
        advice = f"set cpu_threads to {max(1, int(quota))} or raise the quota, because more threads only wait"
        return Check("CPU threads", f"{value}, the container's quota is {quota:g}", COULD_BE_BETTER, advice)
    if threads == cpus > 1 and facts.omp_num_threads == "1":
        advice = "unset it, because other libraries obey it (a run sets its own threads)"
        return Check("CPU threads", f"{value}, OMP_NUM_THREADS is 1", COULD_BE_BETTER, advice)
    fewer = f"set cpu_threads to {cpus} or auto, because more threads than CPUs wait for each other"
    more = "set cpu_threads to auto, because the optimizer uses every core it gets"
    remarks = (threads > cpus, COULD_BE_BETTER, fewer), (threads < cpus, COULD_BE_BETTER, more)
    return _check("CPU threads", value, *remarks)


def _load(facts: MachineFacts) -> Check:
    advice = "wait or end other programs, then measure again with --no-cache, because rates are too low now"
    is_high = facts.load > _HIGH_LOAD_FRACTION * facts.usable_cpus
    value = f"{facts.load:.1f} of {facts.usable_cpus} CPUs in the last minute"
    return _check("other load", value, (is_high, COULD_BE_BETTER, advice))


def _memory(facts: MachineFacts) -> Check:
    available, budget = format_bytes(facts.available_memory_bytes), format_bytes(facts.cpu_memory)
    lower = f"lower cpu_memory below {available} or end other programs, because the run would be killed or swapped out"
    is_taken = facts.available_memory_bytes < facts.memory_bytes // 4 and facts.memory_limit_bytes is None
    advice = "end other programs, because with more RAM the drives move fewer bytes"
    return _check(
        "memory",
        f"{available} free of {format_bytes(facts.memory_bytes)}, budget {budget}",
        (facts.cpu_memory > facts.available_memory_bytes, BAD, lower),
        (is_taken, COULD_BE_BETTER, advice),
    )


def _container(facts: MachineFacts) -> Check:
    name, limit = "container limit", facts.memory_limit_bytes
    if limit is None or limit >= facts.memory_bytes:
        return Check(name, "none on memory", GOOD)
    value = f"{format_bytes(limit)} of {format_bytes(facts.memory_bytes)} memory"
    advice = "raise the container's memory limit, because with more RAM the drives move fewer bytes"
    return Check(name, value, COULD_BE_BETTER, advice)


def _file_system(facts: PathFacts) -> Check:
    kind = facts.file_system
    reached = "choose a directory on a drive of this machine, because this directory is on a network or a server"
    layer = "mount a directory of the host's drive and use that, because this one is a container's layer"
    return _check(
        "file system",
        kind or "unknown",
        (kind in _IN_RAM, BAD, "choose a directory on a drive, because this one is in RAM"),
        (kind in _LAYERED, COULD_BE_BETTER, layer),
        (kind.startswith((*_SHARED, *_CLUSTER)), BAD, reached),
        (kind not in _LOCAL, NOT_KNOWN, ""),
    )


def _room(facts: PathFacts) -> Check:
    capacity = facts.free_bytes if facts.capacity == "auto" else facts.capacity
    usable = min(facts.free_bytes, capacity)
    lower = f"lower its capacity ({format_bytes(capacity)}), or free space if it has no store yet"
    return _check(
        "room",
        f"{format_bytes(usable)}, {count(usable / _STORE_BYTES_PER_PARAM)} parameters in two versions",
        (capacity > facts.free_bytes, COULD_BE_BETTER, lower),
        (usable < _GIB, BAD, "free space or choose another path"),
        (usable < 32 * _GIB, COULD_BE_BETTER, "free space or add a path, because a large model needs more"),
    )


def _wear(facts: PathFacts) -> Check:
    name, wear = "drive wear", facts.wear_percent
    if wear is None:
        return Check(name, f"not readable: {facts.wear_problem}", NOT_KNOWN)
    replace_it = "replace the drive; until then keep checkpoints on another drive"
    plan_for_it = "plan for a new drive; with more cpu_memory a run writes less to this one"
    remarks = (wear >= _WORN_OUT_PERCENT, BAD, replace_it), (wear >= _WORN_PERCENT, COULD_BE_BETTER, plan_for_it)
    return _check(name, f"{wear}% of its rated writes", *remarks)


def rate_checks(profile: HardwareProfile, dtype: str, *, update_bytes: float = 12.0) -> list[Check]:
    """Return the checks of measured rates. `dtype` is the dtype of matrix products. An update reads `update_bytes` for
    each parameter (weight, master and moments), and writes the same number of bytes."""
    checks = [_compute(profile, dtype), *_links(profile)]
    for ssd in profile.ssd:
        advice = "use an NVMe drive on four lanes, or add one as a further path"
        reads = _graded("reads", ssd.read_bytes_per_s, _SLOW_READ_BYTES_PER_S, _FAST_READ_BYTES_PER_S, advice)
        advice = "use an NVMe drive that keeps its rate when its cache is full, or add one as a further path"
        writes = _graded("writes", ssd.write_bytes_per_s, _SLOW_WRITE_BYTES_PER_S, _FAST_WRITE_BYTES_PER_S, advice)
        checks += [replace(check, subject=ssd.path) for check in (reads, writes)]
    read, write, mixed = profile.ssd_read_bytes_per_s, profile.ssd_write_bytes_per_s, profile.ssd_mixed_bytes_per_s
    if len(profile.ssd) > 1:
        alone = sum(ssd.read_bytes_per_s for ssd in profile.ssd), sum(ssd.write_bytes_per_s for ssd in profile.ssd)
        is_slow = read < _TOGETHER_FRACTION * alone[0] or write < _TOGETHER_FRACTION * alone[1]
        advice = "put each path on its own drive with its own lanes, and give faster drives more capacity"
        value = f"{gb_per_s(read)} read, {gb_per_s(write)} written"
        checks.append(_check("all paths together", value, (is_slow, COULD_BE_BETTER, advice)))
    if mixed is not None:
        is_slow = mixed < _MIXED_FRACTION * 2 / (1 / read + 1 / write)  # rate of reads and writes in turns
        advice = "do nothing, because plans count this loss; a drive with more cache loses less"
        checks.append(_check("reads and writes mixed", gb_per_s(mixed), (is_slow, COULD_BE_BETTER, advice)))
    return [*checks, _optimizer(profile, update_bytes)]


def _compute(profile: HardwareProfile, dtype: str) -> Check:
    device = profile.device
    value = f"{device.flops_per_s / 1e12:.3g} TFLOP/s in {dtype}"
    if device.memory_bytes_per_s:
        value += f", elementwise {gb_per_s(device.memory_bytes_per_s)}"
    on_cpu = "use a GPU, because matrix products bound a step on a CPU"
    throttled = "check that no other program uses the GPU and that it is not throttled"
    is_slow = device.flops_per_s < _FAST_GPU_FLOPS_PER_S
    return _check("compute", value, (device.shares_cpu, COULD_BE_BETTER, on_cpu), (is_slow, COULD_BE_BETTER, throttled))


def _links(profile: HardwareProfile) -> list[Check]:
    h2d, d2h, both = profile.h2d_bytes_per_s, profile.d2h_bytes_per_s, profile.duplex_bytes_per_s
    if profile.device.shares_cpu:
        value = f"{gb_per_s(h2d)} to it, {gb_per_s(d2h)} from it"
        return [Check("copies to the device", f"{value} (the CPU's own memory)", GOOD)]
    advice = "check that the GPU has a slot of 16 lanes (nvidia-smi -q, Link Width) and that memory is pinned"
    checks = [
        _graded(name, rate, _SLOW_LINK_BYTES_PER_S, _FAST_LINK_BYTES_PER_S, advice)
        for name, rate in (("host to device", h2d), ("device to host", d2h))
    ]
    if both is not None:
        advice = "do nothing, because plans count this (some links and virtual machines carry one direction at a time)"
        is_slow = both < _DUPLEX_FRACTION * min(h2d, d2h)
        checks.append(_check("both ways at once", gb_per_s(both), (is_slow, COULD_BE_BETTER, advice)))
    return checks


def _optimizer(profile: HardwareProfile, update_bytes: float) -> Check:
    cpu = profile.cpu
    value, update_s = f"{cpu.optimizer_params_per_s / 1e6:,.0f} M parameters/s", 1 / cpu.optimizer_params_per_s
    if cpu.checksum_bytes_per_s:
        value += f", checksums {gb_per_s(cpu.checksum_bytes_per_s)}"
        update_s += 2 * update_bytes / cpu.checksum_bytes_per_s  # checksums of reads and of writes
    drives = 1 / (update_bytes / profile.ssd_read_bytes_per_s + update_bytes / profile.ssd_write_bytes_per_s)
    if 1 / update_s < drives:
        advice = f"give the run more cores or faster memory; the drives could feed {drives / 1e6:,.0f} M parameters/s"
        return Check("optimizer", value, COULD_BE_BETTER, advice)
    return Check("optimizer", f"{value}; the drives feed {drives / 1e6:,.0f} M/s", GOOD)


def _graded(name: str, rate: float, slow: float, fast: float, advice: str) -> Check:
    return _check(name, gb_per_s(rate), (rate < slow, BAD, advice), (rate < fast, COULD_BE_BETTER, advice))
