"""Worker threads, thread settings, policies for a model on the CPU, and forked processes."""

from hf_lohan.threads.cpu_policies import (
    keep_freed_memory,
    return_freed_memory,
    set_compute_threads,
    start_thread,
    usable_cpus,
    use_all_cores,
)
from hf_lohan.threads.failures import FirstFailure, raised_anew
from hf_lohan.threads.forks import Owner, close_in_children, closing
from hf_lohan.threads.task_threads import KernelThreads, TaskThreads
from hf_lohan.threads.thread_settings import ThreadSettings, uninterrupted
from hf_lohan.threads.work_thread import Command, WorkThread
