"""Two network namespaces, each with one rank, stand in for two nodes. The kernel counts the bytes that `Links` count,
and a link may be cut."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from divided_experts import opened
from network_boxes import NetworkBox, NoBoxesError, network_boxes
from rank_processes import CONTEXT, HANGS_AFTER_S
from training_ranks import rank_engine, take_steps

from hf_lohan.ranks import Links, RankFailedError, Ranks, connect
from hf_lohan.testing.models import tiny_batch, tiny_model

pytestmark = pytest.mark.usefixtures("fork_server")
Train = Callable[[Links, str], None]
Work = Callable[[Links, str], object]
NET_TIMEOUT_S = 3.0
BUDGETS = {"cpu_memory": "64MiB", "gpu_memory": "32MiB", "cpu_threads": 1, "_io_threads": 1}


@pytest.fixture
def boxes() -> Iterator[list[NetworkBox]]:
    try:
        with network_boxes(2) as boxes:
            yield boxes
    except NoBoxesError as error:
        pytest.skip(f"no network namespaces here: {error}")


def model_of_four_million() -> Any:
    torch.manual_seed(0)
    return tiny_model("llama", num_layers=7, hidden_size=256).train()


def mixture_of_sixteen() -> Any:
    return tiny_model("mixtral", num_layers=2, hidden_size=256, intermediate_size=64, num_local_experts=16).train()


def train_a_dense_step(links: Links, folder: str) -> None:
    with rank_engine(links, Path(folder), model_of_four_million, **BUDGETS) as engine:
        take_steps(engine, lambda *_: engine.model(**tiny_batch(seed=links.ranks.rank)).loss, 1, max_norm=0.5)
        engine.wait_for_updates()
        num_bytes = sum(block.param_bytes for block in engine.layout.blocks)
    # A rank sends half of the weights in forward, half again in backward, and half of the gradients.
    assert links.sent_bytes["weights"] + links.sent_bytes["gradients"] > num_bytes


def train_a_mixture(links: Links, folder: str) -> None:
    """Rows go to the experts of both ranks, in forward and in backward."""
    with opened(links, Path(folder), mixture_of_sixteen, cpu_memory="64MiB", gpu_memory="32MiB") as engine:
        batch = tiny_batch(batch_size=4, sequence_length=512, seed=links.ranks.rank)
        take_steps(engine, lambda *_: engine.model(**batch).loss, 1)
        engine.wait_for_updates()
    assert links.sent_bytes["tokens"] > 0.8 * sum(links.sent_bytes.values())


def count(links: Links, folder: str, train: Train) -> int:
    train(links, folder)
    links.barrier("the end of the step")
    return sum(links.sent_bytes.values())


def wait_for_ever(links: Links, folder: str) -> tuple[str, float]:
    links.watch.timeout_s = NET_TIMEOUT_S
    try:
        for step in range(1_000_000):
            links.all_gather(f"the norm of step {step}")
            if step == 20:
                Path(folder).touch()
            time.sleep(0.01)
    except RankFailedError as error:
        return str(error), time.monotonic()
    raise AssertionError("no link was cut")


STORE_PORT = 29511
"""In the network namespace of rank 0."""


def be_rank(rank: int, boxes: Sequence[NetworkBox], folder: str, work: Work, connection: Any) -> None:
    boxes[rank].enter()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLOO_SOCKET_IFNAME", boxes[rank].interface)
        # As of a launcher, and cut off with its node.
        store = dist.TCPStore(boxes[0].address, STORE_PORT, is_master=rank == 0, wait_for_workers=False)
        with connect(Ranks(rank, 2, 0, 1), store, 60.0) as links:
            connection.send(work(links, f"{folder}/{rank}"))


@contextmanager
def ranks_on(boxes: list[NetworkBox], folder: Path, work: Work) -> Iterator[list[Any]]:
    """Start a rank on each node, and yield the ends of pipes through which their results come."""
    receiving, processes = [], []
    try:
        for rank in range(len(boxes)):
            ours, theirs = CONTEXT.Pipe()
            process = CONTEXT.Process(target=be_rank, args=(rank, boxes, str(folder), work, theirs), daemon=True)
            process.start()
            theirs.close()
            receiving.append(ours)
            processes.append(process)
        yield receiving
    finally:
        for process in processes:
            process.kill()
            process.join()


def result_of(connection: Any) -> Any:
    assert connection.poll(4 * HANGS_AFTER_S), "a rank says nothing"
    return connection.recv()


@pytest.mark.slow
@pytest.mark.parametrize("train", [train_a_dense_step, train_a_mixture])
def test_the_kernel_counts_what_links_count(train: Train, boxes: list[NetworkBox], tmp_path: Path) -> None:
    # On a busy machine TCP repeats some segments, so the kernel may count more.
    for attempt in range(3):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        before = [box.sent_bytes for box in boxes]
        with ranks_on(boxes, folder, partial(count, train=train)) as receiving:
            sent = [result_of(connection) for connection in receiving]
            of_kernel = [box.sent_bytes - so_far for box, so_far in zip(boxes, before, strict=True)]
        ratios = [kernel_bytes / sent_bytes for kernel_bytes, sent_bytes in zip(of_kernel, sent, strict=True)]
        print(f"links sent {sent} bytes, the kernel {of_kernel}: {ratios}")
        assert min(ratios) >= 1
        if max(ratios) <= 1.02:
            return
    pytest.fail(f"sent by the kernel over sent by links: {ratios}")


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1])
def test_ranks_notice_a_cut_link(number: int, boxes: list[NetworkBox], tmp_path: Path) -> None:
    with ranks_on(boxes, tmp_path, wait_for_ever) as receiving:
        while not all((tmp_path / str(rank)).exists() for rank in (0, 1)):
            time.sleep(0.01)
        subprocess.run(["ip", "link", "set", boxes[number].outside, "down"], check=True)
        cut_s = time.monotonic()
        ends = [result_of(connection) for connection in receiving]
    for rank, (error, at_s) in enumerate(ends):
        told = rf"rank {1 - rank} \(pid \d+, \S+\) was silent for 3 s while rank {rank} waited for the norm of step"
        assert re.match(told, error), error
        assert NET_TIMEOUT_S - 1 < at_s - cut_s < NET_TIMEOUT_S + 30
