"""The tables and the picture of --lifetimes and --plot."""

from __future__ import annotations

from rich.console import Console

from hf_lohan.annexes.studies.allocators import Addresses
from hf_lohan.annexes.studies.lifetimes import StepLifetimes
from hf_lohan.annexes.studies.plan_plot import plot_plan
from hf_lohan.annexes.studies.step_trace import lifetimes_of_step
from hf_lohan.cli.plan_report import table_of
from hf_lohan.cli.plan_request import PlannedRun
from hf_lohan.wording import format_bytes, seconds

__all__ = ["lifetimes_of_run", "plot_plan", "print_lifetimes"]


def lifetimes_of_run(planned: PlannedRun) -> StepLifetimes:
    """Return the lifetimes of the tensors of one micro-batch. Raises ValueError for a model in which a layer runs more
    than once."""
    fused = not planned.hardware.device.shares_cpu
    return lifetimes_of_step(planned, planned.model, planned.config, fused_attention=fused)


def print_lifetimes(lifetimes: StepLifetimes, planned: PlannedRun, console: Console) -> None:
    """Print a table of the kinds of tensors, and a sentence on their use."""
    whole = "The table is for whole layers; the plan runs them in chunks.\n" if planned.plan.chunk_tokens else ""
    kinds = lifetimes.kinds(planned.hardware)
    table = table_of("tensors", "number", "bytes", "in use", "gap", "longest", "link", "SSDs")
    for kind, summary in kinds.items():
        shares = summary.can_leave_share
        table.add_row(
            kind,
            str(summary.num_tensors),
            format_bytes(summary.num_bytes),
            f"{100 * summary.active_share:.2g}%",
            seconds(summary.median_gap_s),
            seconds(summary.longest_gap_s),
            f"{100 * shares['link']:.0f}%",
            f"{100 * shares['ssd']:.0f}%",
        )
    console.print(table)
    console.print(
        "\nA gap is the time between two uses (the median, and the longest). Link and SSDs show the share of the bytes "
        "that could leave the device and return within their longest gap.\n"
        "If all these tensors were on a device with enough memory, one micro-batch and its update would take "
        f"{seconds(lifetimes.step_s)}, and {100 * lifetimes.active_share():.2g}% of the bytes would be in use.\n"
        f"{whole}{_addresses_in_words(lifetimes.addresses())}",
        soft_wrap=True,
    )


def _addresses_in_words(addresses: Addresses) -> str:
    live_bytes = max(1, addresses.live_bytes)
    planned, caching, expandable = (
        f"{100 * (num_bytes / live_bytes - 1):.1f}%"
        for num_bytes in (addresses.planned_bytes, addresses.caching_bytes, addresses.expandable_bytes)
    )
    return (
        f"The tensors that operations create take up to {format_bytes(addresses.live_bytes)} at one time. Addresses "
        f"that are planned for the whole step take {planned} more than that. PyTorch's allocator would reserve "
        f"{expandable} more with expandable segments, and {caching} more without them."
    )
