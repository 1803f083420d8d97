"""Plans of several ranks: parses their options and writes their results as text."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hf_lohan.config.values import check_collectives
from hf_lohan.costs import (
    Cluster,
    Collectives,
    HardwareProfile,
    ModelProfile,
    OffloadPlan,
    TrainingSetup,
    all_ways,
    balanced_experts,
)
from hf_lohan.costs.model_profile import ExpertsProfile
from hf_lohan.costs.step.expert_costs import most_loaded
from hf_lohan.device import LinkKind
from hf_lohan.wording import bottleneck_label, count, format_bytes, gb_per_s, listed, seconds

PAYLOAD_OF_LINE_RATE = 0.94
"""Fraction of a line rate that is payload, with frames of 1500 bytes. Headers of Ethernet, IP and TCP take the rest."""
_LINK = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*([KMGT]?)(bit|b|B)(?:/s|ps)?", re.ASCII)
_COLLECTIVES = {
    "forward_weights": "weights, forward",
    "backward_weights": "weights, backward",
    "gradients": "gradients",
    "forward_rows": "rows of embeddings",
    "forward_tokens": "tokens to experts, forward",
    "backward_tokens": "tokens to experts, backward",
}
_SOURCES = {"world": "all nodes", "ram": "each node's RAM", "ssd": "each node's SSDs"}
_FORMS = {"exact": "exact", "delta": "exact, as a change", "int8": "int8", "int4": "int4"}
_GPU_LINKS = {"nvlink": LinkKind.NVLINK, "pcie": LinkKind.PCIE, "none": LinkKind.NONE, "": LinkKind.UNKNOWN}
_POWERS = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


def link_bytes_per_s(text: str) -> float:
    """Return payload bytes per second. "2.5Gbit" is a line rate, "300MB/s" a payload rate. Raises ValueError."""
    match = _LINK.fullmatch(text.strip())
    rate = float(match[1]) * _POWERS[match[2]] if match else 0.0
    if match is None or not rate:
        raise ValueError(f"link = {text!r} is not allowed; write a rate such as 2.5Gbit, 10Gbit or 1.2GB/s")
    return rate if match[3] == "B" else rate / 8 * PAYLOAD_OF_LINE_RATE


def with_link(hardware: HardwareProfile, link: str | None, num_nodes: int) -> HardwareProfile:
    """Return the machine with the rate of ``link``. Raises ValueError if the nodes need a rate and none is known."""
    if link is not None:
        return replace(hardware, net_bytes_per_s=link_bytes_per_s(link))
    if num_nodes > 1 and hardware.net_bytes_per_s is None:
        raise ValueError(
            f"the rate of the link between {num_nodes} nodes is unknown; give --link 10Gbit, or net_bytes_per_s in "
            "the hardware profile"
        )
    return hardware


def with_gpu_rate(hardware: HardwareProfile, rate: str | None) -> HardwareProfile:
    """Return the machine with the rate of the links between its GPUs, if one is given. Raises ValueError."""
    if rate is None:
        return hardware
    match = _LINK.fullmatch(rate.strip())
    if match is None or match[3] != "B":
        raise ValueError(
            f"gpu_link = {rate!r} is not allowed; write bytes per second in each direction, such as 50GB/s"
        )
    return replace(hardware, gpu_link_bytes_per_s=link_bytes_per_s(rate))


def why_gpus_do_not_send(hardware: HardwareProfile) -> str:
    """Return why the devices of the machine cannot send to each other; "" if they can, or if this is not known."""
    if hardware.device.shares_cpu:
        return "this run computes on the cpu, and only CUDA devices send to each other"
    if hardware.gpu_link == "none":
        return "the GPUs of this machine do not reach each other's memory (gpu_link: none)"
    return ""


@dataclass(frozen=True, slots=True)
class LinksBetweenGpus:
    """The links between the GPUs of a node, in a plan."""

    kind: str
    """The name of the kind in `lohan doctor`."""
    bytes_per_s: float
    rate_is: str
    """The source of the rate, as the end of "the rate is ..."."""


def gpu_links_of(plan: OffloadPlan, hardware: HardwareProfile, given_rate: str | None) -> LinksBetweenGpus | None:
    """Return the links between the GPUs of a node. Return None if a node has one device, or if its devices are not
    GPUs."""
    if plan.cluster.num_local == 1 or hardware.device.shares_cpu:
        return None
    if hardware.gpu_link_bytes_per_s is not None:
        rate_is = "given by --gpu-link" if given_rate is not None else "as in the hardware profile"
    elif hardware.gpu_link == "nvlink":
        rate_is = "assumed, as between two RTX 3090"
    else:
        rate_is = "assumed, as for copies from and to RAM"
    return LinksBetweenGpus(_GPU_LINKS[hardware.gpu_link].value, hardware.between_gpus_bytes_per_s, rate_is)


def between_gpus(plan: OffloadPlan, hardware: HardwareProfile, given_rate: str | None) -> Iterator[str]:
    """Yield sentences on the links between the GPUs of a node, and on the bytes that they carry."""
    links, ranks = gpu_links_of(plan, hardware, given_rate), plan.prediction.ranks
    if links is None or ranks is None:
        return
    if plan.cluster.transport == "host":
        yield f"Links between the GPUs of a node: {links.kind}. They are not used with ranks.transport: host."
        return
    moved = ranks.between_gpus
    yield (
        f"Links between the GPUs of a node: {links.kind}, {gb_per_s(links.bytes_per_s)} in each direction "
        f"({links.rate_is}). In a step each GPU gets {format_bytes(moved.h2d)} of weights from the others, and sends "
        f"them {format_bytes(moved.d2h)} of gradients (ranks.transport: nccl)."
    )
    if hardware.gpus_share_links:
        yield "These bytes also pass over the links between GPUs and RAM, so nccl saves nothing on these links."


def ways_asked_for(text: str | None) -> tuple[Collectives, ...] | None:
    """Return the ways to exchange weights and gradients from which the plan may choose with `--collectives`. ``text``
    is "exact", "quantized" (all ways), or names with values such as "forward=int8,backward=node". None leaves the
    choice to the configuration. Raises ValueError."""
    if text is None:
        return None
    if text == "quantized":
        return all_ways()
    setting: Any = text
    if "=" in text:
        values = ((key.strip(), value.strip()) for key, _, value in (word.partition("=") for word in text.split(",")))
        setting = {key: int(value) if value.isdecimal() else value for key, value in values}
    return check_collectives("--collectives", setting).open_ways()


def of_each_rank(cluster: Cluster) -> str:
    """Return the end of the heading: the number of ranks, or "" for one rank."""
    if cluster.num_ranks == 1:
        return ""
    return f" on each of {cluster.num_ranks} ranks" + (
        f" in {cluster.num_nodes} nodes" if cluster.num_nodes > 1 else " of one node"
    )


def divides_experts(plan: OffloadPlan) -> bool:
    """Return whether each expert belongs to one of several ranks."""
    return plan.prediction.ranks is not None and plan.prediction.experts is not None


def nodes_send(plan: OffloadPlan) -> bool:
    """Return whether nodes send weights and gradients to each other."""
    return plan.cluster.num_nodes > 1


def sent_rows(plan: OffloadPlan) -> Iterator[tuple[str, str, str]]:
    """Yield (collective, form, bytes that one node sends in a step), and the sum as the last row."""
    assert plan.prediction.ranks is not None
    ways = plan.cluster.collectives
    forms = {
        "forward_weights": _FORMS[ways.forward],
        "backward_weights": _FORMS[ways.forward] if ways.backward == "world" else f"from {_source(ways)}",
        "gradients": _FORMS[ways.gradients],
        "forward_rows": _FORMS["exact"],
        "forward_tokens": _FORMS["exact"],
        "backward_tokens": _FORMS["exact"],
    }
    for name, num_bytes in plan.prediction.ranks.bytes_by_collective.items():
        yield _COLLECTIVES[name], forms[name], f"{num_bytes:,}"
    yield "in all", "", f"{plan.prediction.ranks.sent_bytes_per_step:,}"


def tried_rows(plan: OffloadPlan) -> Iterator[tuple[tuple[str, str, str, str], bool]]:
    """Yield a row for each way that was tried, and whether the plan chose it. The fastest way is first."""
    for tried in sorted(plan.tried_ways, key=lambda way: (not way.fits, way.step_s)):
        ways, step = tried.collectives, seconds(tried.step_s) if tried.fits else "does not fit"
        gradients = _FORMS[ways.gradients] + (f", {ways.within} within" if ways.within != "exact" else "")
        row = _FORMS[ways.forward], _source(ways), gradients, step
        yield row, ways == plan.cluster.collectives


def _source(ways: Collectives) -> str:
    """Return the source of weights in backward."""
    if ways.group_ranks is None:
        return _SOURCES[ways.backward]
    return f"the {'RAM' if ways.backward == 'ram' else 'SSDs'} of {ways.group_ranks} ranks"


def what_hides(plan: OffloadPlan) -> Iterator[str]:
    """Yield lines with the number of tokens per step above which computing hides each shared resource and link."""
    ranks = plan.prediction.ranks
    if ranks is None:
        return
    hidden = {name: tokens for name, tokens in ranks.hides_from_tokens.items() if tokens is not None}
    by_tokens = sorted(hidden, key=lambda name: -hidden[name])
    from_tokens = [f"{count(hidden[name])} for {bottleneck_label(name)}" for name in by_tokens]
    if from_tokens:
        at_once = plan.prediction.num_tokens // plan.num_micro_batches
        yield (
            f"Tokens per step of all ranks that hide a resource behind computing: {listed(from_tokens)}; this step has "
            f"{count(at_once)}."
        )
    for name in ranks.hides_from_tokens.keys() - hidden.keys():
        yield f"With any batch, {bottleneck_label(name)} takes longer for each token than computing."


def rounded_within(plan: OffloadPlan) -> Iterator[str]:
    """Yield a line with the bytes that codecs save on the link of each device, if values are rounded there."""
    ways, ranks = plan.cluster.collectives, plan.prediction.ranks
    if ranks is None or ways.within == "exact":
        return
    link, exact = ranks.link_bytes, ranks.exact_link_bytes
    yield (
        f"The link of each device carries {format_bytes(link.h2d)} of weights in int8 instead of "
        f"{format_bytes(exact.h2d)} in a step, and {format_bytes(link.d2h)} of gradients in {ways.within} instead of "
        f"{format_bytes(exact.d2h)}."
    )


def sent_in_a_line(plan: OffloadPlan) -> str:
    """Return a line with the bytes that each node sends in a step, and their forms."""
    assert plan.prediction.ranks is not None
    ways = plan.cluster.collectives
    return (
        f"{format_bytes(plan.prediction.ranks.sent_bytes_per_step)} from each node: weights {_FORMS[ways.forward]}, "
        f"backward's from {_source(ways)}, gradients {_FORMS[ways.gradients]}"
    )


def rows_of_experts(plan: OffloadPlan, profile: ModelProfile, setup: TrainingSetup) -> Iterator[str]:
    """Yield lines for runs in which each expert belongs to one of several ranks: the number of tokens up to which rows
    take fewer bytes than weights, and the rows of the most loaded rank."""
    ranks = plan.prediction.ranks
    if ranks is not None and ranks.rows_equal_weights_at_tokens is not None:
        yield (
            f"With up to {count(ranks.rows_equal_weights_at_tokens)} tokens in a rank's micro-batch, nodes send fewer "
            "bytes for the rows of tokens than they would for the experts' weights and gradients."
        )
    loads = loads_of_ranks(plan, profile, setup)
    if loads is not None:
        most = f"the most loaded rank has {loads['now']:.2f} times the mean rows of experts"
        if "owned" in loads:
            most = (
                f"the experts of the most loaded rank have {loads['owned']:.2f} times the mean rows; with "
                f"experts.balance the most loaded rank computes {loads['now']:.2f} times the mean"
            )
        yield (
            f"In the routing that the run has counted, {most}. Each layer waits for this rank. With lohan reshard "
            f"--balance it would have {loads['balanced']:.2f} times the mean."
        )


def loads_of_ranks(plan: OffloadPlan, profile: ModelProfile, setup: TrainingSetup) -> dict[str, float] | None:
    """Return the rows of the most loaded rank divided by the mean of all ranks, averaged over layers. "now" is the
    present load, and "balanced" the load after `lohan reshard --balance`. If ranks borrow experts (`experts.balance`),
    "owned" is the present load without it. None if ranks divide no experts, or if no routing is known."""
    cluster = plan.cluster
    layers = [experts for experts in profile.experts if experts.chances]
    if not divides_experts(plan) or not layers:
        return None
    divided = balanced_experts([experts.chances for experts in layers], cluster.num_ranks, cluster.num_local)
    owners = [{expert: rank for rank, own in enumerate(way) for expert in own} for way in divided]
    balanced = [
        replace(experts, owners=tuple(of[expert] for expert in range(experts.num_experts)))
        for experts, of in zip(layers, owners, strict=True)
    ]

    def load(of: Sequence[ExpertsProfile], least_rows: int) -> float:
        return statistics.fmean(
            most_loaded(experts, layer, cluster.num_ranks, num_local=cluster.num_local, least_rows=least_rows)
            for layer, experts in enumerate(of)
        )

    least_rows = setup.least_moved_rows
    loads = {"now": load(layers, least_rows), "balanced": load(balanced, least_rows)}
    return {**loads, "owned": load(layers, 0)} if least_rows else loads
