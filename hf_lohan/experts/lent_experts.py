"""Experts that ranks of a node lend each other, so that a rank with few rows computes some of another's.

A *lent* expert's owner copies its weights to a place in memory that the node's ranks share, and each rank that borrows
it computes its groups from there. In backward a borrower puts the gradient of each group in its own place of this
memory, and the owner adds it. Each rank has one place for weights that it lends, and one for a gradient.

No wait is circular, because all ranks go through the lent experts of a call in one order, and an owner has added all
gradients of an expert before it goes on: the first expert that is not done waits only for ranks that have done all
earlier ones. While a rank waits, it may compute experts that it does not lend, which waits for no other rank.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_lohan.device import Device
from hf_lohan.model import Block, ParamSlice
from hf_lohan.ranks import Kind, Links, PayloadReader, RanksDisagreeError

_LOOKS_AGAIN_S = 0.002
"""Seconds after which a rank that waits looks whether another expert has been loaded meanwhile."""
_MOST_HELD = 1
"""Number of an owner's gradients that may wait until gradients of earlier ranks are added."""
_KINDS = (Kind.EXPERT_LENT, Kind.EXPERT_RETURNED, Kind.EXPERT_GRADIENT, Kind.EXPERT_GRADIENT_TAKEN)


@dataclass(frozen=True)
class LentExpert:
    """An expert that a rank of this node lends to others in one call."""

    expert: int
    owner: int
    rank: int
    """This rank, which owns or borrows the expert."""
    computed_by: tuple[int, ...]
    """The rank that computes each group of the expert, in the order of the ranks that have the rows."""
    num_rows: int
    """Number of rows of all groups."""

    @property
    def is_own(self) -> bool:
        return self.rank == self.owner

    @property
    def borrowers(self) -> list[int]:
        return sorted(set(self.computed_by) - {self.owner})

    def __str__(self) -> str:
        return f"expert {self.expert} of rank {self.owner}"


class Lending:
    """One rank's side. The computing thread calls all methods except `close`."""

    def __init__(self, links: Links, memory: Tensor, device: Device) -> None:
        """``memory`` uint8 is shared by the node's ranks, with two places of equal size for each. All ranks make this
        before any of them calls an expert."""
        self._links, self._device = links, device
        self._own = links.ranks.rank
        places = memory.view(links.ranks.num_local, 2, -1)
        # `data` has its own version counter, so that autograd sees no writes to other places.
        self._weights = {rank: places[index, 0].data for index, rank in enumerate(links.ranks.on_this_node)}
        """By rank, the place for the weights that it lends."""
        self._gradients = {rank: places[index, 1].data for index, rank in enumerate(links.ranks.on_this_node)}
        """By rank, the place for its gradient of an expert that it borrows."""
        self._on_device = None if device.memory_is_host else device.empty(places.shape[-1])
        """Memory of the device for what another rank puts in its places."""
        # The links' lock guards these four.
        self._come: dict[int, deque[int]] = {rank: deque() for rank in self._weights}
        """By owner, the experts that it has lent to this rank."""
        self._not_returned: set[int] = set()
        """The ranks that read the weights that this rank lends."""
        self._arrived: dict[int, deque[int]] = {rank: deque() for rank in self._weights}
        """By borrower, this rank's experts of which a gradient is in the borrower's place."""
        self._adder: int | None = None
        """The owner that has yet to add the gradient in this rank's place; None if the place is free."""
        links.set_handler(Kind.EXPERT_LENT, self._on_lent)
        links.set_handler(Kind.EXPERT_RETURNED, self._on_returned)
        links.set_handler(Kind.EXPERT_GRADIENT, self._on_gradient)
        links.set_handler(Kind.EXPERT_GRADIENT_TAKEN, self._on_taken)

    def close(self) -> None:
        """Ignore later messages."""
        for kind in _KINDS:
            self._links.set_handler(kind, lambda _peer, _numbers, _payload: None)

    # Weights.

    def is_ready(self, lent: LentExpert) -> bool:
        """Return whether this rank can go on with the expert: lend it, because its place is free, or compute it,
        because the owner has lent it."""
        with self._links.lock:
            return not self._not_returned if lent.is_own else bool(self._come[lent.owner])

    def wait_until_ready(self, lent: LentExpert) -> None:
        if lent.is_own:
            what = f"the return of the expert that it lent before {lent}"
            self._links.wait_for(lambda: not self._not_returned, what, peers=lambda: sorted(self._not_returned))
        else:
            self._links.wait_for(lambda: self._come[lent.owner], str(lent), peers=[lent.owner])

    def wait_a_moment(self, lent: LentExpert, since_s: float) -> None:
        """Wait until the expert is ready, or for a moment. ``since_s`` (`time.monotonic`): when the wait began. Raises
        the errors of `Links.raise_if_silent`."""
        with self._links.lock:
            self._links.changed.wait_for(lambda: self.is_ready(lent), _LOOKS_AGAIN_S)
            awaited = sorted(self._not_returned) if lent.is_own else [lent.owner]
            self._links.raise_if_silent(str(lent), awaited, since_s)

    def lend(self, lent: LentExpert, weights: Tensor) -> None:
        """Lend an expert of this rank, which is ready, to its borrowers. ``weights`` [numel] are on the device."""
        self._place(self._weights, self._own, weights.dtype, weights.numel()).copy_(weights)
        with self._links.lock:
            self._not_returned = set(lent.borrowers)
        for rank in lent.borrowers:
            self._links.send(rank, Kind.EXPERT_LENT, lent.expert)

    def borrow(self, lent: LentExpert, block: Block) -> Tensor:
        """Return the weights [numel] of an expert that is ready, on the device. They stay until `give_back`."""
        with self._links.lock:
            self._check(lent, lent.owner, self._come[lent.owner].popleft())
        return self._to_device(self._place(self._weights, lent.owner, block.master.working_dtype, block.numel))

    def give_back(self, lent: LentExpert) -> None:
        """Tell the owner that this rank has computed its groups of the expert."""
        self._links.send(lent.owner, Kind.EXPERT_RETURNED)

    # Gradients.

    def send_gradient(self, lent: LentExpert, block: Block, gradients: Mapping[ParamSlice, Tensor]) -> None:
        """Give the owner the gradients of one group. Waits until the owner has added those of the group before."""
        self._links.wait_for(
            lambda: self._adder is None,
            f"the gradient before that of {lent} to be added",
            peers=lambda: [] if self._adder is None else [self._adder],
        )
        place = self._place(self._gradients, self._own, block.master.working_dtype, block.numel)
        for part, gradient in gradients.items():
            place[part.start : part.stop].copy_(gradient.reshape(-1))
        with self._links.lock:
            self._adder = lent.owner
        self._links.send(lent.owner, Kind.EXPERT_GRADIENT, lent.expert)

    def has_gradient(self, rank: int) -> bool:
        """Return whether a gradient of a borrower has arrived."""
        with self._links.lock:
            return bool(self._arrived[rank])

    def take_gradient(
        self, lent: LentExpert, rank: int, block: Block, parts: Sequence[ParamSlice]
    ) -> dict[ParamSlice, Tensor]:
        """Return the gradients [1, ...] of a borrower's next group, on the device. Waits for them. They stay until
        `note_taken`."""
        self._links.wait_for(lambda: self._arrived[rank], f"gradients of {lent}", peers=[rank])
        with self._links.lock:
            self._check(lent, rank, self._arrived[rank].popleft())
        flat = self._to_device(self._place(self._gradients, rank, block.master.working_dtype, block.numel))
        return {part: flat[part.start : part.stop].view(1, *part.shape[1:]) for part in parts}

    def note_taken(self, rank: int) -> None:
        """Tell a borrower that its gradients are added."""
        self._links.send(rank, Kind.EXPERT_GRADIENT_TAKEN)

    # Memory.

    @staticmethod
    def _place(places: Mapping[int, Tensor], rank: int, dtype: torch.dtype, numel: int) -> Tensor:
        return places[rank][: numel * dtype.itemsize].view(dtype)

    def _to_device(self, place: Tensor) -> Tensor:
        if self._on_device is None:
            return place
        return self._on_device[: place.nbytes].view(place.dtype).copy_(place)

    def _check(self, lent: LentExpert, rank: int, expert: int) -> None:
        if expert != lent.expert:
            raise RanksDisagreeError(
                f"rank {rank} is at expert {expert} where rank {self._own} is at {lent}; load the same model on all "
                "ranks"
            )

    # Called by receiving threads.

    def _on_lent(self, peer: int, numbers: tuple[int, ...], _payload: PayloadReader | None) -> None:
        with self._links.lock:
            self._come[peer].append(numbers[0])
            self._links.notify()

    def _on_returned(self, peer: int, _numbers: tuple[int, ...], _payload: PayloadReader | None) -> None:
        with self._links.lock:
            self._not_returned.discard(peer)
            self._links.notify()

    def _on_gradient(self, peer: int, numbers: tuple[int, ...], _payload: PayloadReader | None) -> None:
        with self._links.lock:
            self._arrived[peer].append(numbers[0])
            self._links.notify()

    def _on_taken(self, _peer: int, _numbers: tuple[int, ...], _payload: PayloadReader | None) -> None:
        with self._links.lock:
            self._adder = None
            self._links.notify()


class GradientsInOrder:
    """Adds the gradients of a lent expert's groups, which several ranks compute, in the order of the ranks that have
    the rows."""

    def __init__(
        self,
        lending: Lending,
        lent: LentExpert,
        block: Block,
        parts: Sequence[ParamSlice],
        add: Callable[[Mapping[ParamSlice, Tensor]], None],
    ) -> None:
        """``parts`` have gradients. The owner makes this for one backward of the expert."""
        self._lending, self._lent, self._block, self._parts, self._add = lending, lent, block, parts, add
        self._left = deque(lent.computed_by)
        self._held: deque[Mapping[ParamSlice, Tensor]] = deque()

    def put(self, gradients: Mapping[ParamSlice, Tensor]) -> None:
        """Take the gradients of this rank's next group. They are held, at most `_MOST_HELD`, until it is their turn."""
        self._held.append(gradients)
        self._add_next(is_enough=lambda: len(self._held) <= _MOST_HELD)

    def finish(self) -> None:
        """Wait for the other ranks, and add what is left."""
        self._add_next(is_enough=lambda: not self._left)

    def _add_next(self, *, is_enough: Callable[[], bool]) -> None:
        """Add gradients while there are any, and wait for others unless ``is_enough``."""
        while self._left:
            rank = self._left[0]
            if rank == self._lent.rank:
                if not self._held:
                    return  # this rank has not computed the next group yet
                self._add(self._held.popleft())
            elif is_enough() and not self._lending.has_gradient(rank):
                return
            else:
                self._add(self._lending.take_gradient(self._lent, rank, self._block, self._parts))
                self._lending.note_taken(rank)
            self._left.popleft()
