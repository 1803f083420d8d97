"""What to think of measured rates. Pure: a profile in, verdicts out."""

from __future__ import annotations

from dataclasses import replace

from hf_lohan.cli.verdicts import Check, Verdict
from hf_lohan.planner import CpuProfile, HardwareProfile, SsdProfile

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


def rate_checks(profile: HardwareProfile, dtype: str, *, update_bytes: float = 12.0) -> list[Check]:
    """The lines on what was measured, `dtype` being that of the products; an update reads `update_bytes` of a parameter
    (its weight, master and moments), and writes as many."""
    checks = [_compute(profile, dtype), *_links(profile)]
    for ssd in profile.ssd:
        checks.append(_reads(ssd))
        checks.append(_writes(ssd))
    if len(profile.ssd) > 1:
        checks.append(_together(profile))
    checks += _mixed(profile)
    checks.append(_optimizer(profile, update_bytes))
    return checks


def _compute(profile: HardwareProfile, dtype: str) -> Check:
    device = profile.device
    value = f"{device.flops_per_s / 1e12:.3g} TFLOP/s in {dtype}"
    if device.memory_bytes_per_s:
        value += f", elementwise {_per_s(device.memory_bytes_per_s)}"
    if device.shares_cpu:
        return Check("compute", value, Verdict.COULD_BE_BETTER, "use a GPU: a CPU's step is bound by its products")
    if device.flops_per_s < _FAST_GPU_FLOPS_PER_S:
        advice = "see that nothing else uses the GPU and that it is not throttled"
        return Check("compute", value, Verdict.COULD_BE_BETTER, advice)
    return Check("compute", value, Verdict.GOOD)


def _links(profile: HardwareProfile) -> list[Check]:
    h2d, d2h, both = profile.h2d_bytes_per_s, profile.d2h_bytes_per_s, profile.duplex_bytes_per_s
    if profile.device.shares_cpu:
        value = f"{_per_s(h2d)} to it, {_per_s(d2h)} from it"
        return [Check("copies to the device", f"{value}: the CPU's own memory", Verdict.GOOD)]
    checks = [_link("host to device", h2d), _link("device to host", d2h)]
    if both is not None and both < _DUPLEX_FRACTION * min(h2d, d2h):
        advice = "none is needed: plans count with it (some links and virtual machines carry one direction at a time)"
        checks.append(Check("both ways at once", _per_s(both), Verdict.COULD_BE_BETTER, advice))
    elif both is not None:
        checks.append(Check("both ways at once", _per_s(both), Verdict.GOOD))
    return checks


def _link(name: str, rate: float) -> Check:
    advice = "see that the GPU sits in a slot of 16 lanes (nvidia-smi -q, Link Width) and that memory is pinned"
    return _graded(name, rate, _SLOW_LINK_BYTES_PER_S, _FAST_LINK_BYTES_PER_S, advice)


def _reads(ssd: SsdProfile) -> Check:
    advice = "use an NVMe drive on four lanes, or add one as a further path"
    return replace(
        _graded("reads", ssd.read_bytes_per_s, _SLOW_READ_BYTES_PER_S, _FAST_READ_BYTES_PER_S, advice), subject=ssd.path
    )


def _writes(ssd: SsdProfile) -> Check:
    advice = "use an NVMe drive that keeps its rate when its cache is full, or add one as a further path"
    return replace(
        _graded("writes", ssd.write_bytes_per_s, _SLOW_WRITE_BYTES_PER_S, _FAST_WRITE_BYTES_PER_S, advice),
        subject=ssd.path,
    )


def _together(profile: HardwareProfile) -> Check:
    read, write = profile.ssd_read_bytes_per_s, profile.ssd_write_bytes_per_s
    value = f"{_per_s(read)} read, {_per_s(write)} written"
    alone = (sum(ssd.read_bytes_per_s for ssd in profile.ssd), sum(ssd.write_bytes_per_s for ssd in profile.ssd))
    if read < _TOGETHER_FRACTION * alone[0] or write < _TOGETHER_FRACTION * alone[1]:
        advice = "put the paths on drives of their own with lanes of their own, and give faster ones more capacity"
        return Check("all paths together", value, Verdict.COULD_BE_BETTER, advice)
    return Check("all paths together", value, Verdict.GOOD)


def _mixed(profile: HardwareProfile) -> list[Check]:
    mixed = profile.ssd_mixed_bytes_per_s
    if mixed is None:
        return []
    in_turns = 2 / (1 / profile.ssd_read_bytes_per_s + 1 / profile.ssd_write_bytes_per_s)
    if mixed < _MIXED_FRACTION * in_turns:
        advice = "none is needed: plans count with it; a drive with more cache suffers less"
        return [Check("reads and writes mixed", _per_s(mixed), Verdict.COULD_BE_BETTER, advice)]
    return [Check("reads and writes mixed", _per_s(mixed), Verdict.GOOD)]


def _optimizer(profile: HardwareProfile, update_bytes: float) -> Check:
    rate = _params_per_s(profile.cpu, update_bytes)
    value = f"{profile.cpu.optimizer_params_per_s / 1e6:,.0f} M parameters/s"
    if profile.cpu.checksum_bytes_per_s:
        value += f", checksums {_per_s(profile.cpu.checksum_bytes_per_s)}"
    drives = 1 / (update_bytes / profile.ssd_read_bytes_per_s + update_bytes / profile.ssd_write_bytes_per_s)
    if rate < drives:
        advice = f"give the run more cores or faster memory: the drives could feed {drives / 1e6:,.0f} M parameters/s"
        return Check("optimizer", value, Verdict.COULD_BE_BETTER, advice)
    return Check("optimizer", f"{value}; the drives feed {drives / 1e6:,.0f} M/s", Verdict.GOOD)


def _params_per_s(cpu: CpuProfile, update_bytes: float) -> float:
    """With the checksums of what an update reads and writes."""
    hash_s = 2 * update_bytes / cpu.checksum_bytes_per_s if cpu.checksum_bytes_per_s else 0.0
    return 1 / (1 / cpu.optimizer_params_per_s + hash_s)


def _graded(name: str, rate: float, slow: float, fast: float, advice: str) -> Check:
    if rate >= fast:
        return Check(name, _per_s(rate), Verdict.GOOD)
    return Check(name, _per_s(rate), Verdict.BAD if rate < slow else Verdict.COULD_BE_BETTER, advice)


def _per_s(rate: float) -> str:
    return f"{rate / 1e9:.3g} GB/s"
