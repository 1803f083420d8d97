"""The parent's side: start processes that train and end them at chosen instants."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.forkserver as forkserver
import os
import signal
import sys
import time
from dataclasses import replace
from multiprocessing.connection import wait
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from random import Random
from typing import NamedTuple

import pytest
from runs import TELL_STACKS, Mishap, Report, Run, train

import hf_lohan

CONTEXT = multiprocessing.get_context("forkserver")
HANGS_AFTER_S = 60.0
TELLS_WITHIN_S = 5.0
OUTPUT_TAIL_CHARS = 16_000
"""Enough for the stacks of a dozen threads."""
STEPS_GONE_ON = {signal.SIGTERM: 1.5}
"""How many more steps a process completes, on average, after the report that triggered the signal."""


def start_fork_server(*, preload: str) -> None:
    """Start a fork server that has imported `preload`, so that forked processes need not import it."""
    forkserver._forkserver._stop()  # other tests may have started a server with other imports
    CONTEXT.set_forkserver_preload([preload])
    # Python 3.11's fork server inherits the environment but not `sys.path`, and hides failed imports.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        ensure_running()


class Child:
    """A process that trains and sends reports."""

    def __init__(self, run: Run, mishap: Mishap | None = None) -> None:
        self.run = run
        self.reports: list[tuple[Report, float]] = []
        """Each report with its time of arrival."""
        self.connection, theirs = CONTEXT.Pipe()
        self._process = CONTEXT.Process(target=train, args=(run, mishap or Mishap(), theirs), daemon=True)
        self._process.start()
        theirs.close()
        assert self._process.pid is not None
        self.pid = self._process.pid
        self._pidfd = os.pidfd_open(self.pid)  # never signals another process that reuses the pid

    def wait_for(self, what: str, count: int = 1) -> bool:
        """Wait for `count` reports of `what`. Return False if the process ends before."""
        while self.num_reports(what) < count:
            if not self.connection.poll(HANGS_AFTER_S):
                self._give_up(f"no report of {what!r}")
            if not self._receive():
                return False
        return True

    def lives_for(self, duration_s: float) -> bool:
        """Wait for this duration. Return False as soon as the process ends."""
        return not wait([self._process.sentinel], duration_s)

    def send_signal(self, number: int) -> None:
        """Send a signal unless the process has ended."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, number)

    def go_on(self) -> None:
        """Release a process that its mishap holds. Do nothing if the process has ended."""
        with contextlib.suppress(OSError):
            self.connection.send("go on")

    def end(self) -> int:
        """Wait until the process ends and return its exit code as `Popen.returncode` would."""
        while self.connection.poll(HANGS_AFTER_S):
            if not self._receive():
                break
        self._process.join(HANGS_AFTER_S)
        code = self._process.exitcode
        if code is None:
            self._give_up("it does not end")
        os.close(self._pidfd)
        self.connection.close()
        assert code is not None
        return code

    def num_reports(self, what: str) -> int:
        return sum(report.what == what for report, _ in self.reports)

    @property
    def last_step(self) -> int:
        """The last step reported as completed, or the step that training began from."""
        return max((report.step for report, _ in self.reports), default=0)

    @property
    def error(self) -> str:
        """The error of the process, or "" if it did not fail."""
        return next((report.text for report, _ in self.reports if report.what == "failed"), "")

    @property
    def num_write_calls(self) -> int:
        return int(next(report.text for report, _ in self.reports if report.what == "finished"))

    def output_tail(self) -> str:
        path = self.run.beside / "output.txt"
        return path.read_text(errors="replace")[-OUTPUT_TAIL_CHARS:] if path.exists() else "(no output)"

    def _receive(self) -> bool:
        try:
            self.reports.append((self.connection.recv(), time.monotonic()))
        except (EOFError, OSError):  # the process ended, maybe in the middle of a report
            return False
        return True

    def _give_up(self, reason: str) -> None:
        """Fail the test with the Python and kernel position of each thread."""
        tasks = sorted(Path(f"/proc/{self.pid}/task").glob("*"))
        in_kernel = [f"{_text(task / 'comm')}: {_text(task / 'wchan')}" for task in tasks]
        self.send_signal(TELL_STACKS)
        self.lives_for(TELLS_WITHIN_S)
        self.send_signal(signal.SIGKILL)
        state = f"load {os.getloadavg()[0]:.1f}, threads in the kernel: {', '.join(in_kernel) or 'none'}"
        pytest.fail(f"process {self.pid} hangs, {reason}; {state}\n{self.output_tail()}")


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:  # the thread has ended
        return "?"


def finish(run: Run, mishap: Mishap | None = None) -> Child:
    """Train to the end in one process and check that it succeeds."""
    child = Child(run, mishap)
    code = child.end()
    assert code == 0, f"exit code {code}:\n{child.output_tail()}"
    return child


class Interruption(NamedTuple):
    """How one process of a run ended. Step 0 means that no step was completed."""

    after: str
    exit_code: int
    reported_step: int
    committed_step: int


class Interrupter:
    """Ends one process of a run after another, each at a random instant after a random report. Enough steps remain that
    the run is never finished by these processes."""

    def __init__(self, run: Run, seed: int) -> None:
        self.run = run
        self._random = Random(seed)
        self._pause_s = {"started": 0.5, "begun": 0.2, "stepped": 0.1}
        """The last measured time between one report and the next."""

    def interrupt(self, number: signal.Signals, count: int, kinds: tuple[str, ...]) -> list[Interruption]:
        """Signal `count` processes one after another, each after a report of one of these kinds."""
        done: list[Interruption] = []
        for num_left in range(count, 0, -1):
            num_steps_left = self.run.num_steps - self._committed_step()
            share = num_steps_left / num_left - STEPS_GONE_ON.get(number, 0)
            most_steps = min(max(1, int(2 * share)), (num_steps_left - 4) // 2)
            after = self._random.choice(kinds if most_steps > 0 else kinds[:1])
            num_steps = self._random.randint(1, max(1, most_steps))
            # If a busy machine sends the signal late, the process is still waiting, with one step left per later
            # process.
            holds = Mishap(holds_at=self.run.num_steps - num_left)
            done.append(self._one(number, after, num_steps if after == "stepped" else 1, holds))
        return done

    def _one(self, number: int, after: str, num_reports: int, holds: Mishap) -> Interruption:
        child = Child(self.run, holds)
        if child.wait_for(after, num_reports):
            child.lives_for(self._random.random() * 1.2 * self._pause_s[after])
        child.send_signal(number)
        child.go_on()
        code = child.end()
        assert not child.error, f"{child.error}\n{child.output_tail()}"
        assert code >= 0 or code == -number, f"exit code {code}:\n{child.output_tail()}"
        for (report, begin_s), (_, end_s) in zip(child.reports, child.reports[1:], strict=False):
            self._pause_s[report.what] = end_s - begin_s
        return Interruption(after, code, child.last_step, self._committed_step())

    def _committed_step(self) -> int:
        return hf_lohan.last_step(self.run.output_dir) or 0


def run_in(folder: Path, run: Run) -> Run:
    """Return the same run with its folders in `folder`."""
    return replace(run, output_dir=folder / "out", beside=folder)
