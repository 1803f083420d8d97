"""A run of several ranks in which one rank has a fault at a chosen instant."""

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

ENDS_WITHIN_S = 30.0
NET_TIMEOUT_S = 6
"""Longer than a healthy rank is silent on a busy machine."""
HOLDS_AFTER = 8
"""Each process waits for the parent after this many steps, so that a fault happens before the run ends."""
Fault = Literal["killed", "hangs", "disk full"]


class Ended(NamedTuple):
    """How the healthy ranks ended."""

    fault: Fault
    victim: int
    after_step: int
    took_s: float
    """Seconds until the last of them ended. The time starts at the fault, at the timeout of a hang, or at the report of
    a full disk."""
    errors: list[str]


class RankRun:
    """All processes of a run, which can be started several times."""

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
        """Train to the end, check that all ranks succeed and return the outcome of each rank."""
        children = self.start()
        codes = [child.end() for child in children]
        assert not any(codes), f"exit codes {codes}:\n" + "\n".join(child.output_tail() for child in children)
        return self.outcomes()

    def outcomes(self) -> list[Outcome]:
        return [read_outcome(self.folder / f"rank-{rank}") for rank in self.ranks]

    def check_against(self, undisturbed: list[Outcome]) -> None:
        """Resume, train to the end and check that all ranks equal a run without faults bit for bit."""
        for ours, whole in zip(self.finish(), undisturbed, strict=True):
            assert_same(ours, whole)

    def store_of(self, rank: int) -> Path:
        return self.run.output_dir / "_lohan" / "store" / f"rank-{rank}-of-{self.run.num_ranks}"

    @contextlib.contextmanager
    def small_disk(self, rank: int) -> Iterator[Path]:
        """Context in which the store of one rank is on a separate small disk."""
        with small_file_system(self.folder, 64 * MIB, at=self.store_of(rank)) as disk:
            yield disk

    def befall(self, fault: Fault, victim: int, random: Random) -> Ended:
        """Start all ranks, cause a fault in one within a few steps, and check how all of them end."""
        before = self._committed_step()
        children = self.start(Mishap(holds_at=before + HOLDS_AFTER))
        target = children[victim]
        others = [child for child in children if child is not target]
        # Loading and planning, which have no timeout, last until two steps have ended.
        num_steps = random.randint(3 if fault == "hangs" else 0, 4)
        reported = target.wait_for("stepped", num_steps) if num_steps else target.wait_for("begun")
        assert reported, target.output_tail()
        target.lives_for(random.random() * 0.5)
        if fault == "disk full":
            fill(str(self.store_of(victim) / "any"))
        else:
            target.send_signal(signal.SIGKILL if fault == "killed" else signal.SIGSTOP)
        may_take_s = ENDS_WITHIN_S + (NET_TIMEOUT_S if fault == "hangs" else 0.0)
        for child in children:
            child.go_on()
        if fault == "disk full":
            target.wait_for("failed")  # the rank may compute for long before it writes
        began_s = time.monotonic()
        concerned = children if fault == "disk full" else others
        in_time = [self._ends_until(child, began_s + may_take_s) for child in concerned]
        took_s = time.monotonic() - began_s - (NET_TIMEOUT_S if fault == "hangs" else 0.0)
        if fault == "hangs":
            woken_s = time.monotonic()
            target.send_signal(signal.SIGCONT)
            # A rank that was stopped in a collective of torch ends at the collective's own timeout.
            in_time.append(self._ends_until(target, woken_s + NET_TIMEOUT_S + ENDS_WITHIN_S))
            print(f"the rank that hung ended {time.monotonic() - woken_s:.2f} s after it was woken: ", end="")
        codes = [child.end() for child in children]
        if fault == "disk full":
            assert take_ballast_away(self.store_of(victim))
        outputs = "\n".join(f"rank {child.run.rank}: {child.output_tail()}" for child in children)
        assert all(in_time), f"not all ended within {may_take_s} s of their fault:\n{outputs}"
        assert codes[victim] == (-signal.SIGKILL if fault == "killed" else FAILED), outputs
        self._check_words(fault, target, others)
        after = self._committed_step()
        assert before <= after <= before + HOLDS_AFTER
        return Ended(fault, victim, after, took_s, [child.error for child in others])

    def _ends_until(self, child: Child, until_s: float) -> bool:
        """Return whether the process ends in time. If not, make it write the stacks of its threads."""
        if not child.lives_for(max(0.0, until_s - time.monotonic())):
            return True
        child.send_signal(TELL_STACKS)
        return False

    def _check_words(self, fault: Fault, target: Child, others: list[Child]) -> None:
        named = rf"rank {target.run.rank} \(pid {target.pid}, \S+\)"
        pattern = {
            "killed": rf"RankFailedError: {named} ended.* while rank \d ",
            "hangs": rf"Rank(Timeout|Failed)Error: {named} was silent for \d+ s while rank",
            "disk full": rf"RankFailedError: {named} failed: \w+: .*{re.escape(str(self.store_of(target.run.rank)))}",
        }[fault]
        for child in others:
            assert re.match(pattern, child.error), child.error
            assert child.error in child.output_tail(), "stderr does not say why the run ended"
        if fault == "disk full":
            assert str(self.store_of(target.run.rank)) in target.error, target.error

    def _committed_step(self) -> int:
        return hf_lohan.last_step(self.run.output_dir) or 0
