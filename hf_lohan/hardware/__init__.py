"""Measures: what hardware this is and what it can do, what a process holds, and what a model's step consists of."""

from hf_lohan.hardware.hardware_file import read_hardware, write_hardware
from hf_lohan.hardware.machine_facts import MachineFacts, examine_machine
from hf_lohan.hardware.matmul_rate import MatrixShape
from hf_lohan.hardware.measurement import MeasuringEffort, measure_hardware
from hf_lohan.hardware.path_facts import PathFacts, examine_path
from hf_lohan.hardware.process_memory import AnonymousMemoryPeak, anonymous_memory_bytes
from hf_lohan.hardware.profile_cache import cached_hardware, has_cached_hardware

__all__ = [
    "AnonymousMemoryPeak",
    "MachineFacts",
    "MatrixShape",
    "MeasuringEffort",
    "PathFacts",
    "anonymous_memory_bytes",
    "cached_hardware",
    "examine_machine",
    "examine_path",
    "has_cached_hardware",
    "measure_hardware",
    "read_hardware",
    "write_hardware",
]
