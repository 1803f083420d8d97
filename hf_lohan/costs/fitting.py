"""Checks whether a plan fits each tier, and writes refusals that name the smallest change that helps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import takewhile
from typing import Literal

from hf_lohan.costs.hardware_profile import HardwareProfile
from hf_lohan.costs.model_profile import BlockProfile, ModelProfile
from hf_lohan.costs.offload_plan import InMemoryFit, TrainingSetup
from hf_lohan.costs.record_traffic import RecordTraffic
from hf_lohan.wording import format_bytes


@dataclass(frozen=True, slots=True)
class Room:
    """The room that each tier has left for activations of one rank, in bytes. Negative if the rest does not fit."""

    cpu_bytes: int
    """Room in RAM for swapped activations and records together."""
    ssd_bytes: int
    """Room on SSDs for swapped activations that do not fit RAM."""


ALLOCATOR_PERCENT, FRAGMENTED_PERCENT = 5, 15
"""Memory that the caching allocator holds beyond the tensors, in percent of a step's temporary tensors. The first
number is for segments that grow (`DeviceProfile.grows_segments`), the second for segments of a fixed size. Measurements
gave 4 to 10 and 5 to 20. Growing segments return unused memory before the device runs out, and need less margin."""
WORKSPACES_BYTES = 64 << 20
"""cuBLAS workspaces for the threads of forward and backward. Each has 8 MiB, or 32 MiB on server cards."""
NCCL_BUFFERS_BYTES = (4 << 20) + 8 * 512 * 8 * 16 + 120 * 640 * 8 * 8
"""NCCL's buffers for one channel to one other GPU, one for each of its protocols: Simple (NCCL_BUFFSIZE), LL and LL128.
These are the defaults of its `init.cc`."""
NCCL_CHANNELS = {"pcie": 2}
NCCL_MOST_CHANNELS = 8
"""Number of NCCL's channels to each other GPU: 2 over PCIe, and 2 for each NVLink connection (`paths.cc`). An RTX 3090
has 4 connections. Server cards have more."""
NCCL_OWN_BYTES = 128 << 20
"""NCCL's kernels and its communicator. Assumed, not measured."""
THREAD_WORKSPACE_BYTES = 4096 * 2 * 1024 + 16 * 8 * 1024
"""cuBLAS workspaces of each further thread, for micro-batches that run together."""
_WORKSPACES_SHARE = 16
"""Workspaces are counted as at most 1 / `_WORKSPACES_SHARE` of a step's tensors, because they are small for a tiny
model."""


def layer_working_bytes(model: ModelProfile) -> int:
    """Return the peak device memory in bytes of the largest layer's backward, without its weights and its input."""
    return max((layer_needs(layer, model) for layer in model.layers), default=0)


def layer_needs(layer: BlockProfile, model: ModelProfile) -> int:
    """Return the peak device memory in bytes of a layer's backward, without its weights and its input."""
    return layer.working_bytes or _estimated_working_bytes(layer, model)


def _estimated_working_bytes(layer: BlockProfile, model: ModelProfile) -> int:
    """Estimate the peak without a trace of the backward, as the sum of saved tensors and of the gradients of input,
    output and weights."""
    return layer.saved_bytes + 2 * layer.input_bytes + layer.num_trainable_params * model.param_itemsize


def outer_working_bytes(model: ModelProfile) -> int:
    """Return the peak device memory in bytes of the largest module outside the layers. This is the head with its
    logits, unless they are computed in chunks."""
    layers = {layer.name for layer in model.layers}
    outer = (block for block in model.blocks if block.name not in layers)
    return max((block.working_bytes or block.saved_bytes for block in outer), default=0)


def tied_gradient_bytes(model: ModelProfile) -> int:
    """Return the bytes of the head's gradient if the head is tied to the embeddings, and 0 if not. A tied head's
    gradient stays until the first layer's backward ends. Without a tie, it leaves before the layers' backward."""
    layers = {layer.name for layer in model.layers}
    before = list(takewhile(lambda block: block.name not in layers, model.blocks))
    outer = [block for block in model.blocks if block.name not in layers]
    head = max(outer, key=lambda block: block.working_bytes or block.saved_bytes, default=None)
    if head is None or head not in before or not (head.working_bytes or head.saved_bytes):
        return 0
    return head.num_trainable_params * model.param_itemsize


def allocator_bytes(hardware: HardwareProfile, setup: TrainingSetup, held_bytes: int) -> int:
    """Return the bytes that the device's allocator and library workspaces take, for a step whose peak without the slots
    is ``held_bytes``."""
    if hardware.device.shares_cpu:
        return 0
    percent = _allocator_percent(hardware)
    of_large = -(-held_bytes * percent // 100) + _workspace_bytes(setup)
    return min(of_large, -(-held_bytes * (_WORKSPACES_SHARE * percent + 100) // (100 * _WORKSPACES_SHARE)))


def nccl_bytes(hardware: HardwareProfile, setup: TrainingSetup) -> int:
    """Return the bytes of the device that NCCL takes for exchanges with other devices of the node; 0 without NCCL."""
    cluster = setup.cluster
    if cluster.transport != "nccl" or cluster.num_local == 1 or hardware.device.shares_cpu:
        return 0
    num_channels = NCCL_CHANNELS.get(hardware.gpu_link, NCCL_MOST_CHANNELS)
    return NCCL_OWN_BYTES + (cluster.num_local - 1) * num_channels * NCCL_BUFFERS_BYTES


def device_limit_bytes(hardware: HardwareProfile, setup: TrainingSetup) -> int:
    """Return the bytes of the device that a step may take."""
    if setup.device_memory_bytes is None:
        return hardware.device.memory_bytes
    return min(setup.device_memory_bytes, hardware.device.memory_bytes)


def room_to_hold_bytes(hardware: HardwareProfile, setup: TrainingSetup) -> int:
    """Return the largest possible peak of a step without the slots, in bytes. Negative if the slots do not fit."""
    beside_bytes = device_limit_bytes(hardware, setup) - setup.gpu_fixed_bytes - nccl_bytes(hardware, setup)
    if hardware.device.shares_cpu:
        return beside_bytes
    whole = 100 + _allocator_percent(hardware)
    of_large = (beside_bytes - _workspace_bytes(setup)) * 100 // whole
    return max(of_large, beside_bytes * 100 * _WORKSPACES_SHARE // (_WORKSPACES_SHARE * whole + 100))


def _workspace_bytes(setup: TrainingSetup) -> int:
    return WORKSPACES_BYTES + (setup.num_together - 1) * THREAD_WORKSPACE_BYTES


def _allocator_percent(hardware: HardwareProfile) -> int:
    return ALLOCATOR_PERCENT if hardware.device.grows_segments else FRAGMENTED_PERCENT


def record_bytes(model: ModelProfile, setup: TrainingSetup) -> int:
    """Return the bytes of records on the SSDs of a node, in all versions. Frozen weights have one version."""
    trainable_bytes = model.num_trainable_params * (model.param_itemsize + setup.state_bytes_per_param)
    frozen_bytes = model.param_bytes - model.num_trainable_params * model.param_itemsize
    all_bytes, cluster = int(setup.num_homes * trainable_bytes) + max(0, frozen_bytes), setup.cluster
    return -(-all_bytes // cluster.num_nodes) + _ssd_copy_bytes(model, setup)


def _ssd_copy_bytes(model: ModelProfile, setup: TrainingSetup) -> int:
    """Return the bytes of the copy of other nodes' weights on the SSDs of a node."""
    if setup.cluster.collectives.backward != "ssd":
        return 0
    return setup.cluster.copied_bytes(model.param_bytes) if setup.copy_ssd_bytes is None else setup.copy_ssd_bytes


def ram_copy_bytes(model: ModelProfile, setup: TrainingSetup) -> int:
    """Return the bytes of a rank's RAM for its node's copy of all weights."""
    if setup.cluster.collectives.backward != "ram":
        return 0
    return -(-model.param_bytes // setup.cluster.num_local) if setup.copy_cpu_bytes is None else setup.copy_cpu_bytes


def ssd_limit_bytes(hardware: HardwareProfile, setup: TrainingSetup) -> int:
    if setup.ssd_capacity_bytes is None:
        return hardware.ssd_capacity_bytes
    return min(setup.ssd_capacity_bytes, hardware.ssd_capacity_bytes)


def measure_room(model: ModelProfile, hardware: HardwareProfile, setup: TrainingSetup) -> Room:
    """Return the room of RAM and drives."""
    ssd_bytes = ssd_limit_bytes(hardware, setup) - record_bytes(model, setup)
    return Room(
        cpu_bytes=setup.cpu_memory_bytes
        - setup.cpu_fixed_bytes
        - setup.shared_key_bytes
        - ram_copy_bytes(model, setup),
        ssd_bytes=ssd_bytes // setup.cluster.num_local - setup.spilled_gradient_bytes,
    )


def activation_ram_bytes(room: Room, setup: TrainingSetup, resident: Iterable[RecordTraffic]) -> int:
    """Return the RAM of one rank for swapped activations, in addition to copies of the records ``resident``."""
    left_bytes = max(0, room.cpu_bytes - sum(record.num_bytes for record in resident))
    return left_bytes if setup.activation_cpu_bytes is None else min(left_bytes, setup.activation_cpu_bytes)


def explain_refusal(
    model: ModelProfile,
    hardware: HardwareProfile,
    setup: TrainingSetup,
    *,
    kept_bytes: int,
    working_bytes: int,
    least_swapped_bytes: int,
) -> str | None:
    """Return why no plan fits and what would help; None if a plan fits. `kept_bytes`: activations kept on the device.
    `working_bytes`: the minimum working memory. `least_swapped_bytes`: the minimum to swap."""
    if setup.gpu_fixed_bytes > setup.gpu_memory_bytes:
        return (
            f"gpu_memory of {_shown(setup.gpu_memory_bytes)} is smaller than the slots of this model; set it to "
            f"at least {_shown(setup.gpu_fixed_bytes)}"
        )
    if (refusal := _refuse_device(model, hardware, setup, kept_bytes, working_bytes)) is not None:
        return refusal
    if setup.cpu_fixed_bytes > setup.cpu_memory_bytes:
        return (
            f"cpu_memory of {_shown(setup.cpu_memory_bytes)} is too small for the buffers; set cpu_memory to at least "
            f"{_shown(setup.cpu_fixed_bytes)}"
        )
    copy_bytes = ram_copy_bytes(model, setup)
    if setup.cpu_fixed_bytes + copy_bytes > setup.cpu_memory_bytes:
        return (
            f"cpu_memory of {_shown(setup.cpu_memory_bytes)} for each rank is too small for the buffers and a copy of "
            f"all weights in each node; set cpu_memory to at least {_shown(setup.cpu_fixed_bytes + copy_bytes)}, or "
            "set backward of collectives to ssd or auto"
        )
    if setup.shared_key_bytes:
        copies_bytes = sum(record.num_bytes for record in setup.resident_records)
        needed_bytes = setup.cpu_fixed_bytes + copy_bytes + copies_bytes + setup.shared_key_bytes
        if needed_bytes > setup.cpu_memory_bytes:
            return _refuse_shared_keys(model, setup, copies_bytes, needed_bytes)
    return _refuse_ssd(model, hardware, setup, least_swapped_bytes)


def _refuse_shared_keys(model: ModelProfile, setup: TrainingSetup, copies_bytes: int, needed_bytes: int) -> str:
    beside, advice = "", cpu_memory_advice(needed_bytes)
    if needed_bytes - copies_bytes <= setup.cpu_memory_bytes:
        beside = f", {_shown(copies_bytes)} of records that the run has already copied"
        advice = "let the longest rows come first"
    return (
        f"cpu_memory of {_shown(setup.cpu_memory_bytes)} for each rank is too small: it must hold "
        f"{_shown(setup.shared_key_bytes)} of keys, values and their gradients ({model.batch_size} x "
        f"{model.sequence_length * setup.sequence_ranks} tokens that {setup.sequence_ranks} ranks share by "
        f"ranks.per_row){beside} and {_shown(setup.cpu_fixed_bytes)} of buffers; use shorter rows, or {advice}"
    )


def cpu_memory_advice(num_bytes: int) -> str:
    return f"set cpu_memory to at least {num_bytes}"


def _refuse_device(
    model: ModelProfile, hardware: HardwareProfile, setup: TrainingSetup, kept_bytes: int, working_bytes: int
) -> str | None:
    """Return why a step does not fit the device and what would help; None if it fits."""
    if setup.gpu_fixed_bytes + kept_bytes > setup.gpu_memory_bytes:
        return (
            f"the kept activations of {_shown(kept_bytes)} do not fit gpu_memory of "
            f"{_shown(setup.gpu_memory_bytes)}; set it to at least {_shown(setup.gpu_fixed_bytes + kept_bytes)}, or "
            "activations to auto"
        )
    layer_bytes, outer_bytes = layer_working_bytes(model), outer_working_bytes(model)
    held_bytes, memory_bytes = kept_bytes + working_bytes, device_limit_bytes(hardware, setup)
    more_bytes = allocator_bytes(hardware, setup, held_bytes)
    needed = setup.gpu_fixed_bytes + held_bytes + more_bytes + (of_nccl := nccl_bytes(hardware, setup))
    if needed <= memory_bytes:
        return None
    # With a smaller batch, all memory shrinks except the gradients of weights.
    blocks = [block for block in model.blocks if (block in model.layers) == (layer_bytes >= outer_bytes)]
    gradient_bytes = max(block.num_trainable_params for block in blocks) * model.param_itemsize
    room_bytes = room_to_hold_bytes(hardware, setup) - gradient_bytes
    shrinking_bytes = held_bytes - gradient_bytes
    batch = max(0, model.batch_size * room_bytes // shrinking_bytes) if shrinking_bytes else model.batch_size
    smaller = f"use a batch size of at most {batch}, or " if batch else "use shorter sequences, or "
    who = "the head with its logits and the loss" if outer_bytes > layer_bytes else "a layer"
    chunks = "set chunks.loss: true, or " if outer_bytes > layer_bytes else ""
    num_chunks = max((layer.num_chunks for layer in model.layers), default=1)
    in_chunks = f" in chunks of {-(-model.num_tokens // num_chunks)}" if num_chunks > 1 else ""
    allocator = f" plus {_shown(more_bytes)} for allocator and workspaces" if more_bytes else ""
    allocator += f" plus {_shown(of_nccl)} for NCCL" if of_nccl else ""
    limit, larger = f"the {_shown(memory_bytes)} of the device", "a device with at least that much memory"
    if setup.device_memory_bytes is not None and setup.device_memory_bytes <= hardware.device.memory_bytes:
        limit = f"device_memory of {_shown(memory_bytes)}"
        if needed <= hardware.device.memory_bytes:
            larger = device_memory_advice(needed)
    return (
        f"{who} needs {_shown(working_bytes)} at once for this batch of {model.batch_size} x {model.sequence_length} "
        f"tokens{in_chunks}; with slots and kept activations{allocator}, the step needs {_shown(needed)}, more than "
        f"{limit}; {smaller}{chunks}{larger}"
    )


def device_memory_advice(num_bytes: int) -> str:
    return f"set device_memory to at least {num_bytes}"


def _refuse_ssd(
    model: ModelProfile, hardware: HardwareProfile, setup: TrainingSetup, least_swapped_bytes: int
) -> str | None:
    limit, room = ssd_limit_bytes(hardware, setup), measure_room(model, hardware, setup)
    cap = setup.activation_cpu_bytes
    least_spill = max(0, least_swapped_bytes - (room.cpu_bytes if cap is None else min(room.cpu_bytes, cap)))
    num_local = setup.cluster.num_local
    missing, least_spill = num_local * (least_spill - room.ssd_bytes), num_local * least_spill
    if missing <= 0:
        return None
    state_and_weights_bytes = record_bytes(model, setup) - _ssd_copy_bytes(model, setup)
    saved_by_one_home = state_and_weights_bytes // 2 if setup.durability == "step" else 0
    ways = [f"give the SSDs {_shown(missing)} more ({_shown(limit + missing)} in all)"]
    if missing <= least_spill and setup.activation_cpu_bytes is None:
        ways.append(f"set cpu_memory to at least {_shown(setup.cpu_memory_bytes + -(-missing // num_local))}")
    if missing <= saved_by_one_home:
        ways.append("set durability to checkpoint, which keeps one version of the state instead of two")
    spilled = f" and {_shown(least_spill)} of activations that RAM cannot hold" if least_spill else ""
    state_bytes = record_bytes(model, setup) + num_local * setup.spilled_gradient_bytes
    return (
        f"the SSDs' {_shown(limit)} cannot hold the training state of {_shown(state_bytes)}{spilled}; "
        f"{', or '.join(ways)}"
    )


def _shown(num_bytes: int) -> str:
    """Return all digits without commas, to paste into a setting."""
    return f"{num_bytes} bytes" + (f" ({format_bytes(num_bytes)})" if num_bytes >= 1 << 20 else "")


_STATE_BYTES_PER_PARAM = 16.0
"""Weights, gradients, masters and moments. With float32 gradients of bfloat16 weights the sum would be 18."""


def fits_without_offloading(model: ModelProfile, memory_bytes: int, *, has_allocator: bool) -> InMemoryFit:
    """Return whether training fits `memory_bytes` (`stock_training_fit`), if necessary with recomputation."""
    kept, recomputed = (
        stock_training_fit(
            model, memory_bytes, _STATE_BYTES_PER_PARAM, recomputes=recomputes, has_allocator=has_allocator
        )
        for recomputes in (False, True)
    )
    return kept if kept.fits else recomputed


def stock_training_fit(
    model: ModelProfile, memory_bytes: int, bytes_per_param: float, *, recomputes: bool, has_allocator: bool
) -> InMemoryFit:
    """Return whether the stock Trainer's step fits `memory_bytes`, with a margin for the device's allocator and
    libraries. ``has_allocator``: the device is not the CPU."""
    held_bytes = activation_bytes_in_memory(model, recomputes=recomputes)
    held_bytes += max((max(0, block.working_bytes - block.saved_bytes) for block in model.blocks), default=0)
    margin_bytes = -(-held_bytes * FRAGMENTED_PERCENT // 100) + (WORKSPACES_BYTES if has_allocator else 0)
    needed_bytes = state_bytes_in_memory(model, bytes_per_param) + held_bytes + margin_bytes
    how: Literal["keep", "recompute"] = "recompute" if recomputes else "keep"
    return InMemoryFit(needed_bytes <= memory_bytes, needed_bytes, memory_bytes, how)


def state_bytes_in_memory(model: ModelProfile, bytes_per_param: float) -> int:
    """Return the bytes of weights, gradients, masters and moments: `bytes_per_param` for a trained weight."""
    frozen_bytes = model.param_bytes - model.num_trainable_params * model.param_itemsize
    return int(model.num_trainable_params * bytes_per_param) + max(0, frozen_bytes)


def activation_bytes_in_memory(model: ModelProfile, *, recomputes: bool) -> int:
    """Return the bytes of activations at their peak in a step whose layers are all on the device."""
    saved_bytes = {block.name: block.saved_bytes for block in model.blocks}
    for block in model.blocks:
        saved_bytes[block.name] += block.experts.inner_bytes if block.experts is not None else 0
    all_bytes = sum(saved_bytes.values())
    held_bytes = max((saved_bytes[layer.name] for layer in model.layers), default=0)
    held_bytes = max(held_bytes, outer_working_bytes(model))
    return model.inter_block_bytes + (min(all_bytes, held_bytes) if recomputes else all_bytes)
