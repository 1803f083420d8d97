"""Exchanges of all ranks in lanes, and clean ends."""

from __future__ import annotations

import threading

import pytest
import torch

from hf_lohan.ranks import Links, RankFailedError, RanksDisagreeError
from hf_lohan.ranks.transport import links as links_module
from hf_lohan.testing.thread_ranks import rank_outcomes, run_ranks

NUMBERS_OF_RANKS = [1, 2, 3, 5]


@pytest.mark.parametrize("num_bytes", [0, 1, 200, 236, 237, 238, 100_000])
def test_payloads_of_every_size_arrive_beside_a_tag(num_bytes: int) -> None:
    """Short ones go with the tag, and long ones after it."""

    def gather(links: Links) -> list[list[bytes]]:
        own = bytes([1 + links.ranks.rank]) * (num_bytes if links.ranks.rank else 0)
        return [links.all_gather("ten bytes!", own), links.all_gather("\u00e9" * 400, own)]

    expected = [b"", b"\2" * num_bytes, b"\3" * num_bytes]
    assert run_ranks(3, gather) == [[expected, expected]] * 3


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

    def share(links: Links) -> tuple[torch.Tensor, int]:
        lane = links.open("weights", carries="weights")
        tensor = whole.clone() if links.ranks.rank == owner else torch.full_like(whole, -1)
        lane.broadcast(tensor, owner, "the embedding")
        return tensor, links.sent_bytes["weights"]

    for rank, (tensor, sent_bytes) in enumerate(run_ranks(num_ranks, share)):
        assert torch.equal(tensor, whole)
        assert sent_bytes == ((num_ranks - 1) * 2 * numel if rank == owner else 0)


def test_a_broadcast_of_different_sizes_is_refused_at_once() -> None:
    def share(links: Links) -> None:
        links.broadcast(torch.zeros(4 + links.ranks.rank), 0, "the norm's weight")

    with pytest.raises(RanksDisagreeError, match=r"the norm's weight, rank \d has \d+ bytes of rank 0, and rank"):
        run_ranks(2, share)


@pytest.mark.parametrize("num_ranks", NUMBERS_OF_RANKS)
def test_an_exchange_sends_each_rank_its_part(num_ranks: int) -> None:
    """Rank r sends s bytes to rank s, so rank 0 gets nothing."""

    def exchange(links: Links) -> tuple[list[int], int]:
        rank, lane = links.ranks.rank, links.open("rows", carries="tokens")
        send_sizes = list(range(num_ranks))
        sent = torch.full((sum(send_sizes),), rank, dtype=torch.uint8)
        received = torch.full((rank * num_ranks,), 99, dtype=torch.uint8)
        lane.exchange(sent, send_sizes, received, [rank] * num_ranks, "rows")
        return received.tolist(), links.sent_bytes["tokens"]

    for rank, (received, sent_bytes) in enumerate(run_ranks(num_ranks, exchange, delays_seed=2)):
        assert received == [other for other in range(num_ranks) for _ in range(rank)]
        assert sent_bytes == sum(range(num_ranks)) - rank


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


def test_two_threads_gather_in_their_own_lanes() -> None:
    def gather(links: Links) -> list[bytes]:
        found: list[list[bytes]] = []
        lane = links.open("commits")

        def aside() -> None:
            for step in range(20):
                found.append(lane.agree(f"commit {step}", b"c"))

        thread = threading.Thread(target=aside)
        thread.start()
        for step in range(20):
            assert links.all_gather(f"norm {step}", b"n") == [b"n"] * links.ranks.num_ranks
        thread.join()
        return [given for gathered in found for given in gathered]

    assert run_ranks(3, gather, delays_seed=5) == [[b"c"] * 60] * 3


def test_lanes_of_one_name_of_nodes_and_across_them_are_apart() -> None:
    def gather(links: Links) -> list[list[bytes]]:
        lanes = [links.open("all"), links.open("all"), links.open_here("sums"), links.open_across("sums")]
        return [lane.agree("who is there", bytes([links.ranks.rank])) for lane in lanes]

    for rank, gathered in enumerate(run_ranks(6, gather, num_local=3)):
        here, across = [rank // 3 * 3 + local for local in range(3)], [rank % 3, 3 + rank % 3]
        assert [[of[0] for of in one] for one in gathered] == [[*range(6)], [*range(6)], here, across]


def test_an_exchange_that_was_begun_ends_later() -> None:
    """What is begun needs no wait of other ranks, and may be waited for twice, as after an interrupt."""

    def commit(links: Links) -> list[bytes]:
        lane = links.open("commits")
        finish = lane.begin_agree("a commit", bytes([links.ranks.rank]))
        links.barrier("between")
        assert finish() == finish()
        return finish()

    assert run_ranks(3, commit, delays_seed=4) == [[b"\0", b"\1", b"\2"]] * 3


@pytest.mark.parametrize("leaves_first", [0, 1])
def test_a_rank_may_end_while_the_others_do_not_need_it(leaves_first: int) -> None:
    has_left = threading.Event()

    def run(links: Links) -> str:
        pair = (
            links.open("pair", [rank for rank in range(3) if rank != leaves_first])
            if (links.ranks.rank != leaves_first)
            else None
        )
        links.barrier("the start")
        if pair is None:
            has_left.set()
            return "done"
        assert has_left.wait(60)
        for step in range(20):
            pair.agree(f"step {step}")
        return "done"

    assert run_ranks(3, run) == ["done"] * 3


def test_a_single_rank_supports_all_operations() -> None:
    with Links.alone() as links:
        tensor = torch.arange(5)
        links.broadcast(tensor, 0, "a tensor")
        links.barrier("here")
        lane = links.open("sums", carries="gradients", stops_compute=True)
        received = torch.zeros(5, dtype=torch.uint8)
        lane.exchange(tensor.to(torch.uint8), [5], received, [5], "its own part")
        assert received.tolist() == [0, 1, 2, 3, 4]
        assert (
            links.all_gather("a norm", b"x") == lane.agree("a norm", b"x") == lane.begin_agree("it", b"x")() == [b"x"]
        )
        assert tensor.tolist() == [0, 1, 2, 3, 4]
        assert not any(links.sent_bytes.values())


def test_a_wait_ends_when_this_rank_closes() -> None:
    """At the interpreter's end a thread that returns from gloo would abort the process."""
    errors: list[BaseException] = []

    def run(links: Links) -> None:
        lane = links.open("loads")
        if links.ranks.rank == 1:
            links.barrier("the end")
            return

        def wait() -> None:
            with pytest.raises(RankFailedError) as raised:
                lane.agree("a block")
            errors.append(raised.value)

        thread = threading.Thread(target=wait)
        thread.start()
        links.barrier("the end")
        links.close()
        thread.join(60)
        assert not thread.is_alive()

    run_ranks(2, run)
    assert str(errors[0]) == "rank 0 closed its connections while it waited for a block"


def test_a_constructor_that_fails_leaves_no_thread_and_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: object) -> None:
        raise OSError("no device")

    monkeypatch.setattr(links_module, "gloo_group", refuse)
    for outcome in rank_outcomes(2, lambda links: None):  # it checks the threads
        assert isinstance(outcome.error, OSError | RankFailedError), outcome.error


def test_the_wait_of_a_computation_is_told_to_other_threads() -> None:
    def run(links: Links) -> list[bool]:
        loads, seen = links.open("loads"), list[bool]()
        links.watch.on_waiting(lambda: seen.append(links.watch.waiting_since_s is not None))
        loads.agree("a block")  # a thread beside the computation
        assert seen == []
        with links.watch.waiting(loads.name):
            assert links.watch.waiting_since_s is not None
        return seen

    assert run_ranks(2, run) == [[True, False]] * 2


def test_waits_are_counted_for_the_rank_that_comes_last() -> None:
    together, never = threading.Barrier(3), threading.Event()

    def run(links: Links) -> dict[int, float]:
        for step in range(4):
            together.wait(60)
            if links.ranks.rank == 2:
                never.wait(0.1)
            links.barrier(f"step {step}")
        links.barrier("the waits of the last step")
        return links.waited_s

    for rank, waited_s in enumerate(run_ranks(3, run)[:2]):
        assert waited_s[2] > waited_s[1 - rank]
