"""The machine of a plan, and the seconds of each kind of work on each resource."""

from __future__ import annotations

from dataclasses import dataclass

from hf_lohan.cli.plan_request import PlannedRun
from hf_lohan.costs import HardwareProfile
from hf_lohan.wording import format_bytes, gb_per_s, times


def machine(hardware: HardwareProfile) -> str:
    reads, writes = gb_per_s(hardware.ssd_read_bytes_per_s), gb_per_s(hardware.ssd_write_bytes_per_s)
    return (
        f"{hardware.device.name or 'a device'}, {format_bytes(hardware.device.memory_bytes)}; "
        f"{format_bytes(hardware.cpu.memory_bytes)} RAM; {times(len(hardware.ssd), 'SSD')}, "
        f"{format_bytes(hardware.ssd_capacity_bytes)}, reads {reads}, writes {writes}"
    )


@dataclass(frozen=True, slots=True)
class Work:
    label: str
    forward_s: float
    backward_s: float


@dataclass(frozen=True, slots=True)
class Resource:
    """A part of the machine that works in parallel with the others."""

    label: str
    bottlenecks: frozenset[str]
    """The names that the planner uses for this resource if it is the bottleneck."""
    work: tuple[Work, ...]


def resources_of(planned: PlannedRun) -> list[Resource]:
    """Return all resources of the machine. If the CPU is the device, its cores also compute and copy."""
    step = planned.plan.prediction

    def work(label: str, lane: str) -> Work:
        return Work(label, getattr(step.forward, lane), getattr(step.backward, lane))

    compute, update = work("computing", "compute_s"), work("optimizer", "optimizer_s")
    to_device, to_host = work("copies to the device", "h2d_s"), work("copies from the device", "d2h_s")
    gathered, exchanged = work("weights between GPUs", "gathered_s"), work("gradients between GPUs", "exchanged_s")
    sends_between = [exchange for exchange in (gathered, exchanged) if exchange.forward_s + exchange.backward_s]
    on_links = sends_between if planned.hardware.gpus_share_links else []
    ssds = Resource("SSDs", frozenset({"ssd"}), (work("reading", "ssd_read_s"), work("writing", "ssd_write_s")))
    if planned.hardware.device.shares_cpu:
        resources = [Resource("CPU", frozenset({"compute", "cpu"}), (compute, to_device, to_host, update)), ssds]
        return [*resources, *_shared(planned)]
    return [
        Resource("device", frozenset({"compute"}), (compute,)),
        Resource("link to the device", frozenset({"h2d", "link"}), (to_device, *on_links)),
        Resource("link from the device", frozenset({"d2h", "link"}), (to_host, *on_links)),
        *([Resource("links between GPUs", frozenset({"gpu_link"}), tuple(sends_between))] if sends_between else []),
        ssds,
        Resource("CPU (optimizer)", frozenset({"cpu"}), (update,)),
        *_shared(planned),
    ]


def _shared(planned: PlannedRun) -> list[Resource]:
    """Return the resources that exist only with several ranks: the network between nodes, and each node's RAM."""
    step = planned.plan.prediction
    network = Work("sending", step.forward.net_s, step.backward.net_s)
    ram = Work("passing", step.forward.host_s, step.backward.host_s)
    resources = [Resource("network", frozenset({"net"}), (network,)), Resource("RAM", frozenset({"host"}), (ram,))]
    return [resource for resource in resources if any(work.forward_s + work.backward_s for work in resource.work)]
