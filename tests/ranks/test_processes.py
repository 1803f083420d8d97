"""Ranks that are processes find each other, and notice when one ends."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rank_processes import RankProcesses

from hf_lohan.ranks import Links, SharedRegion

pytestmark = pytest.mark.usefixtures("fork_server")
Report = Callable[[object], None]


def gather_until_the_end(links: Links, report: Report) -> None:
    links.barrier("the start")
    report(os.getpid())
    for step in range(1_000_000):
        links.all_gather(f"the norm of step {step}", b"1")
        time.sleep(0.001)


PROGRAM = """
import sys
import torch.distributed as dist
from hf_lohan.ranks import Ranks, connect
rank, port = int(sys.argv[1]), int(sys.argv[2])
links = connect(Ranks(rank, 2, rank, 2), dist.TCPStore("127.0.0.1", port, is_master=False), 60.0)
links.barrier("the start")
if rank == 1:
    {ends}
links.barrier("the next step")
"""


@pytest.mark.slow  # each case imports torch twice
@pytest.mark.parametrize(
    ("ends", "told"),
    [
        ("raise OSError('the drive is full')", r"rank 1 \(.*\) failed: OSError: the drive is full while rank 0"),
        ("sys.exit(0)", r"rank 1 \(.*\) had ended its run while rank 0 waited for the next step"),
        ("import os; os._exit(1)", r"rank 1 \(.*\) ended while rank 0 waited for the next step"),
    ],
)
def test_a_program_that_exits_without_close_tells_others_how_it_ended(ends: str, told: str) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    programs = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM.format(ends=ends), str(rank), str(store.port)],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        for rank in range(2)
    ]
    errors = [program.communicate(timeout=120)[1] for program in programs]
    assert programs[0].returncode == 1
    assert re.search(told, errors[0]), errors[0]


def interrupt_itself(links: Links, report: Report) -> str:
    """Rank 0 interrupts its wait for rank 1, which comes later."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background process may ignore SIGINT
    late = links.open("late")
    if links.ranks.rank == 0:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            late.barrier("what comes late")
        except KeyboardInterrupt:
            links.barrier("the interrupt")
    else:
        links.barrier("the interrupt")
        late.barrier("what comes late")
    assert late.agree("what is next", b"x") == [b"x", b"x"]
    return "went on"


def test_a_waiting_rank_can_be_interrupted_and_continue() -> None:
    ranks = RankProcesses(2, interrupt_itself)
    try:
        assert [ended.result for ended in ranks.ends() if ended is not None] == ["went on"] * 2
    finally:
        ranks.close()


def share_over_the_network(links: Links, report: Report) -> tuple[float, int]:
    tensor = torch.full((1_000_003,), float(links.ranks.rank))
    links.open("weights", carries="weights").broadcast(tensor, 2, "a tensor")
    return float(tensor.sum()), links.sent_bytes["weights"]


def test_ranks_find_each_other_within_and_between_nodes() -> None:
    ranks = RankProcesses(4, share_over_the_network, num_local=2, environment={"GLOO_SOCKET_IFNAME": "lo"})
    try:
        results = [ended.result for ended in ranks.ends() if ended is not None]
    finally:
        ranks.close()
    assert results == [(2.0 * 1_000_003, 3 * 4_000_012 if rank == 2 else 0) for rank in range(4)]


def write_and_read(links: Links, report: Report) -> tuple[int, list[int], bool]:
    ranks = links.ranks
    region = SharedRegion.create(links, 3 * 4096 + 5, "test")
    region.bytes[ranks.local_rank] = 1 + ranks.rank
    links.barrier("all have written")
    read = region.bytes[: ranks.num_local].tolist()
    links.barrier("all have read")
    inherited = os.fork() if ranks.rank == 0 else 0
    if ranks.rank == 0 and inherited == 0:
        os._exit(0)
    if inherited:
        os.waitpid(inherited, 0)
    return region.bytes.numel(), read, region.bytes.data_ptr() % 4096 == 0


def test_ranks_of_a_node_share_a_region() -> None:
    ranks = RankProcesses(4, write_and_read, num_local=2, environment={"GLOO_SOCKET_IFNAME": "lo"})
    try:
        results = [ended.result for ended in ranks.ends() if ended is not None]
    finally:
        ranks.close()
    assert results == [(12293, [1, 2], True)] * 2 + [(12293, [3, 4], True)] * 2


def hold_memory(links: Links, report: Report) -> None:
    region = SharedRegion.create(links, 8 << 20, "kept")
    region.bytes.fill_(1)
    gather_until_the_end(links, report)


def test_killed_ranks_leave_no_shared_memory() -> None:
    before = set(os.listdir("/dev/shm"))
    ranks = RankProcesses(2, hold_memory)
    try:
        pids = [ranks.report_of(rank) for rank in range(2)]
        assert "memfd:lohan-kept" in Path(f"/proc/{pids[0]}/maps").read_text()
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        assert ranks.ends() == [None, None]
    finally:
        ranks.close()
    assert not {name for name in set(os.listdir("/dev/shm")) - before if "lohan" in name and "tests" not in name}


def fork_children(links: Links, report: Report) -> tuple[str, int, bytes]:
    """Let a child, as a data loader has them, use the links and end as an interpreter does."""
    from_child, to_parent = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            links.barrier("the child")
        except RuntimeError as error:
            os.write(to_parent, str(error).encode())
        links.fail(OSError("of the child"))
        links.close()
        ctypes.pythonapi.Py_Exit(3)
    os.close(to_parent)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    links.barrier("the end")
    return "went on", status, os.read(from_child, 1000)


def test_a_forked_child_takes_no_part_and_harms_nothing() -> None:
    ranks = RankProcesses(2, fork_children)
    try:
        results = [ended.result for ended in ranks.ends() if ended is not None]
    finally:
        ranks.close()
    told = b"this is a forked child of the training process; use the model in the training process"
    assert results == [("went on", 3, told)] * 2
