"""What torch keeps by thread, taken along to another one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


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
