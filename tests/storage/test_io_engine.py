from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hf_lohan.device import mapped_empty
from hf_lohan.storage import DataFile, IoEngine, IoRequest, StorageError, Transfer
from hf_lohan.storage.buffers import sector_view
from hf_lohan.testing.storage_doubles import CountingBackend, FaultyBackend, GatedBackend, SlowBackend

EngineFactory = Callable[..., IoEngine]


def new_file(engine: IoEngine, path: Path, num_bytes: int = 65536) -> DataFile:
    file = engine.open_file(str(path / "data.bin"), create=True)
    file.allocate(num_bytes)
    return file


def transfer(file: DataFile, offset: int, buffer: torch.Tensor) -> Transfer:
    return Transfer(file, offset, (sector_view(buffer),))


def test_moves_pieces_and_counts_bytes(make_engine: EngineFactory, tmp_path: Path) -> None:
    backend = CountingBackend()
    engine = make_engine(backend)
    file = new_file(engine, tmp_path)
    source, out = mapped_empty(40960).random_(0, 256), mapped_empty(40960)
    engine.write([transfer(file, 8192, source)]).wait()
    request = engine.read([transfer(file, 8192, out)])
    request.wait()
    assert request.done() and request.num_bytes == 40960
    assert torch.equal(out, source)
    assert (engine.read_bytes, engine.write_bytes, engine.inflight_bytes) == (40960, 40960, 0)
    assert sorted(backend.write_sizes_bytes) == [8192, 16384, 16384]
    file.close()


def test_several_buffers_make_one_call(make_engine: EngineFactory, tmp_path: Path) -> None:
    backend = CountingBackend()
    engine = make_engine(backend)
    file = new_file(engine, tmp_path)
    parts = [mapped_empty(4096).fill_(i) for i in range(3)]
    engine.write([Transfer(file, 0, tuple(map(sector_view, parts)))]).wait()
    assert backend.write_sizes_bytes == [3 * 4096]
    out = mapped_empty(3 * 4096)
    engine.read([transfer(file, 0, out)]).wait()
    assert torch.equal(out, torch.cat(parts))
    file.close()


def test_more_buffers_than_the_kernel_takes_in_one_call(make_engine: EngineFactory, tmp_path: Path) -> None:
    engine = make_engine(piece_bytes=16 << 20, max_inflight_bytes=64 << 20)
    file = new_file(engine, tmp_path, 1100 * 4096)
    source = mapped_empty(1100 * 4096).random_(0, 256)
    views = tuple(sector_view(sector) for sector in source.view(-1, 4096))
    engine.write([Transfer(file, 0, views)]).wait()
    out = mapped_empty(1100 * 4096)
    engine.read([transfer(file, 0, out)]).wait()
    assert torch.equal(out, source)
    file.close()


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


def test_callbacks_come_once_and_their_errors_harm_nobody(
    make_engine: EngineFactory, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    backend = GatedBackend()
    engine = make_engine(backend)
    file = new_file(engine, tmp_path)
    request = engine.write([transfer(file, 0, mapped_empty(40960))])
    early: list[IoRequest] = []
    called = threading.Event()
    request.add_done_callback(lambda _: 1 // 0)
    request.add_done_callback(early.append)
    request.add_done_callback(lambda _: called.set())
    assert not early and not request.done()
    backend.gate.set()
    assert called.wait(timeout=60)
    assert early == [request]
    late: list[IoRequest] = []
    request.add_done_callback(late.append)
    assert late == [request]
    assert "done-callback of an I/O request failed" in caplog.text
    file.close()


def test_an_error_names_path_and_offset_and_spares_other_requests(
    make_engine: EngineFactory, tmp_path: Path
) -> None:
    engine = make_engine(FaultyBackend("write", 2, errno.EIO), num_threads=1)
    file = new_file(engine, tmp_path)
    request = engine.write([transfer(file, 0, mapped_empty(65536))])
    for _ in range(2):
        with pytest.raises(
            StorageError, match=r"cannot write .*data\.bin at byte 16384 \(Input/output error\)"
        ) as e:
            request.wait()
    assert (e.value.errno, e.value.path, e.value.offset) == (errno.EIO, file.path, 16384)
    assert "\n" not in str(e.value)
    assert request.done() and request.failed and engine.inflight_bytes == 0
    assert engine.write_bytes == 16384  # the pieces after the failed one were not tried
    engine.write([transfer(file, 0, mapped_empty(4096))]).wait()
    file.close()


def test_an_unexpected_error_reaches_the_waiter(make_engine: EngineFactory, tmp_path: Path) -> None:
    class Broken(CountingBackend):
        def read(self, fd, offset, views):  # type: ignore[no-untyped-def]
            raise ZeroDivisionError("a bug")

    engine = make_engine(Broken())
    file = new_file(engine, tmp_path)
    with pytest.raises(ZeroDivisionError, match="a bug"):
        engine.read([transfer(file, 0, mapped_empty(4096))]).wait()
    file.close()


def test_nothing_to_move_is_done_at_once(engine: IoEngine) -> None:
    request = engine.read([])
    assert request.done() and request.num_bytes == 0
    request.wait()


def test_a_closed_engine_starts_nothing() -> None:
    engine = IoEngine(1, 4096, 4096)
    engine.close()
    with pytest.raises(RuntimeError, match="closed"):
        engine.read([])


def test_close_finishes_what_is_in_flight(tmp_path: Path) -> None:
    backend = GatedBackend()
    engine = IoEngine(1, 4096, 1 << 20, backend)
    file = new_file(engine, tmp_path)
    request = engine.write([transfer(file, 0, mapped_empty(16384))])
    backend.arrived.acquire()
    backend.gate.set()
    engine.close()
    assert request.done() and not request.failed
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


def test_bad_bounds_are_refused() -> None:
    with pytest.raises(ValueError, match="num_threads is 0"):
        IoEngine(0, 4096, 4096)
    with pytest.raises(ValueError, match="piece_bytes is 5000"):
        IoEngine(1, 5000, 4096)
    with pytest.raises(ValueError, match="max_inflight_bytes is 0"):
        IoEngine(1, 4096, 0)


def test_misaligned_memory_is_caught() -> None:
    memory = mapped_empty(8192)
    assert memory.data_ptr() % 4096 == 0 and os.sysconf("SC_PAGE_SIZE") % 4096 == 0
    with pytest.raises(AssertionError, match="sector-aligned"):
        sector_view(memory[512 : 512 + 4096])
    with pytest.raises(AssertionError, match="whole"):
        sector_view(memory[:100])
    with pytest.raises(AssertionError, match="contiguous"):
        sector_view(memory.view(2, 4096).t())
    with pytest.raises(ValueError, match="0 bytes"):
        mapped_empty(0)
