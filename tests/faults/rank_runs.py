"""A run of several ranks, one of which something happens to at an instant that the test chooses."""

from __future__ import annotations

import contextlib
import re
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Literal, NamedTuple

from processes import Child
from runs import FAILED, TELL_STACKS, Mishap, Outcome, Run, assert_same, read_outcome
from small_file_system import MIB, fill, small_file_system, take_ballast_away

import hf_lohan

ENDS_WITHIN_S = 5.0
NET_TIMEOUT_S = 6
"""So long a rank may be silent on a busy machine."""
HOLDS_AFTER = 8
"""Steps after which a process waits for the parent, so that what befalls it does so before its run is over."""
Fault = Literal["killed", "hangs", "disk full"]


class Ended(NamedTuple):
    """How the ranks ended that nothing had happened to."""

    fault: Fault
    victim: int
    after_step: int
    took_s: float
    """To the end of the last of them: from the fault; where a rank hangs from the end of its time, and where its disk
    is full from its word that it failed."""
    errors: list[str]


class RankRun:
    """All processes of a run, and what becomes of it if they are started again and again."""

    def __init__(self, run: Run, folder: Path) -> None:
        self.folder = folder
        self.run = replace(run, output_dir=folder / "out")
        self.ranks = range(run.num_ranks)
        for rank in self.ranks:
            (folder / f"rank-{rank}").mkdir()

    def start(self, mishap: Mishap | None = None) -> list[Child]:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        runs = [replace(self.run, rank=rank, port=port, beside=self.folder / f"rank-{rank}") for rank in self.ranks]
        return [Child(run, mishap) for run in runs]

    def finish(self) -> list[Outcome]:
        """Train to the end, which must succeed; what each rank came to."""
        children = self.start()
        codes = [child.end() for child in children]
        assert not any(codes), f"exit codes {codes}:\n" + "\n".join(child.output_tail() for child in children)
        return [read_outcome(self.folder / f"rank-{rank}") for rank in self.ranks]

    def check_against(self, undisturbed: list[Outcome]) -> None:
        """Go on to the end: to the bit as if nothing had happened, on all ranks."""
        for ours, whole in zip(self.finish(), undisturbed, strict=True):
            assert_same(ours, whole)

    def store_of(self, rank: int) -> Path:
        return self.run.output_dir / "_lohan" / "store" / f"rank-{rank}-of-{self.run.num_ranks}"

    @contextlib.contextmanager
    def small_disk(self, rank: int) -> Iterator[Path]:
        """For the store of one rank, until this is left."""
        with small_file_system(self.folder, 64 * MIB, at=self.store_of(rank)) as disk:
            yield disk

    def befall(self, fault: Fault, victim: int, random: Random) -> Ended:
        """Start all ranks, let one meet with a fault within a few steps, and see how all of them end."""
        before = self._committed_step()
        children = self.start(Mishap(holds_at=before + HOLDS_AFTER))
        there = children[victim]
        others = [child for child in children if child is not there]
        # Until two steps have ended, a rank may take as long as it takes to load a model and to plan.
        num_steps = random.randint(3 if fault == "hangs" else 0, 4)
        reported = there.wait_for("stepped", num_steps) if num_steps else there.wait_for("begun")
        assert reported, there.output_tail()
        there.lives_for(random.random() * 0.5)
        if fault == "disk full":
            fill(str(self.store_of(victim) / "any"))
        else:
            there.send_signal(signal.SIGKILL if fault == "killed" else signal.SIGSTOP)
        may_take_s = ENDS_WITHIN_S + (NET_TIMEOUT_S if fault == "hangs" else 0.0)
        for child in children:
            child.go_on()
        if fault == "disk full":
            there.wait_for("failed")  # it may compute long before it needs the disk
        began_s = time.monotonic()
        concerned = children if fault == "disk full" else others
        in_time = [self._ends_until(child, began_s + may_take_s) for child in concerned]
        took_s = time.monotonic() - began_s - (NET_TIMEOUT_S if fault == "hangs" else 0.0)
        if fault == "hangs":
            woken_s = time.monotonic()
            there.send_signal(signal.SIGCONT)
            # If it hung within a collective of torch's, that goes on to the end of its own time.
            in_time.append(self._ends_until(there, woken_s + NET_TIMEOUT_S + ENDS_WITHIN_S))
            print(f"the rank that hung ended {time.monotonic() - woken_s:.2f} s after it was woken: ", end="")
        codes = [child.end() for child in children]
        if fault == "disk full":
            assert take_ballast_away(self.store_of(victim))
        outputs = "\n".join(f"rank {child.run.rank}: {child.output_tail()}" for child in children)
        assert all(in_time), f"not all ended within {may_take_s} s of their fault:\n{outputs}"
        assert codes[victim] == (-signal.SIGKILL if fault == "killed" else FAILED), outputs
        self._check_words(fault, there, others)
        after = self._committed_step()
        assert before <= after <= before + HOLDS_AFTER
        return Ended(fault, victim, after, took_s, [child.error for child in others])

    def _ends_until(self, child: Child, until_s: float) -> bool:
        """Whether it has ended by then. If not, its output has where its threads are."""
        if not child.lives_for(max(0.0, until_s - time.monotonic())):
            return True
        child.send_signal(TELL_STACKS)
        return False

    def _check_words(self, fault: Fault, there: Child, others: list[Child]) -> None:
        named = rf"rank {there.run.rank} \(pid {there.pid}, \S+\)"
        told = {
            "killed": rf"RankFailedError: {named} ended",
            "hangs": rf"Rank(Timeout|Failed)Error: {named} said nothing for {NET_TIMEOUT_S} s while rank",
            "disk full": rf"RankFailedError: {named} failed: \w+: .*{re.escape(str(self.store_of(there.run.rank)))}",
        }[fault]
        for child in others:
            assert re.match(told, child.error), child.error
            assert child.error in child.output_tail(), "stderr does not say why the run ended"
        if fault == "disk full":
            assert str(self.store_of(there.run.rank)) in there.error, there.error

    def _committed_step(self) -> int:
        return hf_lohan.last_step(self.run.output_dir) or 0
