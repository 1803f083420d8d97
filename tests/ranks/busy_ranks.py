"""Ranks with collectives under way in several lanes, of which one has a fault at a random instant."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Literal

import torch
import torch.distributed as dist
from rank_processes import RankProcesses

from hf_lohan.ranks import Links, RankLane

NUM_RANKS = 4
NET_TIMEOUT_S = 3.0
Fault = Literal["killed", "killed with a child", "stopped", "fails", "leaves", "calls another", "waits elsewhere"]
FAULTS: tuple[Fault, ...] = (
    "killed",
    "killed with a child",
    "stopped",
    "fails",
    "leaves",
    "calls another",
    "waits elsewhere",
)
Report = Callable[[object], None]


def befall_itself(links: Links, report: Report, fault: Fault) -> None:
    """Cause a fault in this rank, and report its child when it begins."""
    child = os.fork() if "child" in fault else None
    if child == 0:
        time.sleep(60)
        os._exit(0)
    report(child)
    if fault.startswith("killed"):
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault == "fails":
        raise OSError("the drive is full")
    if fault == "calls another":
        links.barrier("a save")


def work(links: Links, report: Report, *, victim: int, fault: Fault, at_s: float, num_bytes: int) -> None:
    """Send blocks and sums in two threads, and agree in the main thread, until the fault. It never ends by itself."""
    saves = links.open("saves", stops_compute=True)
    block, piece = torch.ones(num_bytes, dtype=torch.uint8), num_bytes // 16
    parts, came = torch.ones(piece * NUM_RANKS, dtype=torch.uint8), torch.empty(piece * NUM_RANKS, dtype=torch.uint8)
    sizes = [piece] * NUM_RANKS

    def send_block(lane: RankLane) -> None:
        lane.send_to_all(block, 1, "a block")

    def send_sums(lane: RankLane) -> None:
        lane.exchange(parts, sizes, came, sizes, "sums")

    def repeat(lane: RankLane, send: Callable[[RankLane], None]) -> None:
        try:
            while True:
                send(lane)
        except BaseException as error:
            links.fail(error)

    for name, send in (("blocks", send_block), ("sums", send_sums)):
        lane = links.open(name, carries="weights")
        threading.Thread(target=repeat, args=(lane, send), daemon=True).start()
    links.barrier("the start")
    began_s, step = time.monotonic(), 0
    while True:
        step += 1
        if links.ranks.rank == victim and time.monotonic() - began_s > at_s:
            befall_itself(links, report, fault)
            if fault == "leaves":
                return
            if fault == "waits elsewhere":
                saves.barrier("a save")
        links.all_gather(f"the end of step {step}", bytes(40))


@dataclass
class Outcome:
    """How the ranks without a fault ended."""

    victim: int
    errors: list[str]
    codes: list[int | None]

    def check(self) -> None:
        assert self.codes == [1] * (NUM_RANKS - 1), "a rank hangs (None) or its interpreter has aborted (-6)"
        for error in self.errors:
            assert f"rank {self.victim}" in error, error


def befall(
    fault: Fault, seed: int, num_local: int, *, num_bytes: int = 4 << 20, rank_0_has_store: bool = False
) -> Outcome:
    """Start ranks, let one have a fault, and return how the others ended."""
    random = Random(f"{fault} {seed} {num_local}")
    victim = 0 if rank_0_has_store else random.randrange(NUM_RANKS)
    at_s = random.uniform(0.1, 0.6)
    ranks = RankProcesses(
        NUM_RANKS,
        partial(work, victim=victim, fault=fault, at_s=at_s, num_bytes=num_bytes),
        num_local=num_local,
        timeout_s=NET_TIMEOUT_S,
        environment={"GLOO_SOCKET_IFNAME": "lo"},
        rank_0_has_store=rank_0_has_store,
        end_interpreters=True,
    )
    child = None
    others = [rank for rank in range(NUM_RANKS) if rank != victim]
    try:
        child = ranks.report_of(victim)
        ends = [ranks.report_of(rank) for rank in others]
        codes = ranks.exit_codes(others)
    finally:
        if child is not None:
            os.kill(child, signal.SIGKILL)
        ranks.close()
    return Outcome(victim, [end.error for end in ends], codes)


def gather_by_torch(links: Links, report: Report, *, output: str, with_child: bool) -> None:
    """Gather as an evaluation does, by torch.distributed's own group, which names nobody and may wait for ever."""
    rank = links.ranks.rank
    with open(f"{output}-{rank}", "w") as file:
        os.dup2(file.fileno(), sys.stderr.fileno())
    store = dist.FileStore(f"{output}-store", links.ranks.num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=links.ranks.num_ranks)
    links.barrier("the start")
    if rank == 1:
        befall_itself(links, report, "killed with a child" if with_child else "killed")
    dist.all_gather_object([None] * links.ranks.num_ranks, rank)


def kill_in_a_gather(output: Path, *, with_child: bool) -> tuple[list[int | None], list[str]]:
    """Kill rank 1 of three in a collective of torch's own. Returns exit codes and stderr of the others."""
    ranks = RankProcesses(3, partial(gather_by_torch, output=str(output), with_child=with_child))
    child = None
    try:
        child = ranks.report_of(1)
        codes = ranks.exit_codes([0, 2])
    finally:
        if child is not None:
            os.kill(child, signal.SIGKILL)
        ranks.close()
    return codes, [Path(f"{output}-{rank}").read_text() for rank in (0, 2)]
