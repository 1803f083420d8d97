"""Measures drives, links, device, CPU and this process's memory, and examines the machine and its paths."""

from hf_lohan.hardware.machine import (
    AnonymousMemoryPeak,
    MachineFacts,
    anonymous_memory_bytes,
    examine_machine,
    with_gpu_link,
)
from hf_lohan.hardware.measurement import MeasuringEffort, measure_computing, measure_hardware
from hf_lohan.hardware.paths import PathFacts, examine_path
from hf_lohan.hardware.profiles import cached_hardware, has_cached_hardware, read_hardware, write_hardware
from hf_lohan.hardware.rates import AttentionShape, MatrixShape
