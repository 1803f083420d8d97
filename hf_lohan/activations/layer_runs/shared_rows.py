"""Runs layers on one rank's tokens of each row, if several ranks share rows.

The keys and values of a layer go through memory that the ranks share. Each rank writes the keys and values of its
tokens, waits until all ranks have written, and runs its chunks. The chunks see the keys of earlier tokens on any rank.
The backward does the same, and sums the gradients of all seen keys and values in float32. When all ranks have their
sums, each rank adds the sums for its own tokens in rank order, and runs the backward of its keys and values.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_lohan.activations.layer_runs.layer_run import CutLayer, LayerInputs, LayerRun
from hf_lohan.activations.layer_runs.module_state import ModuleState
from hf_lohan.activations.token_ranges import ChunkKeys, NotCuttableError, RowPieces, TokenRange
from hf_lohan.device import Device
from hf_lohan.ranks import RowLinks, SharedRegion
from hf_lohan.wording import format_bytes

logger = logging.getLogger(__name__)

_NUM_KEY_PLACES = 2
"""Number of buffers for keys and values, which are used in turn. A rank may write to a buffer while another rank still
reads the keys of the layer before. No rank is two layers ahead, because ranks wait for each other in each layer."""


@dataclass(frozen=True, eq=False)
class RowsOfRanks:
    """The rows of one forward that the ranks of `RowLinks` share."""

    pieces: RowPieces
    memory: RowMemory


def row_memory_bytes(numel: int, itemsize: int, num_ranks: int) -> int:
    """Return the bytes of memory that the ranks of one row share. Keys and values together have ``numel`` elements of
    ``itemsize`` bytes."""
    return _NUM_KEY_PLACES * _aligned(numel * itemsize) + num_ranks * _aligned(numel * torch.float32.itemsize)


class RowMemory:
    """Memory that the ranks of one row share. It has two buffers for keys and values, and sums of gradients of each
    rank. It grows when a layer needs more."""

    def __init__(self, links: RowLinks, device: Device) -> None:
        self.links = links
        self.peak_bytes = 0
        """Largest size so far, of all ranks together."""
        self._planned_bytes: int | None = None
        self._device = device
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._place_bytes = self._sum_bytes = 0
        """Size of a buffer, and size of a rank's sums. They never shrink, because that would move the buffers, and a
        rank may still read from a buffer of an earlier layer."""
        self._place = 0

    def expect(self, num_bytes: int) -> None:
        """Record the size that the plan counts. A larger size is only logged."""
        self._planned_bytes = num_bytes

    def take(self, shapes: Sequence[Sequence[int]], dtype: torch.dtype) -> tuple[list[Tensor], list[list[Tensor]]]:
        """Return keys and values of these shapes in the next buffer, and the float32 sums of each rank. All ranks of
        the row call this with equal shapes."""
        numels = [torch.Size(shape).numel() for shape in shapes]
        place_bytes, sum_bytes = (_aligned(sum(numels) * size) for size in (dtype.itemsize, torch.float32.itemsize))
        num_ranks = self.links.ranks.num_ranks
        if place_bytes > self._place_bytes or sum_bytes > self._sum_bytes:
            self._place_bytes = max(place_bytes, self._place_bytes)
            self._sum_bytes = max(sum_bytes, self._sum_bytes)
            self._allocate(_NUM_KEY_PLACES * self._place_bytes + num_ranks * self._sum_bytes)
        first_sum = _NUM_KEY_PLACES * self._place_bytes
        start, self._place = self._place * self._place_bytes, (self._place + 1) % _NUM_KEY_PLACES

        def split(first_byte: int, of_type: torch.dtype) -> list[Tensor]:
            flat = self._bytes[first_byte : first_byte + sum(numels) * of_type.itemsize].view(of_type)
            # Autograd must not count writes to other buffers, or writes by other ranks, as writes to these tensors.
            return [part.view(*shape).data for part, shape in zip(flat.split(numels), shapes, strict=True)]

        sums = [split(first_sum + rank * self._sum_bytes, torch.float32) for rank in range(num_ranks)]
        return split(start, dtype), sums

    def _allocate(self, num_bytes: int) -> None:
        # The plan counts one allocation, so all ranks free the smaller one first.
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self.links.barrier("the end of the smaller memory for keys and values")
        self._bytes = SharedRegion.create(self.links, num_bytes, "keys and values", self._device).bytes
        self.peak_bytes = max(self.peak_bytes, num_bytes)
        if self._planned_bytes is not None and num_bytes > self._planned_bytes:
            logger.warning(
                "ranks that share rows take %s for keys, values and their gradients, but the plan counts %s; leave "
                "the difference free in RAM",
                format_bytes(num_bytes),
                format_bytes(self._planned_bytes),
            )


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // 64) * 64


class SharedKeys(ChunkKeys):
    """The keys and values of a group of rows that several ranks compute, and the sums of their gradients."""

    def __init__(self, length: int, memory: RowMemory, name: str) -> None:
        """``name``: the layer's name, for errors."""
        super().__init__(length)
        self._memory = memory
        self._name = name
        self._own: dict[TokenRange, tuple[Tensor, Tensor]] = {}
        """This rank's keys and values, until they are shared."""
        self._shared_sums: list[list[Tensor]] = []
        self.is_complete = False
        """Whether the keys and values of all ranks are in the shared memory."""
        self._is_on_host = True

    def _keep(self, tokens: TokenRange, keys: Tensor, values: Tensor) -> None:
        if self._only_keys:  # with a graph, for the backward of this rank's own tokens
            self._own[tokens] = keys, values

    def share(self) -> None:
        """Give the other ranks this rank's keys and values, and wait for theirs."""
        first = next(iter(self._own.values()))
        if len({tensor.dtype for tensor in first}) > 1:
            raise NotCuttableError("has keys and values of different dtypes")
        shapes = [(t.shape[0], t.shape[1], self._length, t.shape[3]) for t in first]
        shared, self._shared_sums = self._memory.take(shapes, first[0].dtype)
        for tokens, own in self._own.items():
            for whole, part in zip(shared, own, strict=True):
                whole[:, :, tokens.start : tokens.stop] = part
        self._own.clear()
        self._memory.links.barrier(f"the keys and values of {self._name}")
        self._is_on_host = first[0].device.type == "cpu"
        self._tensors = tuple(shared if self._is_on_host else (tensor.to(first[0].device) for tensor in shared))
        self.is_complete = True

    def begin_sums(self) -> None:
        """Begin to sum the gradients of keys and values. `gradient_of` adds to the sums."""
        own = self._shared_sums[self._memory.links.ranks.rank]
        self._sums = [
            total.zero_() if self._is_on_host else torch.zeros_like(keys, dtype=torch.float32)
            for total, keys in zip(own, self._tensors, strict=True)
        ]

    def gradient_of(self, number: int, gradient: Tensor | None, tokens: TokenRange, first_key: int) -> Tensor | None:
        if gradient is not None:
            total = self._sums[number]
            assert total is not None
            total[:, :, first_key : tokens.stop] += gradient
        return None  # `take_own` returns it when all ranks have their sums

    def share_sums(self) -> None:
        """Give the other ranks this rank's sums, and wait for theirs."""
        own = self._shared_sums[self._memory.links.ranks.rank]
        for shared, total in zip(own, self._sums, strict=True):
            assert total is not None
            if not self._is_on_host:
                shared.copy_(total)
        self._sums = [None, None]
        self._memory.links.barrier(f"the gradients of the keys and values of {self._name}")

    def take_own(self) -> list[tuple[Tensor, Tensor]]:
        """Return the keys and values of the chunk that has just run with ``only_keys``, and their gradients."""
        ((tokens, own),) = self._own.items()
        self._own.clear()
        found = []
        for number, tensor in enumerate(own):
            parts = [sums[number][:, :, tokens.start : tokens.stop] for sums in self._shared_sums]
            total = parts[0].clone()
            for part in parts[1:]:
                total += part
            found.append((tensor, total.to(tensor.device, tensor.dtype)))
        return found


class SharedRun(LayerRun):
    """One forward of a layer for this rank's tokens, and its backward."""

    def __init__(
        self,
        layer: CutLayer,
        inputs: LayerInputs,
        groups: Sequence[Sequence[TokenRange]],
        state: ModuleState,
        rows: RowsOfRanks,
        *,
        runs_again: bool,
    ) -> None:
        super().__init__(layer, inputs, groups, state, runs_again=runs_again)
        self._rows = rows
        self._name = layer.name

    @property
    def num_backwards(self) -> int:
        return 2 * super().num_backwards

    def begin_group(self, hidden: Tensor, group: Sequence[TokenRange]) -> SharedKeys:
        keys = SharedKeys(self._rows.pieces.length, self._rows.memory, self._name)
        with torch.no_grad():
            for tokens in group:
                self.call(hidden[tokens.index], tokens, keys, only_keys=True)
        keys.share()
        return keys

    def run_group_back(
        self,
        hidden: Tensor,
        gradients: Sequence[Tensor | None],
        of_hidden: Tensor | None,
        group: Sequence[TokenRange],
    ) -> None:
        keys = self.begin_group(hidden, group)
        keys.begin_sums()
        for tokens in reversed(group):
            self.run_back(hidden, gradients, of_hidden, tokens, keys)
        keys.share_sums()
        for tokens in group:
            chunk = hidden[tokens.index].detach().requires_grad_(of_hidden is not None)
            with torch.enable_grad():
                self.call(chunk, tokens, keys, only_keys=True)
            roots = [(tensor, gradient) for tensor, gradient in keys.take_own() if tensor.requires_grad]
            if roots:
                torch.autograd.backward([tensor for tensor, _ in roots], [gradient for _, gradient in roots])
            if of_hidden is not None and chunk.grad is not None:
                of_hidden[tokens.index] += chunk.grad
