"""What the ranks of a box move together over the drives, beside what one rank moves alone."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from hf_lohan.config import OffloadConfig
from hf_lohan.device import CpuDevice
from hf_lohan.engine import OffloadEngine, ParameterAccess, drain_model, open_tiers
from hf_lohan.optim import OffloadAdamW
from hf_lohan.planning import lay_out
from hf_lohan.ranks import Links
from hf_lohan.testing.models import tiny_batch, tiny_model
from hf_lohan.testing.thread_ranks import run_ranks

NUM_STEPS = 3
BUDGETS = {"cpu_memory": "16MiB", "gpu_memory": "2MiB", "io_threads": 1, "resident_records": "none"}
_ONE_AT_A_TIME = threading.Lock()


def bytes_of_a_step(links: Links, folder: Path, max_norm: float) -> tuple[int, int, int]:
    """Read and written by this rank, when every step is as the one before; and the size of all weights."""
    with _ONE_AT_A_TIME:
        torch.manual_seed(0)
        model = tiny_model("llama", num_layers=8, hidden_size=128).train()
    own_folder = str(folder / f"rank-{links.ranks.rank}-of-{links.ranks.num_ranks}")
    config = OffloadConfig.load({**BUDGETS, "ssd": own_folder, "activations": "recompute"}).resolve(
        host_memory_bytes=1 << 30, device_memory_bytes=1 << 30, num_cpus=2, default_ssd_path=own_folder
    )
    hold = max_norm > 0
    layout = lay_out(model, config, working_dtype=torch.float32, hold_gradients=hold, ranks=links.ranks)
    tiers = open_tiers(layout, config, CpuDevice(), links)
    drain_model(layout.blocks, ParameterAccess(tiers.store, layout.blocks, tiers.states, links))
    engine = OffloadEngine(model, layout, tiers, config)
    try:
        optimizer = OffloadAdamW(model.parameters(), lr=1e-3, engine=engine)
        read, written = [], []
        for step in range(NUM_STEPS):
            model(**tiny_batch(seed=100 * step + links.ranks.rank)).loss.backward()
            if max_norm:
                engine.clip_grad_norm(max_norm)
            optimizer.step()
            optimizer.zero_grad()
            engine.wait_for_updates()
            links.barrier("a step that is over")
            read.append(tiers.io.read_bytes)
            written.append(tiers.io.write_bytes)
        return read[-1] - read[-2], written[-1] - written[-2], sum(block.param_bytes for block in layout.blocks)
    finally:
        engine.close()


@pytest.mark.parametrize("max_norm", [0.0, 0.5])
def test_two_ranks_move_together_what_one_does(max_norm: float, tmp_path: Path) -> None:
    """Updates in backward take the old weights from the slot in use where it is lent; who is late reads them."""
    [(read_alone, written_alone, _)] = run_ranks(1, lambda links: bytes_of_a_step(links, tmp_path, max_norm))
    of_ranks = run_ranks(2, lambda links: bytes_of_a_step(links, tmp_path, max_norm))
    read, written = sum(of[0] for of in of_ranks), sum(of[1] for of in of_ranks)
    weights = of_ranks[0][2]
    print(f"read {read} by two, {read_alone} alone; written {written}, {written_alone}; weights {weights}")
    # With the buffers of two ranks fewer gradients are spilled.
    assert written <= 1.02 * written_alone
    assert read <= 1.05 * read_alone + weights / 2  # 1.02 of it on a quiet machine
