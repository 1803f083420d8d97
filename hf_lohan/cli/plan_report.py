"""`lohan plan` and `lohan estimate`: print a plan, its step time, bottleneck and memory, and useful changes."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hf_lohan.cli.plan_changes import (
    faster_parts,
    nearest_changes,
    plan_facts,
    positions_exceeded,
    row_tokens,
    small_states,
    times_slower_than_hidden,
    tokens_at_once,
    with_other_experts,
)
from hf_lohan.cli.plan_ranks import (
    between_gpus,
    divides_experts,
    nodes_send,
    of_each_rank,
    rounded_within,
    rows_of_experts,
    sent_in_a_line,
    sent_rows,
    tried_rows,
    what_hides,
)
from hf_lohan.cli.plan_request import OtherMachine, PlannedRun, PlanRequest, epoch_of, longest_row_of, plan_run
from hf_lohan.cli.plan_resources import machine, resources_of
from hf_lohan.costs import (
    BudgetError,
    HardwareProfile,
    SizeClass,
    drive_life,
)
from hf_lohan.costs.fitting import device_limit_bytes
from hf_lohan.costs.record_traffic import FETCHED_KINDS
from hf_lohan.hardware import read_hardware
from hf_lohan.planning import PlannedEpoch, read_lengths
from hf_lohan.planning.studies import plan_studies, studies_for
from hf_lohan.planning.wear import wear_of
from hf_lohan.wording import bottleneck_label, count, drive_bytes, format_bytes, percent, seconds, times

_BAR_WIDTH = 20
_LABEL_WIDTH = 10
_ANY_BYTES = 1 << 50


def run_plan(
    request: PlanRequest,
    *,
    as_json: bool,
    plot: str | None,
    lifetimes: bool = False,
    lengths_file: str | None = None,
) -> None:
    """Plan a run and print the plan. Raises ValueError for bad values, and BudgetError with the smallest change that
    helps if no plan fits. With `as_json`, a plan that does not fit is printed as well. ``lifetimes``: also print, and
    draw, when tensors are in use. ``lengths_file``: a file with the lengths of an epoch's rows. The plan is for the
    longest row, and the epoch is planned as well."""
    studies: Any = studies_for("--lifetimes" if lifetimes else "--plot") if lifetimes or plot is not None else None
    lengths = read_lengths(lengths_file) if lengths_file is not None else []
    planned = _planned(_for_longest(request, lengths), as_json=as_json)
    if not as_json:
        _refuse_unfit(planned)
    found = None
    if as_json:
        facts = plan_facts(planned)
        if lengths and planned.plan.fits:
            facts["epoch"] = epoch_of(planned, lengths).to_mapping()
        if lifetimes:
            found = studies.lifetimes_of_run(planned)
            facts["lifetimes"] = found.to_mapping(planned.hardware) | {"layers": "whole"}
        typer.echo(json.dumps(facts, indent=2))
        _refuse_unfit(planned)
    else:
        console = Console()
        print_plan(planned, console)
        if lengths:
            console.print()
            print_epoch(epoch_of(planned, lengths), planned, console)
        if lifetimes:
            console.print()
            found = studies.lifetimes_of_run(planned)
            studies.print_lifetimes(found, planned, console)
    if plot is not None:
        studies.plot_plan(planned, plot, found)


def _for_longest(request: PlanRequest, lengths: Sequence[int]) -> PlanRequest:
    """Return the request with the length of the longest row, or with `--seq-len` the length of packed rows."""
    if not lengths:
        if request.sequence_length is None:
            raise ValueError("neither --seq-len nor --lengths is given; give the length of all rows, or of each row")
        return request
    longest = max(lengths)
    if request.sequence_length is not None and request.sequence_length < longest:
        raise ValueError(
            f"--seq-len {request.sequence_length} is shorter than the longest row of --lengths, which has {longest} "
            "tokens; leave --seq-len out, or give the length of packed rows, into which each row must fit"
        )
    return replace(request, sequence_length=request.sequence_length or longest)


def run_estimate(request: PlanRequest, *, as_json: bool) -> None:
    """Print in a few lines whether the run fits, how long a step takes and what it needs. Raises like `run_plan`."""
    planned = _planned(request, as_json=as_json)
    if as_json:
        typer.echo(json.dumps(plan_facts(planned), indent=2))
    _refuse_unfit(planned)
    if not as_json:
        _print_estimate(planned, Console())


def _planned(request: PlanRequest, *, as_json: bool) -> PlannedRun:
    try:
        return plan_run(request)
    except BudgetError as error:
        if as_json:
            typer.echo(json.dumps({"fits": False, "refusal": str(error)}, indent=2))
        raise


def _refuse_unfit(planned: PlannedRun) -> None:
    """Raise BudgetError if the plan does not fit."""
    if planned.plan.refusal is not None:
        raise BudgetError(f"{planned.plan.refusal}{_longest_beside_refusal(planned)}")


def _longest_beside_refusal(planned: PlannedRun) -> str:
    """Return a clause on the longest row that fits, for the end of a refusal. Return "" if no row fits."""
    if planned.plan.least_device_bytes <= device_limit_bytes(planned.hardware, planned.setup):
        return ""
    longest = longest_row_of(planned).num_tokens
    return f"; the longest row that fits, alone in its batch, has {longest} tokens" if longest else ""


def _print_estimate(planned: PlannedRun, console: Console) -> None:
    step = planned.plan.prediction
    tiers = zip(("device memory", "RAM", "SSD"), step.tier_bytes.values(), strict=True)
    needs = [f"{format_bytes(sum(parts.values()))} of {name}" for name, parts in tiers]
    lines = {
        "wear": wear_words(planned),
        "forward": seconds(step.forward_s),
        "backward": seconds(step.backward_s),
        "fits": f"yes, offloaded, in {', '.join(needs)}",
    }
    if nodes_send(planned.plan):
        lines["sends"] = sent_in_a_line(planned.plan)
    figures = [f"{label:<{_LABEL_WIDTH}}{text}" for label, text in lines.items()]
    lines_below = (
        *_length(planned),
        *_rows(planned),
        *_experts(planned),
        *_other_experts(planned),
        *_commits(planned),
        *_on_resources(planned),
        longest_row_text(planned),
        *_what_helps(planned),
        without_offloading(planned),
    )
    for line in (heading(planned), summary(planned), *figures, *lines_below):
        console.print(line, soft_wrap=True)


def _on_resources(planned: PlannedRun) -> Iterable[str]:
    """Yield sentences on links, and on the number of tokens from which computing hides the other resources."""
    yield from rounded_within(planned.plan)
    yield from between_gpus(planned.plan, planned.hardware, planned.request.gpu_link)
    yield hiding(planned)
    yield from what_hides(planned.plan)


def print_plan(planned: PlannedRun, console: Console) -> None:
    console.print(heading(planned), soft_wrap=True)
    console.print()
    console.print(summary(planned), soft_wrap=True)
    for line in (*plan_studies().simulated_sentences(planned), *_order(planned), *_length(planned)):
        console.print(line, soft_wrap=True)
    for table in (_resources(planned), *_sent(planned), _tiers(planned), _activations(planned)):
        console.print()
        console.print(table)
    console.print()
    for line in (
        *_records(planned),
        *_gradients(planned),
        *_parked(planned),
        *_rows(planned),
        *_experts(planned),
        *_other_experts(planned),
        *_wear(planned),
        *_commits(planned),
        *_on_resources(planned),
        longest_row_text(planned),
    ):
        console.print(line, soft_wrap=True)
    if planned.plan.in_memory.fits:
        console.print(Text(without_offloading(planned), style="bold green"), soft_wrap=True)
    console.print()
    console.print(_purchases(planned))


def longest_row_text(planned: PlannedRun) -> str:
    """Return a sentence on the longest row that fits the machine."""
    longest = longest_row_of(planned)
    if not longest.num_tokens:
        return "No row fits this machine alone in its batch."
    if longest.is_longest_tried:
        return f"A row of {longest.num_tokens} tokens fits, alone in its batch; longer rows were not tried."
    return f"The longest row that fits, alone in its batch, has {longest.num_tokens} tokens."


def print_epoch(epoch: PlannedEpoch, planned: PlannedRun, console: Console) -> None:
    """Print a table with a row for each class of lengths, and sentences on the epoch."""
    table = table_of("tokens up to", "batches", "a step", "bound by", "share of the epoch")
    for of_class in epoch.classes:
        table.add_row(
            str(of_class.num_tokens),
            str(of_class.num_batches),
            seconds(of_class.step_s),
            bottleneck_label(of_class.bottleneck),
            percent(of_class.epoch_s / epoch.epoch_s),
        )
    console.print(table)
    padding = percent(1 - epoch.num_tokens / epoch.num_padded_tokens)
    console.print(
        f"\nAn epoch of {times(epoch.num_rows, 'row')} with {epoch.num_tokens} tokens has "
        f"{times(epoch.num_steps, 'step')} and takes {seconds(epoch.epoch_s)}; {padding} of the computed tokens are "
        f"padding.\nPacked into {times(epoch.num_packed_rows, 'row')} of {epoch.packed_row_tokens} tokens, it has "
        f"{times(epoch.num_packed_steps, 'step')} and takes {seconds(epoch.packed_epoch_s)}.",
        soft_wrap=True,
    )
    rows = epoch.ssd_hides_from_packed_rows
    if rows is not None:
        console.print(
            f"If at least {rows:.3g} packed rows share each load of the weights, computing hides the drives.",
            soft_wrap=True,
        )


def heading(planned: PlannedRun) -> Text:
    profile, hardware = planned.profile, planned.hardware
    dtype = str(planned.dtype).removeprefix("torch.")
    num_together = planned.shape.num_together
    num_micro_batches = num_together * planned.shape.num_micro_batches
    accumulated = f", {num_micro_batches} accumulated" if num_micro_batches > 1 else ""
    accumulated += " vertically" if num_together > 1 else ""
    return Text.assemble(
        (planned.model_class, "bold"),
        f", {count(profile.num_params)} parameters, {dtype}; "
        f"batch {profile.batch_size // num_together} x {profile.sequence_length} tokens{accumulated}"
        f"{of_each_rank(planned.plan.cluster)}\n",
        machine(hardware),
    )


def summary(planned: PlannedRun) -> Text:
    step = planned.plan.prediction
    return Text.assemble(
        (f"{seconds(step.step_s)} a step", "bold"),
        f", {step.tokens_per_s:.4g} tokens/s, {step.tflops:.4g} TFLOP/s, bound by ",
        (bottleneck_label(step.bottleneck), "bold yellow"),
    )


def _order(planned: PlannedRun) -> Iterable[str]:
    """Yield a sentence on the order of accumulated micro-batches, if the plan chose the order."""
    other_s = planned.plan.other_order_step_s
    if planned.in_turn_because is not None:
        yield f"The micro-batches run one after the other: {planned.in_turn_because}."
    elif other_s is not None and planned.shape.num_together > 1:
        yield f"The micro-batches run together; one after the other, a step would take {seconds(other_s)}."
    elif other_s is not None:
        yield f"The micro-batches run one after the other; together, a step would take {seconds(other_s)}."


def _length(planned: PlannedRun) -> Iterable[str]:
    """Yield sentences on rows that do not fit whole, are shared by ranks, or exceed `max_position_embeddings`."""
    chunk_tokens = planned.plan.chunk_tokens
    if chunk_tokens is not None:
        yield f"A layer computes {chunk_tokens} tokens at a time (chunks.layers)."
    if planned.config.ranks.per_row > 1:
        yield (
            f"{planned.config.ranks.per_row} ranks share each row of {row_tokens(planned)} tokens (ranks.per_row). "
            "The plan counts the attention to all keys of a row, which are in RAM (shared keys) and on each GPU."
        )
    positions = positions_exceeded(planned)
    if positions is not None:
        yield (
            f"The sequences have {row_tokens(planned)} tokens; the model's config has {positions} positions "
            "(max_position_embeddings)."
        )


def table_of(*columns: str) -> Table:
    """Return an empty table. All columns but the first are aligned to the right."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", no_wrap=True)
    return table


def _resources(planned: PlannedRun) -> Table:
    step = planned.plan.prediction
    table = table_of("seconds busy", "forward", "backward")
    for column in table.columns[1:]:  # in a narrow terminal names of bottlenecks wrap, and bars do not
        column.no_wrap = False
    table.add_column("share of the step", justify="left", no_wrap=True)
    for resource in resources_of(planned):
        forward_s, backward_s = sum(w.forward_s for w in resource.work), sum(w.backward_s for w in resource.work)
        share = min(1.0, (forward_s + backward_s) / step.step_s)
        style = "yellow" if step.bottleneck in resource.bottlenecks else "cyan"
        bar = Text("█" * round(share * _BAR_WIDTH), style=style) + Text(f" {100 * share:.0f}%")
        table.add_row(resource.label, _figure(forward_s), _figure(backward_s), bar)
        for work in resource.work if len(resource.work) > 1 else ():
            table.add_row(f"  {work.label}", _figure(work.forward_s), _figure(work.backward_s), style="dim")
    table.add_section()
    table.add_row("all, at once", _figure(step.forward_s), _figure(step.backward_s), style="bold")
    bounds = bottleneck_label(step.forward_bottleneck), bottleneck_label(step.backward_bottleneck)
    table.add_row("bound by", *bounds, style="yellow")
    return table


def _sent(planned: PlannedRun) -> Iterable[Table]:
    """Yield a table of the bytes that one node sends, and a table of the ways to exchange that were tried."""
    if not nodes_send(planned.plan):
        return
    table = table_of("one node sends in a step", "", "bytes")
    for row in sent_rows(planned.plan):
        table.add_row(*row)
    yield table
    if planned.plan.tried_ways:
        ways = table_of("weights", "backward's from", "gradients", "a step")
        for way, is_taken in tried_rows(planned.plan):
            ways.add_row(*way, style="bold yellow" if is_taken else None)
        yield ways


def _figure(value: float) -> str:
    return "-" if value == 0 else f"{value:.3g}"


def _tiers(planned: PlannedRun) -> Table:
    setup, hardware = planned.setup, planned.hardware
    limits = {
        "gpu": device_limit_bytes(hardware, setup),
        "cpu": setup.cluster.num_local * setup.cpu_memory_bytes,
        "ssd": setup.ssd_capacity_bytes or hardware.ssd_capacity_bytes,
    }
    names = {"gpu": "device", "cpu": "RAM", "ssd": "SSDs"}
    table = table_of("bytes on", "in all", "of")
    table.add_column("for", justify="left")
    for tier, parts in planned.plan.prediction.tier_bytes.items():
        shown = ", ".join(f"{part.replace('_', ' ')} {format_bytes(size)}" for part, size in parts.items() if size)
        table.add_row(names[tier], format_bytes(sum(parts.values())), format_bytes(limits[tier]), shown)
    return table


def _activations(planned: PlannedRun) -> Table:
    step = planned.plan.prediction
    forward_flops = planned.setup.num_micro_batches * planned.profile.flops
    table = table_of("activations", "")
    table.add_row("kept on the device", format_bytes(step.kept_bytes))
    table.add_row("swapped to RAM", format_bytes(step.swapped_bytes - step.spilled_bytes))
    table.add_row("swapped to the SSDs", format_bytes(step.spilled_bytes))
    table.add_row("recomputed in backward", f"{100 * step.recomputed_flops / forward_flops:.3g}% of forward's FLOPs")
    return table


def _records(planned: PlannedRun) -> Iterable[str]:
    """Yield a sentence on the number of blocks that have all weights, and that have optimizer states, in RAM."""
    copies = {(record.block, record.kind) for record in planned.plan.resident}
    with_states = {record.block for record in planned.plan.resident if record.kind not in FETCHED_KINDS}
    shapes, texts = [block.shape() for block in planned.layout.blocks], []
    for what, are_experts in (("blocks", False), ("experts", True)):
        of = [shape for shape in shapes if (shape.size_class is SizeClass.EXPERT) == are_experts]
        weights = sum(all((shape.name, kind) in copies for kind in shape.fetched_bytes) for shape in of)
        states = sum(shape.name in with_states for shape in of)
        if weights or states:
            texts.append(f"weights of {weights} and optimizer states of {states} of {len(of)} {what}")
    if texts:
        yield f"Copies in RAM: {', '.join(texts)}."


def _gradients(planned: PlannedRun) -> Iterable[str]:
    """Yield a sentence on held gradients if the pools have no buffers for them."""
    all_bytes, spilled_bytes = planned.setup.spilled_gradient_bytes, planned.plan.prediction.spilled_gradient_bytes
    if all_bytes:
        held, spilled = format_bytes(all_bytes - spilled_bytes), format_bytes(spilled_bytes)
        yield f"Gradients without buffers: {held} are in the RAM of activations, and {spilled} on the SSDs."


def _parked(planned: PlannedRun) -> Iterable[str]:
    """Yield a sentence on parked updates, and on the RAM that their gradients take on each node."""
    share = planned.plan.parked_share
    if share:
        held_bytes = share * planned.layout.gradient_bytes / planned.plan.cluster.num_nodes
        yield (
            f"{percent(share)} of the updates wait for the next forward, so that the SSDs also work in forward; the "
            f"gradients of these updates take {format_bytes(int(held_bytes))}."
        )


def _rows(planned: PlannedRun) -> Iterable[str]:
    """Yield a sentence on the rows of embeddings that are copied to the device."""
    for block in planned.profile.blocks:
        if block.rows is not None:
            yield (
                f"Embeddings take {format_bytes(block.param_bytes)}. Only the rows of a micro-batch's tokens are "
                f"copied to the device, at most {format_bytes(block.rows.loaded_bytes)}; without a copy in RAM, "
                f"{format_bytes(block.rows.read_bytes)} are read for these rows."
            )


def _experts(planned: PlannedRun) -> Iterable[str]:
    """Yield sentences on the streamed experts, the share that receives tokens, and the bytes that a step moves."""
    plan, step, num_tokens = planned.plan, planned.plan.prediction, planned.profile.num_tokens
    experts = step.experts
    if experts is None:
        return
    share = experts.hits_per_micro_batch / experts.num_experts
    each_bytes = experts.param_bytes / experts.num_experts
    yield (
        f"{times(experts.num_experts, 'expert')} of {format_bytes(each_bytes)} in {times(experts.num_layers, 'layer')} "
        f"stream one by one, {format_bytes(experts.param_bytes)} in all; a token uses "
        f"{count(experts.active_params)} of {count(plan.num_params)} parameters."
    )
    from_tokens = experts.all_hit_from_tokens
    all_hit = "no number of tokens reaches all" if from_tokens is None else f"{from_tokens} or more reach all"
    slots = "" if plan.pools is None else f" into {times(plan.pools.num_slots[SizeClass.EXPERT], 'slot')}"
    num_ranks = plan.cluster.num_ranks
    if divides_experts(plan):
        num_tokens *= num_ranks
        yield f"Each expert belongs to one of {num_ranks} ranks, which loads it for the tokens of all ranks."
    yield (
        f"Balanced routing sends {num_tokens} tokens to {100 * share:.3g}% of a layer's experts ({all_hit}). A step "
        f"loads {count(experts.loads_per_step)}{slots}, {format_bytes(experts.loaded_bytes_per_step)}."
    )
    moved_bytes = step.ssd_read_bytes_per_step + step.ssd_write_bytes_per_step
    yield (
        f"A step needs these SSDs for at least {seconds(step.floor_by_resource_s['ssd'])}, to move "
        f"{drive_bytes(moved_bytes)}."
    )


def _other_experts(planned: PlannedRun) -> Iterable[str]:
    """Yield sentences that compare divided and undivided experts of several ranks."""
    yield from rows_of_experts(planned.plan, planned.profile, planned.setup)
    other = with_other_experts(planned)
    if other is None:
        return
    other_s = seconds(other.plan.prediction.step_s)
    would = f"a step would take {other_s}" if other.plan.fits else "the step would not fit"
    if divides_experts(planned.plan):
        yield f"If each rank loaded all experts with their layers (experts.parallel: none), {would}."
    else:
        yield (
            "Each rank loads all experts with their layers. If each expert belonged to one rank (experts.parallel: "
            f"world), {would}."
        )


def _wear(planned: PlannedRun) -> Iterable[str]:
    step = planned.plan.prediction
    written = format_bytes(step.ssd_write_bytes_per_step)
    life = drive_life(planned.hardware, step)
    if life is None:
        yield f"A step writes {written} to the SSDs."
    else:
        yield (
            f"A step writes {written} to the SSDs: they last {count(life.steps)} steps, {count(life.tokens)} tokens, "
            f"{life.days:.3g} days without a break."
        )


def wear_words(planned: PlannedRun) -> str:
    wear = wear_of(planned, None)
    return f"warning: {wear.words}" if wear.is_much else wear.words


def wear_of_answers(model: str, offload: str) -> str:
    """Return the wear of a run with the settings in a file, on a desktop whose memory only settings limit."""
    try:
        planned = plan_run(PlanRequest(model=model, offload=offload), OtherMachine(_desktop()))
    except (ValueError, OSError):
        return f"not known, because {model} cannot be planned here"
    return wear_words(planned)


def _desktop() -> HardwareProfile:
    found = read_hardware(Path(__file__).with_name("desktop.yaml"))
    drive = replace(found.ssd[0], capacity_bytes=_ANY_BYTES, endurance_bytes=None)
    return replace(found, device=replace(found.device, memory_bytes=_ANY_BYTES), ssd=(drive,))


def _commits(planned: PlannedRun) -> Iterable[str]:
    step = planned.plan.prediction
    if (every := planned.plan.commit_every_steps) > 1:
        yield (
            f"One step of {every} is committed and writes the copies in RAM, so after a crash a run repeats at most "
            f"{seconds(every * step.step_s)}. With commit_every: 1 every step is committed."
        )
    if planned.plan.durability == "checkpoint":
        yield "Two versions of the state do not fit, so after a crash a run resumes from its last checkpoint."


def hiding(planned: PlannedRun) -> str:
    """Return a sentence on the number of tokens per step above which computing hides the drives."""
    enough = planned.plan.prediction.ssd_hides_from_tokens
    if enough is None:
        return "With any batch, the SSDs need longer for activations than the device for computing."
    at_once = tokens_at_once(planned)
    if at_once >= enough:
        least = f"{count(enough)} tokens" if enough >= 1 else "one token"
        return f"From {least} per step on, computing hides the SSDs; this step has {count(at_once)}."
    length = planned.profile.sequence_length
    whole = f"{times(math.ceil(enough / length), 'sequence')} of {length}"
    apart = planned.plan.num_micro_batches > 1
    together = ", in micro-batches that share the weights" if apart else ""
    return (
        f"From {count(enough)} tokens per step on ({whole}{together}), computing would hide the SSDs. This step has "
        f"{count(at_once)} for each load of the weights, and takes {times_slower_than_hidden(planned):.3g} x as long "
        "as with hidden SSDs."
    )


def _what_helps(planned: PlannedRun) -> Iterable[str]:
    for change in nearest_changes(planned):
        rate = change.planned.plan.prediction.tokens_per_s
        yield f"With {change.description}, the run reaches {rate:.4g} tokens/s ({change.times_faster:.2f} x as fast)."


def without_offloading(planned: PlannedRun) -> str:
    """Return a sentence on whether the model could be trained without offloading."""
    fit = planned.plan.in_memory
    needed = f"{format_bytes(fit.needed_bytes)} of {format_bytes(fit.memory_bytes)}"
    if not fit.fits:
        return f"The model does not fit without offloading: it needs {needed} of device memory."
    how = ", its activations recomputed" if fit.activations == "recompute" else ""
    return f"The model fits without offloading ({needed} of device memory{how}), so train it without."


def _purchases(planned: PlannedRun) -> Table:
    table = table_of("what would change it", "a step", "tokens/s", "faster")
    for change in (*nearest_changes(planned), *small_states(planned), *faster_parts(planned)):
        step = change.planned.plan.prediction
        faster = f"{change.times_faster:.2f} x"
        table.add_row(change.description, seconds(step.step_s), f"{step.tokens_per_s:.4g}", faster)
    if not table.rows:
        table.add_row("no change of the hardware helps", "", "")
    return table
