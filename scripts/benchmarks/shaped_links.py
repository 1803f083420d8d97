"""Compares steps of several nodes over slow links with plain ZeRO-3 over gloo on the same links.

A node is a network namespace whose link is limited in both directions, which needs root. ZeRO-3 means two all-gathers
and a reduce-scatter of each unit by torch.distributed, with AdamW in memory. The hf_lohan side is a whole step with
records on the drive. The model is small, so that the links are the limit.

With `--num-experts` the model is a mixture, and both sides are ours: `none` sends the weights of all experts to all
nodes, and `world` sends the rows of tokens to the experts.
"""

from __future__ import annotations

import datetime
import json
import multiprocessing
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from benchmarking import LEARNING_RATE, Options, benchmark, folder_in, spread, table_of
from network_boxes import NetworkBox, network_boxes
from rich.console import Console
from torch import Tensor, nn

from hf_lohan.compat.transformers_private import one_expert
from hf_lohan.config import OffloadConfig
from hf_lohan.device import CpuDevice
from hf_lohan.engine import OffloadEngine, ParameterAccess, drain_model, open_tiers
from hf_lohan.huggingface.offloaded_model import stream_experts
from hf_lohan.optim import OffloadAdamW
from hf_lohan.planning import lay_out
from hf_lohan.ranks import Ranks, connect

HANGS_AFTER_S = 600.0
QUIET_S = 0.5
NEGLIGIBLE_BYTES = 16 << 10
"""Bytes in 10 ms, sent and received: ranks without work still exchange a few."""
MAX_NORM = 1.0
ZERO_3 = "zero3_gloo"
Step = Callable[[], object]


class Unit:
    """A module that ZeRO-3 gathers at once. Each rank keeps a flat shard of the module's weights."""

    def __init__(self, module: nn.Module, rank: int, num_ranks: int) -> None:
        self._parameters = list(module.parameters())
        self._sizes = [parameter.numel() for parameter in self._parameters]
        flat = torch.cat([parameter.detach().reshape(-1) for parameter in self._parameters])
        self._whole = torch.zeros(-(-flat.numel() // num_ranks) * num_ranks)
        self._whole[: flat.numel()] = flat
        self.part = nn.Parameter(self._whole.chunk(num_ranks)[rank].clone())
        for parameter, values in zip(self._parameters, self._views(self._whole), strict=True):
            parameter.data = values
        module.register_forward_pre_hook(lambda _module, _inputs: self.gather())
        module.register_full_backward_pre_hook(lambda _module, _gradients: self.gather())

    def gather(self) -> None:
        dist.all_gather_into_tensor(self._whole, self.part.detach())

    def reduce(self) -> None:
        """Average all ranks' gradients to this rank's shard."""
        summed, gradients = torch.empty_like(self.part), torch.zeros_like(self._whole)
        for parameter, values in zip(self._parameters, self._views(gradients), strict=True):
            values.copy_(parameter.grad)
            parameter.grad = None
        dist.reduce_scatter_tensor(summed, gradients)
        self.part.grad = summed.div_(dist.get_world_size())

    def _views(self, flat: Tensor) -> list[Tensor]:
        of_parameters = flat[: sum(self._sizes)].split(self._sizes)
        return [values.view_as(parameter) for values, parameter in zip(of_parameters, self._parameters, strict=True)]


def zero_3_step(options: Options, ranks: Ranks, batch: dict[str, Tensor]) -> Step:
    model = options.shape.model()
    model.gradient_checkpointing_disable()
    modules = [model.model.embed_tokens, *model.model.layers, model.model.norm, model.lm_head]
    units = [Unit(module, ranks.rank, ranks.num_ranks) for module in modules]
    optimizer = torch.optim.AdamW([unit.part for unit in units], lr=LEARNING_RATE, fused=True)

    def step() -> None:
        model(**batch).loss.backward()
        for unit in reversed(units):
            unit.reduce()
        norm = torch.stack([unit.part.grad.square().sum() for unit in units if unit.part.grad is not None]).sum()
        dist.all_reduce(norm)
        for unit in units:
            assert unit.part.grad is not None
            unit.part.grad.mul_((MAX_NORM / (norm.sqrt() + 1e-6)).clamp(max=1.0))
        optimizer.step()
        optimizer.zero_grad()

    return step


def our_step(
    options: Options, ranks: Ranks, batch: dict[str, Tensor], store: Any, folder: Path, num_experts: int, own: Any
) -> Step:
    """Return a step with the settings ``own``."""
    own_folder = str(folder / f"rank-{ranks.rank}")
    links = connect(ranks, store, HANGS_AFTER_S)
    settings = {**options.budgets, "ssd": own_folder, "cpu_threads": 1, "_io_threads": 1, **own}
    config = OffloadConfig.load(settings, activations="recompute").resolve(
        host_memory_bytes=1 << 32, device_memory_bytes=1 << 32, num_cpus=1, default_ssd_path=own_folder
    )
    model = options.shape.model(num_experts=num_experts)
    layout = lay_out(model, config, working_dtype=torch.float32, hold_gradients=True, ranks=ranks)
    tiers = open_tiers(layout, config, CpuDevice(), links)
    drain_model(layout.blocks, ParameterAccess(tiers.store, layout.blocks, tiers.states, links))
    engine = OffloadEngine(model, layout, tiers, config, compute_expert=one_expert)
    stream_experts(engine.experts)
    optimizer = OffloadAdamW(model.parameters(), lr=LEARNING_RATE, engine=engine)

    def step() -> None:
        model(**batch).loss.backward()
        engine.clip_grad_norm(MAX_NORM)
        optimizer.step()
        engine.wait_for_updates()
        optimizer.zero_grad()

    return step


def be_rank(
    ranks: Ranks,
    node: NetworkBox,
    options: Options,
    modes: list[str],
    num_experts: int,
    folder: Path,
    result: Connection,
) -> None:
    """Take steps of each side in turn. Rank 0 sends the seconds and bytes of each side."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent kills this process
    node.enter()
    os.environ.update(GLOO_SOCKET_IFNAME=node.interface)
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "meeting"), ranks.num_ranks)
    wait = datetime.timedelta(seconds=HANGS_AFTER_S)
    dist.init_process_group("gloo", store=store, rank=ranks.rank, world_size=ranks.num_ranks, timeout=wait)
    batch = options.shape.batches(ranks.num_ranks, "cpu")[ranks.rank]
    sides = {} if num_experts else {ZERO_3: zero_3_step(options, ranks, batch)}
    for number, mode in enumerate(modes):
        own = {"experts.parallel": mode} if num_experts else {"ranks.collectives": _setting(mode)}
        sides[mode] = our_step(options, ranks, batch, store, folder / str(number), num_experts, own)
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    sent: dict[str, list[int]] = {side: [] for side in sides}
    for turn in range(1 + options.num_turns):  # the first one warms up
        for side, step in sides.items():
            dist.barrier()
            (before, _), began_s = node_bytes(node), time.perf_counter()
            step()
            dist.barrier()
            ended_s = wait_until_quiet(node)
            if turn:
                seconds[side].append(ended_s - began_s)
                sent[side].append(node_bytes(node)[0] - before)
    if ranks.rank == 0:
        result.send((seconds, sent))
    dist.barrier()
    os._exit(0)


def wait_until_quiet(node: NetworkBox) -> float:
    """Wait until this node sends and receives nothing, because weights for the next forward come ahead, and would slow
    the next side's step down. A node that only receives may answer later. Returns the time at which it became quiet."""
    last_bytes, since_s = sum(node_bytes(node)), time.perf_counter()
    while time.perf_counter() < since_s + QUIET_S:
        time.sleep(0.01)
        if (now_bytes := sum(node_bytes(node))) > last_bytes + NEGLIGIBLE_BYTES:
            since_s = time.perf_counter()
        last_bytes = now_bytes
    return since_s


def node_bytes(node: NetworkBox) -> tuple[int, int]:
    """Return the bytes that this node has sent, and those that it has received."""
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
        name, _, counts = line.strip().partition(":")
        if name == node.interface:
            return int(counts.split()[8]), int(counts.split()[0])
    raise OSError(f"there is no interface {node.interface}")


def _setting(mode: str) -> Any:
    return json.loads(mode) if mode.startswith("{") else mode


def run(
    options: Options, rate: str, num_nodes: int, num_local: int, modes: list[str], num_experts: int, folder: Path
) -> Any:
    """Start all ranks, and return rank 0's measurements."""
    context = multiprocessing.get_context("spawn")
    processes, ours = [], None
    with network_boxes(num_nodes, rate) as nodes:
        try:
            for rank in range(num_nodes * num_local):
                ranks = Ranks(rank, num_nodes * num_local, rank % num_local, num_local)
                receiving, sending = context.Pipe()
                arguments = (ranks, nodes[ranks.node], options, modes, num_experts, folder, sending)
                processes.append(context.Process(target=be_rank, args=arguments, daemon=True))
                processes[-1].start()
                sending.close()
                ours = ours or receiving
            assert ours is not None
            return ours.recv()
        finally:
            for process in processes:
                process.join(5.0 if sys.exc_info()[0] is None else 0.0)
                process.kill()
                process.join()


@benchmark(
    "shaped_links",
    hidden=256,
    layers=7,
    intermediate=512,
    vocabulary=256,
    sequence_length=64,
    cpu_memory="64MiB",
    gpu_memory="32MiB",
)
def main(
    options: Options,
    *,
    rate: Annotated[list[str] | None, typer.Option(help="of each link, in tc's units; repeatable")] = None,
    nodes: int = 2,
    ranks_a_node: int = 2,
    mode: Annotated[
        list[str] | None,
        typer.Option(help="of `collectives`, or JSON; of `experts.parallel` for a mixture; repeatable"),
    ] = None,
    num_experts: Annotated[int, typer.Option(help="experts of each layer; 0: a dense model")] = 0,
) -> dict[str, Any]:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # also removes the namespaces
    rates, modes = rate or ["50mbit", "200mbit"], mode or (["none", "world"] if num_experts else ["exact"])
    slowest = modes[0] if num_experts else ZERO_3
    figures: dict[str, Any] = {"nodes": nodes, "ranks_a_node": ranks_a_node, "links": {}}
    table = table_of(f"a step, {nodes} nodes of {ranks_a_node} ranks", "link", "side", "seconds", "MB sent", "speed-up")
    for link in rates:
        with folder_in(options.store) as folder:
            seconds, sent = run(options, link, nodes, ranks_a_node, modes, num_experts, folder.resolve())
        median = {side: statistics.median(of) for side, of in seconds.items()}
        speed_up = {side: median[slowest] / of for side, of in median.items()}
        sent_bytes = {side: statistics.median(of) for side, of in sent.items()}
        figures["links"][link] = {**spread("step_s", seconds), "speed_up": speed_up, "box_sent_bytes": sent_bytes}
        for side in seconds:
            megabytes = f"{sent_bytes[side] / 1e6:.1f}"
            table.add_row(link, side, f"{median[side]:.2f}", megabytes, f"{speed_up[side]:.2f}")
    Console().print(table)
    return {"benchmark": "divided_experts", **figures} if num_experts else figures


if __name__ == "__main__":
    typer.run(main)
