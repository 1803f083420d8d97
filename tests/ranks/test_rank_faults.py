"""If a rank dies, fails, hangs or sends nonsense, every other rank soon raises an error that names it and the wait."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import pytest
import torch
from hf_lohan.ranks.transport.connection import Connection, Socket

from hf_lohan.ranks import Channel, Kind, Links, RankFailedError, Ranks, RankTimeoutError
from hf_lohan.ranks.transport.messages import Head
from hf_lohan.testing.thread_ranks import Fault, Outcome, _RankSocket, rank_outcomes

SOON_S = 1.0


def many_steps(links: Links) -> str:
    for step in range(200):
        links.all_gather(f"the norm of step {step}", b"1")
    return "done"


def errors_of(outcomes: list[Outcome[str]], but: int) -> list[BaseException]:
    """Return the errors of all ranks but one."""
    found = [outcome.error for rank, outcome in enumerate(outcomes) if rank != but]
    assert all(error is not None for error in found)
    return [error for error in found if error is not None]


@pytest.mark.covering(2)
@pytest.mark.parametrize("num_ranks", [2, 3, 8])
@pytest.mark.parametrize("at_message", [0, 1, 30])
@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("die", r"ended( in the middle of a message of channel \w+, after \d+ of \d+ bytes of a (head|payload))?"),
        ("truncate", r"ended( in the middle of a message of channel control, after 46 of the 92 bytes of a head)?"),
        ("corrupt", r"sent a message of channel control that cannot be read: its head is damaged .*"),
    ],
)
def test_other_ranks_name_the_faulty_rank(what: str, told: str, at_message: int, num_ranks: int) -> None:
    fault = Fault(1, what, at_message, Channel.CONTROL)  # type: ignore[arg-type]
    outcomes = rank_outcomes(num_ranks, many_steps, faults=[fault], delays_seed=at_message)
    for rank, error in zip([0, *range(2, num_ranks)], errors_of(outcomes, but=1), strict=True):
        assert isinstance(error, RankFailedError)
        who, did = rf"rank 1( \(pid \d+, \S+\))? {told}", rf"rank {rank} (waited for|was about to send|sent)"
        assert re.match(rf"{who}(while|;) {did}" if told.endswith(".*") else rf"{who} while {did}", str(error)), error
        assert error.rank == 1
        assert outcomes[rank].took_s < SOON_S + 200 * 0.02


def test_the_error_of_a_dead_rank_names_the_wait() -> None:
    outcomes = rank_outcomes(3, many_steps, faults=[Fault(2, "die", 3 + 2 * 12, Channel.CONTROL)])
    names = [str(error) for error in errors_of(outcomes, but=2)]
    assert all(re.match(r"rank 2 \(pid \d+, \S+\) ended while rank \d ", name) for name in names)
    assert any(re.search(r"waited for the norm of step \d+$", name) for name in names)


def test_a_dead_rank_sends_nothing_while_its_connections_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise it could tell some ranks that the others have ended."""
    cut, send, sent = _RankSocket.cut, _RankSocket.sendmsg, list[int]()
    is_dying = threading.Event()

    def cut_slowly(end: _RankSocket) -> None:
        is_dying.set()
        cut(end)
        time.sleep(0.01)

    def note(end: _RankSocket, *message: Any) -> int:
        was_dying, num_bytes = is_dying.is_set(), send(end, *message)
        if was_dying and end in end._fate.sockets and end._fate._faults:
            sent.append(num_bytes)
        return num_bytes

    def wait(links: Links) -> str:
        def die() -> None:
            with suppress(RankFailedError):
                while True:
                    links.send(2, Kind.PIECE, payload=torch.zeros(1), channel=Channel.GRADIENTS)

        links.set_handler(Kind.PIECE, lambda *_: None)
        if links.ranks.rank == 1:
            threading.Thread(target=die).start()
        links.wait_for(lambda: False, "the end")
        return ""

    monkeypatch.setattr(_RankSocket, "cut", cut_slowly)
    monkeypatch.setattr(_RankSocket, "sendmsg", note)
    outcomes = rank_outcomes(3, wait, faults=[Fault(1, "die", 60, Channel.GRADIENTS)])
    assert not sent
    assert all(re.match(r"rank 1 \(.*\) ended while rank \d ", str(error)) for error in errors_of(outcomes, but=1))


def test_a_rank_that_closes_has_told_all_others_of_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise they name it, although it has ended because of another rank."""
    post, has_begun = Connection.post, threading.Event()

    def post_slowly(connection: Connection, kind: int, *message: Any) -> None:
        if kind == Kind.FAILED:
            has_begun.set()
            time.sleep(0.1)
        post(connection, kind, *message)

    def fail(links: Links) -> str:
        if links.ranks.rank != 0:
            return many_steps(links)
        thread = threading.Thread(target=links.fail, args=(RankFailedError("rank 7 ended", 7),))
        thread.start()
        assert has_begun.wait(5.0)
        links.close()
        thread.join()
        return ""

    monkeypatch.setattr(Connection, "post", post_slowly)
    for error in errors_of(rank_outcomes(3, fail), but=0):
        assert isinstance(error, RankFailedError) and error.rank == 7, error


def test_a_rank_that_hangs_is_named_after_the_timeout() -> None:
    outcomes = rank_outcomes(3, many_steps, faults=[Fault(1, "hang", 30)], timeout_s=0.5)
    errors = errors_of(outcomes, but=1)
    assert any(isinstance(error, RankTimeoutError) for error in errors)
    for error in errors:
        assert isinstance(error, RankFailedError)
        assert re.match(
            r"rank 1 \(pid \d+, \S+\) said nothing for 0\.5 s while rank \d waited for the norm", str(error)
        )
        assert error.rank == 1
    assert all(outcomes[rank].took_s < 0.5 + SOON_S for rank in (0, 2))


def test_a_rank_that_hangs_while_it_receives_is_named_after_the_timeout() -> None:
    def send(links: Links) -> str:
        if links.ranks.rank == 0:
            for _ in range(100):
                links.send(1, Kind.PIECE, payload=torch.zeros(1 << 20), channel=Channel.GRADIENTS)
        else:
            links.set_handler(Kind.PIECE, lambda peer, numbers, payload: threading.Event().wait(2.0))
            threading.Event().wait(2.0)
        return "done"

    outcomes = rank_outcomes(2, send, timeout_s=0.5)
    assert isinstance(outcomes[0].error, RankTimeoutError)
    assert re.match(
        r"rank 1 \(.*\) said nothing for 0.5 s while rank 0 waited for it to take PIECE", str(outcomes[0].error)
    )


def test_a_failing_rank_tells_its_error_to_waiting_ranks() -> None:
    def fail(links: Links) -> str:
        links.barrier("the start")
        if links.ranks.rank == 2:
            raise OSError("the drive is full")
        return many_steps(links)

    for seed in range(5):
        outcomes = rank_outcomes(4, fail, delays_seed=seed)
        assert isinstance(outcomes[2].error, OSError)
        for error in errors_of(outcomes, but=2):
            assert re.match(r"rank 2 \(.*\) failed: OSError: the drive is full while rank \d w", str(error))


class SlowSocket:
    """A socket that reads slowly."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self.fileno, self.sendmsg, self.shutdown, self.close = end.fileno, end.sendmsg, end.shutdown, end.close

    def recv_into(self, buffer: memoryview) -> int:
        num_bytes = self._end.recv_into(buffer)
        time.sleep(0.05)
        return num_bytes


def test_channels_that_end_first_do_not_hide_the_error() -> None:
    """A failing rank sends its error in the control channel. Its other connections may end before."""
    ends = {channel: socket.socketpair() for channel in Channel}
    waiting: dict[tuple[Channel, int], Socket] = {(channel, 1): pair[0] for channel, pair in ends.items()}
    waiting[Channel.CONTROL, 1] = SlowSocket(ends[Channel.CONTROL][0])
    failing = {(channel, 0): pair[1] for channel, pair in ends.items()}
    with Links(Ranks(0, 2, 0, 2), waiting, 20.0) as links:
        other = Links(Ranks(1, 2, 1, 2), failing, 20.0)
        other.fail(OSError("the drive is full"))
        other.close()
        with pytest.raises(RankFailedError, match=r"rank 1 \(.*\) failed: OSError: the drive is full while rank 0"):
            links.wait_for(lambda: False, "the end")


def test_an_error_in_a_handler_fails_its_rank() -> None:
    def fail(links: Links) -> str:
        def take(peer: int, numbers: tuple[int, ...], payload: object) -> None:
            raise LookupError(f"no block {numbers[0]}")

        links.set_handler(Kind.FILLED, take)
        if links.ranks.rank == 0:
            links.send(1, Kind.FILLED, 7)
        links.wait_for(lambda: False, "the end")
        return "done"

    outcomes = rank_outcomes(3, fail)
    assert isinstance(outcomes[1].error, LookupError)
    for error in errors_of(outcomes, but=1):
        assert re.match(r"rank 1 \(.*\) failed: LookupError: no block 7 while rank \d waited for the end", str(error))


def test_a_clean_end_fails_ranks_that_wait_for_the_rank() -> None:
    def leave(links: Links) -> str:
        links.barrier("the start")
        return "done" if links.ranks.rank == 1 else many_steps(links)

    outcomes = rank_outcomes(3, leave)
    assert outcomes[1].result == "done"
    for rank in (0, 2):
        told = r"rank 1 \(.*\) had ended its run while rank \d waited for the norm of step 0"
        assert re.match(told, str(outcomes[rank].error))


class AnsweredSocket:
    """A socket that calls `answer` after it has sent a farewell."""

    def __init__(self, end: socket.socket, answer: Callable[[], object]) -> None:
        self._end, self._answer = end, answer
        self.fileno, self.recv_into, self.shutdown, self.close = end.fileno, end.recv_into, end.shutdown, end.close

    def sendmsg(self, buffers: Sequence[memoryview], ancillary: Sequence[tuple[int, int, bytes]], flags: int) -> int:
        num_bytes = self._end.sendmsg(buffers, ancillary, flags)
        if Head.unpack(buffers[0]).kind == Kind.BYE:
            self._answer()
        return num_bytes


def test_a_leaving_rank_says_so_on_all_channels_even_if_a_receiver_fails() -> None:
    """Without this its last connections would end without a farewell, as if it had died."""
    ends = {channel: socket.socketpair() for channel in Channel}
    heard = threading.Event()

    def fail_because_of_it() -> None:
        staying.send(1, Kind.FAILED, 1, 0, payload=b"rank 1 had ended its run while rank 0 waited for the end")
        assert heard.wait(5.0)

    leaving = {(channel, 0): pair[1] for channel, pair in ends.items()}
    first = next(iter(leaving))
    with Links(Ranks(0, 2, 0, 2), {(channel, 1): pair[0] for channel, pair in ends.items()}, 20.0) as staying:
        other = Links(Ranks(1, 2, 1, 2), leaving | {first: AnsweredSocket(leaving[first], fail_because_of_it)}, 20.0)
        other.add_failure_callback(lambda error: heard.set())
        other.close()
        with pytest.raises(RankFailedError, match=r"rank 1 \(.*\) had ended its run while rank 0 waited for the end"):
            staying.wait_for(lambda: False, "the end")


def test_all_ranks_name_the_first_failure() -> None:
    """Later failures that it causes are not named."""

    def pass_on(links: Links) -> str:
        links.barrier("the start")
        rank, num_ranks = links.ranks.rank, links.ranks.num_ranks
        if rank == num_ranks - 1:
            raise ValueError("a bad batch")
        links.wait_for(lambda: False, f"rank {rank + 1}", peers=[rank + 1])
        return "done"

    for seed in range(10):
        outcomes = rank_outcomes(5, pass_on, delays_seed=seed)
        for error in errors_of(outcomes, but=4):
            assert isinstance(error, RankFailedError)
            assert error.rank == 4
            assert "rank 4" in str(error).split("failed: ValueError: a bad batch")[0]


def test_a_failure_callback_is_called_without_a_wait() -> None:
    all_listen = threading.Barrier(3)

    def ask(links: Links) -> int:
        told: list[RankFailedError] = []
        is_told = threading.Event()
        links.add_failure_callback(lambda error: (told.append(error), is_told.set()))
        all_listen.wait()
        if links.ranks.rank == 0:
            raise ValueError("no")
        assert is_told.wait(SOON_S)
        assert str(told[0]).endswith(f"failed: ValueError: no while rank {links.ranks.rank} was running")
        return told[0].rank

    outcomes = rank_outcomes(3, ask)
    assert [outcome.result for outcome in outcomes[1:]] == [0, 0]


def test_the_timeout_may_be_changed() -> None:
    def wait(links: Links) -> str:
        links.barrier("the start")
        links.set_timeout(0.3)
        if links.ranks.rank == 0:
            threading.Event().wait(1.0)
            return "done"
        return many_steps(links)

    outcomes = rank_outcomes(2, wait, timeout_s=60.0)
    assert isinstance(outcomes[1].error, RankTimeoutError)
    assert "said nothing for 0.3 s" in str(outcomes[1].error)
