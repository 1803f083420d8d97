"""A lower bound of the simulated step over all placements of activations, by linear programming (scipy).

A step is divided at the beginning of each block's computing. Variables are the lengths of these intervals, the
fractions of each activation that stay, go to RAM, or go to the drives (the rest is recomputed), and what each lane
moves in each interval, which is at most what its rate allows. Weights arrive between the time when their slot is free
and their use. Activations move between their forward and their backward. Gradients and states move at any time, and
weights that an update may hand over are not read. So no plan is shorter, for a device that is not the CPU.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from hf_lohan.annexes.studies.simulation.block_work import block_works
from hf_lohan.annexes.studies.simulation.simulated_step import lane_rules
from hf_lohan.annexes.studies.simulation.step_tasks import DEFAULT_SLOTS, order_loads
from hf_lohan.costs import HardwareProfile, ModelProfile, OffloadPlan, Placement, TrainingSetup
from hf_lohan.costs.fitting import layer_needs, measure_room, room_to_hold_bytes, tied_gradient_bytes
from hf_lohan.costs.offload_plan import INPUT
from hf_lohan.costs.step.step_costs import operation_s


class _Program:
    """A linear program that grows."""

    def __init__(self) -> None:
        self.costs: list[float] = []
        self.limits: list[tuple[float, float | None]] = []
        self._below: list[tuple[dict[int, float], float]] = []
        self._equal: list[tuple[dict[int, float], float]] = []

    def variable(self, most: float | None = None, cost: float = 0.0) -> int:
        self.costs.append(cost)
        self.limits.append((0.0, most))
        return len(self.costs) - 1

    def at_most(self, row: dict[int, float], limit: float) -> None:
        self._below.append((row, limit))

    def equals(self, row: dict[int, float], value: float) -> None:
        self._equal.append((row, value))

    def least_cost(self) -> float:
        """Return the least cost. Raises ValueError if no solution exists."""
        from scipy.optimize import linprog

        below, limits = self._matrix(self._below)
        equal, values = self._matrix(self._equal)
        found = linprog(
            self.costs, A_ub=below, b_ub=limits, A_eq=equal, b_eq=values, bounds=self.limits, method="highs"
        )
        if not found.success:
            raise ValueError(f"the linear program has no solution: {found.message}")
        return float(found.fun)

    def _matrix(self, rows: Iterable[tuple[dict[int, float], float]]) -> tuple[object, object]:
        """Return the rows, each scaled so that its largest coefficient is 1, because HiGHS drops tiny ones."""
        from scipy.sparse import coo_matrix

        indices, columns, numbers, sides = [], [], [], []
        for index, (row, side) in enumerate(rows):
            scale = max(map(abs, row.values()), default=1.0) or 1.0
            sides.append(side / scale)
            for column, number in row.items():
                indices.append(index)
                columns.append(column)
                numbers.append(number / scale)
        if not sides:
            return None, None
        return coo_matrix((numbers, (indices, columns)), shape=(len(sides), len(self.costs))).tocsr(), np.array(sides)


def least_step_s(model: ModelProfile, hardware: HardwareProfile, setup: TrainingSetup, plan: OffloadPlan) -> float:
    """Return the bound for a step with ``plan``'s clipping, commits and records in RAM. Only for one micro-batch."""
    assert setup.num_micro_batches == 1 and not hardware.device.shares_cpu
    all_away = {
        layer.name: {INPUT: Placement.GPU, **{own.name: Placement.GPU for own in layer.operations}}
        for layer in model.layers
    }
    plan = replace(plan, activations=all_away, prediction=replace(plan.prediction, spilled_gradient_bytes=0))
    works = block_works(model, hardware, replace(setup, commit_every_steps=plan.commit_every_steps), plan)
    uses = [*works, *reversed(works)]
    num_intervals, num_blocks = len(uses), len(works)
    program = _Program()
    lengths = [program.variable(cost=1.0) for _ in uses]
    lanes: dict[str, list[dict[int, float]]] = {
        lane: [defaultdict(float) for _ in uses] for lane in ("h2d", "d2h", "ssd")
    }
    computing: list[tuple[dict[int, float], float]] = [({}, work.forward_s) for work in works]
    computing += [({}, work.backward_s) for work in reversed(works)]
    drives = min(1.0, lane_rules(hardware).mixed_factor)
    read_s, write_s = drives / hardware.ssd_read_bytes_per_s, drives / hardware.ssd_write_bytes_per_s
    h2d_s, d2h_s = 1 / hardware.h2d_bytes_per_s, 1 / hardware.d2h_bytes_per_s
    unit_bytes = max(1.0, float(max((block.param_bytes for block in model.blocks), default=1)))

    def move(lane: str, s_per_byte: float, window: Iterable[int], row: dict[int, float], num_bytes: float) -> None:
        """Move ``num_bytes``, plus the bytes of the variables in ``row``, in the intervals of a window."""
        parts = [(interval, program.variable()) for interval in window]
        program.equals(
            {**{part: 1.0 for _, part in parts}, **{own: -size / unit_bytes for own, size in row.items()}},
            num_bytes / unit_bytes,
        )
        for interval, part in parts:
            lanes[lane][interval % num_intervals][part] = s_per_byte * unit_bytes

    slots = DEFAULT_SLOTS if setup.pools is None else setup.pools.num_slots
    for since, place in order_loads([(work.name, work.size_class) for work in uses], slots):
        work = uses[place]
        if since == 0 and not work.is_trained:
            continue  # it may still be in its slot
        window = range(since - 1, place) if since else range(-num_intervals, place)
        window = range(max(window.start, place - num_intervals), place)
        if not work.is_trained or not setup.hands_over:
            move("ssd", read_s, window, {}, work.read_bytes)
        move("h2d", h2d_s, window, {}, work.param_bytes)
    everywhere = range(num_intervals)
    for lane, s_per_byte, num_bytes in (
        ("d2h", d2h_s, sum(work.gradient_bytes for work in works)),
        ("ssd", read_s, sum(max(0.0, work.update_read_bytes - work.lent_bytes) for work in works)),
        ("ssd", write_s, sum(work.update_write_bytes for work in works)),
    ):
        move(lane, s_per_byte, everywhere, {}, num_bytes)
    on_cpu_s = sum(work.num_updated for work in works) / hardware.cpu.optimizer_params_per_s
    program.at_most(dict.fromkeys(lengths, -1.0), -on_cpu_s)
    kept_before: dict[int, float] = {}
    in_ram: dict[int, float] = {}
    on_drives: dict[int, float] = {}
    room = room_to_hold_bytes(hardware, setup)
    place_of = {work.name: place for place, work in enumerate(works)}
    for layer in model.layers:
        place = place_of[layer.name]
        back = num_intervals - 1 - place
        swapped: dict[int, float] = {}
        spilled: dict[int, float] = {}
        for size, seconds in (
            (layer.input_bytes, None),
            *((own.output_bytes, operation_s(own, hardware)) for own in layer.operations),
        ):
            kept, ram, drive = (program.variable(most=1.0) for _ in range(3))
            row = {kept: 1.0, ram: 1.0, drive: 1.0}
            if seconds is None:
                program.equals(row, 1.0)
            else:
                program.at_most(row, 1.0)
                variables, base_s = computing[back]
                variables.update(dict.fromkeys(row, -seconds))
                computing[back] = variables, base_s + seconds
            kept_before[kept] = size
            in_ram[ram], on_drives[drive] = size, size
            swapped.update({ram: size, drive: size})
            spilled[drive] = size
        between = range(place, back)
        move("d2h", d2h_s, between, swapped, 0.0)
        move("h2d", h2d_s, between, swapped, 0.0)
        move("ssd", write_s, between, spilled, 0.0)
        move("ssd", read_s, between, spilled, 0.0)
        needs = layer.input_bytes + layer_needs(layer, model) + tied_gradient_bytes(model)
        before = {own: size for own, size in kept_before.items() if own not in swapped}
        earlier = dict(list(before.items())[: -1 - len(layer.operations)])
        if earlier:
            program.at_most(earlier, max(0.0, room - needs))
    program.at_most(kept_before, max(0, setup.gpu_memory_bytes - setup.gpu_fixed_bytes))
    tiers = measure_room(model, hardware, setup)
    cpu_bytes = max(0, tiers.cpu_bytes - sum(record.num_bytes for record in plan.resident))
    if setup.activation_cpu_bytes is not None:
        cpu_bytes = min(cpu_bytes, setup.activation_cpu_bytes)
    program.at_most(in_ram, cpu_bytes)
    program.at_most(on_drives, max(0, tiers.ssd_bytes))
    assert num_blocks == len(works)
    for interval, (variables, base_s) in enumerate(computing):
        program.at_most({**variables, lengths[interval]: -1.0}, -base_s)
        for moved in lanes.values():
            program.at_most({**moved[interval], lengths[interval]: -1.0}, 0.0)
    return program.least_cost()
