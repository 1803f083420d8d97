"""Places activations by migrations that reserve time on lanes (TeraIO's Algorithm 1, extended by recomputation).

At first all activations stay on the device. While memory is exceeded at some time, one more activation leaves: to RAM,
to the drives, or it is dropped and recomputed. A migration reserves the link after its layer's forward, and again
before its layer's backward. It saves memory in between, if earlier migrations have left enough time for its copies. The
migration with the largest benefit is next. One order is by the benefit, and one by the benefit per second.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Literal

import numpy as np
import numpy.typing as npt

from hf_lohan.annexes.studies.placed_plan import fullest_bytes, placed_by_layer
from hf_lohan.costs.fitting import activation_ram_bytes, measure_room, room_to_hold_bytes
from hf_lohan.costs.hardware_profile import HardwareProfile
from hf_lohan.costs.model_profile import ModelProfile
from hf_lohan.costs.offload_plan import INPUT, ActivationPlacements, OffloadPlan, Placement, TrainingSetup
from hf_lohan.costs.step.step_costs import block_forward_s, cheap_recompute_s, operation_s

_Floats = npt.NDArray[np.float64]
Score = Literal["benefit", "benefit_per_cost"]
_TRIED_LIMITS = 4
"""Maximum number of limits that are tried. The limit of kept activations is lowered until the placements fit."""
_RECOMPUTE, _RAM, _SSD = 0, 1, 2
_PLACES = (Placement.RECOMPUTE, Placement.CPU, Placement.SSD)


def migrated_placements(
    model: ModelProfile, hardware: HardwareProfile, setup: TrainingSetup, plan: OffloadPlan
) -> list[ActivationPlacements]:
    """Return the placements of both orders, if they fit the device. ``plan`` has the other work of the lanes, without
    activations."""
    found: list[ActivationPlacements] = []
    scores: tuple[Score, ...] = ("benefit_per_cost", "benefit")
    for score, drops_last in product(scores, (False, True)):
        placements = _fitting(model, hardware, setup, plan, score, drops_last=drops_last)
        if placements is not None and placements not in found:
            found.append(placements)
    return found


def _fitting(
    model: ModelProfile,
    hardware: HardwareProfile,
    setup: TrainingSetup,
    plan: OffloadPlan,
    score: Score,
    *,
    drops_last: bool,
) -> ActivationPlacements | None:
    room_bytes = room_to_hold_bytes(hardware, setup)
    limit_bytes = float(min(room_bytes, max(0, setup.gpu_memory_bytes - setup.gpu_fixed_bytes)))
    for _ in range(_TRIED_LIMITS):
        placements = _Migrations(model, hardware, setup, plan, max(0.0, limit_bytes)).choose(
            score, drops_last=drops_last
        )
        placed = placed_by_layer(model, placements)
        over_bytes = fullest_bytes(model, placed, num_together=setup.num_together) - room_bytes
        if over_bytes <= 0:
            return placements
        limit_bytes = min(limit_bytes, float(placed.kept.sum())) - over_bytes
        if limit_bytes < 0 and not placed.kept.any():
            return None
    return None


@dataclass(frozen=True, slots=True)
class _Tensors:
    """The tensors that may leave: layer, bytes and seconds of recomputation (infinite for a layer's input) of each."""

    layers: npt.NDArray[np.int64]
    num_bytes: _Floats
    recompute_s: _Floats
    names: list[str]


class _Migrations:
    """One choice of migrations. With n layers, interval k < n is the forward of layer k, and interval k >= n is the
    backward of layer 2n - 1 - k."""

    def __init__(
        self,
        model: ModelProfile,
        hardware: HardwareProfile,
        setup: TrainingSetup,
        plan: OffloadPlan,
        limit_bytes: float,
    ) -> None:
        self._model = model
        self._hardware = hardware
        self._limit_bytes = limit_bytes
        self._tensors = _tensors(model, hardware)
        with np.errstate(divide="ignore", invalid="ignore"):
            worth = self._tensors.recompute_s / self._tensors.num_bytes
        most = worth[np.isfinite(worth)].max(initial=0.0) or 1.0
        self._worth: _Floats = np.where(np.isfinite(worth), worth / most, 1.0)
        """Seconds of recomputation per byte, divided by the maximum over all tensors."""
        layers = model.layers
        forward_s = np.array([block_forward_s(layer, hardware) for layer in layers])
        trained = np.array([1 + layer.trained_fraction for layer in layers])
        cheap_s = np.array([cheap_recompute_s(layer, hardware) for layer in layers])
        self._interval_s: _Floats = np.concatenate([forward_s, (trained * forward_s + cheap_s)[::-1]])
        num_layers = len(layers)
        born = self._tensors.layers
        self._born, self._needed = born, 2 * num_layers - 1 - born
        # The seconds of each lane in each interval that weights, gradients and states do not use.
        load, count = plan.prediction, setup.num_micro_batches
        own_s = {
            "h2d": load.forward.h2d_s + load.backward.h2d_s - count * load.swapped_bytes / hardware.h2d_bytes_per_s,
            "d2h": load.forward.d2h_s + load.backward.d2h_s - count * load.swapped_bytes / hardware.d2h_bytes_per_s,
            "ssd": load.forward.ssd_read_s
            + load.forward.ssd_write_s
            + load.backward.ssd_read_s
            + load.backward.ssd_write_s
            - count * load.spilled_bytes / hardware.ssd_read_bytes_per_s
            - count * load.spilled_bytes / hardware.ssd_write_bytes_per_s,
        }
        step_s = count * float(self._interval_s.sum())
        spare = {lane: max(0.0, 1 - seconds / step_s) if step_s else 0.0 for lane, seconds in own_s.items()}
        self._free_s = {lane: share * self._interval_s for lane, share in spare.items()}
        room = measure_room(model, hardware, setup)
        cpu_bytes = activation_ram_bytes(room, setup, plan.resident)
        self._ram_left, self._ssd_left = float(max(0, cpu_bytes - plan.parked_bytes)), float(max(0, room.ssd_bytes))

    def choose(self, score: Score, *, drops_last: bool) -> ActivationPlacements:
        tensors = self._tensors
        places = np.full(len(tensors.num_bytes), -1)
        kept = np.zeros(2 * len(self._model.layers) + 1)
        np.add.at(kept, self._born, tensors.num_bytes)
        np.add.at(kept, self._needed + 1, -tensors.num_bytes)
        held: _Floats = np.cumsum(kept)[:-1]
        stays = np.ones(len(places), dtype=bool)
        while stays.any() and held.max(initial=0.0) > self._limit_bytes:
            over_s = np.concatenate([np.zeros(1), np.cumsum(self._interval_s * (held > self._limit_bytes))])
            tensor, place, first, last = self._best(score, stays, over_s, drops_last=drops_last)
            stays[tensor], places[tensor] = False, place
            if first < last:
                held[first:last] -= tensors.num_bytes[tensor]
            self._book(tensor, place)
        found: dict[str, dict[str, Placement]] = {layer.name: {} for layer in self._model.layers}
        for index, name in enumerate(tensors.names):
            layer = self._model.layers[int(tensors.layers[index])].name
            found[layer][name] = Placement.GPU if places[index] < 0 else _PLACES[int(places[index])]
        return found

    def _best(
        self, score: Score, stays: npt.NDArray[np.bool_], over_s: _Floats, *, drops_last: bool
    ) -> tuple[int, int, int, int]:
        """Return the best tensor, its place, and the intervals [first, last) in which it is not on the device.
        ``drops_last``: nothing is dropped while a lane has time, and tensors that take the longest to recompute leave
        first."""
        tensors, num_bytes = self._tensors, self._tensors.num_bytes
        best: tuple[float, int, int, int, int] | None = None
        out_s, in_s = num_bytes / self._hardware.d2h_bytes_per_s, num_bytes / self._hardware.h2d_bytes_per_s
        left = self._ends(self._free_s["d2h"], out_s)
        back = self._begins(self._free_s["h2d"], in_s)
        disk_s = num_bytes / self._hardware.ssd_write_bytes_per_s + num_bytes / self._hardware.ssd_read_bytes_per_s
        ssd_free = np.concatenate([np.zeros(1), np.cumsum(self._free_s["ssd"])])
        ssd_fits = ssd_free[self._needed] - ssd_free[self._born] >= disk_s
        worth = self._worth if drops_last else np.ones(len(num_bytes))
        may_drop = np.isfinite(tensors.recompute_s) & (not drops_last)
        ways = (
            (_RAM, left + 1, back, out_s + in_s, num_bytes <= self._ram_left),
            (_SSD, left + 1, back, out_s + in_s + disk_s, ssd_fits & (num_bytes <= self._ssd_left)),
            (_RECOMPUTE, self._born + 1, self._needed, tensors.recompute_s, may_drop),
        )
        for place, first, last, cost_s, fits in ways:
            over_within = np.where(first < last, over_s[np.maximum(first, last)] - over_s[first], 0.0)
            value = over_within * num_bytes * worth
            if score == "benefit_per_cost":
                value = value / np.maximum(cost_s, 1e-30)
            value = np.where(stays & fits & (value > 0), value, -1.0)
            index = int(value.argmax())
            if value[index] > 0 and (best is None or value[index] > best[0]):
                best = float(value[index]), index, place, int(first[index]), int(last[index])
        if best is not None:
            return best[1:]
        # No lane has time. A tensor that can be recomputed is dropped. An input leaves although it waits for the link.
        droppable = np.flatnonzero(stays & np.isfinite(tensors.recompute_s))
        index = int(droppable[self._worth[droppable].argmin()]) if len(droppable) else int(stays.argmax())
        place = _RECOMPUTE if len(droppable) else _RAM if num_bytes[index] <= self._ram_left else _SSD
        return index, place, int(self._born[index]) + 1, int(self._needed[index])

    def _ends(self, free_s: _Floats, seconds: _Floats) -> npt.NDArray[np.int64]:
        """Return for each tensor the interval in which its copy ends, if it begins after the tensor's forward."""
        done = np.concatenate([np.zeros(1), np.cumsum(free_s)])
        ends: npt.NDArray[np.int64] = np.searchsorted(done[1:], done[self._born + 1] + seconds - 1e-12)
        return np.minimum(ends, len(free_s) - 1)

    def _begins(self, free_s: _Floats, seconds: _Floats) -> npt.NDArray[np.int64]:
        """Return for each tensor the interval in which a copy must begin that ends before the tensor's backward."""
        done = np.concatenate([np.zeros(1), np.cumsum(free_s)])
        begins = np.searchsorted(done[1:], done[self._needed] - seconds + 1e-12)
        return np.where(done[self._needed] >= seconds, np.minimum(begins, self._needed), 0)

    def _book(self, tensor: int, place: int) -> None:
        if place == _RECOMPUTE:
            self._interval_s[self._needed[tensor]] += self._tensors.recompute_s[tensor]
            return
        num_bytes, hardware = self._tensors.num_bytes[tensor], self._hardware
        born, needed = int(self._born[tensor]), int(self._needed[tensor])
        _take(self._free_s["d2h"], range(born + 1, needed), num_bytes / hardware.d2h_bytes_per_s)
        _take(self._free_s["h2d"], range(needed - 1, born, -1), num_bytes / hardware.h2d_bytes_per_s)
        if place == _RAM:
            self._ram_left -= num_bytes
            return
        self._ssd_left -= num_bytes
        _take(self._free_s["ssd"], range(born + 1, needed), num_bytes / hardware.ssd_write_bytes_per_s)
        _take(self._free_s["ssd"], range(needed - 1, born, -1), num_bytes / hardware.ssd_read_bytes_per_s)


def _take(free_s: _Floats, intervals: range, seconds: float) -> None:
    """Reserve ``seconds`` of a lane in the ``intervals``, the first interval first."""
    for interval in intervals:
        taken = min(free_s[interval], seconds)
        free_s[interval] -= taken
        seconds -= taken
        if seconds <= 0:
            return


def _tensors(model: ModelProfile, hardware: HardwareProfile) -> _Tensors:
    rows = [
        (index, float(size), seconds, name)
        for index, layer in enumerate(model.layers)
        for name, size, seconds in (
            (INPUT, layer.input_bytes, np.inf),
            *((own.name, own.output_bytes, operation_s(own, hardware)) for own in layer.operations),
        )
    ]
    return _Tensors(
        np.array([row[0] for row in rows], dtype=np.int64),
        np.array([row[1] for row in rows]),
        np.array([row[2] for row in rows]),
        [row[3] for row in rows],
    )
