"""Streams, events, copies and pinned host memory behind one interface (`Device`), for CUDA and for CPU.

All other packages use only the interface, so tests on a CPU run the same engine as a GPU. No other package uses
`torch.cuda`.
"""

from hf_lohan.device.base import Device, DeviceGroup, DeviceHasher
from hf_lohan.device.buffer_pool import Buffer, BufferPool, PoolAborted
from hf_lohan.device.cpu import CpuDevice
from hf_lohan.device.factory import default_torch_device, device_for, num_gpus
from hf_lohan.device.gpu_links import GpuLink, LinkKind, links_between_gpus
from hf_lohan.device.host_memory import (
    available_host_memory_bytes,
    control_groups,
    host_memory_limit_bytes,
    mapped_empty,
    mapped_file,
)
from hf_lohan.device.host_stack import HostRead, HostStack, IntervalStack, TopPlace
from hf_lohan.device.lanes import COPY_LANES, Event, Lane, Stamp
