"""Ranks find each other through a store, and learn how another program ends."""

from __future__ import annotations

import logging
import threading
from functools import partial

import pytest
import torch.distributed as dist

from hf_lohan.ranks import Links, RankFailedError, Ranks, RankTimeoutError, connect
from hf_lohan.ranks.transport import links as links_module
from hf_lohan.ranks.transport.links import outgoing_address


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


def close(links: list[Links]) -> None:
    threads = [threading.Thread(target=link.close) for link in links]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


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
        close(links)


@pytest.mark.parametrize("error", [None, OSError("the drive is full")])
def test_ranks_learn_how_another_program_ended(error: OSError | None, monkeypatch: pytest.MonkeyPatch) -> None:
    at_exit: list[partial[None]] = []
    register = lambda function, *args: at_exit.append(partial(function, *args))  # noqa: E731
    monkeypatch.setattr(links_module.atexit, "register", register)
    monkeypatch.setattr(links_module.sys, "last_value", error, raising=False)
    ending, other = connect_threads(2, 2, dist.HashStore())
    for end in at_exit:
        if end.args[0]() is ending:
            threading.Thread(target=end).start()
    told = "failed: OSError: the drive is full while" if error else "had ended its run while"
    with pytest.raises(RankFailedError, match=rf"rank 0 \(.*\) {told} rank 1 waited for the next step"):
        other.barrier("the next step")
    other.close()


def test_an_exception_is_told_before_the_program_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that is not a daemon, such as a logger's, may keep the program from its end for hours."""
    shown: list[object] = []
    monkeypatch.setattr(links_module.sys, "excepthook", lambda *args: shown.append(args))
    ending, other = connect_threads(2, 2, dist.HashStore())
    last = links_module.sys.excepthook
    hooks = [last, last.args[1]]  # type: ignore[attr-defined]
    hook = next(hook for hook in hooks if hook.args[0]() is ending)
    error = OSError("the drive is full")
    hook.func(hook.args[0], hooks[1].args[1], OSError, error, None)
    with pytest.raises(
        RankFailedError, match=r"rank 0 \(.*\) failed: OSError: the drive is full while rank 1 waited for"
    ):
        other.barrier("the next step")
    assert shown == [(OSError, error, None)], "the program's own hook runs, too"
    close([ending, other])
    hook(OSError, error, None)  # after the end of the links it tells nobody


def test_the_error_names_a_rank_that_never_connects() -> None:
    with pytest.raises(RankTimeoutError, match=r"rank 1 did not connect within 0.3 s: rank 0 waited for it"):
        connect(Ranks(0, 2, 0, 2), dist.HashStore(), 0.3)
    with pytest.raises(
        RankTimeoutError, match=r"rank 0 did not connect within 0.3 s: rank 2 waited for it.*GLOO_SOCKET"
    ):
        connect(Ranks(2, 4, 0, 2), dist.HashStore(), 0.3)


def test_the_error_of_an_unknown_interface_lists_the_known_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth77")
    with pytest.raises(ValueError, match=r"GLOO_SOCKET_IFNAME=eth77 is not a network interface.*'lo'"):
        outgoing_address()
    with pytest.raises(ValueError, match="GLOO_SOCKET_IFNAME=eth77"):
        connect(Ranks(0, 2, 0, 1), dist.HashStore(), 5.0)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,eth0")
    assert outgoing_address() == "127.0.0.1"


@pytest.mark.parametrize(
    ("variable", "advice"),
    [("LOHAN_SOCKET_IFNAME", "set GLOO_SOCKET_IFNAME"), ("LOHAN_RANKS_SECRET", "ranks trust their network")],
)
def test_one_warning_names_a_variable_that_has_no_effect_any_more(
    variable: str, advice: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(variable, "eth77")
    with caplog.at_level(logging.WARNING, "hf_lohan"):
        close(connect_threads(2, 2, dist.HashStore()))
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert f"{variable} no longer has an effect" in caplog.text and advice in caplog.text
