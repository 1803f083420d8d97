"""Costs of a step with several ranks. The costs are of one rank (`StepCosts`), and include the resources that it
shares with other ranks.

All ranks do the same work at the same time. Each rank has a device and a link to it. The ranks of a node share drives,
CPU, RAM and the network to other nodes. They pass weights and gradients through RAM, or from device to device. Each of
Y nodes owns 1/Y of the records, and its ranks read, update and write these. All weights except streamed experts go to
every device. Rows of tokens go to the owners of streamed experts.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from hf_lohan.costs.collectives import SUM_BYTES, Cluster, CollectiveName, SentAs
from hf_lohan.costs.hardware_profile import HardwareProfile
from hf_lohan.costs.model_profile import BlockProfile, ModelProfile, expected_hits
from hf_lohan.costs.offload_plan import ClipMode, LinkBytes, RankPrediction, TrainingSetup
from hf_lohan.costs.step.expert_costs import RowTraffic, most_loaded, row_traffic
from hf_lohan.costs.step.step_costs import (
    SHARED_CORES_EFFICIENCY,
    Choice,
    ResourceUse,
    StepCosts,
    Values,
    experts_forward_s,
)

SOCKET_PASSES = 6
"""RAM accesses for one byte that is sent and one byte that is received. For each byte, the kernel's copy reads and
writes, and the network card reads or writes."""


def step_costs(model: ModelProfile, hardware: HardwareProfile, setup: TrainingSetup) -> StepCosts:
    """Return the cost model for a single rank, or for one of several ranks."""
    kind = RankStepCosts if setup.cluster.num_ranks > 1 else StepCosts
    return kind(model, hardware, setup)


def _sent_of_table(table: BlockProfile, num_tokens: int, cluster: Cluster, gradient_itemsize: int) -> tuple[int, int]:
    """Return the bytes that a node sends of a table's rows in a forward, and of its gradient in a backward, if each
    rank has ``num_tokens`` tokens. A node sends the summed gradients of rows that have a token on any of its ranks, and
    a bit for each row."""
    assert table.rows is not None
    elsewhere = 1 - 1 / cluster.num_nodes
    num_rows, num_params = table.rows.num_rows, table.num_trainable_params
    share = expected_hits(num_rows, 1, cluster.num_local * num_tokens) / num_rows
    gradient_bytes = share * gradient_itemsize * num_params + num_rows / 8 * bool(num_params)
    return round(elsewhere * cluster.num_local * table.loaded_bytes), round(elsewhere * gradient_bytes)


class RankStepCosts(StepCosts):
    """The cost model of one model on a cluster of equal nodes."""

    def __init__(self, model: ModelProfile, hardware: HardwareProfile, setup: TrainingSetup) -> None:
        super().__init__(model, hardware, setup)
        cluster = self._cluster = setup.cluster
        num_nodes, num_local = cluster.num_nodes, cluster.num_local
        in_ram_bytes = sum(record.update_read_bytes for record in setup.resident_records)
        unwritten_bytes = int(in_ram_bytes * (1 - setup.committed_fraction))
        # From here on, these numbers cover one node: its part of the records, and the RAM copies of all its ranks.
        self._update_write_bytes += unwritten_bytes
        # The ranks' parts differ in size, so `num_local` copies of one part can exceed the total. Limit the result to
        # the total.
        self._update_write_bytes = max(0, self._update_write_bytes / num_nodes - num_local * unwritten_bytes)
        self._update_read_bytes /= num_nodes
        self._updated_bytes /= num_nodes
        self._num_updated_params /= num_nodes
        self._resident_param_bytes *= num_local
        self._resident_update_read_bytes = min(num_local * self._resident_update_read_bytes, self._update_read_bytes)
        self._spilled_gradient_bytes *= num_local
        tables = [block for block in model.blocks if block.rows is not None]
        self._table_bytes = sum(block.read_bytes for block in tables)
        """Bytes that a rank's micro-batch reads of tables that are loaded by rows. Each rank asks the owners for its
        own rows, and all other weights go to all ranks together."""
        whole_bytes = self._param_bytes - self._table_bytes
        self._own_param_bytes = whole_bytes / num_nodes + num_local * self._table_bytes
        self._copied_bytes = cluster.copied_bytes(whole_bytes)
        self._num_summed_params = model.dense_trainable_params / num_nodes
        num_plain = model.num_dense_params - model.decoded_numel - sum(block.num_params for block in tables)
        packed_bytes = whole_bytes - num_plain * model.param_itemsize if model.decoded_numel else 0
        self._sent_of_whole = cluster.bytes_by_collective(
            param_bytes=whole_bytes,
            num_params=num_plain,
            packed_bytes=max(0, packed_bytes),
            num_trainable_params=model.dense_trainable_params - sum(block.num_trainable_params for block in tables),
            gradient_itemsize=model.param_itemsize,
            is_summed=setup.num_together > 1,
        )
        """Bytes that a node sends, without rows of tables."""
        self._sent_bytes = dict(self._sent_of_whole)
        itemsize = cluster.sent_gradient_itemsize(model.param_itemsize, is_summed=setup.num_together > 1)
        for table in tables:
            loaded_bytes, gradient_bytes = _sent_of_table(table, model.num_tokens, cluster, itemsize)
            self._sent_bytes["forward_rows"] = self._sent_bytes.get("forward_rows", 0) + loaded_bytes
            self._sent_bytes["gradients"] += gradient_bytes
        self._rows = row_traffic(model, cluster.num_ranks)
        """Rows that leave a rank."""
        self._rows_to_nodes = row_traffic(model, cluster.num_ranks, num_local)
        """Rows that leave a rank's node."""
        self._least_moved_rows = setup.least_moved_rows
        self._wait_for_most_loaded()
        way, itemsize = cluster.collectives, self._gradient_itemsize
        coded_bytes = self._dense_gradient_bytes - sum(table.gradient_bytes(itemsize) for table in tables)
        coded_fraction = way.gradient_fraction_within(itemsize)
        self._copied_row_bytes = sum(table.loaded_bytes for table in tables) if self._is_copied else 0
        self._from_devices = 1 - 1 / num_local if cluster.transport == "nccl" and self._is_copied else 0.0
        """The share of weights that a device gets from other devices."""
        self._devices_add = bool(self._from_devices) and setup.num_micro_batches == 1
        """Whether devices add gradients. Sums of several backwards are in RAM."""
        self._saved_gradient_bytes = 0.0 if self._devices_add else coded_bytes * (1 - coded_fraction)
        """Bytes of gradients that a codec saves on a device's link to RAM, in each backward."""
        self._exchanged_gradient_bytes = self._from_devices * coded_fraction * coded_bytes if self._devices_add else 0.0
        # One device copies the sum of a chunk to RAM. Without devices that add, each device copies its gradient.
        num_summed = model.dense_trainable_params - sum(table.num_trainable_params for table in tables)
        self._not_to_host_bytes = coded_bytes - SUM_BYTES * num_summed / num_local if self._devices_add else 0.0
        self._not_on_host_bytes = coded_bytes if self._devices_add else 0.0
        self._num_added_params = num_summed / num_nodes if self._devices_add else 0.0
        """The part of `_num_summed_params` that devices add."""
        # Blocks with packed weights, and rows, are not coded.
        self._weights_within = 1.0 if self._decoded_numel else way.weight_fraction_within(model.param_itemsize)

    def _backward_row_bytes(self, rows: RowTraffic, choice: Choice) -> Values:
        """Return the bytes of rows of a backward. It recomputes the experts of some layers."""
        share = choice.num_expert_calls / max(1, len(self._model.experts))
        return rows.backward_bytes + share * rows.forward_bytes

    def _wait_for_most_loaded(self) -> None:
        """Add the time in which each layer waits for the rank that has the most rows for its experts."""
        layers = [block for block in self._model.blocks if block.experts is not None]
        for number, block in enumerate(layers):
            assert block.experts is not None
            more = -1 + most_loaded(
                block.experts,
                number,
                self._cluster.num_ranks,
                num_local=self._num_local,
                least_rows=self._least_moved_rows,
            )
            more_s = more * experts_forward_s(block, self._hardware)
            self._forward_s += more_s
            self._backward_s += (2 + block.trained_fraction) * more_s  # the experts compute again before their backward

    def lanes(self, load: ResourceUse, *, efficiency: float = SHARED_CORES_EFFICIENCY) -> dict[str, Values]:
        hardware, num_local = self._hardware, self._num_local
        if hardware.device.shares_cpu:  # all ranks of the node use the same cores
            of_all = ("compute_s", "h2d_bytes", "d2h_bytes")
            load = replace(load, **{name: num_local * getattr(load, name) for name in of_all})
        lanes = super().lanes(load, efficiency=efficiency)
        if hardware.net_bytes_per_s:
            lanes["net"] = load.net_bytes / hardware.net_bytes_per_s
        if hardware.cpu.memory_bytes_per_s:
            lanes["host"] = load.host_bytes / hardware.cpu.memory_bytes_per_s
        if self._from_devices:
            self._add_links_between_devices(lanes, load)
        return lanes

    def _add_links_between_devices(self, lanes: dict[str, Values], load: ResourceUse) -> None:
        """Add the lane of links between devices. An exchange shares a queue with the copies of its direction. If
        there is no other link between devices, an exchange takes both directions of the link to RAM."""
        hardware = self._hardware
        gathered_s, exchanged_s = (
            num_bytes / hardware.between_gpus_bytes_per_s for num_bytes in (load.gathered_bytes, load.exchanged_bytes)
        )
        both_s = lanes["gpu_link"] = gathered_s + exchanged_s
        is_shared = hardware.gpus_share_links
        lanes["h2d"] = lanes["h2d"] + (both_s if is_shared else gathered_s)
        lanes["d2h"] = lanes["d2h"] + (both_s if is_shared else exchanged_s)
        if is_shared and hardware.duplex_bytes_per_s:
            both_bytes = 2 * (load.gathered_bytes + load.exchanged_bytes)
            lanes["link"] = lanes["link"] + both_bytes / hardware.duplex_bytes_per_s

    def _longest(self, load: ResourceUse) -> tuple[float, str]:
        """Return the seconds of the longest lane, and its resource. If exchanges between devices are most of the lane
        of a link, the resource is "gpu_link"."""
        seconds, resource = super()._longest(load)
        if self._from_devices and resource in ("h2d", "d2h") and not self._hardware.gpus_share_links:
            num_bytes = load.gathered_bytes if resource == "h2d" else load.exchanged_bytes
            if 2 * num_bytes.item() / self._hardware.between_gpus_bytes_per_s > seconds:
                return seconds, "gpu_link"
        return seconds, resource

    def _forward_read_bytes(self) -> float:
        ways = self._cluster.collectives
        own_bytes = max(0, self._own_param_bytes - self._resident_param_bytes)
        # With "delta", a node adds the received change to the previous step's weights. The previous weights of other
        # nodes are in its local copy, so the node reads them too.
        return own_bytes + (self._copied_bytes if (ways.forward, ways.backward) == ("delta", "ssd") else 0)

    def _backward_read_bytes(self) -> float:
        # Ranks read their own shards again, even if nodes keep shards of other ranks. Blocks that are still in slots
        # are not loaded.
        turnaround_bytes = self._setup.turnaround_bytes / self._cluster.num_nodes
        own_bytes = max(0, self._own_param_bytes - self._resident_param_bytes - turnaround_bytes)
        if self._cluster.collectives.backward != "ssd":
            return own_bytes
        whole_bytes = self._param_bytes - self._table_bytes
        share_in_slots = min(1.0, self._setup.turnaround_bytes / whole_bytes) if whole_bytes else 0.0
        return own_bytes + (1 - share_in_slots) * self._copied_bytes

    def _forward(self, choice: Choice) -> ResourceUse:
        load = super()._forward(choice)
        coded_bytes = self._copied_param_bytes - self._copied_row_bytes
        load = self._from_other_devices(load, self._weights_within * coded_bytes)
        load = replace(load, h2d_bytes=load.h2d_bytes - (1 - self._weights_within) * coded_bytes)
        copied_bytes = self._copied_bytes if self._cluster.collectives.backward == "ssd" else 0
        return self._passing_ram(
            replace(
                self._with_rows(load, self._rows.forward_bytes),
                ssd_write_bytes=load.ssd_write_bytes + copied_bytes,
                net_bytes=load.net_bytes
                + self._sent_bytes["forward_weights"]
                + self._sent_bytes.get("forward_rows", 0)
                + self._num_local * self._rows_to_nodes.forward_bytes,
                host_bytes=load.host_bytes + 2 * self._resident_param_bytes,
            )
        )

    def _with_rows(self, load: ResourceUse, num_bytes: float | Values) -> ResourceUse:
        """Return the load with rows of ``num_bytes`` that leave a rank's device, and rows of equal size that arrive. On
        a CPU they are only copied within RAM."""
        if not self._is_copied:
            return load
        return replace(load, h2d_bytes=load.h2d_bytes + num_bytes, d2h_bytes=load.d2h_bytes + num_bytes)

    def _backward(self, choice: Choice) -> ResourceUse:
        load = self._with_rows(super()._backward(choice), self._backward_row_bytes(self._rows, choice))
        # Every rank's gradients are read, and their sum is written. Then all nodes' sums of this node's part are read.
        num_nodes = self._cluster.num_nodes
        num_sums = num_nodes * (self._num_summed_params - self._num_added_params)
        num_sums += (num_nodes + 1 if num_nodes > 1 else 0) * self._num_summed_params
        added_on_host_bytes = self._num_local * (self._gradient_bytes - self._not_on_host_bytes) + SUM_BYTES * num_sums
        sent = self._sent_bytes
        row_bytes = self._num_local * self._backward_row_bytes(self._rows_to_nodes, choice)
        coded_bytes = max(0, self._copied_param_bytes - self._setup.turnaround_bytes - self._copied_row_bytes)
        load = self._from_other_devices(load, self._weights_within * coded_bytes)
        return self._passing_ram(
            replace(
                load,
                h2d_bytes=load.h2d_bytes - (1 - self._weights_within) * coded_bytes,
                d2h_bytes=load.d2h_bytes - self._saved_gradient_bytes - self._not_to_host_bytes,
                exchanged_bytes=load.exchanged_bytes + self._exchanged_gradient_bytes,
                net_bytes=load.net_bytes + sent["backward_weights"] + sent["gradients"] + row_bytes,
                host_bytes=load.host_bytes + added_on_host_bytes,
            )
        )

    def _from_other_devices(self, load: ResourceUse, num_bytes: float) -> ResourceUse:
        """Return the load of a pass that brings ``num_bytes`` of weights to each device. Without a transport between
        devices, all weights are copied from RAM."""
        gathered_bytes = self._from_devices * num_bytes
        return replace(
            load, h2d_bytes=load.h2d_bytes - gathered_bytes, gathered_bytes=load.gathered_bytes + gathered_bytes
        )

    def _update(self, choice: Choice) -> ResourceUse:
        load = super()._update(choice)
        # The optimizer reads states and gradients, and writes the states.
        worked_bytes = self._update_read_bytes + self._update_write_bytes + SUM_BYTES * self._num_updated_params
        return self._passing_ram(replace(load, host_bytes=load.host_bytes + worked_bytes))

    def _lent(self) -> ResourceUse:
        """Return the resources saved because each rank's update takes its own part of the weights from the device
        slots instead of reading it from the drives."""
        load = super()._lent()
        lent_bytes = min(self._setup.lent_bytes / self._cluster.num_nodes, self._own_param_bytes)
        lent_bytes = self._lent_share * max(0.0, lent_bytes - self._resident_param_bytes)
        moved = {"d2h_bytes": np.array([lent_bytes / self._num_local]), "ssd_read_bytes": np.array([-lent_bytes])}
        return self._passing_ram(replace(load, **moved))

    def _passing_ram(self, load: ResourceUse) -> ResourceUse:
        """Return the load with the RAM accesses of drives, links and network."""
        drives = load.ssd_read_bytes + load.ssd_write_bytes
        links = self._num_local * (load.h2d_bytes + load.d2h_bytes)
        return replace(load, host_bytes=load.host_bytes + drives + links + SOCKET_PASSES * load.net_bytes)

    def _of_ranks(self, choice: Choice, clip: ClipMode, num_tokens: int) -> RankPrediction:
        count = self._setup.num_micro_batches
        sent_bytes = dict(self._sent_bytes)
        if self._model.experts:
            rows = self._rows_to_nodes
            sent_bytes["forward_tokens"] = round(self._num_local * rows.forward_bytes)
            sent_bytes["backward_tokens"] = round((self._num_local * self._backward_row_bytes(rows, choice)).item())
        copied_bytes = 2 * self._copied_param_bytes - min(self._copied_param_bytes, self._setup.turnaround_bytes)
        exact = LinkBytes(h2d=count * copied_bytes, d2h=count * self._dense_gradient_bytes)
        row_bytes = 2 * count * self._copied_row_bytes
        gathered_bytes = self._from_devices * (exact.h2d - row_bytes)
        between = LinkBytes(
            h2d=round(self._weights_within * gathered_bytes), d2h=round(count * self._exchanged_gradient_bytes)
        )
        exact = LinkBytes(h2d=exact.h2d - round(gathered_bytes), d2h=exact.d2h - round(count * self._not_to_host_bytes))
        coded = LinkBytes(
            h2d=row_bytes + round(self._weights_within * (exact.h2d - row_bytes)),
            d2h=exact.d2h - round(count * self._saved_gradient_bytes),
        )
        by_lane: dict[SentAs, float] = {
            "weights": sent_bytes["forward_weights"] + sent_bytes["backward_weights"],
            "gradients": sent_bytes["gradients"],
            "tokens": sent_bytes.get("forward_rows", 0) + self._num_local * self._row_bytes_of_rank(choice),
        }
        return RankPrediction(
            bytes_by_collective={name: count * size for name, size in sent_bytes.items()},
            sent_bytes={lane: round(count * num_bytes / self._num_local) for lane, num_bytes in by_lane.items()},
            link_bytes=coded,
            exact_link_bytes=exact,
            between_gpus=between,
            hides_from_tokens=self._hides_from(choice, clip, num_tokens),
            rows_equal_weights_at_tokens=self._rows_equal_weights_at(sent_bytes),
        )

    def _row_bytes_of_rank(self, choice: Choice) -> float:
        """Return the bytes of rows of experts that a rank sends in a forward and a backward. Within its node, a rank
        sends its own rows, and rows that another node has sent to it once. Results go straight to the rank of their
        rows."""
        cluster, rows, to_nodes = self._cluster, self._rows, self._rows_to_nodes
        share_within = cluster.num_nodes * (self._num_local - 1) / max(1, cluster.num_ranks - 1)
        to_owners = share_within * rows.to_owners() + to_nodes.to_owners()
        forward_bytes = to_owners + rows.result_bytes
        num_forwards = 1 + choice.num_expert_calls.item() / max(1, len(self._model.experts))
        return num_forwards * forward_bytes + 2 * to_owners + rows.result_bytes + rows.index_bytes

    def _rows_equal_weights_at(self, sent_bytes: dict[CollectiveName, int]) -> float | None:
        """Return the number of tokens in a rank's micro-batch at which rows take the same bytes between nodes as the
        experts' weights and gradients would if all ranks computed all experts. None if no rows leave a node."""
        row_bytes = sent_bytes.get("forward_tokens", 0) + sent_bytes.get("backward_tokens", 0)
        if not row_bytes:
            return None
        model = self._model
        tables = [block for block in model.blocks if block.rows is not None]
        of_all = self._cluster.bytes_by_collective(
            param_bytes=model.param_bytes - sum(block.param_bytes for block in tables),
            num_params=model.num_params - sum(block.num_params for block in tables),
            num_trainable_params=model.num_trainable_params - sum(block.num_trainable_params for block in tables),
            gradient_itemsize=model.param_itemsize,
            is_summed=self._setup.num_together > 1,
        )
        more_bytes = sum(size - self._sent_of_whole[name] for name, size in of_all.items())
        return model.num_tokens * more_bytes / row_bytes

    def _hides_from(self, choice: Choice, clip: ClipMode, num_tokens: int) -> dict[str, float | None]:
        """Return T* of each resource: the number of tokens above which computing takes longer (`_ssd_hides_from`)."""
        costs = self._with(num_micro_batches=1)
        nothing = replace(choice, swapped_bytes=np.zeros(1), spilled_bytes=np.zeros(1))

        def of_a_step(choice: Choice) -> dict[str, float]:
            lanes = [costs.lanes(phase.load, efficiency=1.0) for phase in costs.phases(choice, clip)]
            return {name: math.fsum(phase[name].item() for phase in lanes) for name in lanes[0]}

        fixed_s, whole_s = of_a_step(nothing), of_a_step(choice)
        tokens_at_once = num_tokens / self._setup.num_micro_batches
        hides: dict[str, float | None] = {}
        for name, seconds in fixed_s.items():
            if name != "compute":
                spare_s = whole_s["compute"] - (whole_s[name] - seconds)
                hides[name] = seconds * tokens_at_once / spare_s if spare_s > 0 else None
        return hides
