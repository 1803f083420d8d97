"""Ranks on several nodes that train a tiny model with a setting of `collectives`, and one process that applies the same
codecs to the same values.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import training_ranks
from engines import ONE_GENERATOR, open_engine, resolved
from torch import Tensor
from training_ranks import closing, do_nothing, take_steps, weights_of

from hf_lohan.device import CpuDevice, Device
from hf_lohan.engine import OffloadEngine
from hf_lohan.model import Block, Chunk
from hf_lohan.planning import OffloadLayout, lay_out
from hf_lohan.ranks import BlockCodec, Links, Ranks
from hf_lohan.testing.models import tiny_batch, tiny_model
from hf_lohan.testing.thread_ranks import run_ranks

LR = 1e-3


@dataclass(frozen=True)
class Training:
    """The settings of a training."""

    num_ranks: int
    num_local: int
    max_norm: float = 0.5
    num_steps: int = 4
    dtype: torch.dtype = torch.float32
    evaluates: bool = False
    """Whether to evaluate between steps."""
    cpu_memory: str = "6MiB"
    lr: float = LR
    num_backwards: int = 1
    """Backwards of a step, each with its own batch."""
    make_device: Callable[[], Device] = CpuDevice
    transport: str = "host"
    gpu_memory: str = "1MiB"
    decides_before_loads: bool = True
    """Whether copies are decided before the first block is loaded, so that all loads use them."""

    @property
    def num_nodes(self) -> int:
        return self.num_ranks // self.num_local

    def ranks(self, rank: int) -> Ranks:
        return Ranks(rank, self.num_ranks, rank % self.num_local, self.num_local)

    def layout(self, model: Any, rank: int, folder: Path, collectives: Any = "exact") -> tuple[OffloadLayout, Any]:
        settings: dict[str, Any] = {"_io_threads": 1, "activations": "recompute", "prefetch_blocks": 1}
        settings |= {"cpu_memory": self.cpu_memory, "_resident_records": "none", "ranks.collectives": collectives}
        settings |= {"gpu_memory": self.gpu_memory, "ranks.transport": self.transport}
        config = resolved(folder / f"rank-{rank}", **settings)
        holds = self.max_norm > 0
        layout = lay_out(model, config, working_dtype=self.dtype, hold_gradients=holds, ranks=self.ranks(rank))
        return layout, config

    def run(self, folder: Path, collectives: Any) -> list[Trained]:
        folder.mkdir(exist_ok=True)  # all nodes use one drive here
        return run_ranks(
            self.num_ranks, lambda links: self.train_rank(links, folder, collectives), num_local=self.num_local
        )

    def train_rank(self, links: Links, folder: Path, collectives: Any) -> Trained:
        rank = links.ranks.rank
        with ONE_GENERATOR:
            model = tiny_model("llama").to(self.dtype).train()
        layout, config = self.layout(model, rank, folder, collectives)
        engine = open_engine(model, layout, config, self.make_device(), links)
        before = dict(links.sent_bytes)
        if self.decides_before_loads:
            engine.planned_memory.allocate_copies()
        found = Trained(layout=layout.decided(), rank=rank)

        def evaluate(_engine: OffloadEngine, step: int) -> None:
            with torch.no_grad():
                found.losses.append(model(**batch(step, rank + 100)).loss)

        with closing(engine, links):
            take_steps(
                engine,
                lambda step, number: model(**batch(step + 100 * number, rank)).loss,
                self.num_steps,
                lr=self.lr,
                num_micro=self.num_backwards,
                max_norm=self.max_norm,
                after_step=evaluate if self.evaluates else do_nothing,
                into=found,
            )
            found.sent = quiet_bytes(engine, links, before)
            ring = engine._ring
            for block in layout.blocks:  # a step changes all blocks, and some are loaded for the next step
                found.num_loads[block.name] = ring.num_loads(block)
                assert ring.version_of(block) == self.num_steps
                found.num_states[block.name] = self.num_steps + ring.is_here(block)
            found.figures = engine.tiers.codecs.figures()
            found.weights = weights_of(engine)
            return found


@dataclass
class Trained(training_ranks.Trained):
    """The results of a rank."""

    layout: Any = None
    rank: int = 0
    sent: dict[str, int] = field(default_factory=dict)
    """The bytes of payloads, without those of loading before and of reading afterwards."""
    num_loads: dict[str, int] = field(default_factory=dict)
    num_states: dict[str, int] = field(default_factory=dict)
    """By block: the number of its versions that were loaded."""
    figures: Mapping[str, Any] = field(default_factory=dict)


def quiet_bytes(engine: OffloadEngine, links: Links, before: Mapping[str, int]) -> dict[str, int]:
    """Return the sent bytes after the updates of the last step and the loads for the next pass."""
    engine.wait_for_updates()
    slots = [slot for slots in engine._ring.slots.values() for slot in slots]
    while any(slot.is_loading for slot in slots):
        time.sleep(0.01)
    links.barrier("all to be quiet")
    return {channel: links.sent_bytes[channel] - before[channel] for channel in ("weights", "gradients")}


def batch(step: int, rank: int) -> dict[str, Tensor]:
    return tiny_batch(seed=1000 * step + rank)


# The reference in one process.


class Oracle:
    """One model in memory. Its weights and gradients go through the codecs of the nodes, in the same parts."""

    def __init__(self, training: Training, folder: Path) -> None:
        self.training = training
        self.model = tiny_model("llama").train()
        self.layout, _ = training.layout(self.model, 0, folder)
        self.parameters = dict(self.model.named_parameters())

    def train(
        self,
        *,
        weights: BlockCodec | None = None,
        gradients: BlockCodec | None = None,
        gradients_within: BlockCodec | None = None,
    ) -> None:
        training = self.training
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR, weight_decay=0.1, fused=True)
        self.losses: list[list[Tensor]] = [[] for _ in range(training.num_ranks)]
        self.norms = []
        for step in range(training.num_steps):
            exact = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}
            if weights is not None:
                self.round_weights(weights)
            of_ranks = []
            for rank in range(training.num_ranks):
                of_backwards = []
                for number in range(training.num_backwards):
                    loss = self.model(**batch(step + 100 * number, rank)).loss
                    (loss / training.num_backwards).backward()
                    self.losses[rank].append(loss.detach())
                    of_backwards.append({name: parameter.grad for name, parameter in self.parameters.items()})
                    self.model.zero_grad()
                of_ranks.append(of_backwards)
            for name, parameter in self.parameters.items():
                parameter.data.copy_(exact[name])
                parameter.grad = torch.zeros_like(parameter)
            for chunk in self.layout.chunks():
                flats = [
                    sum(flat_of(chunk, one, gradients_within) for one in of_backwards) for of_backwards in of_ranks
                ]
                mean = self.mean_of(chunk, flats, gradients)
                for piece in chunk.pieces:
                    part = piece.param_slice
                    grad = self.parameters[part.name].grad
                    first = part.first + piece.start_in_slice
                    grad.view(-1)[first : first + piece.numel] = mean[piece.start_in_chunk : piece.stop_in_chunk]
            if training.max_norm:
                self.norms.append(torch.nn.utils.clip_grad_norm_(self.model.parameters(), training.max_norm))
            optimizer.step()
            optimizer.zero_grad()

    def mean_of(self, chunk: Chunk, of_ranks: list[Tensor], codec: BlockCodec | None) -> Tensor:
        """Return the mean of a chunk. Each node sums the gradients of its ranks, and sums of other nodes than the
        owner's go through the codec.
        """
        num_ranks, num_local = self.training.num_ranks, self.training.num_local
        total = None
        for node in range(self.training.num_nodes):
            of_node = of_ranks[node * num_local : (node + 1) * num_local]
            is_coded = codec is not None and node != chunk.owner // num_local
            if num_local == 1:
                value = coded(codec, of_node[0]) if is_coded else of_node[0]
                value = value * (1 / num_ranks)
            else:
                value = of_node[0] * (1 / num_ranks)
                for other in of_node[1:]:
                    value = value + other * (1 / num_ranks)
                value = coded(codec, value) if is_coded else value
            total = value if total is None else total + value
        assert total is not None
        return total

    def round_weights(self, codec: BlockCodec) -> None:
        """Round the weights. Each rank's part of a block is one message."""
        for block in self.layout.blocks:
            flat = torch.zeros(block.numel)
            for part in block.slices:
                flat[part.start : part.stop] = self.parameters[part.name].detach().view(-1)
            for first, last in block.rank_ranges:
                if first < last:
                    flat[first:last] = coded(codec, flat[first:last])
            for part in block.slices:
                self.parameters[part.name].data.copy_(flat[part.start : part.stop].view(part.shape))


def flat_of(chunk: Chunk, gradients: Mapping[str, Tensor | None], codec: BlockCodec | None = None) -> Tensor:
    """Return the gradient of a chunk. Each parameter's part goes through the codec."""
    values = torch.zeros(chunk.numel)
    for piece in chunk.pieces:
        gradient = gradients[piece.param_slice.name]
        if gradient is not None:
            first = piece.param_slice.first + piece.start_in_slice
            part = gradient.reshape(-1)[first : first + piece.numel]
            values[piece.start_in_chunk : piece.stop_in_chunk] = part if codec is None else coded(codec, part)
    return values


def coded(codec: BlockCodec | None, values: Tensor) -> Tensor:
    """Return the decoded values."""
    message = torch.empty(codec.message_bytes(values.numel()), dtype=torch.uint8)
    codec.encode(values, message)
    found = torch.empty_like(values)
    codec.decode(message, found)
    return found


# Sent elements.


def gradient_numels(training: Training, layout: OffloadLayout, rank: int) -> Iterator[int]:
    """Yield the elements of each sum that a rank sends in a step: one for each chunk whose owner has the same local
    rank on another node.
    """
    node, local_rank = divmod(rank, training.num_local)
    for chunk in layout.chunks():
        owner_node, owner_local = divmod(chunk.owner, training.num_local)
        if owner_local == local_rank and owner_node != node:
            yield chunk.numel


def part_numel(block: Block, rank: int) -> int:
    first, last = block.rank_ranges[rank]
    return last - first
