"""How torch's caching allocator takes device memory: in one segment that grows, where the driver can do that.

Segments of a fixed size fragment: what a step frees in one of them is often too small for what it asks for next.
"""

from __future__ import annotations

import ctypes
import logging

import torch

from hf_lohan.compat.torch_private import allocator_settings, set_allocator_settings

logger = logging.getLogger(__name__)

_SETTING = "expandable_segments"
_VIRTUAL_MEMORY = 102
"""CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED"""


def grow_segments(device_index: int) -> bool:
    """Have the allocator grow its segments from here on, unless its settings (`PYTORCH_ALLOC_CONF`,
    `PYTORCH_CUDA_ALLOC_CONF`) say something about that, name another allocator, or the driver cannot. Returns whether
    they grow."""
    settings = allocator_settings()
    if _SETTING in settings:
        return f"{_SETTING}:true" in settings.lower().replace(" ", "")
    if torch.cuda.get_allocator_backend() != "native" or not has_virtual_memory(device_index):
        logger.info("device memory is taken in segments of a fixed size: driver or allocator cannot grow them")
        return False
    # New settings replace all earlier ones.
    set_allocator_settings(",".join(one for one in (settings, f"{_SETTING}:True") if one))
    return True


def has_virtual_memory(device_index: int, driver: str = "libcuda.so.1", nvml: str = "libnvidia-ml.so.1") -> bool:
    """Whether the driver can map memory into addresses that were reserved before, and NVML can be loaded: torch asks
    NVML about the device without checking that it is there."""
    try:
        cuda = ctypes.CDLL(driver)
        ctypes.CDLL(nvml)
        cuda.cuMemAddressReserve  # noqa: B018
    except (OSError, AttributeError):
        return False
    number, can_map = ctypes.c_int(), ctypes.c_int()
    found = (
        cuda.cuInit(0) == 0
        and cuda.cuDeviceGet(ctypes.byref(number), device_index) == 0
        and cuda.cuDeviceGetAttribute(ctypes.byref(can_map), _VIRTUAL_MEMORY, number) == 0
    )
    return found and can_map.value == 1
