"""Compares steps of the ranks of one machine with and without balanced rows of experts (`experts.balance`), where half
of the rows go to one expert of each layer.

Experts compute by waiting: each row takes a time, twice of it in backward, so that all ranks compute at once on any
number of cores, as with a device for each. The products themselves, which give the numbers, and all else are real. The
ranks are threads of one process, and their products and copies share the cores.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from benchmarking import LEARNING_RATE, Options, benchmark, folder_in, spread, table_of
from rich.console import Console
from torch import Tensor, nn

from hf_lohan.compat.transformers_private import one_expert
from hf_lohan.config import OffloadConfig
from hf_lohan.device import CpuDevice
from hf_lohan.engine import OffloadEngine, ParameterAccess, drain_model, open_tiers
from hf_lohan.huggingface.offloaded_model import stream_experts
from hf_lohan.optim import OffloadAdamW
from hf_lohan.planning import lay_out
from hf_lohan.ranks import Links
from hf_lohan.testing.thread_ranks import run_ranks

_one_at_a_time = threading.Lock()
"""torch's random numbers, with which models are made, are those of the process."""


class Paced(torch.autograd.Function):
    """Waits for the rows of an expert, and twice as long in backward."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, row_s: float) -> Tensor:
        ctx.row_s = row_s
        time.sleep(len(rows) * row_s)
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        time.sleep(2 * len(gradient) * ctx.row_s)
        return gradient, None


def paced_expert(row_s: float, module: nn.Module, rows: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
    paced: Tensor = Paced.apply(one_expert(module, rows, weights), row_s)
    return paced


def choose_one_for_half(router: nn.Module, _args: Any, output: tuple[Tensor, Tensor, Tensor]) -> Any:
    """Route half of the choices to one expert, and the others to all in turn."""
    *others, index = output
    turns = torch.arange(index.numel()).view(index.shape)
    return *others, torch.where(turns % 2 == 0, 1, turns // 2 % int(router.num_experts))  # type: ignore[arg-type]


def measure_rank(
    links: Links, options: Options, num_experts: int, row_s: float, folder: Path, own: Mapping[str, Any]
) -> tuple[list[float], dict[str, int]]:
    """Return the seconds of steps of one side, and the rows of the most loaded rank."""
    own_folder = str(folder / f"rank-{links.ranks.rank}")
    settings = {**options.budgets, "ssd": own_folder, "cpu_threads": 1, "_io_threads": 1, "experts": "streamed", **own}
    config = OffloadConfig.load(settings, activations="recompute").resolve(
        host_memory_bytes=1 << 32, device_memory_bytes=1 << 32, num_cpus=1, default_ssd_path=own_folder
    )
    with _one_at_a_time:
        model = options.shape.model(num_experts=num_experts)
    for module in model.modules():
        if type(module).__name__ == "MixtralTopKRouter":
            module.register_forward_hook(choose_one_for_half)
    layout = lay_out(model, config, working_dtype=torch.float32, hold_gradients=False, ranks=links.ranks)
    tiers = open_tiers(layout, config, CpuDevice(), links)
    drain_model(layout.blocks, ParameterAccess(tiers.store, layout.blocks, tiers.states, links))
    engine = OffloadEngine(model, layout, tiers, config, compute_expert=partial(paced_expert, row_s))
    stream_experts(engine.experts)
    optimizer = OffloadAdamW(model.parameters(), lr=LEARNING_RATE, engine=engine)
    batch = options.shape.batches(links.ranks.num_ranks, "cpu")[links.ranks.rank]
    seconds = []
    for turn in range(1 + options.num_turns):  # the first one warms up
        links.barrier("all to begin a step")
        began_s = time.perf_counter()
        model(**batch).loss.backward()
        optimizer.step()
        engine.wait_for_updates()
        optimizer.zero_grad()
        links.barrier("all to end a step")
        if turn:
            seconds.append(time.perf_counter() - began_s)
    rows = engine.rows_by_rank()
    engine.close()
    return seconds, {} if rows is None else {
        "mean": sum(rows.owned) // len(rows.owned),
        "most_owned": rows.most_owned,
        "most_computed": rows.most_computed,
    }


@benchmark(
    "balanced_experts",
    hidden=128,
    layers=2,
    intermediate=256,
    vocabulary=256,
    batch_size=4,
    sequence_length=128,
    cpu_memory="128MiB",
    gpu_memory="32MiB",
)
def main(
    options: Options,
    *,
    num_ranks: int = 4,
    num_experts: int = 16,
    least_rows: Annotated[int, typer.Option(help="the setting experts.balance")] = 16,
    row_us: Annotated[float, typer.Option(help="microseconds in which an expert computes a row")] = 200.0,
) -> dict[str, Any]:
    torch.set_num_threads(1)
    sides: dict[str, Any] = {"owners": {}, "balanced": {"experts.balance": least_rows}}
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    rows: dict[str, int] = {}
    for _ in range(2):  # A B A B
        for side, own in sides.items():
            with folder_in(options.store) as folder:
                measure = partial(
                    measure_rank,
                    options=options,
                    num_experts=num_experts,
                    row_s=row_us * 1e-6,
                    folder=folder.resolve(),
                    own=own,
                )
                steps, of_side = run_ranks(num_ranks, measure, timeout_s=300.0)[0]
            seconds[side] += steps
            rows = rows or of_side
    median = {side: statistics.median(of) for side, of in seconds.items()}
    table = table_of(f"a step, {num_ranks} ranks", "rows are computed", "seconds", "most loaded rank over the mean")
    loads = {"owners": rows["most_owned"] / rows["mean"], "balanced": rows["most_computed"] / rows["mean"]}
    for side, step_s in median.items():
        table.add_row(side, f"{step_s:.2f}", f"{loads[side]:.2f}")
    Console().print(table)
    speed_up = median["owners"] / median["balanced"]
    return {**spread("step_s", seconds), "speed_up": speed_up, "rows": rows, "most_loaded": loads}


if __name__ == "__main__":
    typer.run(main)
