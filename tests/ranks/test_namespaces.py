"""Two boxes, each a network namespace with one rank: the kernel counts on their link what `Links` say they sent."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_processes import CONTEXT, HANGS_AFTER_S

from hf_lohan.config import OffloadConfig
from hf_lohan.device import CpuDevice
from hf_lohan.engine import OffloadEngine, ParameterAccess, drain_model, open_tiers
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
    """Bytes of the weights that this rank holds."""
    model = model_of_four_million()
    config = OffloadConfig.load({**BUDGETS, "ssd": folder, "activations": "recompute"}).resolve(
        host_memory_bytes=1 << 30, device_memory_bytes=1 << 30, num_cpus=2, default_ssd_path=folder
    )
    layout = lay_out(model, config, working_dtype=torch.float32, hold_gradients=True, ranks=links.ranks)
    tiers = open_tiers(layout, config, CpuDevice(), links)
    drain_model(layout.blocks, ParameterAccess(tiers.store, layout.blocks, tiers.states, links))
    engine = OffloadEngine(model, layout, tiers, config)
    try:
        optimizer = OffloadAdamW(model.parameters(), lr=1e-3, engine=engine)
        model(**tiny_batch(seed=links.ranks.rank)).loss.backward()
        engine.clip_grad_norm(0.5)
        optimizer.step()
        engine.settle()
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


def test_the_kernel_counts_what_links_count(boxes: list[NetworkBox], tmp_path: Path) -> None:
    receiving = []
    processes = []
    for rank, box in enumerate(boxes):
        ours, theirs = CONTEXT.Pipe()
        process = CONTEXT.Process(target=be_rank, args=(rank, box, str(tmp_path), theirs), daemon=True)
        process.start()
        theirs.close()
        receiving.append(ours)
        processes.append(process)
    try:
        for connection, box in zip(receiving, boxes, strict=True):
            assert connection.poll(HANGS_AFTER_S), f"the rank in {box.namespace} says nothing"
            weight_bytes, sent_bytes = connection.recv()
            # Half of the weights for forward, and again for backward; the gradients of the other half.
            assert sent_bytes > weight_bytes
            assert sent_bytes <= box.sent_bytes <= 1.02 * sent_bytes
    finally:
        for process in processes:
            process.kill()
            process.join()
