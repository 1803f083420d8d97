from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from data_files import EngineFactory, new_file, transfer
from storage_doubles import CountingBackend, FaultyBackend, GatedBackend

from hf_lohan.device import mapped_empty
from hf_lohan.files import IoEngine, IoRequest, StorageError, Transfer
from hf_lohan.files.data_file import sector_view


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
    assert (engine.read_bytes, engine.write_bytes) == (40960, 40960)
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


def test_many_buffers_are_split_into_several_calls(make_engine: EngineFactory, tmp_path: Path) -> None:
    engine = make_engine(piece_bytes=16 << 20, max_inflight_bytes=64 << 20)
    file = new_file(engine, tmp_path, 1100 * 4096)
    source = mapped_empty(1100 * 4096).random_(0, 256)
    views = tuple(sector_view(sector) for sector in source.view(-1, 4096))
    engine.write([Transfer(file, 0, views)]).wait()
    out = mapped_empty(1100 * 4096)
    engine.read([transfer(file, 0, out)]).wait()
    assert torch.equal(out, source)
    file.close()


def test_callbacks_run_once_and_their_errors_stop_new_pieces(
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
    assert "callback of an I/O request failed" in caplog.text
    with pytest.raises(RuntimeError, match="a callback of the I/O engine failed: ZeroDivisionError"):
        # otherwise code that waits for the callback would wait forever
        engine.write([transfer(file, 0, mapped_empty(4096))])
    file.close()


def test_an_error_names_path_and_offset_and_does_not_affect_other_requests(
    make_engine: EngineFactory, tmp_path: Path
) -> None:
    engine = make_engine(FaultyBackend("write", 2, errno.EIO), num_threads=1, max_inflight_bytes=65536)
    file = new_file(engine, tmp_path)
    request = engine.write([transfer(file, 0, mapped_empty(65536))])
    for _ in range(2):
        with pytest.raises(StorageError, match=r"cannot write .*data\.bin at byte 16384 \(Input/output error\)") as e:
            request.wait()
    assert (e.value.errno, e.value.path, e.value.offset) == (errno.EIO, file.path, 16384)
    assert "\n" not in str(e.value)
    assert request.done() and request.error
    assert engine.write_bytes == 16384  # the pieces after the failed one were skipped
    engine.write([transfer(file, 0, mapped_empty(65536))]).wait()  # needs the whole budget
    file.close()


def test_an_unexpected_error_is_raised_by_wait(make_engine: EngineFactory, tmp_path: Path) -> None:
    class Broken(CountingBackend):
        def read(self, fd, offset, views):  # type: ignore[no-untyped-def]
            raise ZeroDivisionError("a bug")

    engine = make_engine(Broken())
    file = new_file(engine, tmp_path)
    with pytest.raises(ZeroDivisionError, match="a bug"):
        engine.read([transfer(file, 0, mapped_empty(4096))]).wait()
    file.close()


def test_a_request_without_bytes_is_done_at_once(engine: IoEngine) -> None:
    request = engine.read([])
    assert request.done() and request.num_bytes == 0
    request.wait()


def test_a_closed_engine_refuses_requests() -> None:
    engine = IoEngine(1, 4096, 4096)
    engine.close()
    with pytest.raises(RuntimeError, match="closed"):
        engine.read([])


def test_close_finishes_requests_in_progress(tmp_path: Path) -> None:
    backend = GatedBackend()
    engine = IoEngine(1, 4096, 1 << 20, backend)
    file = new_file(engine, tmp_path)
    request = engine.write([transfer(file, 0, mapped_empty(16384))])
    backend.arrived.acquire()
    backend.gate.set()
    engine.close()
    assert request.done() and request.error is None
    file.close()


def test_close_moves_queued_pieces_that_no_thread_has_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = IoEngine(1, 4096, 1 << 20)
    file = new_file(engine, tmp_path)
    put = engine._threads.submit

    def late(task: Callable[[], object]) -> None:
        engine.close()
        put(task)

    monkeypatch.setattr(engine._threads, "submit", late)
    request = engine.write([transfer(file, 0, mapped_empty(16384))])
    assert request.done() and request.error is None and engine.write_bytes == 16384
    file.close()


def test_an_empty_transfer_has_no_piece(engine: IoEngine, tmp_path: Path) -> None:
    file = new_file(engine, tmp_path)
    request = engine.write([Transfer(file, 0, (memoryview(b""),))])
    assert request.done() and request.num_bytes == 0
    file.close()


def test_bad_bounds_are_refused() -> None:
    with pytest.raises(ValueError, match="num_threads is 0"):
        IoEngine(0, 4096, 4096)
    with pytest.raises(ValueError, match="piece_bytes is 5000"):
        IoEngine(1, 5000, 4096)
    with pytest.raises(ValueError, match="max_inflight_bytes is 0"):
        IoEngine(1, 4096, 0)


def test_misaligned_memory_is_refused() -> None:
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
