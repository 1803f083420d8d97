"""Costs of streamed experts for drives, link and RAM, beside the rest of the model."""

from __future__ import annotations

import math

from hf_lohan.planner.hardware_profile import HardwareProfile
from hf_lohan.planner.model_profile import BlockProfile, ModelProfile
from hf_lohan.planner.offload_plan import ExpertPrediction, TrainingSetup
from hf_lohan.planner.pool_plan import MIN_SLOTS_TO_LEND, SizeClass

ROUTER_SYNC_S = 50e-6
"""Seconds until the host knows the choices of a router on the device."""
MOST_STEPS_BEHIND = 5
"""A core makes up a missed step in 0.75 ns per parameter. This number of steps takes about as long as a drive of 3 GB/s
takes to read the parameter's 12 bytes, for which a load of the expert waits anyway."""
LAZY_FROM_SHARE = 0.2
"""The least share of experts without tokens for lazy updates. With a smaller share, reading moments with weights in a
forward costs as much as it saves."""


class ExpertCosts:
    """The costs of one rank. Bytes are expected values, because routing is not known in advance."""

    def __init__(self, model: ModelProfile, hardware: HardwareProfile, setup: TrainingSetup) -> None:
        self._model = model
        self._num_micro_batches = setup.num_micro_batches
        layers = model.experts
        all_bytes = sum(experts.num_experts * experts.param_bytes for experts in layers)
        resident_bytes = sum(record.num_bytes for record in setup.resident_records if record.is_expert_weight)
        slot_bytes = _slot_bytes(setup)
        self._slot_bytes = slot_bytes
        self.forward_bytes = math.fsum(experts.hit_bytes for experts in layers)
        """Bytes of weights that a forward of one micro-batch needs."""
        self.backward_bytes = max(0.0, self.forward_bytes - slot_bytes)
        """Bytes of weights that the backward needs and that are in no slot."""
        share = self.forward_bytes / all_bytes if all_bytes else 0.0
        # A later micro-batch reuses the experts that the previous backward used last, if it needs them.
        later = 1 - 1 / setup.num_micro_batches
        self.forward_bytes -= later * share * min(slot_bytes, self.forward_bytes)
        self.from_ssd = 1 - resident_bytes / all_bytes if all_bytes else 0.0
        """The share of weights without a copy in RAM."""
        self.resident_bytes = resident_bytes
        hit_params = math.fsum(experts.hits() * experts.num_trainable_params for experts in layers)
        self.gradient_bytes = hit_params * model.param_itemsize
        """Bytes of gradients of experts with tokens. Other experts are updated with zeros."""
        self.lent_bytes = self.gradient_bytes if _lends(setup) else 0.0
        """Bytes of weights that an update in backward gets from slots."""
        self.wait_s = math.fsum(_wait_s(experts.param_bytes, hardware, self.from_ssd) for experts in layers)
        """Seconds in which a forward does not compute, because it waits for routers and for the first expert of each
        layer."""
        self.updates_left_out = 0.0
        """Number of parameters of experts whose updates wait for a later step."""
        self.catch_up_bytes = 0.0
        """Bytes of states that a forward reads together with weights that missed steps."""
        if setup.lazy_experts is True or (setup.lazy_experts and self._left_out_share(setup) >= LAZY_FROM_SHARE):
            self._count_lazy_updates(model, setup)

    def reload_bytes(self, layer: BlockProfile) -> float:
        """Return the bytes that a layer's backward loads again to recompute the experts' output. Slots keep the last
        experts until the experts' own backward."""
        return max(0.0, layer.experts.hit_bytes - self._slot_bytes) if layer.experts is not None else 0.0

    def predict(self, reloaded_bytes: float) -> ExpertPrediction | None:
        """Return the prediction for a step. ``reloaded_bytes``: bytes that its backwards load again."""
        model = self._model
        if not (layers := model.experts):
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
        layers = [experts for experts in self._model.experts if experts.num_tokens]
        hits = math.fsum(experts.hits(setup.num_micro_batches) for experts in layers)
        return 1 - hits / sum(experts.num_experts for experts in layers) if layers else 0.0

    def _count_lazy_updates(self, model: ModelProfile, setup: TrainingSetup) -> None:
        for experts in model.experts:
            of_step = experts.chances_of_hit(setup.num_micro_batches)
            for (chance, number), (of_forward, _) in zip(of_step, experts.chances_of_hit(), strict=True):
                num_trained = number * experts.num_trainable_params
                self.updates_left_out += num_trained * left_out_share(1 - chance)
                # If an expert missed the previous step, each forward until its update also reads its moments.
                self.catch_up_bytes += num_trained * of_forward * (1 - chance) * setup.state_bytes_per_param


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
