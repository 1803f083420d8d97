"""Measures the device's FLOP/s and memory bandwidth, and the bandwidth of its link, as medians of several runs."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_lohan.device import Device, Lane

_SAMPLE_S = 0.005
"""Minimum seconds of a sample. Shorter runs are timed together, so that the overhead of synchronization is small."""
_MAX_RUNS_PER_SAMPLE = 1000
_MAX_SAMPLES = 25
_MIN_SIDE = 128
"""Minimum side of a cropped matrix. Products with shorter sides are slower."""
_FIRST_TRIAL_FLOPS = 1e8
_MAX_GROWTH = 16.0
"""Maximum growth from one trial to the next. Small products have fewer FLOP/s, and predict large products poorly."""
_RUNS_IN_BUDGET = 4
_MAX_SHAPES = 6
"""Maximum number of shapes, because making the operands of each takes time."""
_FIRST_TRIAL_TOKENS = 512
"""Tokens of a first trial of attention. Shorter rows have fewer FLOP/s."""
_FEWEST_TOKENS = 1024
"""Shorter rows are not measured, because later batches may be longer, and starting the kernel would take most time."""
_MOST_TOKENS = 4096
"""Longer rows have the same FLOP/s, and kernels that are not fused would need much memory."""
_PATTERN_NUMEL = 1 << 16
_COPIES_AT_ONCE = 4
"""Copies in each direction in a run of both. With several, the time in which only one direction copies is small."""


def median_s(
    run: Callable[[], object],
    synchronize: Callable[[], object],
    *,
    budget_s: float,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Return the median seconds of one `run`. `synchronize` waits for the work that `run` started.

    Takes about `budget_s`, or the time of three runs if that is longer.
    """
    began_s = clock()
    run()  # the first run loads kernels and touches memory
    synchronize()
    start_s = clock()
    run()
    synchronize()
    once_s = clock() - start_s
    num_runs = min(_MAX_RUNS_PER_SAMPLE, math.ceil(_SAMPLE_S / once_s)) if once_s > 0 else _MAX_RUNS_PER_SAMPLE
    samples_s: list[float] = []
    while not samples_s or (clock() - began_s < budget_s and len(samples_s) < _MAX_SAMPLES):
        start_s = clock()
        for _ in range(num_runs):
            run()
        synchronize()
        samples_s.append((clock() - start_s) / num_runs)
    return statistics.median(samples_s)


@dataclass(frozen=True, slots=True)
class MatrixShape:
    """A matrix product [num_rows, inner] x [inner, num_columns] of a linear layer that runs `count` times in a forward.
    A batched or grouped product has `num_matrices` of these."""

    num_rows: int
    inner: int
    num_columns: int
    count: int = 1
    num_matrices: int = 1

    def __post_init__(self) -> None:
        if min(self.num_rows, self.inner, self.num_columns, self.count, self.num_matrices) < 1:
            raise ValueError(f"{self} is not a matrix product; every number must be at least 1")

    @property
    def flops(self) -> float:
        """FLOPs of one run of the product."""
        return 2.0 * self.num_matrices * self.num_rows * self.inner * self.num_columns

    def operand_bytes(self, itemsize: int) -> int:
        rows, inner, columns = self.num_rows, self.inner, self.num_columns
        return self.num_matrices * itemsize * (rows * inner + inner * columns + rows * columns)


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionShape:
    """Causal attention of `num_heads` rows of `num_tokens`. Sequences of a batch count as heads."""

    num_heads: int
    num_tokens: int
    key_dim: int
    value_dim: int

    @property
    def flops(self) -> float:
        """FLOPs of one forward. No token sees a later token."""
        num_pairs = self.num_tokens * (self.num_tokens + 1) // 2
        return 2.0 * self.num_heads * num_pairs * (self.key_dim + self.value_dim)

    def operand_bytes(self, itemsize: int) -> int:
        """Bytes of queries, keys, values, output and the gradients of all four."""
        return 4 * itemsize * self.num_heads * self.num_tokens * (self.key_dim + self.value_dim)


def cropped(shape: MatrixShape, *, max_flops: float, max_bytes: int, itemsize: int) -> MatrixShape:
    """Return the shape, or a smaller shape with similar FLOP/s. Halves first batches, then rows, then the longest side,
    until the product is within both bounds or all sides are short."""
    while shape.flops > max_flops or shape.operand_bytes(itemsize) > max_bytes:
        sides = {"num_rows": shape.num_rows, "inner": shape.inner, "num_columns": shape.num_columns}
        longest = max(sides, key=lambda side: sides[side])
        if shape.num_matrices > 1:
            side, half = "num_matrices", shape.num_matrices // 2
        elif shape.flops > max_flops and shape.num_rows >= 2 * _MIN_SIDE:
            side, half = "num_rows", shape.num_rows // 2
        elif sides[longest] >= 2 * _MIN_SIDE:
            side, half = longest, sides[longest] // 2
        else:
            return shape
        shape = replace(shape, **{side: half})
    return shape


def matmul_flops_per_s(
    device: Device, shapes: Sequence[MatrixShape], dtype: torch.dtype, *, budget_s: float, max_bytes: int
) -> float:
    """Measure FLOP/s of the `shapes` with the most FLOPs, weighted by count, and of the products of both gradients.

    Takes about `budget_s` and `max_bytes` of the device's memory. Raises ValueError for no shapes.
    """
    if not shapes:
        raise ValueError("there are no matrix shapes to measure the device with; give at least one")
    shapes = sorted(shapes, key=lambda shape: -shape.count * shape.flops)[:_MAX_SHAPES]
    share_s = budget_s / len(shapes)
    total_flops = sum(shape.count * shape.flops for shape in shapes)
    total_s = sum(
        shape.count * shape.flops / _shape_flops_per_s(device, shape, dtype, budget_s=share_s, max_bytes=max_bytes)
        for shape in shapes
    )
    return total_flops / total_s


def attention_flops_per_s(
    device: Device, shape: AttentionShape, dtype: torch.dtype, *, budget_s: float, max_bytes: int
) -> float:
    """Measure FLOP/s of fused attention, forward and backward. The backward counts twice the FLOPs of the forward, as
    with matrix products. It has five products where the forward has two, so the rate is lower.

    Takes about `budget_s` and `max_bytes` of the device's memory. If `shape` needs more, fewer heads or shorter rows
    are measured. Rows have at least 1,024 tokens, if these fit, and at most 4,096.
    """
    shape = replace(shape, num_tokens=min(max(shape.num_tokens, _FEWEST_TOKENS), _MOST_TOKENS))
    # A GPU's attention advances the run's random numbers, even without dropout.
    devices = [] if device.torch_device.type == "cpu" else [device.torch_device]
    with torch.random.fork_rng(devices, device_type=device.torch_device.type):
        chosen = replace(shape, num_heads=1, num_tokens=min(shape.num_tokens, _FIRST_TRIAL_TOKENS))
        while chosen != shape:
            if chosen.num_heads < shape.num_heads:
                larger = replace(chosen, num_heads=min(shape.num_heads, 2 * chosen.num_heads))
            else:
                larger = replace(chosen, num_tokens=min(shape.num_tokens, 2 * chosen.num_tokens))
            trial_s = _attention_s(device, chosen, dtype, budget_s=0.0)
            expected_s = trial_s * larger.flops / chosen.flops
            if expected_s > budget_s / _RUNS_IN_BUDGET or larger.operand_bytes(dtype.itemsize) > max_bytes:
                break
            chosen = larger
        return 3 * chosen.flops / _attention_s(device, chosen, dtype, budget_s=budget_s)


def _attention_s(device: Device, shape: AttentionShape, dtype: torch.dtype, *, budget_s: float) -> float:
    """Return the seconds of forward and backward."""
    size = (1, shape.num_heads, shape.num_tokens)
    query, key, value = (
        _filled(device, (*size, dim), dtype).requires_grad_() for dim in (shape.key_dim, shape.key_dim, shape.value_dim)
    )
    gradient = _filled(device, (*size, shape.value_dim), dtype)

    def run() -> None:
        with torch.enable_grad():
            output = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        torch.autograd.grad(output, (query, key, value), gradient)

    return median_s(run, _waiting(device), budget_s=budget_s)


def elementwise_bytes_per_s(device: Device, numel: int, dtype: torch.dtype, *, budget_s: float) -> float:
    """Measure the bytes per second that an addition of two tensors [numel] to a new tensor reads and writes."""
    left, right = _filled(device, (numel,), dtype), _filled(device, (numel,), dtype)
    one_s = median_s(lambda: left + right, _waiting(device), budget_s=budget_s)
    return 3 * numel * dtype.itemsize / one_s


def _shape_flops_per_s(
    device: Device, shape: MatrixShape, dtype: torch.dtype, *, budget_s: float, max_bytes: int
) -> float:
    def within(max_flops: float) -> MatrixShape:
        return cropped(shape, max_flops=max_flops, max_bytes=max_bytes, itemsize=dtype.itemsize)

    run_s = budget_s / _RUNS_IN_BUDGET
    chosen, largest = within(_FIRST_TRIAL_FLOPS), within(math.inf)
    while chosen != largest:
        trial_s = _product_times_s(device, chosen, dtype, budget_s=0.0, num_products=1)[0]
        larger = within(chosen.flops * min(_MAX_GROWTH, run_s / (3 * trial_s)))
        if larger.flops <= chosen.flops:
            break
        chosen = larger
    times_s = _product_times_s(device, chosen, dtype, budget_s=budget_s)
    return 3 * chosen.flops / sum(times_s)


def _product_times_s(
    device: Device, shape: MatrixShape, dtype: torch.dtype, *, budget_s: float, num_products: int = 3
) -> list[float]:
    """Return the seconds of the product, of its input's gradient and of its weight's gradient, or of the first
    `num_products` of these. Operands have autograd's layout, with the weight transposed."""
    batch = (shape.num_matrices,) if shape.num_matrices > 1 else ()
    inputs = _filled(device, (*batch, shape.num_rows, shape.inner), dtype)
    weight = _filled(device, (*batch, shape.num_columns, shape.inner), dtype)
    gradient = _filled(device, (*batch, shape.num_rows, shape.num_columns), dtype)
    products: tuple[Callable[[], Tensor], ...] = (
        lambda: inputs @ weight.mT,
        lambda: gradient @ weight,
        lambda: gradient.mT @ inputs,
    )
    share_s = budget_s / num_products
    return [median_s(product, _waiting(device), budget_s=share_s) for product in products[:num_products]]


def _waiting(device: Device) -> Callable[[], None]:
    return lambda: device.record(Lane.COMPUTE).synchronize()


def _filled(device: Device, size: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return random numbers. Products of zeros would take less power and run at higher clocks."""
    numel = math.prod(size)
    generator = torch.Generator().manual_seed(0)  # does not change the run's random numbers
    pattern = torch.randn(min(numel, _PATTERN_NUMEL), generator=generator).to(device.torch_device, dtype)
    return pattern.repeat(-(-numel // pattern.numel()))[:numel].view(*size)


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkRates:
    """Bandwidth between host and device memory."""

    h2d_bytes_per_s: float
    d2h_bytes_per_s: float
    duplex_bytes_per_s: float
    """Sum of both directions when both copy at once."""


def measure_links(device: Device, *, copy_bytes: int, budget_s: float) -> LinkRates:
    """Measure copies of `copy_bytes` between `Device.host_empty` and `Device.empty`, on the device's lanes.

    Takes about `budget_s`, and twice `copy_bytes` of host memory and of device memory.
    """
    ends: dict[Lane, tuple[Tensor, Tensor]] = {}
    for lane in (Lane.H2D, Lane.D2H):
        # Untouched pages are all mapped to one page of zeros, which stays in the cache. So the memory is filled first.
        host, remote = (empty(copy_bytes).fill_(1) for empty in (device.host_empty, device.empty))
        ends[lane] = (remote, host) if lane is Lane.H2D else (host, remote)
    device.record(Lane.COMPUTE).synchronize()

    def copy(lane: Lane) -> None:
        target, source = ends[lane]
        device.copy(lane, target, source)

    def synchronize(lane: Lane) -> None:
        device.record(lane).synchronize()

    def copy_several(lane: Lane) -> None:
        for _ in range(_COPIES_AT_ONCE):
            copy(lane)
        synchronize(lane)

    def alone_bytes_per_s(lane: Lane) -> float:
        return copy_bytes / median_s(lambda: copy(lane), lambda: synchronize(lane), budget_s=budget_s / 3)

    # As in a run, each direction has its own thread. A CPU device copies in these threads.
    with ThreadPoolExecutor(2, "lohan-links") as threads:
        both_s = median_s(lambda: list(threads.map(copy_several, ends)), lambda: None, budget_s=budget_s / 3)
    return LinkRates(
        h2d_bytes_per_s=alone_bytes_per_s(Lane.H2D),
        d2h_bytes_per_s=alone_bytes_per_s(Lane.D2H),
        duplex_bytes_per_s=2 * _COPIES_AT_ONCE * copy_bytes / both_s,
    )
