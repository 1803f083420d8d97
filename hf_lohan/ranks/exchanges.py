"""What all ranks do together, in one order: small messages of all to all, and one rank's bytes to all."""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hf_lohan.ranks.errors import RanksDisagreeError
from hf_lohan.ranks.messages import Kind, Lane, PayloadReader, bytes_of

if TYPE_CHECKING:
    from hf_lohan.ranks.links import Links

SHARED_PIECE_BYTES = 4 << 20
_LENGTHS = struct.Struct("<II")
_SHAPE = struct.Struct("<qq")


class Exchanges:
    """Counts what the ranks do together. A rank that is at another place of the order is told so by both sides."""

    def __init__(self, links: Links) -> None:
        self._links = links
        self._num_done: dict[str, int] = defaultdict(int)
        self._gathered: dict[tuple[str, int], dict[int, tuple[str, bytes]]] = defaultdict(dict)
        """By sequence and number in it: what came from which rank."""
        self._shared: dict[int, tuple[Tensor, int]] = {}
        """By owner: where its bytes go to, and how many have come."""
        links.on(Kind.GATHER, self._take_gathered)
        links.on(Kind.SHARE, self._take_shared)

    def gather(self, tag: str, payload: bytes, sequence: str) -> list[bytes]:
        links = self._links
        others = links.ranks.others
        links.raise_if_failed(f"waited for {tag}")
        with links.lock:
            number = self._num_done[sequence]
            self._num_done[sequence] += 1
            came = self._gathered[sequence, number]
        names = sequence.encode(), tag.encode()
        packed = b"".join((_LENGTHS.pack(len(names[0]), len(names[1])), *names, payload))
        links.send_all(Kind.GATHER, number, payload=packed)

        def is_complete() -> bool:
            self._refuse_others(came, tag, sequence, number)
            return len(came) == len(others)

        links.wait_for(is_complete, tag, peers=lambda: [other for other in others if other not in came])
        with links.lock:
            del self._gathered[sequence, number]
        return [payload if other == links.ranks.rank else came[other][1] for other in range(links.ranks.num_ranks)]

    def refuse_others(self, tag: str, sequence: str = "main") -> None:
        """For who waits in another way and then calls `gather`, with the lock held. Raises RanksDisagreeError where a
        rank is at something else."""
        number = self._num_done[sequence]
        self._refuse_others(self._gathered.get((sequence, number), {}), tag, sequence, number)

    def _refuse_others(self, came: Mapping[int, tuple[str, bytes]], tag: str, sequence: str, number: int) -> None:
        for other, (others_tag, _) in came.items():
            if others_tag != tag:
                raise RanksDisagreeError(
                    f"rank {self._links.ranks.rank} is at {tag!r} where rank {other} is at {others_tag!r} (number "
                    f"{number} of {sequence!r}); all ranks have to do the same in the same order: look for a step, a "
                    "callback or a save that only some of them run"
                )

    def share(self, tensor: Tensor, owner: int, tag: str, sequence: str) -> None:
        links = self._links
        is_owner = owner == links.ranks.rank
        view = bytes_of(tensor)
        with links.lock:
            if not is_owner:
                # Nothing comes before all ranks have said, in the gather, that they are ready for it.
                self._shared[owner] = (tensor.detach().reshape(-1).view(torch.uint8), 0)
        shapes = links.gather(tag, _SHAPE.pack(owner, len(view)), sequence=sequence)
        for rank, shape in enumerate(shapes):
            if shape != shapes[links.ranks.rank]:
                its_owner, its_bytes = _SHAPE.unpack(shape)
                raise RanksDisagreeError(
                    f"for {tag}, rank {links.ranks.rank} has {len(view)} bytes of rank {owner}, and rank {rank} "
                    f"{its_bytes} bytes of rank {its_owner}; do the ranks load the same model?"
                )
        if is_owner:
            content = tensor.detach().reshape(-1).view(torch.uint8)
            for start in range(0, len(view), SHARED_PIECE_BYTES):
                links.send_all(
                    Kind.SHARE, start, payload=content[start : start + SHARED_PIECE_BYTES], lane=Lane.WEIGHTS
                )
        else:
            links.wait_for(lambda: self._shared[owner][1] == len(view), tag, peers=[owner])
            with links.lock:
                del self._shared[owner]

    def _take_gathered(self, peer: int, numbers: tuple[int, ...], payload: PayloadReader | None) -> None:
        assert payload is not None
        packed = payload.bytes()
        lengths = _LENGTHS.unpack_from(packed)
        tag_at = _LENGTHS.size + lengths[0]
        content_at = tag_at + lengths[1]
        sequence, tag = packed[_LENGTHS.size : tag_at].decode(), packed[tag_at:content_at].decode()
        with self._links.lock:
            self._gathered[sequence, numbers[0]][peer] = (tag, packed[content_at:])
            self._links.notify()

    def _take_shared(self, peer: int, numbers: tuple[int, ...], payload: PayloadReader | None) -> None:
        assert payload is not None
        (start,) = numbers
        with self._links.lock:
            content, _ = self._shared[peer]
        stop = start + payload.num_bytes
        payload.read_into(content[start:stop])
        with self._links.lock:
            self._shared[peer] = (content, stop)
            self._links.notify()
