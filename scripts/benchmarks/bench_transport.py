"""Measures how fast ranks of one machine send messages to each other, over Unix sockets and over TCP.

    python scripts/benchmarks/bench_transport.py

Three ranks are processes. Rank 0 sends to rank 1. While channels are loaded, a payload that nobody takes waits in
another channel to rank 1, and then in the same channel to rank 2. Times include threads and wake-ups of both sides. CPU
seconds are those of ranks 0 and 1 together.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import typer
from benchmarking import Options, benchmark, folder_in, spread, table_of
from rich.console import Console

from hf_lohan.ranks import Channel, Kind, Links, PayloadReader, Ranks, connect

HANGS_AFTER_S = 120.0
NUM_ROUND_TRIPS, NUM_AT_ONCE, NUM_BESIDE = 1_000, 2_000, 1_000
PIECE_BYTES, NUM_PIECES, LARGE_BYTES = 4 << 20, 64, 256 << 20
SIDES = {"Unix sockets": 3, "TCP": 1}
"""By side, the ranks of a node. Ranks of one node use Unix sockets."""
FIGURES = {
    "half_round_trip_us": "half a round trip of a small message, us",
    "at_once_us": "2,000 small messages at once, us each",
    "beside_channel_us": "1,000 while 256 MiB wait in another channel, us each",
    "beside_peer_us": "1,000 while 256 MiB wait in the same channel for another rank, us each",
    "pieces_gb_per_s": "messages of 4 MiB, GB/s",
    "pieces_cpu_s_per_gb": "CPU seconds per GB of them, both ranks",
    "large_gb_per_s": "one message of 256 MiB, GB/s",
}


class Measured:
    """The measurements of one rank. All ranks call the same methods in the same order."""

    def __init__(self, links: Links) -> None:
        self.links = links
        self.rank = links.ranks.rank
        self._num_came = 0
        self._may_take = threading.Event()
        self._landing = torch.zeros(LARGE_BYTES, dtype=torch.uint8)
        self._payload = torch.ones(LARGE_BYTES, dtype=torch.uint8)
        links.set_handler(Kind.TAKEN, self._count)
        links.set_handler(Kind.PIECE, self._land)
        links.set_handler(Kind.STORE_PIECE, self._leave)

    def turn(self) -> dict[str, float]:
        """Return the figures of one turn. Those of rank 0 count."""
        found = {"half_round_trip_us": self._round_trips(), "at_once_us": self._burst(NUM_AT_ONCE, Channel.CONTROL)}
        for name, peer in (("beside_channel_us", 1), ("beside_peer_us", 2)):
            with self._waiting_payload(peer, Channel.GRADIENTS):
                found[name] = self._burst(NUM_BESIDE, (Channel.GRADIENTS, Channel.TOKENS)[peer == 1])
        cpu_s = time.process_time()
        pieces_s = self._payloads(NUM_PIECES, PIECE_BYTES)
        used_s = sum(map(float, self.links.all_gather("CPU seconds", repr(time.process_time() - cpu_s).encode())[:2]))
        found["pieces_gb_per_s"] = NUM_PIECES * PIECE_BYTES / pieces_s / 1e9
        found["pieces_cpu_s_per_gb"] = used_s / (NUM_PIECES * PIECE_BYTES / 1e9)
        found["large_gb_per_s"] = LARGE_BYTES / self._payloads(1, LARGE_BYTES) / 1e9
        return found

    def _round_trips(self) -> float:
        self._begin()
        began_s = time.perf_counter()
        if self.rank < 2:
            for number in range(1, NUM_ROUND_TRIPS + 1):
                if self.rank == 1:
                    self._await(number)
                self.links.send(1 - self.rank, Kind.TAKEN)
                if self.rank == 0:
                    self._await(number)
        return (time.perf_counter() - began_s) / NUM_ROUND_TRIPS / 2 * 1e6

    def _burst(self, number: int, channel: Channel) -> float:
        def send() -> None:
            for _ in range(number):
                self.links.send(1, Kind.TAKEN, channel=channel)

        return self._sent(send, number) / number * 1e6

    def _payloads(self, number: int, num_bytes: int) -> float:
        def send() -> None:
            for _ in range(number):
                self.links.send(1, Kind.PIECE, payload=self._payload[:num_bytes], channel=Channel.GRADIENTS)

        return self._sent(send, number)

    def _sent(self, send: Callable[[], None], number: int) -> float:
        """Return the seconds until rank 1 has all of ``number`` messages."""
        self._begin()
        began_s = time.perf_counter()
        if self.rank == 0:
            send()
            self._await(1)
        elif self.rank == 1:
            self._await(number)
            self.links.send(0, Kind.TAKEN)
        return time.perf_counter() - began_s

    @contextlib.contextmanager
    def _waiting_payload(self, peer: int, channel: Channel) -> Iterator[None]:
        """Rank 0 sends a payload that ``peer`` takes at the end."""
        self._may_take.clear()
        self.links.barrier("nobody to take")
        sending = threading.Thread(
            target=self.links.send,
            args=(peer, Kind.STORE_PIECE),
            kwargs={"payload": self._payload, "channel": channel},
        )
        if self.rank == 0:
            sending.start()
        yield
        self.links.barrier("the messages to arrive")
        assert self.rank or sending.is_alive(), "the payload was sent, although nobody has taken it"
        self._may_take.set()
        if self.rank == 0:
            sending.join()
        self.links.barrier("the payload to be taken")

    def _begin(self) -> None:
        self._num_came = 0
        self.links.barrier("all to begin")

    def _await(self, number: int) -> None:
        self.links.wait_for(lambda: self._num_came >= number, "messages")

    def _count(self, peer: int, numbers: tuple[int, ...], payload: PayloadReader | None) -> None:
        with self.links.lock:
            self._num_came += 1
            self.links.notify()

    def _land(self, peer: int, numbers: tuple[int, ...], payload: PayloadReader | None) -> None:
        assert payload is not None
        payload.read_into(self._landing[: payload.num_bytes])
        self._count(peer, numbers, None)

    def _leave(self, peer: int, numbers: tuple[int, ...], payload: PayloadReader | None) -> None:
        assert payload is not None
        self._may_take.wait(HANGS_AFTER_S)
        payload.read_into(self._landing[: payload.num_bytes])


def be_rank(rank: int, num_turns: int, folder: Path, result: Connection) -> None:
    """Measure the sides in turns. Rank 0 sends the figures of each."""
    torch.set_num_threads(1)
    os.environ["LOHAN_SOCKET_IFNAME"] = "lo"
    found: dict[str, dict[str, list[float]]] = {side: {name: [] for name in FIGURES} for side in SIDES}
    with contextlib.ExitStack() as closing:
        sides = {}
        for side, num_local in SIDES.items():
            store = dist.FileStore(str(folder / side), len(SIDES) + 1)
            links = connect(Ranks(rank, 3, rank % num_local, num_local), store, HANGS_AFTER_S)
            sides[side] = Measured(closing.enter_context(links))
        for turn in range(1 + num_turns):  # the first one warms up
            for side, measured in sides.items():
                for name, figure in measured.turn().items():
                    if turn:
                        found[side][name].append(figure)
        if rank == 0:
            result.send(found)
        sides["TCP"].links.barrier("the end")


@benchmark("transport", num_turns=7)
def main(options: Options) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    with folder_in(options.store) as folder:
        receiving, sending = context.Pipe()
        arguments = (options.num_turns, folder.resolve(), sending)
        processes = [context.Process(target=be_rank, args=(rank, *arguments), daemon=True) for rank in range(3)]
        try:
            for process in processes:
                process.start()
            sending.close()
            found = receiving.recv()
            for process in processes:
                process.join()
        finally:
            for process in processes:
                process.kill()
    table = table_of("ranks of one machine, medians", "", *SIDES)
    figures: dict[str, Any] = {}
    for name, label in FIGURES.items():
        figures |= spread(name, {side: found[side][name] for side in SIDES})
        digits = 0 if name.endswith("us") else 2
        table.add_row(label, *(f"{figures[name][side]:.{digits}f}" for side in SIDES))
    Console().print(table)
    return figures


if __name__ == "__main__":
    typer.run(main)
