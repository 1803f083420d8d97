"""What waits before it is moved: for room, for what is needed more; and what an interrupt leaves of it."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from data_files import EngineFactory, new_file, transfer

from hf_lohan.device import mapped_empty
from hf_lohan.files import IoRequest
from hf_lohan.testing.storage_doubles import GatedBackend, SlowBackend


def test_submission_waits_for_room(make_engine: EngineFactory, tmp_path: Path) -> None:
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
    # Both threads are held at the gate, so nothing can make room and the third submission cannot be over.
    assert len(started) == 2 and engine.inflight_bytes == 32768
    assert not any(request.done() for request in started)
    backend.gate.set()
    thread.join()
    for request in started:
        request.wait()
    assert len(started) == 4 and engine.inflight_bytes == 0
    file.close()


def test_urgent_reads_go_before_others_and_reads_before_writes_that_have_not_begun(
    make_engine: EngineFactory, tmp_path: Path
) -> None:
    moved: list[tuple[str, int]] = []

    class Noting(GatedBackend):
        def read(self, fd, offset, views):  # type: ignore[no-untyped-def]
            moved.append(("read", offset))
            return super().read(fd, offset, views)

        def write(self, fd, offset, views):  # type: ignore[no-untyped-def]
            moved.append(("write", offset))
            return super().write(fd, offset, views)

    backend = Noting()
    engine = make_engine(backend, num_threads=1)
    file = new_file(engine, tmp_path)
    requests = [engine.write([transfer(file, offset, mapped_empty(4096))]) for offset in (0, 4096)]
    backend.arrived.acquire()  # the first has begun
    for offset, is_urgent in ((8192, False), (12288, True), (16384, False)):
        requests.append(engine.read([transfer(file, offset, mapped_empty(4096))], is_urgent=is_urgent))
    backend.gate.set()
    for request in requests:
        request.wait()
    assert moved == [("write", 0), ("read", 12288), ("read", 8192), ("read", 16384), ("write", 4096)]
    file.close()


def test_the_bound_holds_under_many_submitters(make_engine: EngineFactory, tmp_path: Path) -> None:
    peak_bytes = 0
    peak_lock = threading.Lock()

    class Watching(SlowBackend):
        def write(self, fd, offset, views):  # type: ignore[no-untyped-def]
            nonlocal peak_bytes
            with peak_lock:
                peak_bytes = max(peak_bytes, engine.inflight_bytes)
            return super().write(fd, offset, views)

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
    assert 8192 <= peak_bytes <= 20480
    assert engine.write_bytes == 6 * 10 * 8192 and engine.inflight_bytes == 0
    file.close()


def test_a_request_above_the_bound_goes_alone(make_engine: EngineFactory, tmp_path: Path) -> None:
    backend = GatedBackend()
    engine = make_engine(backend, max_inflight_bytes=4096)
    file = new_file(engine, tmp_path)
    big = engine.write([transfer(file, 0, mapped_empty(65536))])
    assert engine.inflight_bytes == 65536
    thread = threading.Thread(target=lambda: engine.write([transfer(file, 0, mapped_empty(4096))]).wait())
    thread.start()
    for _ in range(2):
        backend.arrived.acquire()
    assert engine.inflight_bytes == 65536
    backend.gate.set()
    big.wait()
    thread.join()
    assert engine.write_bytes == 65536 + 4096
    file.close()


def test_an_interrupt_comes_when_nothing_is_under_way_any_more(
    make_engine: EngineFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = GatedBackend()
    engine = make_engine(backend)
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

    monkeypatch.setattr(engine._threads, "submit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.write([transfer(file, 0, mapped_empty(65536))])
    assert engine.inflight_bytes == 0 and engine.write_bytes <= 32768
    file.close()


def test_an_interrupt_right_after_a_piece_was_given_away_leaves_none_behind(
    make_engine: EngineFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    file = new_file(engine, tmp_path)
    submit = engine._threads.submit

    def interrupted(*args):  # type: ignore[no-untyped-def]
        submit(*args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine._threads, "submit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.write([transfer(file, 0, mapped_empty(65536))])
    assert engine.inflight_bytes == 0
    engine.write([transfer(file, 0, mapped_empty(65536))]).wait()
    file.close()
