"""Experts that ranks of a node lend each other, so that a rank with few rows computes some rows of another rank.

The owner of a *lent* expert copies the weights to a buffer in memory that the node's ranks share. Each rank that
borrows the expert computes its groups with these weights. In backward a borrower writes the gradient of each group to
its own buffer, and the owner adds it. Each rank has one buffer for weights that it lends, and one for a gradient.

The buffers are used in turns, which follow from the numbers of rows (`in_turns`). A turn has two halves. In the first
half, owners add the gradients of the turn before, and lend their next expert. In the second half, borrowers compute.
All ranks of the node tell each other when they have done their part of a half. A rank without a part does this at once,
and does not wait.

No wait is circular: a rank begins a half only when all ranks have ended the half before, and does not need another rank
to end its half. While a rank waits, it may compute experts that it does not lend, which needs no other rank either.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
from torch import Tensor

from hf_lohan.device import Device
from hf_lohan.model import Block, ParamSlice
from hf_lohan.ranks import BegunWork, Links

_LOOKS_AGAIN = timedelta(milliseconds=2)
"""Interval at which a waiting rank checks whether another expert has been loaded."""


@dataclass(frozen=True)
class LentExpert:
    """An expert that a rank of this node lends to others in one call."""

    expert: int
    owner: int
    rank: int
    """This rank."""
    computed_by: tuple[int, ...]
    """The rank that computes each group of the expert, in the order of the ranks that have the rows."""
    num_rows: int
    """Number of rows of all groups."""
    turns: tuple[int, ...] = ()
    """The turn in which each group is computed, if a borrower computes it."""

    @property
    def is_own(self) -> bool:
        return self.rank == self.owner

    @property
    def borrowed(self) -> list[tuple[int, int] | None]:
        """The borrower and the turn of each group; None if the owner computes the group."""
        pairs = zip(self.computed_by, self.turns, strict=True)
        return [None if rank == self.owner else (rank, turn) for rank, turn in pairs]

    @property
    def first_turn(self) -> int:
        return next(turn for _, turn in filter(None, self.borrowed))

    @property
    def own_turns(self) -> list[int]:
        """The turns of the groups that this rank borrows."""
        return [turn for rank, turn in filter(None, self.borrowed) if rank == self.rank]


def in_turns(lent: Sequence[LentExpert], *, gives_gradients: bool) -> list[LentExpert]:
    """Return the lent experts of a node with their turns. In a turn, each owner lends one expert, and with
    ``gives_gradients`` each borrower gives one gradient. Gradients of an expert have the order of its groups."""
    of_owner: Counter[int] = Counter()
    of_borrower: Counter[int] = Counter()
    found = []
    for item in lent:
        turn, turns = of_owner[item.owner], []
        for rank in item.computed_by:
            if rank != item.owner and gives_gradients:
                turn = max(turn, of_borrower[rank])
                of_borrower[rank] = turn + 1
            turns.append(turn)
        of_owner[item.owner] = turn + 1
        found.append(replace(item, turns=tuple(turns)))
    return found


class Lending:
    """Lends and borrows the experts of one rank, on its computing thread."""

    def __init__(self, links: Links, memory: Tensor, device: Device) -> None:
        """``memory`` (uint8) is shared by the node's ranks, with two buffers of equal size for each rank. All ranks
        create this object together."""
        self._links, self._device = links, device
        self._lane = links.open_here("lent experts", stops_compute=True)
        self._begun: BegunWork | None = None
        buffers = memory.view(links.ranks.num_local, 2, -1)
        own = links.ranks.on_this_node
        # `data` has its own version counter, so that autograd sees no writes to other buffers.
        self._weights = {rank: buffers[index, 0].data for index, rank in enumerate(own)}
        """For each rank, the buffer for the weights that it lends."""
        self._gradients = {rank: buffers[index, 1].data for index, rank in enumerate(own)}
        """For each rank, the buffer for its gradient of an expert that it borrows."""
        self._on_device = None if device.memory_is_host else device.empty(buffers.shape[-1])
        """Device memory for a copy of another rank's buffer."""

    # Halves of turns.

    def end_half(self, what: str) -> None:
        """Tell the ranks of this node that this rank has done its part of a half. ``what`` completes "rank 0 waited for
        ...". A rank without a part in the next half may end the next half before all ranks have ended this half."""
        barrier = torch.distributed.BarrierOptions()
        self._begun = self._lane.begin(what, lambda group: group.barrier(barrier))

    @property
    def is_over(self) -> bool:
        """Whether all ranks have ended the half that this rank ended last."""
        return self._begun is None or self._begun.work.is_completed()

    def wait(self) -> None:
        """Wait until all ranks have ended the half. Raises the errors of `Lane.run`."""
        if self._begun is not None:
            self._lane.finish(self._begun)
            self._begun = None

    def wait_a_moment(self) -> None:
        """Wait until all ranks have ended the half, but only for a moment. Raises RankFailedError."""
        assert self._begun is not None
        self._links.raise_if_failed(f"waited for {self._begun.what}")
        with suppress(RuntimeError):
            self._begun.work.wait(_LOOKS_AGAIN)

    # Weights and gradients.

    def lend(self, weights: Tensor) -> None:
        """Lend an expert of this rank. ``weights`` [numel] are on the device."""
        self._buffer(self._weights, self._links.ranks.rank, weights.dtype, weights.numel()).copy_(weights)

    def borrow(self, lent: LentExpert, block: Block) -> Tensor:
        """Return the weights [numel] of a lent expert on the device. They stay until the next call."""
        return self._to_device(self._buffer(self._weights, lent.owner, block.master.working_dtype, block.numel))

    def give_gradient(self, block: Block, gradients: Mapping[ParamSlice, Tensor]) -> None:
        """Give the owner the gradients of one group of a borrowed expert."""
        buffer = self._buffer(self._gradients, self._links.ranks.rank, block.master.working_dtype, block.numel)
        for part, gradient in gradients.items():
            buffer[part.start : part.stop].copy_(gradient.reshape(-1))

    def take_gradient(self, rank: int, block: Block, parts: Sequence[ParamSlice]) -> dict[ParamSlice, Tensor]:
        """Return the gradients [1, ...] that a borrower gave, on the device. They stay until the next call."""
        flat = self._to_device(self._buffer(self._gradients, rank, block.master.working_dtype, block.numel))
        return {part: flat[part.start : part.stop].view(1, *part.shape[1:]) for part in parts}

    @staticmethod
    def _buffer(buffers: Mapping[int, Tensor], rank: int, dtype: torch.dtype, numel: int) -> Tensor:
        return buffers[rank][: numel * dtype.itemsize].view(dtype)

    def _to_device(self, buffer: Tensor) -> Tensor:
        if self._on_device is None:
            return buffer
        return self._on_device[: buffer.nbytes].view(buffer.dtype).copy_(buffer)
