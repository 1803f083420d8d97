"""Makes tasks from the steps of a plan, with the order and the limits of a run.

The limits are the numbers of slots, of layers that are fetched ahead or leave, of chunks of states and of buffers of
gradients, and the order in which the drives take requests.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from hf_lohan.annexes.studies.simulation.block_work import BlockWork, block_works
from hf_lohan.annexes.studies.simulation.lanes import NO_LANE, TaskGraph
from hf_lohan.costs.collectives import ONE_RANK
from hf_lohan.costs.hardware_profile import HardwareProfile
from hf_lohan.costs.model_profile import ModelProfile
from hf_lohan.costs.offload_plan import OffloadPlan, TrainingSetup
from hf_lohan.costs.parking import spread_share
from hf_lohan.costs.pool_plan import MAX_CHUNK_NUMEL, NUM_PIPELINE_STAGES, NUM_RECALL_BUFFERS, SizeClass
from hf_lohan.costs.step.expert_costs import ROUTER_SYNC_S

COMPUTE, H2D, D2H, SSD, CPU, HASH = "compute", "h2d", "d2h", "ssd", "cpu", "hash"
_URGENT, _SOON, _ANY_TIME = 0, 1, 2
"""Urgency of requests to drives, as in a run: weights first, then other reads, then writes."""
_STAGING_BUFFERS = 4
"""Number of buffers through which activations move to and from the drives."""
DEFAULT_SLOTS = {SizeClass.LAYER: 3, SizeClass.EXPERT: 8, SizeClass.OUTER: 1, SizeClass.RESIDENT: 1 << 20}
"""Number of slots if the setup has no pools."""
_DEFAULT_BUFFER_BYTES = 4 * MAX_CHUNK_NUMEL
_MOST_PIECES = 8
_ADDED_BYTES, _UPDATED_BYTES = 12, 28
"""Bytes that are moved in RAM to add a gradient to a sum, and by an update. Their ratio gives the rate of sums."""
_PIECES_OF_A_PASS = 3000
"""Approximate maximum of pieces in a step. With many blocks each has fewer pieces, so that a simulation stays short."""
_EXPERT_PARTS = 4
"""Number of parts of a layer's experts. A part computes while the next part is loaded."""

Tier = Literal["device", "ram"]


@dataclass(frozen=True, slots=True)
class MemoryChange:
    """Bytes that a task takes or frees, when it begins or ends."""

    tier: Tier
    task: int
    at_end: bool
    num_bytes: float


class StepTasks:
    """Several steps of one plan as a graph of tasks."""

    def __init__(
        self,
        model: ModelProfile,
        hardware: HardwareProfile,
        setup: TrainingSetup,
        plan: OffloadPlan,
        num_steps: int,
    ) -> None:
        self.graph = TaskGraph()
        self.ends: list[int] = []
        """The last compute task of each step."""
        self.changes: list[MemoryChange] = []
        self._hardware = hardware
        self._setup = setup
        self._plan = plan
        self._is_copied = not hardware.device.shares_cpu
        num_passes = 2 * setup.num_micro_batches * max(1, len(model.blocks))
        self.is_coarse = False
        """Whether pieces are larger than in a run."""
        self._most_pieces = max(1, min(_MOST_PIECES, _PIECES_OF_A_PASS // num_passes))
        pools = setup.pools
        self._slots: Mapping[SizeClass, int] = DEFAULT_SLOTS if pools is None else pools.num_slots
        self._buffer_bytes = _DEFAULT_BUFFER_BYTES if pools is None else pools.staging_buffer_bytes
        self._most_gradients = math.inf if pools is None else pools.num_gradient_buffers * pools.gradients_per_buffer
        self._works = block_works(model, hardware, setup, plan)
        self._loads: list[tuple[int, int]] = []
        self._layers = [work for work in self._works if work.is_layer]
        self._shares: dict[str, list[float]] = {}
        # The state after the tasks so far.
        self._compute: int | None = None
        self._in_slots: set[str] = set()
        self._updates: dict[str, dict[int, tuple[int, int]]] = {}
        """Maps block and index of the piece to (CPU task, write task) of the last update."""
        self._cpu_tasks: list[int] = []
        self._writes: list[int] = []
        self._step_writes: list[int] = []
        self._released: deque[tuple[float, int]] = deque()
        """(number of chunks of gradients so far, task after which all of these chunks have left their buffers)."""
        self._num_released = 0.0
        self._recalled: list[int] = []
        """Tasks after which the buffers of recalled sums are free."""
        self._accepted: int | None = None
        """Task after which the update thread has taken the last gradient that arrived."""
        self._num_arrived = 0.0
        self._held: dict[str, dict[int, int]] = {}
        """Maps block and index of the piece to the task after which the held gradient may be applied."""
        self._parked = self._parked_pieces()
        self._worker: int | None = None
        """Task after which the update thread is free."""
        self._swap_thread: int | None = None
        self._staging: list[int] = []
        self._begin: int | None = None
        for step in range(num_steps):
            self.graph.step = step
            self._add_step(step)

    def _add_step(self, step: int) -> None:
        held, self._held = self._held, {}
        if held:
            for work in self._works:
                for number, ready in held.get(work.name, {}).items():
                    self._update_piece(work, number, ready, is_deferred=True)
            self._commit()
        for number in range(self._setup.num_micro_batches):
            self._add_pass(number)
        assert self._compute is not None
        self.ends.append(self._compute)
        last: list[int | None] = [self._compute, *(task for tasks in self._held.values() for task in tasks.values())]
        if self._plan.clip != "defer":
            last += self._step_writes if self._plan.clip == "speculate" else self._cpu_tasks[-1:]
        if not self._held:
            self._commit()
        self._begin = self.graph.add(NO_LANE, 0.0, last, name="updates")
        if self._plan.clip == "speculate":  # guesses are assumed to be right, so held gradients are dropped
            held_chunks = sum(
                work.num_chunks * (1 - len(self._held.get(work.name, {})) / len(self._chunk_shares(work)))
                for work in self._works
                if work.is_trained and work.holds_in_buffers
            )
            self._release(held_chunks, self._begin)

    def _commit(self) -> None:
        """If the step is committed, make the update thread wait until everything is written."""
        if self._setup.committed_fraction:
            self._worker = self.graph.add(NO_LANE, 0.0, [*self._step_writes, *self._cpu_tasks[-1:]], name="commit")
        elif self._cpu_tasks:
            self._worker = self._cpu_tasks[-1]
        self._step_writes = []

    # One forward and its backward.

    def _add_pass(self, number: int) -> None:
        uses = [*self._works, *reversed(self._works)]
        if not self._loads:  # equal in all passes
            self._loads = order_loads([(work.name, work.size_class) for work in uses], self._slots)
        begin = self._begin if number == 0 else self._compute
        num_blocks = len(self._works)
        parts: list[tuple[int, int]] = []
        for place, work in enumerate(uses):
            parts.append(self._add_compute(work, place < num_blocks))
        if begin is not None:
            self.graph.link(begin, parts[0][0])
        chain: int | None = None
        for since, place in self._loads:
            work = uses[place]
            if work.name in self._in_slots and since == 0:
                continue
            free = parts[since - 1][1] if since else begin
            chain = self._load(work, free, chain, parts[place][0])
        self._in_slots = _held_at_end(uses, self._slots)
        forward = {work.name: parts[place] for place, work in enumerate(self._works)}
        backward = {work.name: parts[num_blocks + place] for place, work in enumerate(reversed(self._works))}
        stored = self._swap_out(forward)
        self._swap_in(parts, forward, backward, stored)
        is_last = number == self._setup.num_micro_batches - 1
        previous: int | None = None
        for work in reversed(self._works):
            first, last = backward[work.name]
            self.graph.link(previous, first)
            previous = self._gradient(work, first, last, is_first=number == 0, is_last=is_last)
            self._note_work(work, forward[work.name], (first, last))
        if is_last:
            self._in_slots -= {work.name for work in self._works if work.is_trained}

    def _add_compute(self, work: BlockWork, is_forward: bool) -> tuple[int, int]:
        """Add the compute tasks of one block. Returns the first and the last of them."""
        seconds = work.forward_s if is_forward else work.backward_s
        loaded_bytes = work.expert_bytes[not is_forward]
        has_halves = work.early_share > 0 if is_forward else work.is_trained
        num_parts = 2 if has_halves and self._most_pieces > 1 else 1
        first: int | None = None
        loads: list[int | None] = [None] * num_parts
        if loaded_bytes:  # the router of the layer runs before its experts are loaded
            num_parts = _EXPERT_PARTS
            self._compute = first = self.graph.add(COMPUTE, ROUTER_SYNC_S, [self._compute], name="computing")
            loads = self._load_experts(loaded_bytes, num_parts, first)
        name = "computing"
        for load in loads:
            task = self.graph.add(COMPUTE, seconds / num_parts, [self._compute, load], name=name)
            self._compute = task
            first = task if first is None else first
        assert first is not None and self._compute is not None
        return first, self._compute

    def _load_experts(self, num_bytes: float, num_parts: int, router: int) -> list[int | None]:
        hardware, each_bytes = self._hardware, num_bytes / num_parts
        loads: list[int | None] = []
        for _ in range(num_parts):
            task = self.graph.add(
                SSD, each_bytes / hardware.ssd_read_bytes_per_s, [router], name="experts", rank=_URGENT
            )
            if self._is_copied:
                task = self.graph.add(H2D, each_bytes / hardware.h2d_bytes_per_s, [task], name="experts")
            loads.append(task)
        return loads

    def _load(self, work: BlockWork, free: int | None, chain: int | None, use: int) -> int | None:
        """Load a block to a slot, for the compute task ``use``. Returns the last read, after which the loader begins
        the next load."""
        if not work.param_bytes:
            return chain
        graph, hardware = self.graph, self._hardware
        updates = self._updates.get(work.name) or None
        comes_from_updates = updates is not None and self._setup.hands_over
        num_pieces = self._num_pieces(work.param_bytes)
        shares = self._chunk_shares(work) if updates is not None else [1 / num_pieces] * num_pieces
        is_direct = hardware.device.moves_files and self._setup.cluster == ONE_RANK
        hash_rate = hardware.cpu.checksum_bytes_per_s if not is_direct else None
        copied = self._is_copied or comes_from_updates
        ready: int | None = None
        for number, share in enumerate(shares):
            read_s = share * work.read_bytes / hardware.ssd_read_bytes_per_s
            copy_s = share * (work.decode_s + (work.param_bytes / hardware.h2d_bytes_per_s if copied else 0.0))
            ready = free
            on_cpu, written = updates[number] if updates is not None else (None, None)
            if read_s:
                before = [free, on_cpu]
                if not comes_from_updates:
                    before += [chain, written]
                task = graph.add(SSD, read_s, before, name="weights", rank=_URGENT)
                if comes_from_updates and written is not None:
                    graph.skip_unless_ended(task, written)
                else:
                    chain = task
                ready = task
                if hash_rate:
                    hashed_s = share * work.read_bytes / hash_rate
                    ready = graph.add(HASH, hashed_s, [task], name="weights")
                    if comes_from_updates and written is not None:
                        graph.skip_unless_ended(ready, written)
            if copy_s:
                ready = graph.add(H2D, copy_s, [ready, free, on_cpu], name="weights")
            elif not read_s:
                graph.link(on_cpu, use)
            graph.link(ready, use)
        return chain

    # Activations.

    def _swap_out(self, forward: Mapping[str, tuple[int, int]]) -> dict[str, tuple[int | None, list[int]]]:
        """Add the copies of activations that leave the device. Returns for each layer the task after which they have
        left, and the writes of activations that move on to the drives."""
        graph, hardware = self.graph, self._hardware
        stored: dict[str, tuple[int | None, list[int]]] = {}
        left: list[int | None] = []
        for layer in self._layers:
            first, last = forward[layer.name]
            if len(left) >= self._plan.layers_leaving:
                graph.link(left[-self._plan.layers_leaving], first)
            gone: int | None = None
            writes: list[int] = []
            # Tensors leave as soon as they exist, some in the first half of the forward.
            early_share = layer.early_share if first != last and not layer.expert_bytes[0] else 0.0
            for share, made in ((early_share, first), (1 - early_share, last)):
                if share * layer.ram_bytes:
                    seconds = share * layer.ram_bytes / hardware.d2h_bytes_per_s
                    gone = graph.add(D2H, seconds, [made, self._swap_thread], name="activations to leave")
            if layer.spilled_bytes:
                num_pieces = self._num_pieces(layer.spilled_bytes)
                for number in range(num_pieces):
                    each_bytes = layer.spilled_bytes / num_pieces
                    buffer = self._staging[-_STAGING_BUFFERS] if len(self._staging) >= _STAGING_BUFFERS else None
                    made = first if number + 1 <= early_share * num_pieces else last
                    before = [made, gone, self._swap_thread, buffer]
                    gone = graph.add(D2H, each_bytes / hardware.d2h_bytes_per_s, before, name="activations to leave")
                    self._swap_thread = gone
                    write_s = each_bytes / hardware.ssd_write_bytes_per_s
                    written = graph.add(SSD, write_s, [gone], name="writes", rank=_ANY_TIME, is_write=True)
                    writes.append(written)
                    self._staging.append(written)
            stored[layer.name] = gone, writes
            left.append(gone)
        return stored

    def _swap_in(
        self,
        parts: Sequence[tuple[int, int]],
        forward: Mapping[str, tuple[int, int]],
        backward: Mapping[str, tuple[int, int]],
        stored: Mapping[str, tuple[int | None, list[int]]],
    ) -> None:
        graph, hardware = self.graph, self._hardware
        places = [place for place, work in enumerate(reversed(self._works), len(self._works)) if work.is_layer]
        turn = parts[len(self._works) - 1][1]
        for position, layer in enumerate(reversed(self._layers)):
            gone, writes = stored[layer.name]
            if gone is None:
                continue
            ahead = position - self._plan.fetch_ahead
            trigger = turn if ahead < 0 else parts[places[ahead] - 1][1]
            use = backward[layer.name][0]
            first: int | None = None
            if layer.ram_bytes:
                seconds = layer.ram_bytes / hardware.h2d_bytes_per_s
                first = graph.add(H2D, seconds, [trigger, gone, self._swap_thread], name="activations")
                graph.link(first, use)
                self._change("ram", forward[layer.name][1], True, layer.ram_bytes)
                self._change("ram", first, True, -layer.ram_bytes)
            copies: list[int] = []
            for number, written in enumerate(writes):
                each_bytes = layer.spilled_bytes / len(writes)
                buffer = copies[number - _STAGING_BUFFERS] if number >= _STAGING_BUFFERS else None
                before = [trigger, written, buffer, self._swap_thread]
                read = graph.add(
                    SSD, each_bytes / hardware.ssd_read_bytes_per_s, before, name="activations", rank=_SOON
                )
                copy = graph.add(H2D, each_bytes / hardware.h2d_bytes_per_s, [read], name="activations")
                copies.append(copy)
                graph.link(copy, use)
                first = read if first is None else first
            if copies:
                self._swap_thread = copies[-1]
            fetched_bytes = (layer.ram_bytes + layer.spilled_bytes) * layer.device_share
            assert first is not None
            self._change("device", first, False, fetched_bytes)
            self._change("device", backward[layer.name][1], True, -fetched_bytes)
            self._change("device", gone, True, -fetched_bytes)

    # Gradients and updates.

    def _gradient(self, work: BlockWork, first: int, last: int, *, is_first: bool, is_last: bool) -> int | None:
        """Add the tasks of a block's gradient. Returns the task that the backward of the next block waits for, because
        all buffers are in use until then."""
        if not work.is_trained:
            return None
        graph, hardware = self.graph, self._hardware
        if is_last:
            self._updates[work.name] = {}
        shares = self._chunk_shares(work)
        each_chunks = work.num_chunks / len(shares)
        blocked: int | None = None
        for number, share in enumerate(shares):
            updates_now = is_last and (work.name, number) not in self._parked
            gradient_bytes, sum_bytes = share * work.gradient_bytes, share * work.spilled_sum_bytes
            spilled_bytes = share * work.spilled_gradient_bytes if is_last else sum_bytes
            half = first if 2 * number < len(shares) else last
            self._num_arrived += each_chunks
            blocked = self._after_release(self._num_arrived - self._most_gradients)
            if half != last:  # while the host waits for a buffer, it does not enqueue the rest of the layer
                graph.link(blocked, last)
            seconds = gradient_bytes / hardware.d2h_bytes_per_s
            task = graph.add(D2H, seconds, [half, blocked], name="gradients")
            self._change("ram", task, False, 0 if work.holds_in_buffers else gradient_bytes - spilled_bytes)
            is_recalled = sum_bytes > 0 and not is_first
            if is_recalled:  # the update thread reads and adds one sum after the other
                before = [task, self._worker, self._accepted, *self._cpu_tasks[-2:-1]]
                if len(self._recalled) >= NUM_RECALL_BUFFERS:
                    before.append(self._recalled[-NUM_RECALL_BUFFERS])
                seconds = sum_bytes / hardware.ssd_read_bytes_per_s
                task = graph.add(SSD, seconds, before, name="gradients", rank=_SOON)
                seconds = share * work.num_updated * _ADDED_BYTES / _UPDATED_BYTES / hardware.cpu.optimizer_params_per_s
                task = graph.add(CPU, seconds, [task], name="gradients")
                self._release(each_chunks, task)
            elif not updates_now:
                task = graph.add(NO_LANE, 0.0, [task, self._worker, self._accepted], name="gradients")
            if is_recalled or not updates_now:
                self._accepted = task
            if not updates_now:
                if spilled_bytes:
                    seconds = spilled_bytes / hardware.ssd_write_bytes_per_s
                    task = graph.add(SSD, seconds, [task], name="gradients", rank=_ANY_TIME, is_write=True)
                if is_recalled:
                    self._recalled.append(task)
                elif not (is_first and work.holds_in_buffers):
                    self._release(each_chunks, task)
            if updates_now:
                self._update_piece(work, number, task, is_deferred=False, is_recalled=is_recalled, is_first=is_first)
            elif is_last:
                self._held.setdefault(work.name, {})[number] = task
        return blocked

    def _release(self, num_chunks: float, task: int) -> None:
        self._num_released += num_chunks
        self._released.append((self._num_released, task))

    def _after_release(self, num_chunks: float) -> int | None:
        """Return the task after which the first ``num_chunks`` chunks of gradients have left their buffers."""
        if num_chunks <= 0:
            return None
        released = self._released
        while len(released) > 1 and released[0][0] < num_chunks:  # later gradients never need earlier chunks
            released.popleft()
        return released[0][1] if released else None

    def _update_piece(
        self,
        work: BlockWork,
        number: int,
        gradient: int,
        *,
        is_deferred: bool,
        is_recalled: bool = False,
        is_first: bool = True,
    ) -> None:
        """Update a piece of a block after the task ``gradient``. ``is_recalled``: the gradient is in a buffer of
        recalled sums, and the buffer in which it arrived is free."""
        graph, hardware, share = self.graph, self._hardware, self._chunk_shares(work)[number]
        lent_bytes = 0.0 if is_deferred else share * work.lent_bytes
        read_bytes = max(0.0, share * work.update_read_bytes - lent_bytes)
        write_bytes = share * work.update_write_bytes
        spilled_bytes = share * work.spilled_gradient_bytes if is_deferred else 0.0
        if self._plan.clip == "speculate" and not is_deferred:
            write_bytes += share * work.spilled_gradient_bytes  # the gradient is kept in case the guess is wrong
        on_cpu_s = share * work.num_updated / hardware.cpu.optimizer_params_per_s
        if hardware.cpu.checksum_bytes_per_s:
            on_cpu_s += (read_bytes + write_bytes) / hardware.cpu.checksum_bytes_per_s
        num_pieces = len(self._chunk_shares(work))
        each_chunks = work.num_chunks / num_pieces
        stages = self._num_stages(work, num_pieces) if is_deferred else NUM_PIPELINE_STAGES
        before: list[int | None] = [gradient, self._worker, self._begin if is_deferred else None]
        if len(self._writes) >= stages:
            before.append(self._writes[-stages])
        if not is_deferred and len(self._cpu_tasks) > 1:
            before.append(self._cpu_tasks[-2])
        inputs: list[int | None] = []
        if read_bytes + spilled_bytes:
            seconds = (read_bytes + spilled_bytes) / hardware.ssd_read_bytes_per_s
            inputs.append(graph.add(SSD, seconds, before, name="states", rank=_SOON))
        if lent_bytes:
            inputs.append(graph.add(D2H, lent_bytes / hardware.d2h_bytes_per_s, before, name="states"))
        task = graph.add(CPU, on_cpu_s, [*before, *inputs, *self._cpu_tasks[-1:]], name="updates")
        self._cpu_tasks.append(task)
        written = task
        if write_bytes:
            seconds = write_bytes / hardware.ssd_write_bytes_per_s
            written = graph.add(SSD, seconds, [task], name="writes", rank=_ANY_TIME, is_write=True)
        self._writes.append(written)
        self._step_writes.append(written)
        if is_recalled:
            self._recalled.append(written if self._plan.clip == "speculate" and work.spilled_gradient_bytes else task)
        else:
            is_guess = self._plan.clip == "speculate" and not is_deferred  # a wrong guess needs the gradient again
            if work.holds_in_buffers:
                if not (is_deferred or is_first):  # the sum is in the buffer of the first gradient
                    self._release(each_chunks, graph.add(NO_LANE, 0.0, before, name="gradients"))
                if not is_guess:
                    self._release(each_chunks, task)
            elif not is_deferred:
                self._release(each_chunks, written if is_guess and work.spilled_gradient_bytes else task)
        in_ram = 0.0 if work.holds_in_buffers else work.gradient_bytes - work.spilled_gradient_bytes
        self._change("ram", task, True, -share * in_ram)
        self._updates[work.name][number] = task, written

    def _num_stages(self, work: BlockWork, num_pieces: int) -> int:
        """Return how many pieces updates during a forward read, update and write at the same time. They may use the
        buffers of gradients that are already applied."""
        pools = self._setup.pools
        if pools is None or not work.holds_in_buffers:
            return NUM_PIPELINE_STAGES
        per_chunk = max(1, pools.num_state_buffers // NUM_PIPELINE_STAGES)
        free = (pools.num_gradient_buffers - pools.num_arrival_buffers) // 2
        chunks_ahead = NUM_PIPELINE_STAGES + free // per_chunk
        return max(NUM_PIPELINE_STAGES, round(chunks_ahead * num_pieces / max(1, work.num_chunks)))

    # Memory.

    def _note_work(self, work: BlockWork, forward: tuple[int, int], backward: tuple[int, int]) -> None:
        """Record the device memory that computing a block takes and frees."""
        swapped_bytes = (work.ram_bytes + work.spilled_bytes) * work.device_share
        if work.is_layer:
            self._change("device", forward[0], False, work.output_bytes)
            self._change("device", backward[1], True, swapped_bytes - work.output_bytes)
        self._change("device", backward[0], False, work.working_bytes)
        self._change("device", backward[1], True, -work.working_bytes)

    def _change(self, tier: Tier, task: int, at_end: bool, num_bytes: float) -> None:
        if num_bytes:
            self.changes.append(MemoryChange(tier, task, at_end, num_bytes))

    def _chunk_shares(self, work: BlockWork) -> list[float]:
        """Return the pieces in which a block's gradients arrive and are applied, as fractions of the block. These are
        the block's chunks (the last may be small), or fewer pieces of equal size if there are many chunks."""
        shares = self._shares.get(work.name)
        if shares is None:
            self.is_coarse = self.is_coarse or work.num_chunks > self._most_pieces
            if work.num_chunks == 1 or work.num_chunks > self._most_pieces:
                num_pieces = min(self._most_pieces, work.num_chunks)
                shares = [1 / num_pieces] * num_pieces
            else:
                num_whole = work.num_chunks - 1
                shares = [(1 - work.last_chunk_share) / num_whole] * num_whole + [work.last_chunk_share]
            self._shares[work.name] = shares
        return shares

    def _parked_pieces(self) -> set[tuple[str, int]]:
        """Return (block, index of the piece) of the pieces that are updated during the next forward."""
        pieces = [
            ((work.name, number), share * work.num_updated)
            for work in self._works
            if work.is_trained
            for number, share in enumerate(self._chunk_shares(work))
        ]
        share = 1.0 if self._plan.clip == "defer" else self._plan.parked_share
        parked = spread_share([numel for _, numel in pieces], share)
        return {piece for (piece, _), is_parked in zip(pieces, parked, strict=True) if is_parked}

    def _num_pieces(self, num_bytes: float) -> int:
        num_pieces = round(num_bytes / self._buffer_bytes)
        self.is_coarse = self.is_coarse or num_pieces > self._most_pieces
        return max(1, min(self._most_pieces, num_pieces))


def order_loads(uses: Sequence[tuple[str, SizeClass]], num_slots: Mapping[SizeClass, int]) -> list[tuple[int, int]]:
    """Return the loads of a pass in order, as pairs (use before which the slot is free, use that needs the load). A
    load overwrites the slot whose block is needed last."""
    places: dict[str, list[int]] = defaultdict(list)
    for place, (name, _) in enumerate(uses):
        places[name].append(place)

    def next_use(name: str, place: int) -> int:
        return next((other for other in places[name] if other >= place), len(uses))

    loads: list[tuple[int, int]] = []
    last_used: dict[SizeClass, dict[str, int]] = defaultdict(dict)
    free_since: dict[SizeClass, int] = defaultdict(int)
    for place, (name, size_class) in enumerate(uses):
        held = last_used[size_class]
        if name not in held:
            if len(held) >= max(1, num_slots.get(size_class, 1)):
                since = free_since[size_class] = max(min(held.values()) + 1, free_since[size_class])
                gone = [other for other, used in held.items() if used < since]
                del held[max(gone, key=lambda other: next_use(other, place))]
            loads.append((free_since[size_class], place))
        held[name] = place
    return sorted(loads)


def _held_at_end(uses: Sequence[BlockWork], num_slots: Mapping[SizeClass, int]) -> set[str]:
    held: dict[SizeClass, dict[str, None]] = defaultdict(dict)
    for work in reversed(uses):
        of_class = held[work.size_class]
        if len(of_class) < max(1, num_slots.get(work.size_class, 1)):
            of_class[work.name] = None
    return {name for of_class in held.values() for name in of_class}
