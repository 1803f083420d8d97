"""Threads: for short tasks, for kernels beside compute, for one order of commands; and malloc's policy."""

from hf_lohan.threads.allocator import keep_freed_memory
from hf_lohan.threads.failures import raised_anew
from hf_lohan.threads.kernel_threads import KernelThreads, set_compute_threads, start_thread, usable_cpus, use_all_cores
from hf_lohan.threads.task_threads import TaskThreads
from hf_lohan.threads.work_thread import Command, WorkThread

__all__ = [
    "Command",
    "KernelThreads",
    "TaskThreads",
    "WorkThread",
    "keep_freed_memory",
    "raised_anew",
    "set_compute_threads",
    "start_thread",
    "usable_cpus",
    "use_all_cores",
]
