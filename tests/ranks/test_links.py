"""Messages, exchanges of all ranks, and clean ends."""

from __future__ import annotations

import re
import threading
import time
from collections import Counter
from functools import partial

import pytest
import torch

from hf_lohan.ranks import Channel, Kind, Links, PayloadReader, RankFailedError, RanksDisagreeError
from hf_lohan.ranks.transport.messages import Head
from hf_lohan.testing.thread_ranks import rank_outcomes, run_ranks

NUMBERS_OF_RANKS = [1, 2, 3, 4, 8]


@pytest.mark.parametrize("num_ranks", NUMBERS_OF_RANKS)
def test_all_gather_returns_payloads_in_rank_order(num_ranks: int) -> None:
    def gather_twice(links: Links) -> list[list[bytes]]:
        mine = bytes([links.ranks.rank]) * (1 + 1000 * links.ranks.rank)
        return [links.all_gather("first", mine), links.all_gather("second", mine + b"!")]

    of_each = [bytes([rank]) * (1 + 1000 * rank) for rank in range(num_ranks)]
    expected = [of_each, [given + b"!" for given in of_each]]
    assert run_ranks(num_ranks, gather_twice, delays_seed=num_ranks) == [expected] * num_ranks


@pytest.mark.parametrize("num_ranks", NUMBERS_OF_RANKS)
def test_no_rank_passes_a_barrier_before_the_last_one_arrives(num_ranks: int) -> None:
    arrived: list[int] = []

    def meet(links: Links) -> int:
        arrived.append(links.ranks.rank)
        links.barrier("here")
        return len(arrived)

    assert run_ranks(num_ranks, meet, delays_seed=1) == [num_ranks] * num_ranks


@pytest.mark.parametrize("num_ranks", NUMBERS_OF_RANKS)
@pytest.mark.parametrize("numel", [0, 1, 3_000_001])
def test_a_broadcast_reaches_all_ranks_and_is_counted(num_ranks: int, numel: int) -> None:
    owner = num_ranks // 2
    whole = torch.arange(numel, dtype=torch.int32).to(torch.int16)

    def share(links: Links) -> tuple[torch.Tensor, int, int]:
        tensor = whole.clone() if links.ranks.rank == owner else torch.full_like(whole, -1)
        links.broadcast(tensor, owner, "the embedding")
        return tensor, links.sent_bytes[Channel.WEIGHTS], links.received_bytes[Channel.WEIGHTS]

    for rank, (tensor, sent_bytes, received_bytes) in enumerate(run_ranks(num_ranks, share)):
        assert torch.equal(tensor, whole)
        assert sent_bytes == ((num_ranks - 1) * 2 * numel if rank == owner else 0)
        assert received_bytes == (0 if rank == owner else 2 * numel)


def test_a_broadcast_of_different_sizes_is_refused_at_once() -> None:
    def share(links: Links) -> None:
        links.broadcast(torch.zeros(4 + links.ranks.rank), 0, "the norm's weight")

    with pytest.raises(RanksDisagreeError, match=r"the norm's weight, rank \d has \d+ bytes of rank 0, and rank"):
        run_ranks(2, share)


def test_the_error_of_different_exchanges_names_both() -> None:
    def step(links: Links) -> None:
        if links.ranks.rank == 1:
            links.barrier("a save that rank 1 alone runs")
        links.all_gather("the norm of step 3", b"1.0")
        links.barrier("the end")

    outcomes = rank_outcomes(3, step)
    told = [outcome.error for outcome in outcomes if isinstance(outcome.error, RanksDisagreeError)]
    assert told
    for error in told:
        assert "'a save that rank 1 alone runs'" in str(error)
        assert "'the norm of step 3'" in str(error)
    assert all(isinstance(outcome.error, RanksDisagreeError | RankFailedError) for outcome in outcomes)


def test_two_threads_gather_in_their_own_sequences() -> None:
    def gather(links: Links) -> list[bytes]:
        found: list[list[bytes]] = []

        def aside() -> None:
            for step in range(20):
                found.append(links.all_gather(f"commit {step}", b"c", sequence="commits"))

        thread = threading.Thread(target=aside)
        thread.start()
        for step in range(20):
            assert links.all_gather(f"norm {step}", b"n") == [b"n"] * links.ranks.num_ranks
        thread.join()
        return [given for gathered in found for given in gathered]

    assert run_ranks(3, gather, delays_seed=5) == [[b"c"] * 60] * 3


def test_messages_before_their_handler_wait_for_it_in_order() -> None:
    def send_first(links: Links) -> list[tuple[int, bytes]]:
        came: list[tuple[int, bytes]] = []
        other = 1 - links.ranks.rank
        for number in range(50):
            links.send(other, Kind.PREPARED, number, payload=bytes([number]) if number % 2 else None)
        links.barrier("all are sent")

        def take(peer: int, numbers: tuple[int, ...], payload: PayloadReader | None) -> None:
            assert peer == other
            came.append((numbers[0], payload.bytes() if payload is not None else b""))
            links.notify()

        links.set_handler(Kind.PREPARED, take)
        links.wait_for(lambda: len(came) == 50, "50 messages", peers=[other])
        return came

    expected = [(number, bytes([number]) if number % 2 else b"") for number in range(50)]
    assert run_ranks(2, send_first, delays_seed=2) == [expected] * 2


def test_two_ranks_that_send_more_than_sockets_hold_still_read() -> None:
    """Large payloads both ways at once, and answers by the thousand from handlers of the control channel."""
    num_messages, numel = 3_000, 1 << 20

    def flood(links: Links) -> tuple[int, torch.Tensor]:
        other = 1 - links.ranks.rank
        answers = 0
        landed = torch.zeros(numel)
        has_landed = False

        def answer(peer: int, numbers: tuple[int, ...], payload: PayloadReader | None) -> None:
            for _ in range(4):
                links.send(peer, Kind.TAKEN, *numbers)

        def count(peer: int, numbers: tuple[int, ...], payload: PayloadReader | None) -> None:
            nonlocal answers
            answers += 1
            links.notify()

        def land(peer: int, numbers: tuple[int, ...], payload: PayloadReader | None) -> None:
            nonlocal has_landed
            payload.read_into(landed)
            has_landed = True
            links.notify()

        links.set_handler(Kind.TAKEN, count)
        links.set_handler(Kind.FILLED, answer)
        for number in range(num_messages):
            links.send(other, Kind.FILLED, number)
        links.set_handler(Kind.PIECE, land)
        links.send(other, Kind.PIECE, payload=torch.full((numel,), 1.0 + links.ranks.rank), channel=Channel.GRADIENTS)
        links.wait_for(lambda: answers == 4 * num_messages and has_landed, "the answers", peers=[other])
        links.barrier("all to have theirs")  # a rank that has left does not answer
        return answers, landed

    for rank, (answers, landed) in enumerate(run_ranks(2, flood)):
        assert answers == 4 * num_messages
        assert bool((landed == 2.0 - rank).all())


def test_channels_and_ranks_do_not_wait_for_each_other() -> None:
    """256 MiB that rank 1 does not take in one channel, and rank 2 in another, delay no other messages to rank 1."""
    num_messages = 1_000
    payload = torch.empty(256 << 20, dtype=torch.uint8)

    def run(links: Links) -> Counter[int]:
        came: Counter[int] = Counter()
        may_take = threading.Event()

        def count(peer: int, numbers: tuple[int, ...], _payload: PayloadReader | None) -> None:
            with links.lock:
                came.update(numbers)
                links.notify()

        links.set_handler(Kind.TAKEN, count)
        links.set_handler(Kind.PIECE, lambda *_: may_take.wait(30.0))
        sending = []
        if links.ranks.rank == 0:
            for peer, channel in ((1, Channel.GRADIENTS), (2, Channel.WEIGHTS)):
                send = partial(links.send, peer, Kind.PIECE, payload=payload, channel=channel)
                sending.append(threading.Thread(target=send))
                sending[-1].start()
                while not links.sent_bytes[channel]:
                    time.sleep(0.001)
            for channel in set(Channel) - {Channel.GRADIENTS}:
                for _ in range(num_messages):
                    links.send(1, Kind.TAKEN, channel, channel=channel)
        elif links.ranks.rank == 1:
            links.wait_for(lambda: came.total() == 3 * num_messages, "the messages", peers=[0])
        links.barrier("the messages to arrive")
        assert all(thread.is_alive() for thread in sending)
        may_take.set()
        for thread in sending:
            thread.join()
        links.barrier("the payloads to be taken")
        return came

    assert run_ranks(3, run)[1] == dict.fromkeys(set(Channel) - {Channel.GRADIENTS}, num_messages)


def test_a_tensor_may_be_changed_when_it_was_sent() -> None:
    def send(links: Links) -> list[float]:
        other = 1 - links.ranks.rank
        came: list[float] = []
        landing = torch.zeros(100_000)

        def land(peer: int, numbers: tuple[int, ...], payload: PayloadReader | None) -> None:
            payload.read_into(landing)
            assert bool((landing == landing[0]).all())
            came.append(float(landing[0]))
            links.notify()

        links.set_handler(Kind.PIECE, land)
        tensor = torch.empty(100_000)
        for value in range(20):
            tensor.fill_(value)
            links.send(other, Kind.PIECE, payload=tensor, channel=Channel.GRADIENTS)
        links.wait_for(lambda: len(came) == 20, "20 tensors", peers=[other])
        return came

    assert run_ranks(2, send, delays_seed=3) == [[float(value) for value in range(20)]] * 2


def test_a_handler_that_ignores_its_payload_loses_no_message() -> None:
    def send(links: Links) -> list[int]:
        came: list[int] = []

        def take(peer: int, numbers: tuple[int, ...], payload: PayloadReader | None) -> None:
            came.append(numbers[0])
            links.notify()

        links.set_handler(Kind.PIECE, take)
        for number in range(5):
            payload = torch.ones(2_000_000, dtype=torch.uint8)
            links.send(1 - links.ranks.rank, Kind.PIECE, number, payload=payload, channel=Channel.GRADIENTS)
        links.wait_for(lambda: len(came) == 5, "5 messages", peers=[1 - links.ranks.rank])
        return came

    assert run_ranks(2, send) == [list(range(5))] * 2


def test_ranks_may_end_at_different_times() -> None:
    def pass_on(links: Links) -> str:
        """Rank 0 leaves first. Each other rank waits only for the one before it."""
        rank, num_ranks = links.ranks.rank, links.ranks.num_ranks
        came: list[int] = []
        links.set_handler(Kind.TAKEN, lambda peer, numbers, payload: (came.append(peer), links.notify()))
        if rank > 0:
            links.wait_for(lambda: came, f"rank {rank - 1}", peers=[rank - 1])
        if rank + 1 < num_ranks:
            links.send(rank + 1, Kind.TAKEN)
            links.send(0, Kind.PREPARED)  # to a rank that may have left
        return "done"

    # Rank 0 also sends to rank 1, and not to itself.
    def run(links: Links) -> str:
        return pass_on(links) if links.ranks.rank else _first(links)

    def _first(links: Links) -> str:
        links.send(1, Kind.TAKEN)
        return "done"

    for seed in range(5):
        assert run_ranks(4, run, delays_seed=seed) == ["done"] * 4


def test_a_single_rank_supports_all_operations() -> None:
    with Links.alone() as links:
        tensor = torch.arange(5)
        links.broadcast(tensor, 0, "a tensor")
        links.barrier("here")
        links.send_all(Kind.PREPARED, 3)
        assert links.all_gather("a norm", b"x") == [b"x"]
        assert tensor.tolist() == [0, 1, 2, 3, 4]
        assert links.sent_bytes == dict.fromkeys(Channel, 0)
        links.wait_for(lambda: True, "nothing")


@pytest.mark.parametrize("num_bytes", [1 << 62, 1 << 30])
@pytest.mark.parametrize("kind", [Kind.GATHER, Kind.FAILED])
def test_an_absurd_size_is_refused_before_memory_is_allocated(kind: Kind, num_bytes: int) -> None:
    def announce(links: Links) -> None:
        if links.ranks.rank == 1:
            connection = links._peers[0].connections[Channel.CONTROL]
            with connection._lock:
                head = Head(kind, Channel.CONTROL, connection.num_sent, (0, 1), num_bytes)
                connection._outgoing.append(memoryview(head.pack()))
                connection.num_sent += 1
                connection._flush()
        links.barrier("the next step")

    told = rf"rank 1 \(.*\) sent a message of channel control that cannot be read: it announces {num_bytes:,} bytes"
    error = rank_outcomes(2, announce)[0].error
    assert isinstance(error, RankFailedError) and re.search(told, str(error)), error
