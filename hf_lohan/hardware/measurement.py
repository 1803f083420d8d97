"""Measures the `HardwareProfile` of this machine within a few seconds, with the operations and threads of a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from hf_lohan.config import ResolvedConfig
from hf_lohan.costs import COMPUTING_RATES, CpuProfile, DeviceProfile, HardwareProfile, SsdProfile
from hf_lohan.device import Device, available_host_memory_bytes
from hf_lohan.files import SECTOR_BYTES, IoEngine, StorePath
from hf_lohan.files.directories import resolve_capacities
from hf_lohan.hardware.cpu_rates import checksum_bytes_per_s, optimizer_params_per_s
from hf_lohan.hardware.machine import device_name
from hf_lohan.hardware.paths import drive_endurance_bytes
from hf_lohan.hardware.rates import (
    AttentionShape,
    MatrixShape,
    attention_flops_per_s,
    elementwise_bytes_per_s,
    matmul_flops_per_s,
    measure_links,
)
from hf_lohan.hardware.ssd_rates import measure_ssds
from hf_lohan.store import DATA_NAMES
from hf_lohan.threads import set_compute_threads

_MIB = 1 << 20
_UPDATE_BYTES_PER_PARAM = 3 * 16
"""Bytes per parameter of three chunks with weights, masters, gradients and moments."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuringEffort:
    """Limits of the time and memory of a measurement."""

    budget_s: float = 5.0
    scratch_bytes: int = 128 * _MIB
    """Maximum size of the scratch file of each SSD path."""
    io_buffer_bytes: int = 64 * _MIB
    copy_bytes: int = 32 * _MIB
    product_bytes: int = 128 * _MIB
    """Device memory for the operands of a product."""
    activation_bytes: int = 32 * _MIB
    update_numel: int = 2 * _MIB

    def within(self, config: ResolvedConfig) -> MeasuringEffort:
        """Return this effort, with its memory reduced to the config's budgets if necessary."""
        host_bytes, device_bytes = config.cpu_memory // SECTOR_BYTES, config.gpu_memory // SECTOR_BYTES
        return replace(
            self,
            io_buffer_bytes=min(self.io_buffer_bytes, host_bytes * SECTOR_BYTES),
            copy_bytes=max(SECTOR_BYTES, min(self.copy_bytes, host_bytes // 2 * SECTOR_BYTES)),
            product_bytes=min(self.product_bytes, device_bytes * SECTOR_BYTES),
            activation_bytes=min(self.activation_bytes, device_bytes // 3 * SECTOR_BYTES),
            update_numel=max(1024, min(self.update_numel, config.cpu_memory // _UPDATE_BYTES_PER_PARAM)),
        )


def measure_hardware(
    config: ResolvedConfig,
    device: Device,
    *,
    matrix_shapes: Sequence[MatrixShape],
    dtype: torch.dtype,
    attention: AttentionShape | None = None,
    effort: MeasuringEffort | None = None,
) -> HardwareProfile:
    """Measure device, links, drives and CPU for a model of `matrix_shapes` with working weights of `dtype`, and fused
    attention of the given shape.

    `config` is the run's resolved config, whose budgets limit the memory of the measurement. This does not change the
    run's random numbers. Takes about `effort.budget_s` (5 seconds by default). Raises CapacityError or StorageError if
    a path cannot be measured, and ValueError for no shapes or a dtype that cannot be trained.
    """
    effort = (effort or MeasuringEffort()).within(config)
    budget_s, paths = effort.budget_s, store_paths(config)
    device_memory_bytes = device.total_memory_bytes()  # measuring takes some of it
    host_memory_bytes = available_host_memory_bytes()
    with _run_threads(config):
        alone, together = measure_ssds(
            paths,
            device,
            partial(IoEngine, config.io_threads, config.io_piece_bytes),
            scratch_bytes=effort.scratch_bytes,
            buffer_bytes=effort.io_buffer_bytes,
            budget_s=0.35 * budget_s,
        )
        links = measure_links(device, copy_bytes=effort.copy_bytes, budget_s=0.1 * budget_s)
        computing = _computing_rates(device, matrix_shapes, dtype, attention, effort)
        hashed_bytes_per_s = checksum_bytes_per_s(num_threads=config.cpu_threads, budget_s=0.03 * budget_s)
        params_per_s = optimizer_params_per_s(
            device,
            dtype,
            numel=effort.update_numel,
            budget_s=0.12 * budget_s,
            moment_dtype=config.moment_dtype,
        )
    device.give_back_unused()  # a run allocates other sizes
    return HardwareProfile(
        device=DeviceProfile(
            **computing,
            memory_bytes=device_memory_bytes,
            shares_cpu=device.shares_cores,
            grows_segments=device.grows_segments,
            name=device_name(device),
        ),
        cpu=CpuProfile(
            memory_bytes=host_memory_bytes,
            optimizer_params_per_s=_rounded(params_per_s),
            checksum_bytes_per_s=_rounded(hashed_bytes_per_s),
        ),
        h2d_bytes_per_s=_rounded(links.h2d_bytes_per_s),
        d2h_bytes_per_s=_rounded(links.d2h_bytes_per_s),
        duplex_bytes_per_s=_rounded(links.duplex_bytes_per_s),
        ssd=tuple(
            SsdProfile(
                path=path.path,
                read_bytes_per_s=_rounded(rates.read_bytes_per_s),
                write_bytes_per_s=_rounded(rates.write_bytes_per_s),
                capacity_bytes=path.capacity_bytes or 0,
                endurance_bytes=drive_endurance_bytes(path.path, [other.path for other in paths if other != path]),
            )
            for path, rates in zip(paths, alone, strict=True)
        ),
        ssd_together_read_bytes_per_s=_rounded(together.read_bytes_per_s),
        ssd_together_write_bytes_per_s=_rounded(together.write_bytes_per_s),
        ssd_mixed_bytes_per_s=_rounded(together.mixed_bytes_per_s),
    )


def measure_computing(
    profile: HardwareProfile,
    config: ResolvedConfig,
    device: Device,
    *,
    matrix_shapes: Sequence[MatrixShape],
    dtype: torch.dtype,
    attention: AttentionShape | None = None,
    effort: MeasuringEffort | None = None,
) -> HardwareProfile:
    """Return the profile with the rates at which the device computes products, attention and elementwise operations of
    these shapes, with the threads that torch has. Other arguments are as in `measure_hardware`. Takes a third of
    `effort.budget_s`. Raises ValueError for no shapes."""
    effort = (effort or MeasuringEffort()).within(config)
    computing = _computing_rates(device, matrix_shapes, dtype, attention, effort)
    device.give_back_unused()
    return replace(profile, device=replace(profile.device, **computing))


def _computing_rates(
    device: Device,
    matrix_shapes: Sequence[MatrixShape],
    dtype: torch.dtype,
    attention: AttentionShape | None,
    effort: MeasuringEffort,
) -> dict[str, Any]:
    """Measure the rates of a `DeviceProfile` that are named in `COMPUTING_RATES`."""
    budget_s, most_bytes = effort.budget_s, effort.product_bytes
    flops_per_s = matmul_flops_per_s(device, matrix_shapes, dtype, budget_s=0.2 * budget_s, max_bytes=most_bytes)
    attended_flops_per_s = None
    if attention is not None:
        attended_flops_per_s = attention_flops_per_s(
            device, attention, dtype, budget_s=0.1 * budget_s, max_bytes=most_bytes
        )
    largest_numel = max(shape.num_rows * max(shape.inner, shape.num_columns) for shape in matrix_shapes)
    added_numel = min(largest_numel, effort.activation_bytes // dtype.itemsize)
    memory_bytes_per_s = elementwise_bytes_per_s(device, added_numel, dtype, budget_s=0.05 * budget_s)
    rates = flops_per_s, attended_flops_per_s, memory_bytes_per_s
    return {name: None if rate is None else _rounded(rate) for name, rate in zip(COMPUTING_RATES, rates, strict=True)}


def _rounded(rate: float) -> float:
    """Round to four digits, which is about the precision of a measurement."""
    return float(f"{rate:.4g}")


def with_present_room(profile: HardwareProfile, config: ResolvedConfig, device: Device) -> HardwareProfile:
    """Return the profile with the current free memory and disk space, and the current settings of the allocator."""
    return replace(
        profile,
        device=replace(profile.device, memory_bytes=device.total_memory_bytes(), grows_segments=device.grows_segments),
        cpu=replace(profile.cpu, memory_bytes=available_host_memory_bytes()),
        ssd=tuple(
            replace(ssd, path=path.path, capacity_bytes=path.capacity_bytes or 0)
            for ssd, path in zip(profile.ssd, store_paths(config), strict=True)
        ),
    )


def store_paths(config: ResolvedConfig) -> tuple[StorePath, ...]:
    """Return the paths of a resolved config. The capacity "auto" becomes the free space plus the size of a store in the
    path."""
    paths = [StorePath(ssd.path, ssd.capacity if isinstance(ssd.capacity, int) else None) for ssd in config.ssd]
    return resolve_capacities(paths, DATA_NAMES)


@contextmanager
def _run_threads(config: ResolvedConfig) -> Iterator[None]:
    before = torch.get_num_threads()
    set_compute_threads(config.cpu_threads)
    try:
        yield
    finally:
        if torch.get_num_threads() != before:
            torch.set_num_threads(before)
