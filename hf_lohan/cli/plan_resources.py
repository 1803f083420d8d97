"""A step by resource: how long each is busy in forward and backward, and with what."""

from __future__ import annotations

from dataclasses import dataclass

from hf_lohan.cli.plan_request import PlannedRun


@dataclass(frozen=True, slots=True)
class Work:
    """One kind of work of a resource."""

    label: str
    forward_s: float
    backward_s: float


@dataclass(frozen=True, slots=True)
class Resource:
    """Something that does one thing after another, while the others do theirs."""

    label: str
    bottlenecks: frozenset[str]
    """What the planner calls it where a phase waits for it."""
    work: tuple[Work, ...]

    @property
    def forward_s(self) -> float:
        return sum(work.forward_s for work in self.work)

    @property
    def backward_s(self) -> float:
        return sum(work.backward_s for work in self.work)


def resources_of(planned: PlannedRun) -> list[Resource]:
    """All resources of the machine. Where the CPU is the device, its cores do all but what the drives do."""
    step = planned.plan.prediction

    def work(label: str, lane: str) -> Work:
        return Work(label, getattr(step.forward, lane), getattr(step.backward, lane))

    compute, update = work("computing", "compute_s"), work("optimizer", "optimizer_s")
    to_device, to_host = work("copies to the device", "h2d_s"), work("copies from the device", "d2h_s")
    ssds = Resource("SSDs", frozenset({"ssd"}), (work("reading", "ssd_read_s"), work("writing", "ssd_write_s")))
    if planned.hardware.device.shares_cpu:
        return [Resource("CPU", frozenset({"compute", "cpu"}), (compute, to_device, to_host, update)), ssds]
    return [
        Resource("device", frozenset({"compute"}), (compute,)),
        Resource("link to the device", frozenset({"h2d", "link"}), (to_device,)),
        Resource("link from the device", frozenset({"d2h", "link"}), (to_host,)),
        ssds,
        Resource("CPU (optimizer)", frozenset({"cpu"}), (update,)),
    ]


def bottleneck_label(name: str) -> str:
    """A bottleneck's name in words."""
    return {
        "compute": "computing",
        "h2d": "the link to the device",
        "d2h": "the link from the device",
        "link": "the link to and from the device",
        "ssd": "the SSDs",
        "cpu": "the optimizer on the CPU",
    }.get(name, name)
