"""The queue of the I/O engine: the byte budget, the order of requests, and interrupts."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from data_files import EngineFactory, new_file, transfer
from storage_doubles import GatedBackend, SlowBackend

from hf_lohan.device import mapped_empty
from hf_lohan.files import IoRequest


def test_submission_waits_for_the_byte_budget(make_engine: EngineFactory, tmp_path: Path) -> None:
    backend = GatedBackend()
    engine = make_engine(backend, max_inflight_bytes=32768)
    file = new_file(engine, tmp_path)
    started: list[IoRequest] = []
    submitted = threading.Semaphore(0)

    def submit_four() -> None:
        for i in range(4):
            started.append(engine.write([transfer(file, i * 16384, mapped_empty(16384))]))
            submitted.release()

    thread = threading.Thread(target=submit_four)
    thread.start()
    for _ in range(2):
        submitted.acquire()
        backend.arrived.acquire()
    # Both threads are held at the gate, so no budget is released and the third submission must wait.
    assert len(started) == 2
    assert not any(request.done() for request in started)
    backend.gate.set()
    thread.join()
    for request in started:
        request.wait()
    assert len(started) == 4
    file.close()


def test_urgent_reads_pass_other_reads_and_reads_pass_queued_writes(make_engine: EngineFactory, tmp_path: Path) -> None:
    moved: list[tuple[str, int]] = []

    class Recording(GatedBackend):
        def read(self, fd, offset, views):  # type: ignore[no-untyped-def]
            moved.append(("read", offset))
            return super().read(fd, offset, views)

        def write(self, fd, offset, views):  # type: ignore[no-untyped-def]
            moved.append(("write", offset))
            return super().write(fd, offset, views)

    backend = Recording()
    engine = make_engine(backend, num_threads=1)
    file = new_file(engine, tmp_path)
    requests = [engine.write([transfer(file, offset, mapped_empty(4096))]) for offset in (0, 4096)]
    backend.arrived.acquire()  # the first write has begun
    for offset, is_urgent in ((8192, False), (12288, True), (16384, False)):
        requests.append(engine.read([transfer(file, offset, mapped_empty(4096))], is_urgent=is_urgent))
    backend.gate.set()
    for request in requests:
        request.wait()
    assert moved == [("write", 0), ("read", 12288), ("read", 8192), ("read", 16384), ("write", 4096)]
    file.close()


def test_many_threads_keep_within_the_budget(make_engine: EngineFactory, tmp_path: Path) -> None:
    num_running = peak = 0
    lock = threading.Lock()

    class Watching(SlowBackend):
        def write(self, fd, offset, views):  # type: ignore[no-untyped-def]
            nonlocal num_running, peak
            with lock:
                num_running += 1
                peak = max(peak, num_running)
            try:
                return super().write(fd, offset, views)
            finally:
                with lock:
                    num_running -= 1

    engine = make_engine(Watching(0.001), num_threads=4, max_inflight_bytes=20480)
    file = new_file(engine, tmp_path)

    def submit_many(first: int) -> None:
        buffer = mapped_empty(8192)
        for _ in range(10):
            engine.write([transfer(file, first * 8192, buffer)]).wait()

    threads = [threading.Thread(target=submit_many, args=(first,)) for first in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 1 <= peak <= 2, "the budget fits two writes of 8192 bytes at a time"
    assert engine.write_bytes == 6 * 10 * 8192
    file.close()


def test_a_request_above_the_budget_runs_alone(make_engine: EngineFactory, tmp_path: Path) -> None:
    backend = GatedBackend()
    engine = make_engine(backend, max_inflight_bytes=4096)
    file = new_file(engine, tmp_path)
    big = engine.write([transfer(file, 0, mapped_empty(65536))])
    small: list[IoRequest] = []
    thread = threading.Thread(target=lambda: small.append(engine.write([transfer(file, 0, mapped_empty(4096))])))
    thread.start()
    for _ in range(2):
        backend.arrived.acquire()
    assert not small, "the small request did not wait for the budget"
    backend.gate.set()
    big.wait()
    thread.join()
    small[0].wait()
    assert engine.write_bytes == 65536 + 4096
    file.close()


def test_an_interrupt_is_raised_when_no_piece_is_in_progress(
    make_engine: EngineFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = GatedBackend()
    engine = make_engine(backend, max_inflight_bytes=65536)
    file = new_file(engine, tmp_path)
    submit, num_submitted = engine._threads.submit, 0

    def interrupted(*args):  # type: ignore[no-untyped-def]
        nonlocal num_submitted
        num_submitted += 1
        if num_submitted < 3:
            return submit(*args)
        backend.arrived.acquire()
        threading.Thread(target=backend.gate.set).start()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine._threads, "submit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.write([transfer(file, 0, mapped_empty(65536))])
    assert engine.write_bytes <= 32768
    engine.write([transfer(file, 0, mapped_empty(65536))]).wait()  # needs the whole budget
    file.close()


def test_an_interrupt_right_after_a_submit_returns_the_budget(
    make_engine: EngineFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(max_inflight_bytes=65536)
    file = new_file(engine, tmp_path)
    submit = engine._threads.submit

    def interrupted(*args):  # type: ignore[no-untyped-def]
        submit(*args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine._threads, "submit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.write([transfer(file, 0, mapped_empty(65536))])
    engine.write([transfer(file, 0, mapped_empty(65536))]).wait()  # needs the whole budget
    file.close()
