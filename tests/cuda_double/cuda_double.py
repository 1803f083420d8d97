"""The Python side of the CUDA double: installs its kernels when torch is imported, counts calls and finds callers.

torch loads it through its entry point (`torch.backends`), so a program on the double need not import it.

    python -m cuda_double FOLDER    # sums up the reports of CUDA_DOUBLE_REPORT; exits with status 1 for violations
"""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

VIOLATION = "VIOLATION: "
_KERNELS = Path(__file__).parent / "cuda_double_kernels.so"
_LISTENER = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_longlong, ctypes.c_uint)


@cache
def _runtime() -> ctypes.CDLL:
    return ctypes.CDLL("libcudart.so.13", mode=ctypes.RTLD_GLOBAL)


def autoload() -> None:
    """Called by torch when it is imported."""
    if _is_on("COMPUTE", otherwise=True):
        kernels = ctypes.CDLL(str(_KERNELS))
        kernels.cuda_double_install_kernels()
        if _is_on("POISON"):
            kernels.cuda_double_poison_freed_memory()
    if folder := os.environ.get("CUDA_DOUBLE_REPORT"):
        atexit.register(write_report, Path(folder))
    atexit.register(_runtime().cuda_double_drain_all)  # runs first, before the objects that streams use


def _is_on(name: str, otherwise: bool = False) -> bool:
    return os.environ.get(f"CUDA_DOUBLE_{name}", str(int(otherwise))) not in ("", "0")


def write_report(folder: Path) -> None:
    """Write the counts of this process to a file in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = "".join(f"{name}\t{number}\n" for name, number in counts().items())
    (folder / f"{os.getpid()}.tsv").write_text(rows, encoding="utf-8")


def counts() -> dict[str, int]:
    """Return counts since `reset` by name: "cudaMalloc", "copy h2d bytes", "blocking: cudaStreamSynchronize", ..."""
    size = _runtime().cuda_double_write_counts(ctypes.create_string_buffer(1), 1) + 65536  # others may count meanwhile
    text = ctypes.create_string_buffer(size)
    _runtime().cuda_double_write_counts(text, size)
    rows = (line.rsplit("\t", 1) for line in text.value.decode(errors="replace").splitlines())
    return {name: int(number) for name, number in rows}


def reset() -> None:
    """Reset all counts except violations, so that one test cannot hide the violations of another."""
    _runtime().cuda_double_reset_counts()


def violations() -> dict[str, int]:
    """Return the number of each violation in this process: races, reads of poison, writes past an allocation's end."""
    return {name[len(VIOLATION) :]: number for name, number in counts().items() if name.startswith(VIOLATION)}


def drain() -> None:
    """Wait until all streams are done. Does not count as a synchronization."""
    _runtime().cuda_double_drain_all()


def fail_allocation(number: int) -> None:
    """Make the `number`-th device allocation from now on fail, and the caching allocator's retry. 0 disables this.

    `counts()["device allocations"]` is the number of allocations. The caching allocator makes few; with
    PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True it makes more.
    """
    _runtime().cuda_double_fail_allocation(ctypes.c_long(number))


@contextmanager
def pin_limit(num_bytes: int) -> Iterator[None]:
    """Context in which more pinned memory than this is refused, as by WSL2 or a low memlock limit."""
    with _limit(_runtime().cuda_double_set_pin_limit, num_bytes):
        yield


@contextmanager
def device_memory(num_bytes: int) -> Iterator[None]:
    """Context with another size of the device's memory."""
    with _limit(_runtime().cuda_double_set_memory, num_bytes):
        yield


@contextmanager
def _limit(set_limit: Any, num_bytes: int) -> Iterator[None]:
    set_limit.restype = ctypes.c_longlong
    former = set_limit(ctypes.c_longlong(num_bytes))
    try:
        yield
    finally:
        set_limit(ctypes.c_longlong(former))


class Callers:
    """Counts the callers of calls whose names begin with one of `prefixes`:

        with Callers("sync:", "cudaMalloc", inside="hf_lohan") as callers:
            step()
        print(callers)

    `found` counts them by (call, thread name, Python frames in files whose path contains `inside`, innermost first). If
    no such frame exists, the key has all frames. `bytes` has the same keys. Use one object at a time.
    """

    def __init__(self, *prefixes: str, inside: str = "hf_lohan", depth: int = 3) -> None:
        self._prefixes, self._inside, self._depth = prefixes, inside, depth
        self.found: Counter[tuple[str, str, str]] = Counter()
        self.bytes: Counter[tuple[str, str, str]] = Counter()
        self._callback = _LISTENER(self._hear)

    def _hear(self, what: bytes, num_bytes: int, stream: int) -> None:
        text = what.decode(errors="replace")
        if not text.startswith(self._prefixes):
            return
        key = (f"{text} [stream {stream}]", threading.current_thread().name.rstrip("0123456789-_"), self._frames())
        self.found[key] += 1
        self.bytes[key] += num_bytes

    def _frames(self) -> str:
        frames = traceback.extract_stack(sys._getframe(2))[::-1]
        inside = [frame for frame in frames if self._inside in frame.filename] or frames
        places = (f"{'/'.join(Path(frame.filename).parts[-2:])}:{frame.lineno} {frame.name}" for frame in inside)
        return " < ".join(list(places)[: self._depth])

    def __enter__(self) -> Callers:
        _runtime().cuda_double_set_listener(self._callback)
        return self

    def __exit__(self, *exception: object) -> None:
        _runtime().cuda_double_set_listener(ctypes.cast(None, _LISTENER))

    def __str__(self) -> str:
        return "\n".join(
            f"{number:6d}  {self.bytes[key]:>14,} B  {what}  ({thread})  {frames}"
            for key, number in self.found.most_common()
            for what, thread, frames in [key]
        )


def summarize(folder: Path) -> tuple[str, bool]:
    """Sum up the reports in `folder`. Returns the text and whether the run had no violation."""
    total: Counter[str] = Counter()
    reports = sorted(folder.glob("*.tsv"))
    for report in reports:
        for line in report.read_text(encoding="utf-8").splitlines():
            name, _, number = line.rpartition("\t")
            total[name] += int(number)
    wrong = {name[len(VIOLATION) :]: number for name, number in total.items() if name.startswith(VIOLATION)}
    races = sum(number for name, number in wrong.items() if name.startswith("race"))
    poison = sum(number for name, number in wrong.items() if name.startswith("poison"))
    others = sum(wrong.values()) - races - poison
    lines = [f"{number} times: {name}" for name, number in wrong.items()]
    lines.append(
        f"cuda double: {total['tasks']} tasks in {len(reports)} processes; {races} races, {poison} reads of poison, "
        f"{others} other violations"
    )
    return "\n".join(lines), not wrong


if __name__ == "__main__":
    text, is_fine = summarize(Path(sys.argv[1]))
    print(text)
    sys.exit(not is_fine)
