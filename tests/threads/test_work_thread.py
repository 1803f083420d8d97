"""A thread that is told what to do, from the outside."""

from __future__ import annotations

import os
import threading

import pytest

from hf_lohan.threads import FirstFailure, WorkThread


def started() -> WorkThread:
    thread = WorkThread("test", FirstFailure())
    thread.start()
    return thread


def test_who_waits_for_a_thread_that_died_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon thread is gone when the interpreter ends, or after an interrupt at a bad moment."""
    monkeypatch.setattr(threading, "excepthook", lambda arguments: None)
    thread = started()
    monkeypatch.setattr(thread, "_try", lambda work: 1 // 0)
    thread.submit(lambda: None)
    with pytest.raises(RuntimeError, match="the engine is closed"):
        thread.barrier()


def test_a_forked_child_is_told_that_it_has_no_thread_and_closes_nothing() -> None:
    thread = started()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            thread.close()
            thread.barrier()
        except RuntimeError as error:
            code = 0 if "forked child" in str(error) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert thread.call(lambda: 5) == 5
    thread.close()
