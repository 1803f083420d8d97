"""Lists the ways to keep, swap and recompute the activations of one model.

Layers are alike, so operations are grouped into *kinds* with equal costs and equal bytes. A candidate has the number of
swapped operations of each kind. Operations are swapped from the first layer on, because backward needs the first
layers' outputs last. They are kept from the last layer back, because backward needs the last layers' outputs
first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from hf_lohan.costs.model_profile import BlockProfile, ModelProfile, OperationProfile
from hf_lohan.costs.offload_plan import Activations
from hf_lohan.costs.step.step_costs import Values

MAX_MIXTURES = 4096
"""Up to this number of mixtures of kinds, all are tried. With more, the ranked candidates are within one output of the
best."""

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class OperationKind:
    """Equal operations of all layers. `places` are (layer, operation) indices in forward order."""

    seconds: float
    flops: float
    output_bytes: int
    reloaded_bytes: float = 0.0
    """Bytes of experts that are loaded again to recompute the operation."""
    loads_experts: bool = False
    places: list[tuple[int, int]] = field(default_factory=list)

    @property
    def benefit(self) -> float:
        """LoHan's OB, in seconds per byte."""
        return self.seconds / self.output_bytes if self.output_bytes else math.inf


@dataclass(frozen=True, slots=True)
class KeptActivations:
    """Activations that stay on the device. These are the inputs of the last layers, and the last operations of each
    kind."""

    num_inputs: int
    num_of_kind: Counts
    num_bytes: int

    def inputs_alone(self, input_bytes: Sequence[int]) -> KeptActivations:
        """Return only the kept inputs. ``input_bytes``: the bytes of each layer's input."""
        num_bytes = sum(input_bytes[len(input_bytes) - self.num_inputs :])
        return KeptActivations(self.num_inputs, np.zeros_like(self.num_of_kind), num_bytes)


@dataclass(frozen=True, slots=True)
class Candidates:
    """The ways to swap activations that are not kept. Fields are sums [num_candidates]. `swapped` has counts
    [num_candidates, kinds]."""

    kept: KeptActivations
    swapped: Counts
    swapped_bytes: Values
    recompute_s: Values
    recomputed_flops: Values
    reloaded_bytes: Values
    num_expert_calls: Values
    num_recomputed: Counts

    def only(self, rows: npt.NDArray[np.intp]) -> Candidates:
        of_rows = {name: getattr(self, name)[rows] for name in self.__slots__ if name != "kept"}
        return replace(self, **of_rows)


class ActivationChoices:
    """All candidates for one model. They do not depend on budgets or bandwidths, so a larger budget or bandwidth never
    removes a good candidate."""

    def __init__(
        self,
        model: ModelProfile,
        operation_s: Callable[[OperationProfile], float],
        reload_bytes: Callable[[BlockProfile], float] = lambda layer: 0.0,
    ) -> None:
        self.layers = model.layers
        self.kinds = _group(self.layers, operation_s, reload_bytes)
        self._num_of_kind = np.array([len(kind.places) for kind in self.kinds], dtype=np.int64)
        self._loads_first = sorted(range(len(self.kinds)), key=lambda index: not self.kinds[index].reloaded_bytes)
        self._counts = _count_candidates(self._num_of_kind, self._loads_first)
        self._all_input_bytes = [layer.input_bytes for layer in self.layers]
        self.num_operations = int(self._num_of_kind.sum())

    def kept_choices(self, budget_bytes: int) -> list[KeptActivations]:
        """Return the activations that fit ``budget_bytes`` of the device, in several orders. One order has whole layers
        from the last to the first, because the memory of the last layers is free soonest. Others begin with the most
        expensive operations of all layers, by FLOPs or because they load experts again."""
        orders = [self._last_layers_first(), self._dearest_first(range(len(self.kinds)))]
        if self._loads_first != list(range(len(self.kinds))):
            orders.append(self._dearest_first(self._loads_first))
        return [self._fill(order, budget_bytes) for order in orders]

    def candidates(self, kept: KeptActivations, activations: Activations = "auto") -> Candidates:
        """Return the ways to swap activations that are not kept. Settings other than "auto" have one way."""
        counts = self._counts
        if activations in ("recompute", "inputs"):
            counts = np.zeros_like(counts[:1])
        elif activations != "auto":
            counts = self._num_of_kind[None, :]
        available = self._num_of_kind - kept.num_of_kind
        swapped = np.minimum(counts, available)
        recomputed = available - swapped
        output_bytes = np.array([kind.output_bytes for kind in self.kinds], dtype=np.float64)
        num_swapped_inputs = len(self.layers) - kept.num_inputs
        return Candidates(
            kept,
            swapped,
            swapped @ output_bytes + sum(self._all_input_bytes[:num_swapped_inputs]),
            recomputed @ np.array([kind.seconds for kind in self.kinds], dtype=np.float64),
            recomputed @ np.array([kind.flops for kind in self.kinds], dtype=np.float64),
            recomputed @ np.array([kind.reloaded_bytes for kind in self.kinds], dtype=np.float64),
            recomputed @ np.array([kind.loads_experts for kind in self.kinds], dtype=np.float64),
            recomputed.sum(axis=1),
        )

    def _last_layers_first(self) -> Iterator[tuple[int | None, int]]:
        """Yield (kind, bytes) of activations in the order in which they are kept. A layer's input has kind None."""
        of_layer: list[list[int]] = [[] for _ in self.layers]
        for index, kind in enumerate(self.kinds):
            for layer, _ in kind.places:
                of_layer[layer].append(index)
        for layer in reversed(range(len(self.layers))):
            yield None, self._all_input_bytes[layer]
            for index in of_layer[layer]:
                yield index, self.kinds[index].output_bytes

    def _dearest_first(self, order: Sequence[int]) -> Iterator[tuple[int | None, int]]:
        for input_bytes in reversed(self._all_input_bytes):
            yield None, input_bytes
        for index in order:
            for _ in self.kinds[index].places:
                yield index, self.kinds[index].output_bytes

    def _fill(self, order: Iterator[tuple[int | None, int]], budget_bytes: int) -> KeptActivations:
        num_inputs, num_bytes = 0, 0
        num_of_kind = np.zeros(len(self.kinds), dtype=np.int64)
        for index, size_bytes in order:
            if num_bytes + size_bytes > budget_bytes:
                break
            num_bytes += size_bytes
            if index is None:
                num_inputs += 1
            else:
                num_of_kind[index] += 1
        return KeptActivations(num_inputs, num_of_kind, num_bytes)


def _group(
    layers: tuple[BlockProfile, ...],
    operation_s: Callable[[OperationProfile], float],
    reload_bytes: Callable[[BlockProfile], float],
) -> list[OperationKind]:
    """Return the kinds in falling order of their benefit."""
    kinds: dict[tuple[float, float, int, float, bool], OperationKind] = {}
    for layer_index, layer in enumerate(layers):
        for index, operation in enumerate(layer.operations):
            reloaded = reload_bytes(layer) if operation.loads_experts else 0.0
            key = (operation_s(operation), operation.flops, operation.output_bytes, reloaded, operation.loads_experts)
            kinds.setdefault(key, OperationKind(*key)).places.append((layer_index, index))
    # Rounded, so that the order of kinds with equal benefits does not depend on the rate of the device.
    return sorted(kinds.values(), key=lambda kind: -float(f"{kind.benefit:.9g}"))


def _count_candidates(num_of_kind: Counts, loads_first: Sequence[int]) -> Counts:
    """Return counts [num_candidates, kinds]. They are the first 0, 1, 2, ... operations in falling order of benefit
    (Algorithm 1), the same with operations that load experts first, and all mixtures of kinds if these are few."""
    ranked = _ranked(num_of_kind)
    found = [ranked]
    if list(loads_first) != list(range(len(num_of_kind))):
        other = np.empty_like(ranked)
        other[:, loads_first] = _ranked(num_of_kind[list(loads_first)])
        found.append(other)
    if len(num_of_kind) and math.prod(int(number) + 1 for number in num_of_kind) <= MAX_MIXTURES:
        axes = np.meshgrid(*(np.arange(number + 1) for number in num_of_kind), indexing="ij")
        found.append(np.stack(axes, axis=-1).reshape(-1, len(num_of_kind)))
    return np.concatenate(found)


def _ranked(num_of_kind: Counts) -> Counts:
    before = np.cumsum(num_of_kind) - num_of_kind
    return np.clip(np.arange(int(num_of_kind.sum()) + 1)[:, None] - before, 0, num_of_kind)
