"""Applies torch's settings of one thread to another, and runs work that no signal handler interrupts."""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import TypeVar

import torch

from hf_lohan.threads.work_thread import CHECK_INTERVAL_S

_Value = TypeVar("_Value")


class ThreadSettings:
    """Torch's per-thread settings that affect a forward. These are gradient recording, autocast, the default device and
    the number of kernel threads. Modes and saved-tensor hooks are not included."""

    def __init__(self, device_type: str) -> None:
        """Capture the calling thread's settings, for models on devices of this type."""
        self._records = torch.is_grad_enabled()
        self._default_device = torch.get_default_device()
        self._caches_casts = torch.is_autocast_cache_enabled()
        self._num_threads = torch.get_num_threads()
        self._autocast = {
            kind: torch.get_autocast_dtype(kind)
            for kind in dict.fromkeys((device_type, "cpu"))
            if torch.is_autocast_enabled(kind)
        }

    @contextlib.contextmanager
    def applied(self, *others: contextlib.AbstractContextManager[object]) -> Iterator[None]:
        """Apply these settings to the calling thread in this context, and enter ``others`` too."""
        with contextlib.ExitStack() as stack:
            # A new thread has the number that any thread set last, perhaps temporarily. Sums depend on this number.
            if torch.get_num_threads() != self._num_threads:
                torch.set_num_threads(self._num_threads)
            for other in others:
                stack.enter_context(other)
            stack.enter_context(torch.set_grad_enabled(self._records))
            if self._default_device.type != "cpu":
                stack.enter_context(self._default_device)
            for kind, dtype in self._autocast.items():
                stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=self._caches_casts))
            yield


def uninterrupted(work: Callable[[], _Value], settings: ThreadSettings) -> _Value:
    """Run ``work`` with ``settings`` on a new thread, on which Python calls no signal handlers. Returns or raises as
    ``work`` does. An interrupt of the calling thread is raised after the work has ended, so the work must be short.
    This is for work during which torch calls Python code where an exception would end the process."""
    if threading.current_thread() is not threading.main_thread():
        return work()
    results: list[_Value] = []
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
        may_begin.put(False)  # the thread may exist, but nobody would wait for it
        raise
    interrupt: BaseException | None = None
    has_begun = False
    # After an interrupt, `Thread.join` of Python 3.10 to 3.12 treats a running thread as ended.
    while not (results or errors):
        try:
            if not has_begun:
                has_begun = True
                may_begin.put(True)
            while not (results or errors):
                ended.acquire(timeout=CHECK_INTERVAL_S)  # an interrupt may have consumed the release
        except BaseException as error:
            interrupt = interrupt or error
    if interrupt is not None:
        raise interrupt
    if errors:
        raise errors.pop()
    return results[0]
