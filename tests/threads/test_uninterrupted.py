"""Interrupts during uninterruptible work are raised after the work. They come at chosen instants before and during
it."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest
import torch

from hf_lohan.threads import ThreadSettings, uninterrupted


class Interrupts:
    """A handler of SIGINT that records its calls."""

    def __init__(self) -> None:
        self.has_come = threading.Event()

    def __call__(self, _number: int, _frame: object) -> None:
        self.has_come.set()
        raise KeyboardInterrupt

    def come(self) -> None:
        """Send the signal and wait until the handler has been called on any thread."""
        self.has_come.clear()
        os.kill(os.getpid(), signal.SIGINT)
        assert self.has_come.wait(60)


@pytest.fixture
def interrupts() -> Iterator[Interrupts]:
    handler = Interrupts()
    before = signal.signal(signal.SIGINT, handler)
    yield handler
    signal.signal(signal.SIGINT, before)


def test_results_and_errors_of_the_work_are_passed_on() -> None:
    assert uninterrupted(lambda: 7, ThreadSettings("cpu")) == 7
    with pytest.raises(ZeroDivisionError):
        uninterrupted(lambda: 1 // 0, ThreadSettings("cpu"))


def test_the_work_runs_with_the_settings_of_the_caller() -> None:
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        settings = uninterrupted(
            lambda: (torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")), ThreadSettings("cpu")
        )
    assert settings == (False, True)


def test_interrupts_wait_for_the_end(interrupts: Interrupts) -> None:
    done: list[str] = []

    def work() -> None:
        interrupts.come()
        interrupts.come()  # a second interrupt
        done.append("all")

    before = set(threading.enumerate())
    with pytest.raises(KeyboardInterrupt):
        uninterrupted(work, ThreadSettings("cpu"))
    assert done == ["all"]
    assert len(set(threading.enumerate()) - before) <= 1, "the thread may still be ending"


def test_an_interrupt_takes_precedence_over_an_error_of_the_work(interrupts: Interrupts) -> None:
    def work() -> None:
        interrupts.come()
        raise ValueError("on purpose")

    with pytest.raises(KeyboardInterrupt):
        uninterrupted(work, ThreadSettings("cpu"))


def test_an_interrupt_before_the_work_begins_prevents_it(
    interrupts: Interrupts, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, begun = threading.Thread.start, list[str]()

    def start_interrupted(thread: threading.Thread) -> None:
        start(thread)
        monkeypatch.undo()
        interrupts.come()

    monkeypatch.setattr(threading.Thread, "start", start_interrupted)
    with pytest.raises(KeyboardInterrupt):
        uninterrupted(lambda: begun.append("work"), ThreadSettings("cpu"))
    for thread in threading.enumerate():
        if thread.name == "lohan-uninterrupted":
            thread.join()
    assert not begun


def test_a_thread_other_than_the_main_one_runs_the_work_itself() -> None:
    where: list[int] = []
    thread = threading.Thread(target=lambda: where.append(uninterrupted(threading.get_ident, ThreadSettings("cpu"))))
    thread.start()
    thread.join()
    assert where == [thread.ident]
