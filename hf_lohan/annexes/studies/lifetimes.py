"""Computes when each tensor of a training step is in use, and whether it could leave the device between two uses.

A step is a list of operations, with an update at its end. Weights, gradients and optimizer states are tensors of the
step as well, as if all were in a device's memory (TeraIO, Fig. 1 and 2).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from hf_lohan.annexes.studies.allocators import Addresses, compare_addresses
from hf_lohan.costs.address_plan import Life
from hf_lohan.costs.hardware_profile import HardwareProfile
from hf_lohan.costs.quantization import DEVICE_MEMORY_BYTES_PER_S

TensorKind: TypeAlias = Literal["param", "gradient", "state", "activation", "intermediate"]
TENSOR_KINDS: tuple[TensorKind, ...] = ("param", "gradient", "state", "activation", "intermediate")
"""A `state` is the master and the moments of one weight. An `activation` is made in forward and freed in backward. All
other tensors of operations are `intermediate`."""


@dataclass(frozen=True, slots=True)
class StepOperation:
    """One operation of a step."""

    name: str
    """Name in torch, such as "aten.mm.default"."""
    block: str
    flops: float
    moved_bytes: int
    """Bytes that the operation reads and writes in device memory."""

    def seconds(self, hardware: HardwareProfile) -> float:
        """Return the seconds of the operation. They follow from its FLOPs, or from its bytes if it has no FLOPs."""
        if self.flops:
            if "attention" not in self.name or hardware.device.attention_flops_per_s is None:
                return hardware.device.compute_s(self.flops)
            # The rate counts a backward as 2 forwards, but its FLOPs equal 5/2 forwards.
            flops = self.flops * 4 / 5 if "backward" in self.name else self.flops
            return hardware.device.compute_s(flops, flops)
        return self.moved_bytes / (hardware.device.memory_bytes_per_s or DEVICE_MEMORY_BYTES_PER_S)


@dataclass(slots=True)
class TensorLifetime:
    """One tensor of a step. Times are indices of operations."""

    name: str
    """Name of the weight, or name of the operation that made the tensor."""
    block: str
    kind: TensorKind
    num_bytes: int
    born: int
    """The operation that makes the tensor."""
    died: int
    """The first operation that runs after the tensor was freed."""
    uses: list[int] = field(default_factory=list)
    """The operations that read or write the tensor, in order."""
    is_kept: bool = False
    """Whether the tensor exists in all steps, so that one of its gaps continues in the next step."""


@dataclass(frozen=True, slots=True)
class Weight:
    """One weight, with the sizes of the tensors that its update uses."""

    name: str
    block: str
    num_bytes: int
    state_bytes: int
    """Bytes of master and moments, or 0 for a frozen weight."""
    gradient_bytes: int
    """Bytes of the gradient, or 0 for a frozen weight."""
    uses: Sequence[int]
    """Operations of forward and backward that read the weight."""


@dataclass(frozen=True, slots=True)
class KindSummary:
    """Figures of all tensors of one kind."""

    num_tensors: int
    num_bytes: int
    """Bytes of all these tensors together, even if they do not exist at the same time."""
    most_bytes: int
    """Peak of the bytes that exist at the same time."""
    active_share: float
    """Fraction of the existing bytes that is in use, averaged over the step."""
    median_gap_s: float
    """Median time between two uses of a tensor."""
    longest_gap_s: float
    can_leave_share: dict[str, float]
    """Fraction of the bytes whose tensors can leave the device and return between two uses. Keys: "link" (to RAM) and
    "ssd"."""


_NO_TIME = 1e-12
"""Gaps shorter than this fraction of the step are rounding errors."""
_Floats: TypeAlias = npt.NDArray[np.float64]
_Integers: TypeAlias = npt.NDArray[np.int64]


class StepLifetimes:
    """The lifetimes of all tensors of a step."""

    def __init__(
        self,
        operation_s: Sequence[float],
        tensors: Sequence[TensorLifetime],
        traced: Sequence[TensorLifetime] = (),
    ) -> None:
        """``operation_s``: seconds of each operation. ``traced``: the tensors that operations make. A run allocates no
        other tensors during a step. In ``traced``, gradients are freed when they are complete, because a run sends them
        to the host."""
        self.tensors = tensors
        self._traced = traced
        self._seconds: _Floats = np.asarray(operation_s, dtype=np.float64)
        self._starts: _Floats = np.concatenate([np.zeros(1), np.cumsum(self._seconds)])
        """Time at which each operation begins, and time at which the step ends."""

    @property
    def step_s(self) -> float:
        """Sum of the seconds of all operations."""
        return float(self._starts[-1])

    @property
    def starts_s(self) -> _Floats:
        """Times at which operations begin, in seconds [num_operations]."""
        return self._starts[:-1]

    def active_share(self) -> float:
        """Return the fraction of the existing bytes that is in use, averaged over the step."""
        return self._active_share(self.tensors)

    def memory_curve(self, kind: TensorKind) -> _Integers:
        """Return the bytes of tensors of one kind that exist during each operation [num_operations]."""
        changes = np.zeros(len(self._seconds) + 1, dtype=np.int64)
        for tensor in self.tensors:
            if tensor.kind == kind:
                changes[tensor.born] += tensor.num_bytes
                changes[tensor.died] -= tensor.num_bytes
        return np.cumsum(changes)[:-1]

    def gaps_s(self, tensor: TensorLifetime) -> _Floats:
        """Return the seconds between each use of a tensor and the next use. They are 0 between consecutive
        operations."""
        uses = np.asarray(tensor.uses, dtype=np.int64)
        if not uses.size:
            return np.full(1, self.step_s) if tensor.is_kept else np.zeros(0)
        gaps = self._starts[uses[1:]] - self._starts[uses[:-1] + 1]
        if tensor.is_kept:
            over_the_end = self._starts[-1] - self._starts[uses[-1] + 1] + self._starts[uses[0]]
            gaps = np.append(gaps, over_the_end)
        return np.where(gaps > _NO_TIME * self.step_s, gaps, 0.0)

    def addresses(self) -> Addresses:
        """Return the device memory that the tensors of operations take, with planned addresses and with PyTorch's
        allocator. Takes a second for ten thousand tensors."""
        return compare_addresses([Life(own.num_bytes, own.born, own.died) for own in self._traced])

    def kinds(self, hardware: HardwareProfile) -> dict[TensorKind, KindSummary]:
        """Return a summary of each kind that has tensors."""
        of_kind: dict[TensorKind, list[TensorLifetime]] = defaultdict(list)
        for tensor in self.tensors:
            of_kind[tensor.kind].append(tensor)
        return {kind: self._summary(kind, of_kind[kind], hardware) for kind in TENSOR_KINDS if of_kind[kind]}

    def to_mapping(self, hardware: HardwareProfile) -> dict[str, Any]:
        """Return the figures for JSON."""
        kinds = {kind: asdict(summary) for kind, summary in self.kinds(hardware).items()}
        return {
            "active_share": self.active_share(),
            "step_s": self.step_s,
            "kinds": kinds,
            "addresses": asdict(self.addresses()),
        }

    def _active_share(self, tensors: Sequence[TensorLifetime]) -> float:
        active, held = 0.0, 0.0
        for tensor in tensors:
            active += tensor.num_bytes * float(self._seconds[tensor.uses].sum()) if tensor.uses else 0.0
            held += tensor.num_bytes * float(self._starts[tensor.died] - self._starts[tensor.born])
        return active / held if held else 0.0

    def _summary(self, kind: TensorKind, tensors: Sequence[TensorLifetime], hardware: HardwareProfile) -> KindSummary:
        gaps = [self.gaps_s(tensor) for tensor in tensors]
        positive = np.concatenate(gaps)
        positive = positive[positive > 0]
        longest_s = np.array([gap.max() if gap.size else 0.0 for gap in gaps])
        num_bytes = np.array([tensor.num_bytes for tensor in tensors], dtype=np.float64)
        all_bytes = int(num_bytes.sum())
        s_per_byte = {
            "link": 1 / hardware.d2h_bytes_per_s + 1 / hardware.h2d_bytes_per_s,
            "ssd": 1 / hardware.ssd_write_bytes_per_s + 1 / hardware.ssd_read_bytes_per_s,
        }
        return KindSummary(
            num_tensors=len(tensors),
            num_bytes=all_bytes,
            most_bytes=int(self.memory_curve(kind).max(initial=0)),
            active_share=self._active_share(tensors),
            median_gap_s=float(np.median(positive)) if positive.size else 0.0,
            longest_gap_s=float(longest_s.max(initial=0.0)),
            can_leave_share={
                name: float(num_bytes[num_bytes * each_s < longest_s].sum()) / all_bytes if all_bytes else 0.0
                for name, each_s in s_per_byte.items()
            },
        )


def step_lifetimes(
    operations: Sequence[StepOperation],
    tensors: Sequence[TensorLifetime],
    weights: Sequence[Weight],
    hardware: HardwareProfile,
) -> StepLifetimes:
    """Return the lifetimes of a step from a trace of its forward and backward.

    An update of each block follows the backward. It reads and writes weights and states, and reads gradients. Gradients
    exist until then. ``tensors``: tensors of the traced operations. A gradient has the name of its weight. If a trained
    weight has no traced gradient, its gradient begins at the last use of the weight.
    """
    seconds = [operation.seconds(hardware) for operation in operations]
    gradients = {tensor.name: tensor for tensor in tensors if tensor.kind == "gradient"}
    of_block: dict[str, list[Weight]] = defaultdict(list)
    for weight in weights:
        of_block[weight.block].append(weight)
    updated = {block: own for block, own in of_block.items() if any(weight.state_bytes for weight in own)}
    num_operations = len(operations) + len(updated)
    updates: Mapping[str, int] = {block: len(operations) + number for number, block in enumerate(updated)}
    rate = hardware.device.memory_bytes_per_s or DEVICE_MEMORY_BYTES_PER_S
    found = [tensor for tensor in tensors if tensor.kind != "gradient" or tensor.name not in gradients]

    def keep(weight: Weight, kind: TensorKind, num_bytes: int, uses: list[int]) -> None:
        own = TensorLifetime(weight.name, weight.block, kind, num_bytes, 0, num_operations, uses, is_kept=True)
        found.append(own)

    for block, own in of_block.items():
        moved_bytes = 0
        for weight in own:
            update = [updates[block]] if weight.state_bytes else []
            keep(weight, "param", weight.num_bytes, [*weight.uses, *update])
            if not weight.state_bytes:
                continue
            moved_bytes += 2 * weight.state_bytes + 2 * weight.num_bytes + weight.gradient_bytes
            traced = gradients.get(weight.name)
            uses = traced.uses if traced is not None else list(weight.uses[-1:])
            born = traced.born if traced is not None else (uses or update)[0]
            found.append(
                TensorLifetime(
                    weight.name, block, "gradient", weight.gradient_bytes, born, update[0] + 1, [*uses, *update]
                )
            )
            keep(weight, "state", weight.state_bytes, update)
        if block in updated:
            seconds.append(moved_bytes / rate)
    return StepLifetimes(seconds, found, tensors)
