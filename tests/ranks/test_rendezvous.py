"""Ranks find each other, and strangers are refused."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist
from hf_lohan.ranks.transport.rendezvous import outgoing_address

from hf_lohan.ranks import Links, RankFailedError, Ranks, RankTimeoutError, connect
from hf_lohan.ranks.transport import rendezvous


def connect_threads(num_ranks: int, num_local: int, store: dist.Store, timeout_s: float = 20.0) -> list[Links]:
    links: dict[int, Links] = {}

    def run(rank: int) -> None:
        links[rank] = connect(Ranks(rank, num_ranks, rank % num_local, num_local), store, timeout_s)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [links[rank] for rank in range(num_ranks)]


@pytest.mark.parametrize(("num_ranks", "num_local"), [(1, 1), (2, 2), (2, 1), (4, 2), (8, 8)])
def test_ranks_meet_twice_at_one_store(num_ranks: int, num_local: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    store = dist.PrefixStore("run", dist.HashStore())
    for _ in range(2):
        links = connect_threads(num_ranks, num_local, store)
        threads = [threading.Thread(target=link.barrier, args=("here",)) for link in links]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for link in links:
            link.close()


@pytest.mark.parametrize("error", [None, OSError("the drive is full")])
def test_ranks_learn_how_another_program_ended(error: OSError | None, monkeypatch: pytest.MonkeyPatch) -> None:
    at_exit: list[partial[None]] = []
    monkeypatch.setattr(rendezvous.atexit, "register", lambda function, *args: at_exit.append(partial(function, *args)))
    monkeypatch.setattr(rendezvous.sys, "last_value", error, raising=False)
    ending, other = connect_threads(2, 2, dist.HashStore())
    for end in at_exit:
        if end.args[0]() is ending:
            end()
    told = "failed: OSError: the drive is full while" if error else "had ended its run while"
    with pytest.raises(RankFailedError, match=rf"rank 0 \(.*\) {told} rank 1 waited for the next step"):
        other.barrier("the next step")
    other.close()


def test_an_exception_is_told_before_the_program_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that is not a daemon, such as a logger's, may keep the program from its end for hours."""
    shown: list[object] = []
    monkeypatch.setattr(rendezvous.sys, "excepthook", lambda *args: shown.append(args))
    ending, other = connect_threads(2, 2, dist.HashStore())
    last = rendezvous.sys.excepthook
    hooks = [last, last.args[1]]  # type: ignore[attr-defined]
    hook = next(hook for hook in hooks if hook.args[0]() is ending)
    error = OSError("the drive is full")
    hook.func(hook.args[0], hooks[1].args[1], OSError, error, None)
    with pytest.raises(
        RankFailedError, match=r"rank 0 \(.*\) failed: OSError: the drive is full while rank 1 waited for"
    ):
        other.barrier("the next step")
    assert shown == [(OSError, error, None)], "the program's own hook runs, too"
    for links in (ending, other):
        links.close()
    hook(OSError, error, None)  # after the end of the links it tells nobody


def test_a_stranger_is_refused_and_blocks_no_rank(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("LOHAN_SOCKET_IFNAME", "lo")
    store = dist.HashStore()
    found: list[Links] = []
    first = threading.Thread(target=lambda: found.append(connect(Ranks(0, 2, 0, 1), store, 20.0)))
    first.start()
    store.wait(["lohan/1/address/0"], timedelta(seconds=20))
    address = json.loads(store.get("lohan/1/address/0"))["tcp"]
    with socket.create_connection(address) as silent, socket.create_connection(address) as stranger:
        stranger.sendall(b"LOH1" + bytes(5 + 16 + 32))  # a greeting of rank 0, channel 0, without a proof
        stranger.settimeout(5)
        assert len(stranger.recv(16)) == 16
        assert stranger.recv(1) == b""  # the connection is closed
        second = connect(Ranks(1, 2, 0, 1), store, 20.0)
        first.join()
        silent.close()
    second.close()
    found[0].close()
    assert "does not know the secret" in caplog.text


def test_the_error_names_a_rank_that_never_connects() -> None:
    store = dist.HashStore()
    with pytest.raises(RankTimeoutError, match=r"rank 1 did not connect within 0.3 s: rank 0 waited for its"):
        connect(Ranks(0, 2, 0, 2), store, 0.3)
    with pytest.raises(RankTimeoutError, match=r"rank 0 did not connect within 0.3 s: rank 1 waited for the secret"):
        connect(Ranks(1, 2, 1, 2), dist.HashStore(), 0.3)


def test_the_error_of_an_unknown_interface_lists_the_known_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth77")
    with pytest.raises(ValueError, match=r"GLOO_SOCKET_IFNAME=eth77 is not a network interface.*'lo'"):
        outgoing_address()
    monkeypatch.setenv("LOHAN_SOCKET_IFNAME", "lo")
    assert outgoing_address() == (socket.AF_INET, "127.0.0.1")


def test_silent_connections_delay_the_start_and_do_not_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOHAN_SOCKET_IFNAME", "lo")
    monkeypatch.setattr(rendezvous, "_MOST_GREETINGS", 2)
    monkeypatch.setattr(rendezvous, "_HANDSHAKE_S", 0.5)  # a running rank is faster
    store, strangers = dist.HashStore(), contextlib.ExitStack()
    with strangers, ThreadPoolExecutor(1) as threads:
        first = threads.submit(connect, Ranks(0, 2, 0, 1), store, 20.0)
        store.wait(["lohan/1/address/0"], timedelta(seconds=20))
        address = json.loads(store.get("lohan/1/address/0"))["tcp"]
        for _ in range(3):
            strangers.enter_context(socket.create_connection(address))
        connect(Ranks(1, 2, 0, 1), store, 20.0).close()
        first.result().close()


def test_a_process_with_too_many_open_files_continues_to_listen(monkeypatch: pytest.MonkeyPatch) -> None:
    accept, refused = socket.socket.accept, iter([errno.EMFILE, errno.ENFILE, errno.ECONNABORTED] * 2)

    def refuses_at_first(self: socket.socket) -> Any:
        for code in refused:
            raise OSError(code, os.strerror(code))
        return accept(self)

    monkeypatch.setattr(socket.socket, "accept", refuses_at_first)
    for links in connect_threads(2, 2, dist.HashStore(), 10.0):
        links.close()


def test_the_secret_is_removed_from_the_store_after_ranks_have_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.PrefixStore("run", dist.HashStore())
    for links in connect_threads(2, 2, store):
        links.close()
    assert store.check(["lohan/1/address/0"]) and not store.check(["lohan/1/secret"])
    monkeypatch.setenv("LOHAN_RANKS_SECRET", "of the launcher")
    told: list[str] = []
    real = dist.Store.set
    monkeypatch.setattr(dist.PrefixStore, "set", lambda self, key, value: (told.append(value), real(self, key, value)))
    for links in connect_threads(2, 2, store):
        links.close()
    assert len(told) == 3 and not any("of the launcher" in value for value in told)


def test_a_secret_of_only_one_rank_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    store.set("lohan/1/secret", "for all to read")
    monkeypatch.setenv("LOHAN_RANKS_SECRET", "of rank 1")
    with pytest.raises(ValueError, match="LOHAN_RANKS_SECRET is set for rank 1 but not for rank 0; set it to the same"):
        connect(Ranks(1, 2, 1, 2), store, 5.0)
    store.set("lohan/2/secret", "environment")
    monkeypatch.delenv("LOHAN_RANKS_SECRET")
    with pytest.raises(ValueError, match="LOHAN_RANKS_SECRET is set for rank 0 but not for rank 1"):
        connect(Ranks(1, 2, 1, 2), store, 5.0)
