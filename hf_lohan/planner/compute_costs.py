"""How long the device computes on one operation, and on one block."""

from __future__ import annotations

from hf_lohan.planner.hardware_profile import HardwareProfile
from hf_lohan.planner.model_profile import BlockProfile, OperationProfile


def operation_s(operation: OperationProfile, hardware: HardwareProfile) -> float:
    """To run one product or attention once."""
    if operation.forward_s is not None:
        return operation.forward_s
    return operation.flops / hardware.device.flops_per_s


def block_forward_s(block: BlockProfile, hardware: HardwareProfile) -> float:
    """To run a block's forward once."""
    if block.forward_s is not None:
        return block.forward_s
    return block.flops / hardware.device.flops_per_s + _elementwise_s(block, hardware)


def cheap_recompute_s(block: BlockProfile, hardware: HardwareProfile) -> float:
    """For what is always made again in a layer's backward: all but products and attention."""
    operations_s = [operation.forward_s for operation in block.operations]
    if block.forward_s is None or None in operations_s:
        return _elementwise_s(block, hardware)
    listed_s = sum(seconds for seconds in operations_s if seconds is not None)
    not_listed_flops = block.flops - sum(operation.flops for operation in block.operations)
    return max(0.0, block.forward_s - listed_s - not_listed_flops / hardware.device.flops_per_s)


def _elementwise_s(block: BlockProfile, hardware: HardwareProfile) -> float:
    rate = hardware.device.memory_bytes_per_s
    return block.moved_bytes / rate if rate else 0.0


def experts_forward_s(block: BlockProfile, hardware: HardwareProfile) -> float:
    """Of what in a block's forward loads experts one by one."""
    return sum(operation_s(operation, hardware) for operation in block.operations if operation.loads_experts)
