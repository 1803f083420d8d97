"""Random backwards of several ranks: their gradients of each chunk, the order in which they come, and the expected
sums.
"""

from __future__ import annotations

import queue
import random
import threading
from contextlib import suppress
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hf_lohan.device import CpuDevice
from hf_lohan.ranks import (
    Channel,
    CompleteGradient,
    DeviceSums,
    DeviceTransport,
    GradientExchange,
    Links,
    MeasuredCodec,
    RankFailedError,
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
    """The sums of one rank's owner thread."""

    sums: dict[tuple[int, int], tuple[Tensor | None, int]] = field(default_factory=dict)
    num_left: int = 0
    """The number of buffers that were not released."""
    sent_bytes: int = 0


class RankOfExchange:
    """One rank with buffers in shared memory and a thread that sums complete gradients."""

    def __init__(self, links: Links, backwards: Backwards, coded: MeasuredCodec | None = None) -> None:
        self.links = links
        self.backwards = backwards
        self.sums = OwnersSums()
        ranks = links.ranks
        region = SharedRegion.create(links, ranks.num_local * NUM_BUFFERS * BUFFER_BYTES, "gradients")
        mine = region.bytes[ranks.local_rank * NUM_BUFFERS * BUFFER_BYTES :][: NUM_BUFFERS * BUFFER_BYTES]
        self.free: queue.SimpleQueue[Tensor] = queue.SimpleQueue()
        for buffer in mine.split(BUFFER_BYTES):
            self.free.put(buffer)
        self._complete: queue.SimpleQueue[CompleteGradient | None] = queue.SimpleQueue()
        self.abandoned: list[tuple[int, int]] = []
        self.errors: list[BaseException] = []
        self.exchange = GradientExchange(
            links,
            backwards.owners,
            region,
            completed=self._complete.put,
            release=self._take_back,
            abandoned=lambda step, rank: self.abandoned.append((step, rank)),
            coded=coded,
        )
        self._thread = threading.Thread(target=self._sum_all, daemon=True)
        self._thread.start()

    def publish(self, step: int, key: int) -> None:
        rank = self.links.ranks.rank
        gradient = self.backwards.gradient(step, rank, key)
        self.links.wait_for(lambda: not self.free.empty(), "a buffer")
        buffer = self.free.get()
        values = buffer[: gradient.nbytes].view(gradient.dtype)
        values.copy_(gradient)
        self.exchange.publish(key, values, self.backwards.slice_bits(step, rank, key), buffer)

    def end(self) -> None:
        """End the thread and the exchange, also after a failure."""
        self._complete.put(None)
        self._thread.join()
        self.exchange.close()

    def close(self) -> OwnersSums:
        self._complete.put(None)
        self._thread.join()
        if self.errors:
            raise self.errors[0]
        self.links.barrier("all sums to be made")
        self.links.wait_for(lambda: self.free.qsize() == NUM_BUFFERS, "its own buffers")
        self.links.barrier("all buffers to be back")
        self.exchange.close()
        self.sums.num_left = NUM_BUFFERS - self.free.qsize()
        self.sums.sent_bytes = self.links.sent_bytes[Channel.GRADIENTS]
        return self.sums

    def _take_back(self, buffer: object) -> None:
        assert isinstance(buffer, Tensor)
        buffer.fill_(255)  # a late reader would find NaN
        self.free.put(buffer)
        self.links.notify()

    def _sum_all(self) -> None:
        try:
            while (gradient := self._complete.get()) is not None:
                self._sum(gradient)
        except BaseException as error:
            self.errors.append(error)
            self.links.fail(error)

    def _sum(self, gradient: CompleteGradient) -> None:
        total = None
        if gradient.numel:
            total = gradient.sum_into(torch.full((gradient.numel,), float("nan")))
        gradient.release()
        self.sums.sums[gradient.step, gradient.key] = (total, gradient.slice_bits)


class RankWithDevice:
    """One rank whose device adds its gradients, while its loads of weights come in between."""

    def __init__(self, links: Links, backwards: Backwards, coded: MeasuredCodec | None = None) -> None:
        self.links, self.backwards, self.found = links, backwards, OwnersSums()
        device = CpuDevice()
        self.transport = DeviceTransport.connect(links, device)
        self.num_free = NUM_BUFFERS
        self.places: dict[tuple[int, int], Tensor] = {}
        self.complete: queue.SimpleQueue[CompleteGradient | None] = queue.SimpleQueue()
        self.exchange = GradientExchange(
            links,
            backwards.owners,
            None,
            completed=self._take if links.ranks.num_nodes == 1 else self.complete.put,
            release=self._take_back,
            sums=DeviceSums(device, self.transport, links.ranks, BUFFER_BYTES),
            place=self._place,
            coded=coded,
        )
        self.owner = threading.Thread(target=self._take_all, daemon=True)
        if links.ranks.num_nodes > 1:  # sums of other nodes take time
            self.owner.start()
        links.barrier("all exchanges")

    def _place(self, step: int, key: int) -> Tensor:
        return self.places.setdefault((step, key), torch.full((self.backwards.numel(key),), float("nan")))

    def _take_all(self) -> None:
        with suppress(RankFailedError):
            while (complete := self.complete.get()) is not None:
                self._take(complete)

    def _take(self, complete: CompleteGradient) -> None:
        total = self.places.get((complete.step, complete.key))
        assert complete.is_summed == (total is not None)
        if complete.numel:
            total = complete.sum_into(torch.full((complete.numel,), float("nan")) if total is None else total)
        self.found.sums[complete.step, complete.key] = (total, complete.slice_bits)
        complete.release()

    def _take_back(self, buffer: object) -> None:
        assert isinstance(buffer, Tensor)
        buffer.fill_(float("nan"))  # a late reader would find it
        with self.links.lock:
            self.num_free += 1
            self.links.notify()

    def load_all(self, num_loads: int) -> None:
        """Exchange weights, in the order of loads."""
        rank, num_ranks = self.links.ranks.local_rank, self.links.ranks.num_local
        parts = [(10 * member, 10 * member + 10) for member in range(num_ranks)]
        for load in range(num_loads):
            whole = torch.full((10 * num_ranks,), -1.0)
            whole[10 * rank : 10 * rank + 10] = 100 * load + rank
            what = "its shard of a test"
            self.transport.take_part(load, what, lambda whole=whole: self.transport.fill_from_all(whole, parts))
            assert whole[::10].tolist() == [100 * load + member for member in range(num_ranks)]

    def run(self, num_loads: int) -> OwnersSums:
        loads = threading.Thread(target=self.load_all, args=(num_loads,))
        loads.start()
        for step in range(self.backwards.num_steps):
            for key in self.backwards.order(step, self.links.ranks.rank):
                self.links.wait_for(lambda: self.num_free, "a buffer")
                with self.links.lock:
                    self.num_free -= 1
                gradient = self.backwards.gradient(step, self.links.ranks.rank, key)
                assert gradient is not None
                bits = self.backwards.slice_bits(step, self.links.ranks.rank, key)
                self.exchange.publish(key, gradient, bits, gradient, is_on_device=True)
            assert self.exchange.wait_until_complete(self.exchange.end_backward())
        loads.join(20)
        assert not loads.is_alive()
        if self.owner.is_alive():
            self.complete.put(None)
            self.owner.join()
        self.links.barrier("all sums to be made")
        self.links.wait_for(lambda: self.num_free == NUM_BUFFERS, "its own buffers")
        self.links.barrier("all buffers to be back")
        self.found.sent_bytes = self.links.sent_bytes[Channel.GRADIENTS]
        self.exchange.close()
        self.transport.close()
        return self.found


def exchange_all(links: Links, backwards: Backwards, coded: MeasuredCodec | None = None) -> OwnersSums:
    rank = RankOfExchange(links, backwards, coded)
    for step in range(backwards.num_steps):
        for key in backwards.order(step, links.ranks.rank):
            rank.publish(step, key)
        assert rank.exchange.end_backward() == step
        assert rank.exchange.wait_until_complete(step)
    return rank.close()


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
