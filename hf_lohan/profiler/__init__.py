"""Measures: what hardware this is and what it can do, what a process holds, and what a model's step consists of."""

from hf_lohan.profiler.hardware import MeasuringEffort, measure_hardware
from hf_lohan.profiler.hardware_file import read_hardware, write_hardware
from hf_lohan.profiler.machine_facts import MachineFacts, examine_machine
from hf_lohan.profiler.matmul_rate import MatrixShape
from hf_lohan.profiler.model_profiler import BlockToProfile, TracedModel, profile_model, trace_model
from hf_lohan.profiler.path_facts import PathFacts, examine_path
from hf_lohan.profiler.process_memory import AnonymousMemoryPeak, anonymous_memory_bytes
from hf_lohan.profiler.profile_cache import cached_hardware, has_cached_hardware

__all__ = [
    "AnonymousMemoryPeak",
    "BlockToProfile",
    "MachineFacts",
    "MatrixShape",
    "MeasuringEffort",
    "PathFacts",
    "TracedModel",
    "anonymous_memory_bytes",
    "cached_hardware",
    "examine_machine",
    "examine_path",
    "has_cached_hardware",
    "measure_hardware",
    "profile_model",
    "read_hardware",
    "trace_model",
    "write_hardware",
]
