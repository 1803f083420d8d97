"""Computes the time of a step by LoHan's equations for T_f and T_b, with additions, for numbers or arrays of
candidates.

    T_f = max( FLOP_f/THP_G , A/BW_G , 2P/BW_G , 2P/BW_S2M + aA/BW_M2S )
    T_b = max( (2 FLOP_f + FLOP_r)/THP_G , 2P/BW_G , (2P + A)/BW_G , (14P + aA)/BW_S2M + 14P/BW_M2S )

The additions are for the optimizer on the CPU, links without full duplex, records in RAM, deferred updates, several
micro-batches per step, the CPU as the device, and work that does not overlap. (The first
block arrives before it computes, and the last block's traffic ends after its compute.)

`StepCosts.predict` predicts each resource's work and the bottleneck for one choice. `rank_costs` adds the costs of
several ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from hf_lohan.costs.collectives import ONE_RANK, SUM_BYTES
from hf_lohan.costs.hardware_profile import HardwareProfile, with_changed
from hf_lohan.costs.model_profile import GRAPH, BlockProfile, ModelProfile, OperationProfile
from hf_lohan.costs.offload_plan import ClipMode, Lanes, RankPrediction, StepPrediction, TrainingSetup
from hf_lohan.costs.quantization import DECODED_PER_S, DEVICE_MEMORY_BYTES_PER_S, MOVED_BYTES_PER_DECODED
from hf_lohan.costs.record_traffic import FETCHED_KINDS, PARAM
from hf_lohan.costs.step.expert_costs import ExpertCosts

Values: TypeAlias = npt.NDArray[np.float64]
"""One number, or one for each candidate. Both broadcast together."""

SHARED_CORES_EFFICIENCY = 0.87
"""Efficiency of cores that compute and also do all other work. If another thread takes a core, the computing threads on
the other cores wait. Measured on two cores, which were busy for 6.1 of 7.0 core-seconds."""
WORTH_PARKING = 0.99
"""Updates are parked if a step then takes less than this share of its time."""
MORE_PARKED = 1.2
"""Parked updates are at most this multiple of the updates that fit into the forward, if the rest fits into the
backward. Rates of drives vary, so a few more updates keep them busy."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The differences between candidates that cost time."""

    swapped_bytes: Values
    """A: activations that leave the device and return, in each micro-batch."""
    spilled_bytes: Values
    """aA: the part of A that goes to the SSD."""
    recompute_s: Values
    """Seconds of recomputation in backward (FLOP_r/THP_G)."""
    spilled_gradient_bytes: Values
    """Spilled gradients of the last backward."""
    reloaded_bytes: Values
    """Experts that backward loads again to recompute their output."""
    num_expert_calls: Values
    """Layers whose experts backward calls again to recompute their output."""
    parked_share: Values = field(default_factory=lambda: np.zeros(1))
    """The share of updates in backward that wait for the next forward instead."""


@dataclass(frozen=True, slots=True)
class ResourceUse:
    """The work of each resource in one forward or backward. With several ranks, these are one rank's device, and its
    node's drives, CPU, RAM and network."""

    compute_s: Values
    h2d_bytes: Values
    d2h_bytes: Values
    ssd_read_bytes: Values
    ssd_write_bytes: Values
    hashed_on_device_bytes: Values
    """The part of the SSD bytes whose checksums the device computes."""
    updated_params: Values
    net_bytes: Values
    host_bytes: Values
    gathered_bytes: Values
    """Weights that a device gets from other devices of its node."""
    exchanged_bytes: Values
    """Gradients that a device sends to other devices of its node."""
    wait_s: Values
    """Seconds in which no resource can work."""

    def __add__(self, other: ResourceUse) -> ResourceUse:
        return ResourceUse(*(getattr(self, name) + getattr(other, name) for name in _AMOUNTS))

    def __mul__(self, factor: float | Values) -> ResourceUse:
        return ResourceUse(*(getattr(self, name) * factor for name in _AMOUNTS))


_AMOUNTS = [field.name for field in fields(ResourceUse)]
_COUNTED_ALREADY = ("link", "gpu_link")
"""Lanes whose seconds also count for the two directions of the link."""
_SSD_AMOUNTS = ("ssd_read_bytes", "ssd_write_bytes")


def _load(**amounts: float | Values) -> ResourceUse:
    """Return a `ResourceUse` with 0 for all amounts that are not passed."""
    return ResourceUse(*(np.atleast_1d(np.asarray(amounts.get(name, 0.0), dtype=np.float64)) for name in _AMOUNTS))


@dataclass(frozen=True, slots=True)
class StepPhase:
    """`count` equal forwards or backwards of a step."""

    count: int
    is_forward: bool
    load: ResourceUse


def ssd_s(hardware: HardwareProfile, read_bytes: Any, write_bytes: Any) -> Any:
    """Return the seconds of the drives for bytes or arrays of bytes. Reads and writes share a drive's time (simplex),
    unless their mix was measured."""
    read_s = read_bytes / hardware.ssd_read_bytes_per_s
    write_s = write_bytes / hardware.ssd_write_bytes_per_s
    if not hardware.ssd_mixed_bytes_per_s:
        return read_s + write_s
    both_bytes = np.minimum(read_bytes, write_bytes)
    mixed_s = 2 * both_bytes / hardware.ssd_mixed_bytes_per_s
    rest_s = (read_bytes - both_bytes) / hardware.ssd_read_bytes_per_s
    rest_s = rest_s + (write_bytes - both_bytes) / hardware.ssd_write_bytes_per_s
    return np.maximum(mixed_s + rest_s, np.maximum(read_s, write_s))


def decoded_per_s(hardware: HardwareProfile) -> float:
    """Return how many packed weights the device decodes in a second, after they were copied to it."""
    if hardware.device.shares_cpu:
        return DECODED_PER_S
    return (hardware.device.memory_bytes_per_s or DEVICE_MEMORY_BYTES_PER_S) / MOVED_BYTES_PER_DECODED


def operation_s(operation: OperationProfile, hardware: HardwareProfile) -> float:
    """Return the seconds of one product or attention, or of a compiled layer."""
    if operation.forward_s is not None:
        return operation.forward_s
    return hardware.device.compute_s(operation.flops, operation.attention_flops) + _elementwise_s(operation, hardware)


def block_forward_s(block: BlockProfile, hardware: HardwareProfile) -> float:
    """Return the seconds of a block's forward."""
    if block.forward_s is not None:
        return block.forward_s
    return hardware.device.compute_s(block.flops, block.attention_flops) + _elementwise_s(block, hardware)


def cheap_recompute_s(block: BlockProfile, hardware: HardwareProfile) -> float:
    """Return the seconds of the operations that a layer's backward always recomputes, which are all except products and
    attention. A compiled layer has none."""
    if any(operation.name == GRAPH for operation in block.operations):
        return 0.0
    operations_s = [operation.forward_s for operation in block.operations]
    if block.forward_s is None or None in operations_s:
        return _elementwise_s(block, hardware)
    listed_s = sum(seconds for seconds in operations_s if seconds is not None)
    not_listed_flops = block.flops - sum(operation.flops for operation in block.operations)
    return max(0.0, block.forward_s - listed_s - not_listed_flops / hardware.device.flops_per_s)


def _elementwise_s(of: BlockProfile | OperationProfile, hardware: HardwareProfile) -> float:
    rate = hardware.device.memory_bytes_per_s
    return of.moved_bytes / rate if rate else 0.0


def repeated_s(block: BlockProfile, hardware: HardwareProfile) -> float:
    """Return the seconds in which a layer's backward in chunks recomputes keys and values in addition."""
    rate = hardware.device.memory_bytes_per_s
    return block.repeated_flops / hardware.device.flops_per_s + (block.repeated_bytes / rate if rate else 0.0)


def experts_forward_s(block: BlockProfile, hardware: HardwareProfile) -> float:
    """Return the seconds of the operations in a block's forward that load experts one by one."""
    return sum(operation_s(operation, hardware) for operation in block.operations if operation.loads_experts)


def lending_layers(model: ModelProfile, hardware: HardwareProfile) -> list[BlockProfile]:
    """Return the layers of which updates in backward borrow the slots, if there are enough slots. A layer lends its
    slot if the layer before it in backward has returned its slot (`SlotRing.borrow_slot`). If the device computes while
    the host continues, every second layer lends its slot."""
    trained = [layer for layer in reversed(model.layers) if layer.num_trainable_params]
    return trained if hardware.device.shares_cpu else trained[::2]


def gradient_itemsize(model: ModelProfile, setup: TrainingSetup) -> int:
    """Return the bytes of an element of a gradient that leaves the device. Gradients of micro-batches that run together
    are summed on the device, in float32."""
    return max(SUM_BYTES, model.param_itemsize) if setup.num_together > 1 else model.param_itemsize


class StepCosts:
    """The cost model of one model on one machine with one setup."""

    def __init__(self, model: ModelProfile, hardware: HardwareProfile, setup: TrainingSetup) -> None:
        self._model = model
        self._hardware = hardware
        self._setup = setup
        forward_s = [(block_forward_s(block, hardware), block.trained_fraction) for block in model.blocks]
        self._forward_s = sum(seconds for seconds, _ in forward_s)
        # A frozen weight needs no gradient, so its backward has one product instead of two.
        self._backward_s = sum(seconds * (1 + fraction) for seconds, fraction in forward_s)
        # Intermediate results of experts are not swapped.
        self._backward_s += sum(experts_forward_s(block, hardware) for block in model.layers)
        if setup.activations != "keep":
            self._backward_s += sum(cheap_recompute_s(block, hardware) for block in model.layers)
        self._backward_s += sum(repeated_s(block, hardware) for block in model.layers)
        self._num_blocks = max(1, len(model.blocks))
        self._param_bytes = model.dense_read_bytes
        self._experts = ExpertCosts(model, hardware, setup)
        num_lent = sum(layer.num_trainable_params for layer in lending_layers(model, hardware))
        self._lent_share = num_lent / max(1, sum(layer.num_trainable_params for layer in model.layers))
        # If the device's memory is host memory, reads go straight to their destination.
        self._is_copied = not hardware.device.shares_cpu
        self._copied_param_bytes = model.dense_loaded_bytes if self._is_copied else 0
        # If files move to the device, it computes checksums. Several ranks read weights to shared host memory instead.
        self._hashes_swapped = float(hardware.device.moves_files)
        self._hashes_weights = float(hardware.device.moves_files and setup.cluster == ONE_RANK)
        self._decoded_numel, self._decoded_per_expert_byte = model.decoded_numel, model.decoded_per_expert_byte
        num_updated = model.num_trainable_params - self._experts.updates_left_out
        trainable_bytes = num_updated * model.param_itemsize
        state_bytes = num_updated * setup.state_bytes_per_param
        dense_bytes = model.dense_trainable_params * model.param_itemsize
        self._gradient_itemsize = gradient_itemsize(model, setup)
        self._dense_gradient_bytes = sum(block.gradient_bytes(self._gradient_itemsize) for block in model.blocks)
        self._gradient_bytes = self._dense_gradient_bytes + self._experts.gradient_bytes
        self._updated_bytes: float = dense_bytes
        self._num_local = setup.cluster.num_local
        self._update_read_bytes = state_bytes + (trainable_bytes if setup.update_reads_param else 0)
        self._update_write_bytes = state_bytes + trainable_bytes
        self._num_updated_params: float = model.num_trainable_params  # updates that wait are made later
        self._spilled_gradient_bytes = setup.spilled_gradient_bytes
        resident = setup.resident_records
        read_of_rows = {block.name: block.read_bytes for block in model.blocks if block.rows is not None}
        self._resident_param_bytes = sum(
            min(record.num_bytes, read_of_rows.get(record.block, record.num_bytes))
            for record in resident
            if record.kind in FETCHED_KINDS
        )
        self._resident_param_bytes -= self._experts.resident_bytes
        self._resident_update_read_bytes: float = sum(
            record.update_read_bytes for record in resident if setup.update_reads_param or record.kind != PARAM
        )
        # An update writes the records that it has read. Between commits, records in RAM stay there.
        unwritten_bytes = sum(record.update_read_bytes for record in resident) * (1 - setup.committed_fraction)
        # Copies have padding, so together they may be larger than the records that an update writes.
        least_bytes = self._update_write_bytes * setup.committed_fraction
        self._update_write_bytes = max(least_bytes, self._update_write_bytes - int(unwritten_bytes))

    def phases(self, choice: Choice, clip: ClipMode) -> list[StepPhase]:
        """Return the step's forwards and backwards. Updates run during the first forward and the last backward."""
        forward, backward = self._forward(choice), self._backward(choice)
        parked = np.ones(1) if clip == "defer" else choice.parked_share
        first = forward * (1 - parked) + self._forward_under_update(choice) * parked
        last = self._last_backward(choice) + self._update_in_backward(choice, clip) * (1 - parked)
        count = self._setup.num_micro_batches - 1
        loads = [(1, True, first), (count, True, forward), (count, False, backward), (1, False, last)]
        return [StepPhase(*load) for load in loads if load[0]]

    def _update_in_backward(self, choice: Choice, clip: ClipMode) -> ResourceUse:
        update = self._update(choice) + self._lent()
        if clip != "speculate":
            return update
        # Spilled gradients are for a wrong guess.
        unread_bytes = self._num_local * choice.spilled_gradient_bytes
        return replace(update, ssd_read_bytes=update.ssd_read_bytes - unread_bytes)

    def parked_share(self, choice: Choice, clip: ClipMode, most: Values) -> Values:
        """Return the share of updates in backward to park, at most ``most``; 0 if parking does not pay. Parked updates
        fit into the forward without making it longer. The share is less if the rest fits into the backward."""
        last = self._last_backward(choice)
        free = self._share_under(self._forward(choice), self._forward_under_update(choice))
        late = 1 - self._share_under(last, last + self._update_in_backward(choice, clip))
        share = np.minimum(most, np.minimum(MORE_PARKED * free, late))
        parked_s, usual_s = (sum(self.step_s(replace(choice, parked_share=of), clip)) for of in (share, np.zeros(1)))
        return np.where(parked_s < WORTH_PARKING * usual_s, share, 0.0)

    def _share_under(self, load: ResourceUse, with_update: ResourceUse) -> Values:
        """Return the share of an update that a phase can take without becoming longer."""
        before, after = self.lanes(load), self.lanes(with_update)
        longest: Values = np.maximum.reduce(np.broadcast_arrays(*before.values()))
        share: Values = np.ones(1)
        for name, seconds in before.items():
            more = after[name] - seconds
            share = np.minimum(share, np.where(more > 0, (longest - seconds) / np.where(more > 0, more, 1.0), 1.0))
        return share

    def _forward_under_update(self, choice: Choice) -> ResourceUse:
        """Return the use of a forward with updates. The forward gets new weights from the updates."""
        load = self._forward(choice) + self._update(choice)
        if not self._setup.hands_over:
            return load
        handed_over = max(0, self._updated_bytes - self._resident_param_bytes)
        handed_over += self._num_local * self._experts.from_ssd * self._experts.gradient_bytes
        # New weights are copied to the device in any case. Without the updates the forward copies them, and its costs
        # include this.
        copied_bytes = 0.0
        if not self._is_copied:
            copied_bytes = self._model.dense_gradient_bytes + self._experts.gradient_bytes
        return replace(
            load,
            ssd_read_bytes=load.ssd_read_bytes - handed_over,
            hashed_on_device_bytes=load.hashed_on_device_bytes - self._hashes_weights * handed_over,
            h2d_bytes=load.h2d_bytes + copied_bytes,
        )

    def _lent(self) -> ResourceUse:
        """Return the use that an update in backward saves because it gets weights from slots instead of SSDs."""
        lent_bytes: float = self._lent_share * max(0, self._setup.lent_bytes - self._resident_param_bytes)
        lent_bytes = lent_bytes + self._experts.from_ssd * self._experts.lent_bytes
        return _load(d2h_bytes=lent_bytes, ssd_read_bytes=-lent_bytes)

    def step_s(self, choice: Choice, clip: ClipMode) -> tuple[Values, Values]:
        """Return the seconds of forward (T_f) and backward (T_b) of all micro-batches of a step. If only some steps are
        committed, this is the mean over steps."""
        committed = self._setup.committed_fraction
        if 0 < committed < 1:
            with_s, without_s = (self._with(commit_every_steps=steps).step_s(choice, clip) for steps in (1, 0))
            forward_s, backward_s = (
                committed * one + (1 - committed) * other for one, other in zip(with_s, without_s, strict=True)
            )
            return forward_s, backward_s
        forward_s, backward_s = np.zeros(1), np.zeros(1)
        for phase in self.phases(choice, clip):
            if phase.is_forward:
                forward_s = forward_s + phase.count * self.phase_s(phase.load)
            else:
                backward_s = backward_s + phase.count * self.phase_s(phase.load)
        if clip == "speculate":
            # After a wrong guess, updates are repeated during the next forward.
            forward = self._forward(choice)
            done_over_s = self.phase_s(self._forward_under_update(choice)) - self.phase_s(forward)
            forward_s = forward_s + self._setup.clip_rate * (1 - choice.parked_share) * done_over_s
        return forward_s, backward_s

    def lanes(self, load: ResourceUse, *, efficiency: float = SHARED_CORES_EFFICIENCY) -> dict[str, Values]:
        """Return the busy seconds of each resource. All resources work at the same time, so a phase takes about as long
        as the longest. ``efficiency``: efficiency of cores that do several kinds of work."""
        hardware = self._hardware
        lanes = {
            "compute": load.compute_s,
            "h2d": load.h2d_bytes / hardware.h2d_bytes_per_s,
            "d2h": load.d2h_bytes / hardware.d2h_bytes_per_s,
            "ssd": ssd_s(self._hardware, load.ssd_read_bytes, load.ssd_write_bytes),
            "cpu": load.updated_params / hardware.cpu.optimizer_params_per_s,
        }
        if hardware.cpu.checksum_bytes_per_s:
            hashed_bytes = load.ssd_read_bytes + load.ssd_write_bytes - load.hashed_on_device_bytes
            lanes["cpu"] = lanes["cpu"] + hashed_bytes / hardware.cpu.checksum_bytes_per_s
        if hardware.device.shares_cpu:
            # The same cores compute, copy, update and hash, so these times are added.
            busy = lanes["compute"] + lanes["h2d"] + lanes["d2h"] + lanes["cpu"]
            return {"compute": busy / efficiency, "ssd": lanes["ssd"]}
        if hardware.duplex_bytes_per_s:
            lanes["link"] = (load.h2d_bytes + load.d2h_bytes) / hardware.duplex_bytes_per_s
        return lanes

    def phase_s(self, load: ResourceUse) -> Values:
        """Return the seconds of the longest lane, plus the time in which the pipeline fills or drains: one block's
        share of each other lane."""
        longest: Values = np.zeros(1)
        total: Values = np.zeros(1)
        for name, seconds in self.lanes(load).items():
            longest = np.maximum(longest, seconds)
            total = total if name in _COUNTED_ALREADY else total + seconds
        if not self._setup.counts_fill:
            return longest
        return longest + np.maximum(0.0, total - longest) / self._num_blocks + load.wait_s

    def busy_s(self, choice: Choice, clip: ClipMode) -> Values:
        """Return the busy seconds of all resources together."""
        busy_s: Values = np.zeros(1)
        for phase in self.phases(choice, clip):
            for seconds in self.lanes(phase.load).values():
                busy_s = busy_s + phase.count * seconds
        return busy_s

    def predict(self, choice: Choice, clip: ClipMode, **decided: Any) -> StepPrediction:
        """Predict the step of one choice (arrays of one element). ``decided``: the fields of the prediction that are
        already known."""
        phases = self.phases(choice, clip)
        forwards = [phase for phase in phases if phase.is_forward]
        backwards = [phase for phase in phases if not phase.is_forward]
        forward_s, backward_s = self.step_s(choice, clip)
        whole = sum((phase.load * phase.count for phase in phases[1:]), phases[0].load * phases[0].count)
        return StepPrediction(
            forward_s=forward_s.item(),
            backward_s=backward_s.item(),
            forward=self._in_all(forwards),
            backward=self._in_all(backwards),
            forward_bottleneck=self._bottleneck(forwards),
            backward_bottleneck=self._bottleneck(backwards),
            bottleneck=self._bottleneck(phases),
            floor_by_resource_s=self._floors_s(whole),
            swapped_bytes=int(choice.swapped_bytes.item()),
            spilled_bytes=int(choice.spilled_bytes.item()),
            spilled_gradient_bytes=int(choice.spilled_gradient_bytes.item()),
            ssd_read_bytes_per_step=round(whole.ssd_read_bytes.item()),
            ssd_write_bytes_per_step=round(whole.ssd_write_bytes.item()),
            ssd_hidden_step_s=self._ssd_hidden_step_s(choice, clip),
            ssd_hides_from_tokens=self._ssd_hides_from(choice, clip, decided["num_tokens"]),
            ranks=self._of_ranks(choice, clip, decided["num_tokens"]),
            experts=self._experts.predict(choice.reloaded_bytes.item()),
            **decided,
        )

    def _ssd_hides_from(self, choice: Choice, clip: ClipMode, num_tokens: int) -> float | None:
        """Return T* = S / (c - a), for weights that move once per step. The drives take S seconds for weights, states
        and gradients. Each token takes c seconds of computing, and a seconds of the drives for activations. With B
        bytes per parameter and no activations on the drives, this is B F / (8 BW) for every size of model."""
        nothing = replace(choice, swapped_bytes=np.zeros(1), spilled_bytes=np.zeros(1))
        costs = self._with(num_micro_batches=1)
        loads = [phase.load for phase in costs.phases(nothing, clip)]
        read_bytes, write_bytes = (sum(getattr(load, name) for load in loads) for name in _SSD_AMOUNTS)
        tokens_at_once = num_tokens / self._setup.num_micro_batches
        compute_s = sum(load.compute_s for load in loads)
        spilled_bytes = self._num_local * choice.spilled_bytes
        spare_s = (compute_s - ssd_s(self._hardware, spilled_bytes, spilled_bytes)).item()
        fixed_s = float(ssd_s(self._hardware, read_bytes, write_bytes).item())
        return fixed_s * tokens_at_once / spare_s if spare_s > 0 else None

    def _of_ranks(self, choice: Choice, clip: ClipMode, num_tokens: int) -> RankPrediction | None:
        """Return the part of the prediction for several ranks; None for one rank."""
        return None

    def _ssd_hidden_step_s(self, choice: Choice, clip: ClipMode) -> float:
        hardware = replace(
            self._hardware,
            ssd=tuple(
                with_changed(ssd, lambda _rate: math.inf, "read_bytes_per_s", "write_bytes_per_s")
                for ssd in self._hardware.ssd
            ),
            ssd_together_read_bytes_per_s=None,
            ssd_together_write_bytes_per_s=None,
            ssd_mixed_bytes_per_s=None,
        )
        forward_s, backward_s = type(self)(self._model, hardware, self._setup).step_s(choice, clip)
        return float((forward_s + backward_s).item())

    def _with(self, **changes: Any) -> StepCosts:
        return type(self)(self._model, self._hardware, replace(self._setup, **changes))

    def _in_all(self, phases: list[StepPhase]) -> Lanes:
        hardware = self._hardware

        def total(amount: str) -> float:
            return math.fsum(phase.count * getattr(phase.load, amount).item() for phase in phases)

        return Lanes(
            compute_s=total("compute_s"),
            h2d_s=total("h2d_bytes") / hardware.h2d_bytes_per_s,
            d2h_s=total("d2h_bytes") / hardware.d2h_bytes_per_s,
            ssd_read_s=total("ssd_read_bytes") / hardware.ssd_read_bytes_per_s,
            ssd_write_s=total("ssd_write_bytes") / hardware.ssd_write_bytes_per_s,
            optimizer_s=total("updated_params") / hardware.cpu.optimizer_params_per_s,
            net_s=total("net_bytes") / (hardware.net_bytes_per_s or math.inf),
            host_s=total("host_bytes") / (hardware.cpu.memory_bytes_per_s or math.inf),
            gathered_s=total("gathered_bytes") / hardware.between_gpus_bytes_per_s,
            exchanged_s=total("exchanged_bytes") / hardware.between_gpus_bytes_per_s,
        )

    def _bottleneck(self, phases: list[StepPhase]) -> str:
        """Return the resource that is the longest lane for most of the time."""
        waited_s: dict[str, float] = {}
        for phase in phases:
            seconds, resource = self._longest(phase.load)
            waited_s[resource] = waited_s.get(resource, 0.0) + phase.count * seconds
        return max(waited_s, key=lambda resource: waited_s[resource])

    def _longest(self, load: ResourceUse) -> tuple[float, str]:
        """Return the seconds of the longest lane, and its resource."""
        return max((seconds.item(), name) for name, seconds in self.lanes(load).items())

    def _floors_s(self, whole: ResourceUse) -> dict[str, float]:
        floors = {name: float(seconds.item()) for name, seconds in self.lanes(whole, efficiency=1.0).items()}
        # If reading and writing at the same time is slower than in turn, a step may do them in turn.
        in_turn_s = (
            whole.ssd_read_bytes / self._hardware.ssd_read_bytes_per_s
            + whole.ssd_write_bytes / self._hardware.ssd_write_bytes_per_s
        )
        return {**floors, "ssd": min(floors["ssd"], float(in_turn_s.item()))}

    def _decoding(self, skipped_bytes: float, expert_bytes: Values | float) -> tuple[Values | float, Values | float]:
        """Return the seconds of compute for decoding the weights that a pass loads, and the bytes of the link that take
        the same time. ``skipped_bytes`` of weights are in slots already. A device decodes between its copies."""
        share = self._decoded_numel / self._param_bytes if self._param_bytes else 0.0
        numel = max(0.0, self._decoded_numel - share * skipped_bytes) + self._decoded_per_expert_byte * expert_bytes
        seconds = numel / decoded_per_s(self._hardware)
        return (0.0, seconds * self._hardware.h2d_bytes_per_s) if self._is_copied else (seconds, 0.0)

    def _forward(self, choice: Choice) -> ResourceUse:
        experts = self._experts
        decoding_s, decoding_bytes = self._decoding(0, experts.forward_bytes)
        weight_bytes = self._forward_read_bytes() + self._num_local * experts.from_ssd * experts.forward_bytes
        spilled_bytes = self._num_local * choice.spilled_bytes
        return _load(
            compute_s=self._forward_s + decoding_s,
            h2d_bytes=self._copied_param_bytes + self._is_copied * experts.forward_bytes + decoding_bytes,
            d2h_bytes=choice.swapped_bytes,
            ssd_read_bytes=weight_bytes + experts.catch_up_bytes / self._setup.cluster.num_nodes,
            ssd_write_bytes=spilled_bytes,
            hashed_on_device_bytes=self._hashed_on_device(weight_bytes, spilled_bytes),
            wait_s=experts.wait_s,
        )

    def _backward(self, choice: Choice) -> ResourceUse:
        turnaround_bytes = self._setup.turnaround_bytes
        # Each backward after the first adds to the gradients that were spilled before, so it reads these back.
        brought_back = self._spilled_gradient_bytes * (1 - 1 / self._setup.num_micro_batches)
        expert_bytes = self._experts.backward_bytes + choice.reloaded_bytes
        copied_bytes = max(0, self._copied_param_bytes - turnaround_bytes) + self._is_copied * expert_bytes
        read_bytes = self._backward_read_bytes() + self._num_local * self._experts.from_ssd * expert_bytes
        decoding_s, decoding_bytes = self._decoding(turnaround_bytes, expert_bytes)
        return _load(
            compute_s=self._backward_s + choice.recompute_s + decoding_s,
            h2d_bytes=copied_bytes + choice.swapped_bytes + decoding_bytes,
            d2h_bytes=self._gradient_bytes,
            ssd_read_bytes=read_bytes + self._num_local * choice.spilled_bytes + brought_back,
            ssd_write_bytes=self._spilled_gradient_bytes,
            hashed_on_device_bytes=self._hashed_on_device(read_bytes, self._num_local * choice.spilled_bytes),
        )

    def _hashed_on_device(self, weight_bytes: Values | float, spilled_bytes: Values) -> Values:
        """Return the bytes of read weights and of spilled activations whose checksums the device computes."""
        return self._hashes_weights * weight_bytes + self._hashes_swapped * spilled_bytes

    def _forward_read_bytes(self) -> float:
        """Return the bytes of weights that a forward reads. Copies in RAM are whole records, which are a little larger
        than the weights because of padding."""
        return max(0, self._param_bytes - self._resident_param_bytes)

    def _backward_read_bytes(self) -> float:
        return max(0, self._param_bytes - self._resident_param_bytes - self._setup.turnaround_bytes)

    def _last_backward(self, choice: Choice) -> ResourceUse:
        """Return the use of the last backward. Its gradients may wait in the memory of swapped activations."""
        load, spilled_bytes = self._backward(choice), self._num_local * choice.spilled_gradient_bytes
        return replace(load, ssd_write_bytes=load.ssd_write_bytes - self._spilled_gradient_bytes + spilled_bytes)

    def _update(self, choice: Choice) -> ResourceUse:
        spilled_bytes = self._num_local * choice.spilled_gradient_bytes
        read_bytes = max(0, self._update_read_bytes - self._resident_update_read_bytes) + spilled_bytes
        return _load(
            ssd_read_bytes=read_bytes,
            ssd_write_bytes=self._update_write_bytes,
            updated_params=self._num_updated_params,
        )
