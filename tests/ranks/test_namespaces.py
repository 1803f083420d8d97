"""Two network namespaces, each with one rank, stand in for two nodes. The kernel counts the bytes that `Links`
count."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engines import open_engine, resolved
from rank_processes import CONTEXT, HANGS_AFTER_S

from hf_lohan.optim import OffloadAdamW
from hf_lohan.planning import lay_out
from hf_lohan.ranks import HEAD_BYTES, Links, Ranks, connect
from hf_lohan.testing.models import tiny_batch, tiny_model
from hf_lohan.testing.network_boxes import NetworkBox, NoBoxesError, network_boxes

pytestmark = pytest.mark.usefixtures("fork_server")
BUDGETS = {"cpu_memory": "64MiB", "gpu_memory": "32MiB", "cpu_threads": 1, "io_threads": 1}


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


def train_a_step(links: Links, folder: str) -> int:
    """Train one step and return the bytes of all weights."""
    model = model_of_four_million()
    config = resolved(folder, **BUDGETS, activations="recompute")
    layout = lay_out(model, config, working_dtype=torch.float32, hold_gradients=True, ranks=links.ranks)
    engine = open_engine(model, layout, config, links=links)
    try:
        optimizer = OffloadAdamW(model.parameters(), lr=1e-3, engine=engine)
        model(**tiny_batch(seed=links.ranks.rank)).loss.backward()
        engine.clip_grad_norm(0.5)
        optimizer.step()
        engine.wait_for_updates()
    finally:
        engine.close()
    return sum(block.param_bytes for block in layout.blocks)


def be_rank(rank: int, box: NetworkBox, folder: str, connection: Any) -> None:
    box.enter()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOHAN_SOCKET_IFNAME", box.interface)
        store = dist.FileStore(f"{folder}/meeting", 2)
        with connect(Ranks(rank, 2, 0, 1), store, 60.0) as links:
            num_bytes = train_a_step(links, f"{folder}/{rank}")
            links.barrier("the end of the step")
            sent = sum(links.sent_bytes.values()) + HEAD_BYTES * sum(links.num_sent.values())
    connection.send((num_bytes, sent))


def train_on_nodes(boxes: list[NetworkBox], folder: Path) -> list[tuple[int, int, int]]:
    """Return by rank the bytes of all weights, the bytes that `Links` sent in a step, and the bytes that the kernel
    sent.
    """
    sent_before = [box.sent_bytes for box in boxes]
    receiving = []
    processes = []
    for rank, box in enumerate(boxes):
        ours, theirs = CONTEXT.Pipe()
        process = CONTEXT.Process(target=be_rank, args=(rank, box, str(folder), theirs), daemon=True)
        process.start()
        theirs.close()
        receiving.append(ours)
        processes.append(process)
    counts = []
    try:
        for connection, box, before in zip(receiving, boxes, sent_before, strict=True):
            assert connection.poll(HANGS_AFTER_S), f"the rank in {box.namespace} says nothing"
            weight_bytes, sent_bytes = connection.recv()
            counts.append((weight_bytes, sent_bytes, box.sent_bytes - before))
    finally:
        for process in processes:
            process.kill()
            process.join()
    return counts


@pytest.mark.slow
def test_the_kernel_counts_what_links_count(boxes: list[NetworkBox], tmp_path: Path) -> None:
    # On a busy machine TCP repeats some segments, so the kernel may count more.
    for attempt in range(3):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        counts = train_on_nodes(boxes, folder)
        for weight_bytes, sent_bytes, kernel_bytes in counts:
            # A rank sends half of the weights in forward, half again in backward, and half of the gradients: about 1.5
            # times the weights.
            assert weight_bytes < sent_bytes <= kernel_bytes
        if all(kernel_bytes <= 1.02 * sent_bytes for _, sent_bytes, kernel_bytes in counts):
            return
    pytest.fail(f"weights, sent by links, sent by the kernel: {counts}")
