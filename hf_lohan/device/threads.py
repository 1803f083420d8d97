"""CPU threads: as many as the affinity mask allows, whatever a launcher exported.

`accelerate launch` and `torchrun` set OMP_NUM_THREADS=1, which would run the CPU optimizer on a single core.
"""

from __future__ import annotations

import logging
import os

import torch

logger = logging.getLogger(__name__)


def usable_cpus() -> int:
    """Number of CPUs this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def set_compute_threads(num_threads: int) -> None:
    """Make torch's CPU kernels use `num_threads`, saying so where that undoes a launcher's setting."""
    if torch.get_num_threads() == num_threads:
        return
    logger.info(
        "torch runs its CPU kernels on %d threads now, not %d (OMP_NUM_THREADS=%s): the optimizer needs the cores",
        num_threads,
        torch.get_num_threads(),
        os.environ.get("OMP_NUM_THREADS", "unset"),
    )
    torch.set_num_threads(num_threads)
