"""Costs of streamed experts for drives, link and RAM, in addition to the rest of the model.

With several ranks each expert belongs to one rank. The owner loads it if a token of any rank chooses it, and the rows
of tokens go to the owner.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import chain

from hf_lohan.costs.cuts import shared_segments
from hf_lohan.costs.hardware_profile import HardwareProfile
from hf_lohan.costs.model_profile import BlockProfile, ExpertsProfile, ModelProfile
from hf_lohan.costs.offload_plan import ExpertPrediction, TrainingSetup
from hf_lohan.costs.pool_plan import MIN_SLOTS_TO_LEND, SizeClass

ROUTER_SYNC_S = 50e-6
"""Seconds until the host knows the choices of a router on the device."""
MOST_STEPS_BEHIND = 5
"""A core applies a missed step in 0.75 ns per parameter. So this number of steps takes about the time in which a drive
of 3 GB/s reads the parameter's 12 bytes. A load of the expert waits for this read anyway."""
LAZY_FROM_SHARE = 0.2
"""Minimum share of experts without tokens for lazy updates. With a smaller share, reading moments with weights in a
forward costs as much as it saves."""


class ExpertCosts:
    """The costs of one rank. Bytes are expected values, because routing is not known in advance."""

    def __init__(self, model: ModelProfile, hardware: HardwareProfile, setup: TrainingSetup) -> None:
        self._model = model
        self._num_micro_batches = setup.num_micro_batches
        num_ranks = self._num_ranks = setup.cluster.num_ranks
        layers = self._layers = [_of_all_ranks(experts, num_ranks) for experts in model.experts]
        all_bytes = sum(experts.num_experts * experts.param_bytes for experts in layers) / num_ranks
        resident_bytes = sum(record.num_bytes for record in setup.resident_records if record.is_expert_weight)
        slot_bytes = _slot_bytes(setup)
        self._slot_bytes = slot_bytes
        self.forward_bytes = math.fsum(experts.hit_bytes for experts in layers) / num_ranks
        """Bytes of the rank's weights that a forward of one micro-batch needs."""
        self.backward_bytes = max(0.0, self.forward_bytes - slot_bytes)
        """Bytes of weights that the backward needs and that are in no slot."""
        share = self.forward_bytes / all_bytes if all_bytes else 0.0
        # A later micro-batch reuses the experts that the previous backward used last, if it needs them.
        later = 1 - 1 / setup.num_micro_batches
        self.forward_bytes -= later * share * min(slot_bytes, self.forward_bytes)
        self.from_ssd = 1 - resident_bytes / all_bytes if all_bytes else 0.0
        """The share of weights without a copy in RAM."""
        self.resident_bytes = resident_bytes
        hit_params = math.fsum(experts.hits() * experts.num_trainable_params for experts in layers) / num_ranks
        self.gradient_bytes = hit_params * model.param_itemsize
        """Bytes of gradients of experts with tokens. Other experts are updated with zeros."""
        self.lent_bytes = self.gradient_bytes if _lends(setup) else 0.0
        """Bytes of weights that an update in backward gets from slots."""
        self.wait_s = math.fsum(_wait_s(experts.param_bytes, hardware, self.from_ssd) for experts in layers)
        """Seconds in which a forward does not compute, because it waits for routers and for the first expert of each
        layer."""
        self.updates_left_out = 0.0
        """Number of parameters of all experts whose updates wait for a later step."""
        self.catch_up_bytes = 0.0
        """Bytes of states of all experts that a forward reads together with weights that missed steps."""
        if setup.lazy_experts is True or (setup.lazy_experts and self._left_out_share(setup) >= LAZY_FROM_SHARE):
            self._count_lazy_updates(setup)

    def reload_bytes(self, layer: BlockProfile) -> float:
        """Return the bytes that a layer's backward loads again to recompute the experts' output. Slots keep the last
        experts until the experts' own backward."""
        if layer.experts is None:
            return 0.0
        return max(0.0, _of_all_ranks(layer.experts, self._num_ranks).hit_bytes / self._num_ranks - self._slot_bytes)

    def predict(self, reloaded_bytes: float) -> ExpertPrediction | None:
        """Return the prediction for a step. ``reloaded_bytes``: bytes that its backwards load again."""
        model = self._model
        if not (layers := self._layers):
            return None
        loaded = self._num_micro_batches * (self.forward_bytes + self.backward_bytes + reloaded_bytes)
        num_experts = sum(experts.num_experts for experts in layers)
        param_bytes = sum(experts.num_experts * experts.param_bytes for experts in layers)
        dense_params = sum(block.num_params for block in model.blocks)
        from_tokens = [experts.all_hit_from_tokens for experts in layers]
        return ExpertPrediction(
            num_layers=len(layers),
            num_experts=num_experts,
            param_bytes=param_bytes,
            hits_per_micro_batch=math.fsum(experts.hits() for experts in layers),
            loads_per_step=loaded / param_bytes * num_experts,
            loaded_bytes_per_step=loaded,
            active_params=dense_params + sum(experts.num_chosen * experts.num_params for experts in layers),
            all_hit_from_tokens=None if None in from_tokens else max(number or 0 for number in from_tokens),
        )

    def _left_out_share(self, setup: TrainingSetup) -> float:
        """Return the share of all experts whose update a step postpones."""
        layers = [experts for experts in self._layers if experts.num_tokens]
        hits = math.fsum(experts.hits(setup.num_micro_batches) for experts in layers)
        return 1 - hits / sum(experts.num_experts for experts in layers) if layers else 0.0

    def _count_lazy_updates(self, setup: TrainingSetup) -> None:
        for experts in self._layers:
            of_step = experts.chances_of_hit(setup.num_micro_batches)
            for (chance, number), (of_forward, _) in zip(of_step, experts.chances_of_hit(), strict=True):
                num_trained = number * experts.num_trainable_params
                self.updates_left_out += num_trained * left_out_share(1 - chance)
                # If an expert missed the previous step, each forward until its update also reads its moments.
                self.catch_up_bytes += num_trained * of_forward * (1 - chance) * setup.state_bytes_per_param


@dataclass(frozen=True, slots=True)
class RowTraffic:
    """Bytes of rows that one rank sends to owners in a pass over all layers, and bytes of the results that return. If
    ranks are equal, a rank receives the same number of bytes."""

    row_bytes: float
    """Rows of tokens, once for each rank that owns an expert of the token."""
    result_bytes: float
    """Results, one for each choice."""
    index_bytes: float
    """Indices or routing weights, one for each choice."""

    @property
    def forward_bytes(self) -> float:
        """The owner gets rows and indices, and returns results."""
        return self.row_bytes + self.index_bytes + self.result_bytes

    @property
    def backward_bytes(self) -> float:
        """The owner gets rows, their gradients, indices and routing weights. It returns gradients of rows and of
        weights."""
        return 2 * self.row_bytes + 3 * self.index_bytes + self.result_bytes

    def to_owners(self) -> float:
        """Return the bytes that go to owners in a forward. In a backward twice this number goes to owners."""
        return self.row_bytes + self.index_bytes


_INDEX_BYTES = 4


def row_traffic(model: ModelProfile, num_ranks: int, num_local: int | None = None) -> RowTraffic:
    """Return the traffic of one rank's micro-batch to the experts of other ranks, of ``num_ranks`` in all. With
    ``num_local`` ranks on a node, return the traffic to other nodes, in which rows are sent once to each node.

    A token reaches m of E experts with the probability 1 - C(E - m, k) / C(E, k) for k choices.
    """
    at_once = num_local or 1
    rows = choices = 0.0
    index_bytes = 0.0
    layers = [block for block in model.blocks if block.experts is not None]
    for number, block in enumerate(layers):
        experts = block.experts
        assert experts is not None
        if not experts.num_tokens:
            continue
        row_bytes = block.input_bytes / experts.num_tokens
        owned = experts.owned(number, num_ranks)
        receivers = [
            list(chain.from_iterable(owned[first : first + at_once])) for first in range(0, num_ranks, at_once)
        ]
        share = 1 - at_once / num_ranks  # the share that goes to other receivers, as a mean over all senders
        reached = math.fsum(map(experts.chance_to_reach, receivers))
        rows += share * experts.num_tokens * reached * row_bytes
        choices += share * experts.num_tokens * experts.num_chosen * row_bytes
        index_bytes += share * experts.num_tokens * experts.num_chosen * _INDEX_BYTES
    return RowTraffic(rows, choices, index_bytes)


def most_loaded(
    experts: ExpertsProfile, layer: int, num_ranks: int, *, num_local: int = 1, least_rows: int = 0
) -> float:
    """Return the rows of the rank with the most rows, divided by the mean of all ranks, according to the measured
    routing. A layer waits for this rank. ``layer``: the index among the layers with experts. With ``least_rows`` the
    ``num_local`` ranks of a node balance their rows, in segments of at least this number of rows."""
    chances = experts.chances or (experts.num_chosen / experts.num_experts,) * experts.num_experts
    owned = experts.owned(layer, num_ranks)
    loads = [num_ranks * math.fsum(chances[expert] for expert in own) for own in owned]
    if least_rows:
        rows = [round(experts.num_tokens * chance) for chance in chances]
        owners = [rank for _, rank in sorted((expert, rank) for rank, own in enumerate(owned) for expert in own)]
        for (expert, _), rank in shared_segments([rows] * num_ranks, owners, num_local, least_rows).items():
            loads[owners[expert]] -= chances[expert]
            loads[rank] += chances[expert]
    return max(loads) / math.fsum(chances)


def _of_all_ranks(experts: ExpertsProfile, num_ranks: int) -> ExpertsProfile:
    """Return the profile with the tokens of all ranks, which share the experts."""
    return replace(experts, num_tokens=num_ranks * experts.num_tokens)


def left_out_share(miss_chance: float) -> float:
    """Return the share of steps that an expert takes later, if each step misses it with ``miss_chance``. An expert
    takes a step at once if it has tokens, or if it would be too many steps behind."""
    if miss_chance >= 1:
        return 1 - 1 / (MOST_STEPS_BEHIND + 1)
    in_a_row = miss_chance**MOST_STEPS_BEHIND
    is_at_most_behind = in_a_row * (1 - miss_chance) / (1 - in_a_row * miss_chance)
    return miss_chance * (1 - is_at_most_behind)


def _lends(setup: TrainingSetup) -> bool:
    return setup.pools is not None and setup.pools.num_slots.get(SizeClass.EXPERT, 0) >= MIN_SLOTS_TO_LEND


def _slot_bytes(setup: TrainingSetup) -> int:
    """Return the bytes of all slots for experts."""
    if setup.pools is None:
        return 0
    return setup.pools.num_slots.get(SizeClass.EXPERT, 0) * setup.pools.slot_bytes.get(SizeClass.EXPERT, 0)


def _wait_s(expert_bytes: int, hardware: HardwareProfile, from_ssd: float) -> float:
    copy_s = 0.0 if hardware.device.shares_cpu else expert_bytes / hardware.h2d_bytes_per_s
    return ROUTER_SYNC_S + from_ssd * expert_bytes / hardware.ssd_read_bytes_per_s + copy_s
