"""Worker threads that died or belong to the parent process."""

from __future__ import annotations

import os
import threading

import pytest

from hf_lohan.threads import FirstFailure, WorkThread


def started() -> WorkThread:
    thread = WorkThread("test", FirstFailure())
    thread.start()
    return thread


def test_a_barrier_on_a_dead_thread_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon thread dies at the end of the interpreter or from an unlucky interrupt."""
    monkeypatch.setattr(threading, "excepthook", lambda arguments: None)
    thread = started()
    monkeypatch.setattr(thread, "_try", lambda work: 1 // 0)
    thread.submit(lambda: None)
    with pytest.raises(RuntimeError, match="the engine is closed"):
        thread.barrier()


def test_a_forked_child_cannot_use_the_thread() -> None:
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
