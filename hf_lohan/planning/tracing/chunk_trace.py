"""Traces a layer that runs in chunks. Only some of its chunks are traced, so that long rows take no longer than short
rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hf_lohan.activations.chunked_layers import ChunkedLayers
from hf_lohan.activations.layer_runs.layer_run import LayerInputs, LayerRun
from hf_lohan.activations.token_ranges import ChunkKeys, TokenRange
from hf_lohan.costs.model_profile import OperationProfile
from hf_lohan.planning.tracing.operations import BlockTrace, OperationTrace


@dataclass(frozen=True, slots=True)
class LayersOnPaper:
    """Layers that are traced in chunks of ``chunk_tokens`` tokens."""

    layers: ChunkedLayers
    chunk_tokens: int
    has_costs: bool = True
    """Whether FLOPs and moved bytes of chunks in the middle of a row are traced. Memory does not depend on them."""
    reasons: list[str] = field(default_factory=list)
    """Why layers were traced whole; each completes "because each ..."."""
    keys: list[tuple[int, int]] = field(default_factory=list)
    """Number of elements of a token's keys and values in traced layers, and the bytes of an element."""

    def tokens_of_norms(self) -> int | None:
        """Return the number of tokens in a chunk of norms after the layers, or None if the layers run whole."""
        return self.chunk_tokens if self.layers.has_cut else None

    def cut(
        self, layer: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Callable[[OperationTrace], Any] | None:
        """Return a function that traces a call of a layer in chunks and returns its output. None if it runs whole."""
        chunked = self.layers.of_layer.get(layer)
        cut = None if chunked is None else chunked.cut_on_paper(args, kwargs, self.chunk_tokens)
        if chunked is not None and chunked.reason_on_paper is not None:
            self.reasons.append(chunked.reason_on_paper)
        if chunked is None or cut is None:
            return None
        inputs, hidden, groups = cut
        self.layers.note_cut()

        def run(of_groups: Sequence[Sequence[TokenRange]]) -> LayerRun:
            return LayerRun(chunked, inputs, of_groups)

        return lambda operations: _trace(operations, run, inputs, hidden, groups, self.keys, has_costs=self.has_costs)


def _trace(
    operations: OperationTrace,
    run: Callable[[Sequence[Sequence[TokenRange]]], LayerRun],
    inputs: LayerInputs,
    hidden: Tensor,
    groups: Sequence[Sequence[TokenRange]],
    keys: list[tuple[int, int]],
    *,
    has_costs: bool,
) -> Any:
    """Trace a layer's chunks for `OperationTrace.target`, and return its output. Adds to ``keys``."""
    trace, length = operations.target, hidden.shape[1]
    single = run([])
    num_earlier: dict[TokenRange, int] = {}

    def traced(tokens: TokenRange, *, only_keys: bool = False) -> BlockTrace:
        operations.target = BlockTrace()
        cache = ChunkKeys(length) if tokens.stop - tokens.start < length else None
        with torch.no_grad():
            single.call(hidden[tokens.index], tokens, cache, only_keys=only_keys)
        if cache is not None:
            keys.append(cache.of_a_token)
            num_earlier[tokens] = cache.num_earlier
        return operations.target

    try:
        for group, times in _kinds(groups):
            sampled = _sample(len(group), has_costs=has_costs)
            samples = {index: traced(group[index]) for index in sampled}
            most = max((num_earlier.get(group[index], 0) for index in sampled), default=0)
            for index in _around_last_growth(group, most):
                samples[index] = samples.get(index) or traced(group[index])
            _add_all(trace, samples, len(group), times)
            if len(group) > 1 and has_costs:
                again, num_again = traced(group[0], only_keys=True), times * (len(group) - 1)
                trace.repeated_flops += num_again * again.flops
                trace.repeated_bytes += num_again * again.moved_bytes
    finally:
        operations.target = trace
    trace.num_run_again = len(trace.operations)
    trace.num_chunks = sum(map(len, groups))
    # The last two chunks of a row see the most keys, and the last but one runs while all sums of gradients exist.
    fullest = [groups[0][-2:]] if len(groups[0]) > 1 else groups[:2]
    whole = run(fullest)
    operations.is_in_backward = True  # these operations have been counted
    try:
        with torch.no_grad():
            outputs = whole.forward(hidden)
        operations.live.forget(outputs)
        gradients = [torch.empty_like(output) if output.is_floating_point() else None for output in outputs]
        whole.backward(hidden, gradients, needs_hidden=hidden.requires_grad)
        trace.working_bytes, trace.saved_bytes = operations.live.peak_bytes, 0  # each chunk is made again
    finally:
        operations.is_in_backward = False
    needs_gradient = hidden.requires_grad or bool(whole.trained)
    first, *recorded = [
        output.detach().requires_grad_(needs_gradient and output.is_floating_point()) for output in outputs
    ]
    inputs.add_recorded(list(zip(whole.recorded_names, recorded, strict=True)))
    return whole.in_form(first)


def _kinds(groups: Sequence[Sequence[TokenRange]]) -> list[tuple[Sequence[TokenRange], int]]:
    """Return groups of different numbers of rows, with the number of equal groups."""
    counts: dict[int, list[Sequence[TokenRange]]] = {}
    for group in groups:
        counts.setdefault(group[0].last_row - group[0].first_row, []).append(group)
    return [(of_size[0], len(of_size)) for of_size in counts.values()]


def _sample(num_chunks: int, *, has_costs: bool) -> list[int]:
    """Return the indices of chunks between which costs are linear. Between the second and the last but one, chunks
    differ only in their costs. The last chunk may be shorter."""
    indices = {0, 1, num_chunks - 2, num_chunks - 1}
    if has_costs:
        indices |= {num_chunks // 4, num_chunks // 2}
    return sorted(index for index in indices if 0 <= index < num_chunks)


def _around_last_growth(group: Sequence[TokenRange], most_earlier: int) -> list[int]:
    """Return the index of the last chunk that sees all earlier tokens, and the next index. A chunk sees at most
    ``most_earlier`` tokens in a window. Costs are linear before and after these chunks."""
    num_growing = sum(tokens.start <= most_earlier for tokens in group)
    return [num_growing - 1, num_growing] if num_growing < len(group) else []


def _add_all(trace: BlockTrace, samples: Mapping[int, BlockTrace], num_chunks: int, times: int) -> None:
    """Add the operations of all chunks, interpolated from the ``samples``."""
    at, every = sorted(samples), np.arange(num_chunks)

    def total(of_sample: Callable[[BlockTrace], float]) -> float:
        return times * float(np.interp(every, at, [of_sample(samples[index]) for index in at]).sum())

    trace.flops += round(total(lambda sample: sample.flops))
    trace.moved_bytes += round(total(lambda sample: sample.moved_bytes))
    for how, fused in trace.fused.items():
        fused.num_bytes += round(total(lambda sample, how=how: sample.fused[how].num_bytes))  # type: ignore[misc]
    for sample in samples.values():
        trace.products.update(sample.products)
        trace.attentions.update(sample.attentions)
    named = {operation.name: operation for sample in samples.values() for operation in sample.operations}
    before = {operation.name: number for number, operation in enumerate(trace.operations)}
    for name, operation in named.items():
        flops = total(lambda sample, name=name: _of(sample, name).flops)  # type: ignore[misc]
        output_bytes = round(total(lambda sample, name=name: _of(sample, name).output_bytes))  # type: ignore[misc]
        if name in before:
            first = trace.operations[before[name]]
            trace.operations[before[name]] = replace(
                first, flops=first.flops + flops, output_bytes=first.output_bytes + output_bytes
            )
        else:
            trace.operations.append(replace(operation, flops=flops, output_bytes=output_bytes))


def _of(sample: BlockTrace, name: str) -> OperationProfile:
    """Return an operation of a chunk. The first chunk of a row may have fewer operations than the others."""
    nothing = OperationProfile(name=name, flops=0.0, output_bytes=0)
    return next((operation for operation in sample.operations if operation.name == name), nothing)
