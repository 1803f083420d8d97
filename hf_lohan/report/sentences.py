"""Writes the sentences next to each chart, and the warnings."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from typing import Any

from hf_lohan.report.findings import SHOWN_LANES, Findings, StepPicture, Wait
from hf_lohan.timeline import COMPUTE, COMPUTE_WAITS, CPU_OPTIMIZER, D2H, H2D, SSD_READ, SSD_WRITE
from hf_lohan.wording import bottleneck_label, count, drive_bytes, format_bytes, listed, percent, seconds, times

_WAITS_THAT_MATTER = 0.02
"""Waits shorter than this fraction of the step are not mentioned."""
_MOSTLY_BUSY = 0.7
_FAR_OFF = 0.15
_LONG_BETWEEN = 0.1
_WAITS_MUCH_LONGER = 0.3
"""A rank is named as slow if the wait for it exceeds every other wait by more than this fraction of a step."""


def bound_by(findings: Findings) -> str | None:
    """Return the busiest resource of the steps, or the plan's bottleneck if no step was measured."""
    lanes = {work.lane: work.share for work in findings.lanes}
    if not lanes:
        planned = findings.summary.get("bottleneck")
        return bottleneck_label(planned, shares_cpu=findings.shares_cpu) if planned else None
    if lanes.get(COMPUTE, 0.0) >= _MOSTLY_BUSY:
        return "computing"
    shares = {
        "computing": lanes.get(COMPUTE, 0.0),
        "the SSDs": lanes.get(SSD_READ, 0.0) + lanes.get(SSD_WRITE, 0.0),
        "the optimizer on the CPU": lanes.get(CPU_OPTIMIZER, 0.0),
        "the link to the device": lanes.get(H2D, 0.0),
        "the link from the device": lanes.get(D2H, 0.0),
    }
    return max(shares, key=lambda name: shares[name])


def on_step_time(findings: Findings) -> str:
    """Write the median and spread of step times, and compare them with plan and floor."""
    assert findings.step_s is not None
    text = f"A step took {seconds(findings.step_s)} (the median of {times(len(findings.later), 'step')}"
    if len(findings.later) >= 10:
        cuts = statistics.quantiles(findings.step_times_s, n=20)
        text += f"; nine in ten took between {seconds(cuts[0])} and {seconds(cuts[-1])}"
    text += ")"
    beside = []
    if findings.predicted_s:
        beside.append(f"{findings.step_s / findings.predicted_s:.2f} times the planned {seconds(findings.predicted_s)}")
    if findings.floor:
        resource, floor_s = findings.floor
        label = bottleneck_label(resource, shares_cpu=findings.shares_cpu)
        if floor_s <= findings.step_s:
            beside.append(f"{findings.step_s / floor_s:.2f} times the floor of {seconds(floor_s)} set by {label}")
    if not beside:
        return f"{text}. There is no floor, because the run had no plan."
    return f"{text}: {listed(beside)}.{_on_busy_cpus(findings)}"


def _on_busy_cpus(findings: Findings) -> str:
    """Write a note if the machine was busy, or if the floor is above the measured step because cached rates are low."""
    load, num_cpus = findings.summary.get("cpu_load"), findings.summary.get("num_cpus")
    is_busy = load and num_cpus and load > num_cpus
    busy = f" The machine was busy when training began: a load of {load:.1f} on {num_cpus} CPUs." if is_busy else ""
    if findings.floor and findings.step_s is not None and findings.floor[1] > findings.step_s:
        return f" There is no floor, because the hardware was slower when it was measured than in the steps.{busy}"
    return busy


def on_lanes(findings: Findings) -> str:
    by_share = sorted(findings.lanes, key=lambda work: -work.share)
    words = [f"{SHOWN_LANES[work.lane].label} {percent(work.share)}" for work in by_share]
    first, *rest = words
    others = f", {listed(rest)}" if rest else ""
    return f"Of a step's time, {first.replace(' ', ' took ', 1) if ' ' in first else first}{others}. They overlap."


def on_waits(findings: Findings) -> str:
    """Write the waits of the computing thread and the time between steps."""
    step_s = _mean_step_s(findings)
    waits = [wait for wait in findings.waits if wait.lane == COMPUTE_WAITS]
    total_s = sum(wait.seconds for wait in waits)
    if not waits or total_s < _WAITS_THAT_MATTER * step_s:
        text = f"Compute waited little, {seconds(total_s)} a step ({percent(total_s / step_s)})."
    else:
        text = f"Compute waited {seconds(total_s)} a step ({percent(total_s / step_s)}), {_mostly(waits, total_s)}."
    if findings.between_s > _WAITS_THAT_MATTER * step_s:
        between = f"{seconds(findings.between_s)} ({percent(findings.between_s / step_s)})"
        text += f" Between two steps {between} went to data, logging, saving and evaluating."
    return text


def _mostly(waits: list[Wait], total_s: float) -> str:
    longest, *rest = waits
    share = longest.seconds / total_s
    if share >= 0.9:
        return f"nearly all of it for {longest.cause}"
    if share >= 0.6:
        return f"most of it for {longest.cause}"
    return f"for {listed([f'{wait.cause} ({seconds(wait.seconds)})' for wait in (longest, *rest[:2])])}"


_DEVICE_MEMORY = ("peak_allocated", "peak_reserved", "planned")


def on_memory(findings: Findings) -> str:
    _, rss = findings.values("anon_rss_bytes")
    last = findings.steps[-1]
    pools, config = last.get("cpu_pool_bytes"), findings.run.config
    texts = [f"The process had at most {format_bytes(max(rss))} of private memory."] if rss else []
    if pools:
        took = format_bytes(sum(pools.values()))
        texts.append(f"Host buffers and copies took {took}{_allowed(config, 'cpu_memory')}.")
    if "device_slots_bytes" in last:
        took = format_bytes(last["device_slots_bytes"]) + ("" if findings.shares_cpu else " on the device")
        texts.append(f"Slots for weights took {took}{_allowed(config, 'gpu_memory')}.")
    if rss:
        texts.append("Python, the libraries, and tensors of autograd took the rest of the private memory.")
    return " ".join(texts) + _on_device_memory(last)


def _on_device_memory(last: Mapping[str, Any]) -> str:
    """Write the peak memory of a device that counts it."""
    allocated, reserved, planned = (last.get(f"device_{name}_bytes") for name in _DEVICE_MEMORY)
    if not isinstance(allocated, int) or not isinstance(reserved, int):
        return ""
    against = f"; the plan expected {format_bytes(planned)}" if isinstance(planned, int) else ""
    return (
        f" On the device, tensors had at most {format_bytes(allocated)}, and the allocator reserved "
        f"{format_bytes(reserved)} for them{against}."
    )


def _allowed(config: object, name: str) -> str:
    limit = config.get(name) if isinstance(config, dict) else None
    return f" (of {format_bytes(limit)} allowed)" if isinstance(limit, int) else ""


def on_bytes(findings: Findings) -> str:
    read, written = findings.mean_of("ssd_read_bytes") or 0.0, findings.mean_of("ssd_write_bytes") or 0.0
    text = f"A step read {format_bytes(read)} from the SSDs and wrote {format_bytes(written)}."
    wear = findings.summary.get("wear")
    if wear and not wear["is_much"]:
        text += f" The plan said: {wear['words']}."
    if findings.written_bytes and findings.written_bytes_per_day:
        text += (
            f" The run has written {drive_bytes(findings.written_bytes)}, and would write "
            f"{drive_bytes(findings.written_bytes_per_day)} a day at this rate"
        )
        hardware = findings.summary.get("measured_hardware") or {}
        endurance = [ssd["endurance_bytes"] for ssd in hardware.get("ssd", ()) if ssd.get("endurance_bytes")]
        if endurance:
            text += f"; the drives are rated for {sum(endurance) / findings.written_bytes_per_day:.0f} such days"
            tokens = findings.mean_of("num_tokens")
            text += f", or {count(sum(endurance) / written * tokens)} tokens" if tokens and written else ""
        text += "."
    if sent := findings.sent_bytes:
        text += f" A step sent {format_bytes(sum(sent.values()))} to other ranks, {_coded(findings)}."
    rows = findings.summary.get("expert_rows")
    if rows and sum(rows["owned"]):  # a run that was killed early counted none
        mean = sum(rows["owned"]) / len(rows["owned"])
        text += (
            " On average over all layers, the rank with the most rows of experts computed "
            f"{rows['most_computed'] / mean:.2f} times the mean, instead of {rows['most_owned'] / mean:.2f} times "
            "without balance."
        )
    every = findings.summary.get("commit_every_steps")
    if isinstance(every, int) and every > 1:
        text += f" The plan commits one step of {every}. Records with copies in RAM are written only for commits."
    return text


def _coded(findings: Findings) -> str:
    """Write the size of encoded data relative to the data, and its error."""
    words = [
        f"{name.replace('_within', ' within the node')} "
        f"in {percent(of_lane['sent_bytes'] / of_lane['exact_bytes'])} of their bytes"
        + (f", off by {percent(error)}" if (error := of_lane.get("relative_rms_error")) is not None else "")
        for name, of_lane in (findings.summary.get("coded") or {}).items()
        if of_lane["exact_bytes"]
    ]
    return f"{listed(words)} (rounded)" if words else "none of it rounded"


def on_loss(findings: Findings) -> str:
    steps, losses = findings.values("loss")
    text = f"The loss was {losses[0]:.3f} at step {steps[0]:,}"
    if len(losses) > 1:
        text = f"The loss went from {losses[0]:.3f} at step {steps[0]:,} to {losses[-1]:.3f} at step {steps[-1]:,}"
    _, norms = findings.values("grad_norm")
    if norms:
        clipped = statistics.fmean(bool(step.get("is_clipped")) for step in findings.steps)
        how_many = {0.0: "no step was", 1.0: "every step was"}.get(clipped, f"{percent(clipped)} of the steps were")
        text += f"; the median gradient norm was {statistics.median(norms):.3g}, and {how_many} clipped"
    return f"{text}."


def on_picture(picture: StepPicture) -> str:
    text = f"Step {picture.step:,}, a typical step, took {seconds(picture.step_s)}. Gaps in a row are idle time."
    if picture.ssd_hidden_share is not None:
        text += f" The device computed during {percent(picture.ssd_hidden_share)} of the SSDs' busy time."
    return text


def warnings(findings: Findings) -> Iterator[str]:
    summary = findings.summary
    if summary.get("is_finished") is False or (findings.steps and not summary):
        planned = summary.get("num_planned_steps")
        of = f" of {planned:,}" if planned else ""
        done = findings.steps[-1]["step"] if findings.steps else 0
        yield f"This run has not ended: it is at step {done:,}{of}, or it was stopped there."
    wear = summary.get("wear")
    if wear and wear["is_much"]:
        yield f"Wear: {wear['words']}."
    num_skipped = sum(bool(step.get("is_skipped")) for step in findings.steps)
    if num_skipped:
        first = next(step["step"] for step in findings.steps if step.get("is_skipped"))
        were = "was" if num_skipped == 1 else "were"
        yield (
            f"{times(num_skipped, 'step')} {were} skipped because gradients were not finite, the first at step "
            f"{first:,}; lower the learning rate or look at the data."
        )
    if findings.step_s and findings.predicted_s and abs(findings.step_s / findings.predicted_s - 1) > _FAR_OFF:
        off = findings.step_s / findings.predicted_s - 1
        corrected = findings.corrected_s
        later = f"; the plan was corrected to {seconds(corrected)} after the first steps" if corrected else ""
        yield (
            f"The prediction of {seconds(findings.predicted_s)} was off: a step took {percent(abs(off))} "
            f"{'longer' if off > 0 else 'less'}{later}."
        )
    if findings.later and findings.between_s > _LONG_BETWEEN * _mean_step_s(findings):
        share = percent(findings.between_s / _mean_step_s(findings))
        yield f"{share} of the time passed between steps (data, logging, saving, evaluating); do these less often."
    if len(waits := findings.waits_for_ranks) > 1 and waits[0][1] - waits[1][1] > _WAITS_MUCH_LONGER:
        yield (
            f"Rank {waits[0][0]} is slower than the others: they waited for it during {percent(waits[0][1])} of a "
            f"step, and for any other rank during {percent(waits[1][1])} at most. Find out what slows it down."
        )
    num_redone = sum(step.get("updates") == "redone" for step in findings.steps)
    if num_redone:
        yield f"{times(num_redone, 'step')} guessed wrongly that the norm would not clip, and repeated the updates."


def _mean_step_s(findings: Findings) -> float:
    return statistics.fmean(findings.step_times_s)
