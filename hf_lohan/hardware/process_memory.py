"""Anonymous memory of this process: what budgets are about. (RSS also counts page cache, which costs nothing.)"""

from __future__ import annotations

import threading
from pathlib import Path

import psutil

_SAMPLE_INTERVAL_S = 0.05


def anonymous_memory_bytes() -> int:
    """RssAnon of this process; where the kernel does not tell, its resident set less shared pages."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    info = psutil.Process().memory_info()
    return int(info.rss - getattr(info, "shared", 0))


class AnonymousMemoryPeak:
    """Samples anonymous memory on a thread, from `start` to `stop`, and keeps the highest value seen."""

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._recent_peak_bytes = 0
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        if self._thread is None:
            self._stopped.clear()
            self._thread = threading.Thread(target=self._run, name="lohan-memory-peak", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        if self._thread is not None:
            self._stopped.set()
            self._thread.join()
            self._thread = None
            self.sample()

    def _run(self) -> None:
        while not self._stopped.wait(_SAMPLE_INTERVAL_S):
            self.sample()

    def sample(self) -> None:
        """Look once, now."""
        now_bytes = anonymous_memory_bytes()
        self.peak_bytes = max(self.peak_bytes, now_bytes)
        self._recent_peak_bytes = max(self._recent_peak_bytes, now_bytes)

    def take_recent_peak(self) -> int:
        """The highest value since this was called last, the present one included."""
        self.sample()
        recent_peak_bytes, self._recent_peak_bytes = self._recent_peak_bytes, 0
        return recent_peak_bytes
