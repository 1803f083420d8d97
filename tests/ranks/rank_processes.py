"""Ranks that are processes and connect through a store of the test."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import torch.distributed as dist

from hf_lohan.ranks import Links, Ranks, connect

CONTEXT = multiprocessing.get_context("forkserver")
HANGS_AFTER_S = 60.0
CONNECTS_WITHIN_S = 30.0


@dataclass
class Ended:
    """The result or error of a rank."""

    result: Any = None
    error: str = ""


class RankProcesses:
    """Runs a function in processes. Its arguments are `Links` and a function that reports a value to the test."""

    def __init__(
        self,
        num_ranks: int,
        function: Callable[[Links, Callable[[object], None]], object],
        *,
        num_local: int | None = None,
        timeout_s: float = 30.0,
        environment: dict[str, str] | None = None,
        rank_0_has_store: bool = False,
        end_interpreters: bool = False,
    ) -> None:
        """``rank_0_has_store``: the store ends with the process of rank 0, and not with this one.
        ``end_interpreters``: interpreters end as at the end of a script, which a forked process leaves out."""
        if rank_0_has_store:
            with socket.create_server(("127.0.0.1", 0)) as server:
                port = server.getsockname()[1]
        else:
            self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            port = self._store.port
        self.connections: list[Connection] = []
        self.processes = []
        num_local = num_local or num_ranks
        for rank in range(num_ranks):
            ranks = Ranks(rank, num_ranks, rank % num_local, num_local)
            ours, theirs = CONTEXT.Pipe()
            process = CONTEXT.Process(
                target=_run,
                args=(
                    *(function, ranks, port, rank_0_has_store, end_interpreters),
                    *(timeout_s, environment or {}, theirs, sys.path),
                ),
                daemon=True,
            )
            process.start()
            theirs.close()
            self.connections.append(ours)
            self.processes.append(process)

    def report_of(self, rank: int) -> Any:
        """Return the next report of a rank, or its `Ended`."""
        if not self.connections[rank].poll(HANGS_AFTER_S):
            raise AssertionError(f"rank {rank} reported nothing")
        return self.connections[rank].recv()

    def ends(self) -> list[Ended | None]:
        """Return how each rank ended. None is a killed rank."""
        found: list[Ended | None] = [None] * len(self.connections)
        open_ones = dict(zip(self.connections, range(len(self.connections)), strict=True))
        until_s = time.monotonic() + HANGS_AFTER_S
        while open_ones:
            ready = wait(list(open_ones), until_s - time.monotonic())
            assert ready, f"ranks {list(open_ones.values())} hang"
            for connection in ready:
                assert isinstance(connection, Connection)
                try:
                    said = connection.recv()
                except EOFError:
                    del open_ones[connection]
                    continue
                if isinstance(said, Ended):
                    found[open_ones[connection]] = said
        for process in self.processes:
            process.join(HANGS_AFTER_S)
        return found

    def exit_codes(self, of_ranks: Sequence[int]) -> list[int | None]:
        """Return the exit codes of processes, in time; None if one hangs."""
        until_s = time.monotonic() + HANGS_AFTER_S
        for rank in of_ranks:
            self.processes[rank].join(max(0.0, until_s - time.monotonic()))
        return [self.processes[rank].exitcode for rank in of_ranks]

    def assert_killed_and_named(self, rank: int) -> None:
        """Check that a rank that reports before it is killed ends all others by an error that names it, and not by a
        timeout."""
        self.report_of(rank)
        ends = self.ends()
        assert ends[rank] is None
        for end in (*ends[:rank], *ends[rank + 1 :]):
            assert end is not None
            assert re.search(rf"RankFailedError: rank {rank} \(pid \d+, \S+\) ended", end.error), end.error

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def _run(
    function: Callable[[Links, Callable[[object], None]], object],
    ranks: Ranks,
    port: int,
    rank_0_has_store: bool,
    end_interpreter: bool,
    timeout_s: float,
    environment: dict[str, str],
    connection: Connection,
    path: list[str],
) -> None:
    sys.path[:] = path
    os.environ.update(environment)
    gc.freeze()  # at the interpreter's end, Python would look for garbage in all modules
    ended, code = Ended(), 0
    try:
        has_store = rank_0_has_store and ranks.rank == 0
        store = dist.TCPStore("127.0.0.1", port, is_master=has_store, wait_for_workers=False)
        links = connect(ranks, store, CONNECTS_WITHIN_S)
        links.watch.timeout_s = timeout_s
        ended.result = function(links, connection.send)
        if not end_interpreter:
            links.close()
    except BaseException as error:
        ended.error, code = f"{type(error).__name__}: {error}", 1
        sys.last_value = error
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    connection.send(ended)
    sys.stdout.flush()
    sys.stderr.flush()
    ctypes.pythonapi.Py_Exit(code) if end_interpreter else os._exit(code)
