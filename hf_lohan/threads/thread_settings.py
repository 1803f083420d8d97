"""torch's settings of one thread applied to another, and work on such a thread that no signal handler interrupts."""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import TypeVar

import torch

_Result = TypeVar("_Result")
_LOOK_S = 1.0
"""An interrupt may take away the word that the work has ended: then it shows this much later."""


class ThreadSettings:
    """What a forward depends on and torch keeps by thread, to be taken along to other threads: whether gradients are
    recorded, autocast, and the default device. What else somebody set around it (modes, hooks for what is saved) stays
    behind."""

    def __init__(self, device_type: str) -> None:
        """Those of the calling thread, for models on devices of this type."""
        self._records = torch.is_grad_enabled()
        self._default_device = torch.get_default_device()
        self._caches_casts = torch.is_autocast_cache_enabled()
        self._autocast = {
            kind: torch.get_autocast_dtype(kind)
            for kind in dict.fromkeys((device_type, "cpu"))
            if torch.is_autocast_enabled(kind)
        }

    @contextlib.contextmanager
    def applied(self, *others: contextlib.AbstractContextManager[object]) -> Iterator[None]:
        """For the thread that enters this, with what else it is to enter."""
        with contextlib.ExitStack() as stack:
            for other in others:
                stack.enter_context(other)
            stack.enter_context(torch.set_grad_enabled(self._records))
            if self._default_device.type != "cpu":
                stack.enter_context(self._default_device)
            for kind, dtype in self._autocast.items():
                stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=self._caches_casts))
            yield


def uninterrupted(work: Callable[[], _Result], settings: ThreadSettings) -> _Result:
    """What ``work`` returns or raises. It runs under ``settings`` on a thread of its own, where Python calls no handler
    of a signal. What one raises meanwhile (an interrupt) is raised when the work has ended, so keep that short.

    For work in which torch calls Python where it cannot bear an exception, and would end the process.
    """
    if threading.current_thread() is not threading.main_thread():
        return work()
    results: list[_Result] = []
    errors: list[BaseException] = []
    may_begin: SimpleQueue[bool] = SimpleQueue()
    ended = threading.Lock()
    ended.acquire()

    def run() -> None:
        if not may_begin.get():
            return
        try:
            with settings.applied():
                results.append(work())
        except BaseException as error:
            errors.append(error)
        ended.release()

    context = contextvars.copy_context()
    thread = threading.Thread(target=context.run, args=(run,), name="lohan-uninterrupted", daemon=True)
    try:
        thread.start()
    except BaseException:
        may_begin.put(False)  # there may be a thread, but nobody would wait for it
        raise
    interrupt: BaseException | None = None
    is_told = False
    # Not `Thread.join`, which takes the thread for ended when it was interrupted itself (Python 3.10 to 3.12).
    while not (results or errors):
        try:
            if not is_told:
                is_told = True
                may_begin.put(True)
            while not (results or errors):
                ended.acquire(timeout=_LOOK_S)
        except BaseException as error:
            interrupt = interrupt or error
    if interrupt is not None:
        raise interrupt
    if errors:
        raise errors.pop()
    return results[0]
