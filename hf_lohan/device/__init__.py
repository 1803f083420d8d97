"""The compute device and everything that touches it.

Streams, events, pinned host memory and copies behind one small interface (`Device`), with one implementation for
CUDA and one for CPU. Everything above this room is written against the interface alone, so the engine that runs on
a laptop's CPU in the tests is the engine that runs on the GPU. The only room that names `torch.cuda`.
"""

from hf_lohan.device.allocator import keep_freed_memory
from hf_lohan.device.base import Device, Event, Lane, Stamp
from hf_lohan.device.buffer_pool import Buffer, BufferPool, PoolAborted
from hf_lohan.device.cpu import CpuDevice
from hf_lohan.device.factory import default_torch_device, device_for
from hf_lohan.device.host_memory import available_host_memory_bytes, mapped_empty
from hf_lohan.device.host_stack import HostStack, IntervalStack
from hf_lohan.device.kernel_names import Operation, anchor_name
from hf_lohan.device.task_threads import TaskThreads
from hf_lohan.device.threads import KernelThreads, set_compute_threads, start_thread, usable_cpus, use_all_cores
from hf_lohan.device.work_thread import Command, WorkThread

__all__ = [
    "Buffer",
    "BufferPool",
    "Command",
    "CpuDevice",
    "Device",
    "Event",
    "HostStack",
    "IntervalStack",
    "KernelThreads",
    "Lane",
    "Operation",
    "PoolAborted",
    "Stamp",
    "TaskThreads",
    "WorkThread",
    "anchor_name",
    "available_host_memory_bytes",
    "default_torch_device",
    "device_for",
    "keep_freed_memory",
    "mapped_empty",
    "set_compute_threads",
    "start_thread",
    "usable_cpus",
    "use_all_cores",
]
