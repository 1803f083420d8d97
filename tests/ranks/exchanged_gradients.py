"""Random backwards of several ranks: their gradients of each chunk, the order in which they come, and the expected
sums.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from hf_lohan.device import CpuDevice
from hf_lohan.ranks import (
    CompleteGradient,
    DeviceLanes,
    DeviceSums,
    GradientExchange,
    Links,
    MeasuredCodec,
    SharedRegion,
)

BUFFER_BYTES = 4 * 600_000
NUM_BUFFERS = 12


@dataclass(frozen=True)
class Backwards:
    """The gradients of all ranks, drawn from a seed."""

    num_ranks: int
    num_local: int
    seed: int
    dtype: torch.dtype = torch.float32
    num_chunks: int = 5
    num_steps: int = 2
    share_without: float = 0.2
    """The probability that a rank has no gradient of a chunk."""
    max_numel: int = 3000

    def numel(self, key: int) -> int:
        return random.Random(f"{self.seed} {key}").randint(1, self.max_numel)

    def owner(self, key: int) -> int:
        return random.Random(f"owner {self.seed} {key}").randrange(self.num_ranks)

    @property
    def owners(self) -> dict[int, int]:
        return {key: self.owner(key) for key in range(self.num_chunks)}

    def gradient(self, step: int, rank: int, key: int) -> Tensor | None:
        draw = random.Random(f"{self.seed} {step} {rank} {key}")
        if draw.random() < self.share_without:
            return None
        generator = torch.Generator().manual_seed(draw.randrange(2**40))
        return torch.randn(self.numel(key), generator=generator).to(self.dtype)

    def slice_bits(self, step: int, rank: int, key: int) -> int:
        """Return bits that sometimes need more than 64 bits."""
        return 1 << (rank + 40 * (key % 3)) | 1 << 5

    def order(self, step: int, rank: int) -> list[int]:
        keys = [key for key in range(self.num_chunks) if self.gradient(step, rank, key) is not None]
        random.Random(f"{self.seed} {step} {rank}").shuffle(keys)
        return keys

    def mean(self, step: int, key: int) -> Tensor | None:
        """Return the mean. Ranks of a node are added first, in rank order, and then nodes."""
        factor = torch.tensor(1.0) / torch.tensor(float(self.num_ranks))
        of_nodes = []
        for first in range(0, self.num_ranks, self.num_local):
            of_ranks = [self.gradient(step, rank, key) for rank in range(first, first + self.num_local)]
            scaled = [gradient.float() * factor for gradient in of_ranks if gradient is not None]
            if scaled:
                of_nodes.append(_added(scaled))
        return _added(of_nodes) if of_nodes else None

    def bits(self, step: int, key: int) -> int:
        bits = 0
        for rank in range(self.num_ranks):
            if self.gradient(step, rank, key) is not None:
                bits |= self.slice_bits(step, rank, key)
        return bits

    def bytes_between_nodes(self, rank: int) -> int:
        """Return the bytes that `rank` sends to owners on other nodes: the sum of its node in float32, or the part of a
        single rank in its own dtype.
        """
        num_bytes = 0
        node, local_rank = divmod(rank, self.num_local)
        for step in range(self.num_steps):
            for key, owner in self.owners.items():
                if owner % self.num_local != local_rank or owner // self.num_local == node:
                    continue
                of_node = range(node * self.num_local, (node + 1) * self.num_local)
                num_parts = sum(self.gradient(step, other, key) is not None for other in of_node)
                itemsize = self.dtype.itemsize if num_parts == 1 else 4
                num_bytes += self.numel(key) * itemsize if num_parts else 0
        return num_bytes


def _added(values: list[Tensor]) -> Tensor:
    total = values[0].clone()
    for value in values[1:]:
        total += value
    return total


@dataclass
class OwnersSums:
    """The sums of one rank."""

    sums: dict[tuple[int, int], tuple[Tensor | None, int]] = field(default_factory=dict)
    num_left: int = 0
    """The number of buffers that were not released."""
    sent_bytes: int = 0


@dataclass(frozen=True)
class Place:
    """Memory for an average."""

    values: Tensor


class RankOfExchange:
    """One rank with buffers in shared memory, or whose device adds its gradients while its loads of weights come in
    between."""

    def __init__(
        self, links: Links, backwards: Backwards, coded: MeasuredCodec | None = None, *, on_device: bool = False
    ) -> None:
        self.links, self.backwards, self.sums = links, backwards, OwnersSums()
        ranks = links.ranks
        region = SharedRegion.create(links, ranks.num_local * NUM_BUFFERS * BUFFER_BYTES, "gradients")
        mine = region.bytes[ranks.local_rank * NUM_BUFFERS * BUFFER_BYTES :][: NUM_BUFFERS * BUFFER_BYTES]
        self.free: queue.SimpleQueue[Tensor | None] = queue.SimpleQueue()
        for buffer in mine.split(BUFFER_BYTES):
            self.free.put(buffer)
        self.published: dict[tuple[int, int], Tensor] = {}
        self.lanes = DeviceLanes.open(links, CpuDevice()) if on_device else None
        sums = DeviceSums(CpuDevice(), self.lanes.gradients, ranks, BUFFER_BYTES) if self.lanes is not None else None
        self.exchange = GradientExchange(
            links,
            backwards.owners,
            region,
            completed=self.note_complete,
            release=self._take_back,
            place=self.place,
            failed=lambda error: self.free.put(None),
            coded=coded,
            sums=sums,
        )

    def place(self, step: int, key: int) -> Place | None:
        return Place(torch.full((self.backwards.numel(key),), float("nan")))

    def note_complete(self, complete: CompleteGradient) -> None:
        total = None if complete.place is None else complete.place.values
        self.sums.sums[complete.step, complete.key] = (total, complete.slice_bits)

    def publish(self, step: int, key: int) -> None:
        rank = self.links.ranks.rank
        gradient = self.backwards.gradient(step, rank, key)
        assert gradient is not None
        with self.exchange.waiting():
            buffer = self.free.get()
        if buffer is None:
            self.links.raise_if_failed("waited for a buffer")
            raise AssertionError("the exchange ended")
        values = buffer[: gradient.nbytes].view(gradient.dtype)
        values.copy_(gradient)
        bits = self.backwards.slice_bits(step, rank, key)
        self.published[step, key] = values
        self.exchange.publish(key, values, bits, buffer, is_on_device=self.lanes is not None)

    def publish_all(self, step: int) -> None:
        for key in self.backwards.order(step, self.links.ranks.rank):
            self.publish(step, key)

    def load_all(self, num_loads: int) -> None:
        """Exchange weights, in the order of loads."""
        assert self.lanes is not None
        rank, num_ranks, lane = self.links.ranks.local_rank, self.links.ranks.num_local, self.lanes.weights
        parts = [(10 * member, 10 * member + 10) for member in range(num_ranks)]
        for load in range(num_loads):
            whole = torch.full((10 * num_ranks,), -1.0)
            whole[10 * rank : 10 * rank + 10] = 100 * load + rank
            lane.run("its shard of a test", partial(lane.fill_from_all, whole, parts))
            assert whole[::10].tolist() == [100 * load + member for member in range(num_ranks)]

    def run(self, num_loads: int = 0) -> OwnersSums:
        loads = threading.Thread(target=self.load_all, args=(num_loads,))
        if num_loads:
            loads.start()
        for step in range(self.backwards.num_steps):
            self.publish_all(step)
            assert self.finish()
        if num_loads:
            loads.join(20)
            assert not loads.is_alive()
        return self.close()

    def finish(self) -> bool:
        """End a step. Return whether it was complete."""
        self.exchange.end_backward()
        is_complete = self.exchange.wait_until_complete()
        self.exchange.begin_next()
        return is_complete

    def wait_for_all_buffers(self) -> None:
        with self.exchange.waiting():
            while self.free.qsize() < NUM_BUFFERS:
                self.links.raise_if_failed("waited for its buffers")
                time.sleep(1e-3)

    def close(self) -> OwnersSums:
        self.wait_for_all_buffers()
        self.links.barrier("all buffers to be back")
        self.end()
        self.sums.num_left = NUM_BUFFERS - self.free.qsize()
        self.sums.sent_bytes = self.links.sent_bytes.get("gradients", 0)
        return self.sums

    def end(self) -> None:
        """End the exchange, also after a failure."""
        self.exchange.close()
        if self.lanes is not None:
            self.lanes.close()

    def _take_back(self, buffer: object) -> None:
        assert isinstance(buffer, Tensor)
        buffer.fill_(255)  # a late reader would find NaN
        self.free.put(buffer)


def exchange_all(
    links: Links,
    backwards: Backwards,
    coded: MeasuredCodec | None = None,
    *,
    on_device: bool = False,
    num_loads: int = 0,
) -> OwnersSums:
    return RankOfExchange(links, backwards, coded, on_device=on_device).run(num_loads)


def check(backwards: Backwards, of_ranks: list[OwnersSums]) -> None:
    for rank, found in enumerate(of_ranks):
        own = [key for key, owner in backwards.owners.items() if owner == rank]
        assert set(found.sums) == {(step, key) for step in range(backwards.num_steps) for key in own}
        for (step, key), (total, bits) in found.sums.items():
            expected = backwards.mean(step, key)
            assert bits == backwards.bits(step, key)
            assert (total is None) == (expected is None)
            if total is not None and expected is not None:
                assert torch.equal(total.view(torch.int32), expected.view(torch.int32))
        assert found.num_left == 0
        assert found.sent_bytes == backwards.bytes_between_nodes(rank)
