"""Measures: what hardware this is, what a process holds, and later what links, drives and models can do."""

from hf_lohan.profiler.process_memory import AnonymousMemoryPeak, anonymous_memory_bytes

__all__ = ["AnonymousMemoryPeak", "anonymous_memory_bytes"]
