"""Ranks on several boxes that train a tiny model with one setting of `collectives`, and one process that applies the
same codecs to the same values."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_lohan.config import OffloadConfig
from hf_lohan.device import CpuDevice
from hf_lohan.engine import OffloadEngine, ParameterAccess, drain_model, open_tiers
from hf_lohan.model import Block, Chunk
from hf_lohan.optim import OffloadAdamW
from hf_lohan.planning import OffloadLayout, lay_out
from hf_lohan.ranks import BlockCodec, Channel, Links, Ranks
from hf_lohan.testing.models import tiny_batch, tiny_model
from hf_lohan.testing.thread_ranks import run_ranks

LR = 1e-3
_ONE_GENERATOR = threading.Lock()
"""Ranks are threads here, and torch has one generator for all."""


@dataclass(frozen=True)
class Training:
    """What all ranks do."""

    num_ranks: int
    num_local: int
    max_norm: float = 0.5
    num_steps: int = 4
    dtype: torch.dtype = torch.float32
    evaluates: bool = False
    """Between steps."""
    cpu_memory: str = "6MiB"
    lr: float = LR
    decides_before_loads: bool = True
    """Whether the way to exchange weights is decided before the first block is loaded, so that all loads follow it."""

    @property
    def num_boxes(self) -> int:
        return self.num_ranks // self.num_local

    def ranks(self, rank: int) -> Ranks:
        return Ranks(rank, self.num_ranks, rank % self.num_local, self.num_local)

    def layout(self, model: Any, rank: int, folder: Path, collectives: Any = "exact") -> tuple[OffloadLayout, Any]:
        own_folder = str(folder / f"rank-{rank}")
        config = OffloadConfig.load(
            {"cpu_memory": self.cpu_memory, "gpu_memory": "1MiB", "ssd": own_folder, "io_threads": 1},
            activations="recompute",
            prefetch_blocks=1,
            resident_records="none",
            collectives=collectives,
        ).resolve(host_memory_bytes=1 << 30, device_memory_bytes=1 << 30, num_cpus=2, default_ssd_path=own_folder)
        holds = self.max_norm > 0
        layout = lay_out(model, config, working_dtype=self.dtype, hold_gradients=holds, ranks=self.ranks(rank))
        return layout, config

    def run(self, folder: Path, collectives: Any) -> list[Trained]:
        folder.mkdir(exist_ok=True)  # on one drive here, where boxes would have their own
        return run_ranks(
            self.num_ranks, lambda links: self.train_rank(links, folder, collectives), num_local=self.num_local
        )

    def train_rank(self, links: Links, folder: Path, collectives: Any) -> Trained:
        rank = links.ranks.rank
        with _ONE_GENERATOR:
            model = tiny_model("llama").to(self.dtype).train()
        layout, config = self.layout(model, rank, folder, collectives)
        tiers = open_tiers(layout, config, CpuDevice(), links)
        drain_model(layout.blocks, ParameterAccess(tiers.store, layout.blocks, tiers.states, links))
        before = dict(links.sent_bytes)
        engine = OffloadEngine(model, layout, tiers, config)
        if self.decides_before_loads:
            engine.planned_memory.allocate_copies()
        found = Trained(layout.decided(), rank)
        try:
            optimizer = OffloadAdamW(model.parameters(), lr=self.lr, weight_decay=0.1, engine=engine)
            for step in range(self.num_steps):
                loss = model(**batch(step, rank)).loss
                loss.backward()
                found.losses.append(loss.detach())
                if self.max_norm:
                    found.norms.append(engine.clip_grad_norm(self.max_norm))
                optimizer.step()
                optimizer.zero_grad()
                if self.evaluates:
                    with torch.no_grad():
                        found.losses.append(model(**batch(step, rank + 100)).loss)
            engine.wait_for_updates()
            found.num_loads = {block.name: engine._ring.num_loads(block) for block in layout.blocks}
            ring = engine._ring
            for block in layout.blocks:  # a step changes all of them, and some are loaded for the next one
                assert ring.version_of(block) == self.num_steps
                found.num_states[block.name] = self.num_steps + ring.is_here(block)
            found.sent = quiet_bytes(links, before)
            found.figures = tiers.codecs.figures()
            found.weights = {name: engine.parameters.read_parameter(name) for name, _ in model.named_parameters()}
            return found
        finally:
            engine.close()


@dataclass
class Trained:
    """What a rank's run leaves."""

    layout: OffloadLayout
    rank: int
    weights: dict[str, Tensor] = field(default_factory=dict)
    norms: list[Tensor] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)
    sent: dict[Channel, int] = field(default_factory=dict)
    """Bytes of payloads, without those of the loading before and the reading afterwards."""
    num_loads: dict[str, int] = field(default_factory=dict)
    num_states: dict[str, int] = field(default_factory=dict)
    """By block, in how many states of it it was loaded."""
    figures: Mapping[str, Any] = field(default_factory=dict)


def quiet_bytes(links: Links, before: Mapping[Channel, int]) -> dict[Channel, int]:
    """What was sent, once nothing more is: the next pass's first loads are under way."""
    found: dict[Channel, int] = {}
    links.barrier("steps to be over", sequence="quiet")
    while found != (
        found := {
            channel: links.sent_bytes[channel] - before[channel] for channel in (Channel.WEIGHTS, Channel.GRADIENTS)
        }
    ):
        time.sleep(0.3)
    links.barrier("all to be quiet", sequence="quiet")
    return found


def batch(step: int, rank: int) -> dict[str, Tensor]:
    return tiny_batch(seed=1000 * step + rank)


# The same in one process.


class Oracle:
    """One model in memory, whose weights and gradients go through the codecs that boxes use, cut as they are."""

    def __init__(self, training: Training, folder: Path) -> None:
        self.training = training
        self.model = tiny_model("llama").train()
        self.layout, _ = training.layout(self.model, 0, folder)
        self.parameters = dict(self.model.named_parameters())

    def train(self, *, weights: BlockCodec | None = None, gradients: BlockCodec | None = None) -> None:
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
                loss = self.model(**batch(step, rank)).loss
                loss.backward()
                self.losses[rank].append(loss.detach())
                of_ranks.append({name: parameter.grad for name, parameter in self.parameters.items()})
                self.model.zero_grad()
            for name, parameter in self.parameters.items():
                parameter.data.copy_(exact[name])
                parameter.grad = torch.zeros_like(parameter)
            for chunk in self.layout.chunks():
                mean = self.mean_of(chunk, [flat_of(chunk, of_rank) for of_rank in of_ranks], gradients)
                for piece in chunk.pieces:
                    part = piece.param_slice
                    grad = self.parameters[part.name].grad
                    assert grad is not None
                    first = part.first + piece.start_in_slice
                    grad.view(-1)[first : first + piece.numel] = mean[piece.start_in_chunk : piece.stop_in_chunk]
            if training.max_norm:
                self.norms.append(torch.nn.utils.clip_grad_norm_(self.model.parameters(), training.max_norm))
            optimizer.step()
            optimizer.zero_grad()

    def mean_of(self, chunk: Chunk, of_ranks: list[Tensor], codec: BlockCodec | None) -> Tensor:
        """Each box sums what its ranks have; what comes from another box than the owner's went through the codec."""
        num_ranks, num_local = self.training.num_ranks, self.training.num_local
        total = None
        for node in range(self.training.num_boxes):
            of_box = of_ranks[node * num_local : (node + 1) * num_local]
            is_coded = codec is not None and node != chunk.owner // num_local
            if num_local == 1:
                value = coded(codec, of_box[0]) if is_coded else of_box[0]
                value = value * (1 / num_ranks)
            else:
                value = of_box[0] * (1 / num_ranks)
                for other in of_box[1:]:
                    value = value + other * (1 / num_ranks)
                value = coded(codec, value) if is_coded else value
            total = value if total is None else total + value
        assert total is not None
        return total

    def round_weights(self, codec: BlockCodec) -> None:
        """Each rank's part of a block is one message."""
        for block in self.layout.blocks:
            flat = torch.zeros(block.numel)
            for part in block.slices:
                flat[part.start : part.stop] = self.parameters[part.name].detach().view(-1)
            for first, last in block.rank_ranges:
                if first < last:
                    flat[first:last] = coded(codec, flat[first:last])
            for part in block.slices:
                self.parameters[part.name].data.copy_(flat[part.start : part.stop].view(part.shape))


def flat_of(chunk: Chunk, gradients: Mapping[str, Tensor | None]) -> Tensor:
    values = torch.zeros(chunk.numel)
    for piece in chunk.pieces:
        gradient = gradients[piece.param_slice.name]
        if gradient is not None:
            first = piece.param_slice.first + piece.start_in_slice
            values[piece.start_in_chunk : piece.stop_in_chunk] = gradient.view(-1)[first : first + piece.numel]
    return values


def coded(codec: BlockCodec | None, values: Tensor) -> Tensor:
    """What arrives."""
    assert codec is not None
    message = torch.empty(codec.message_bytes(values.numel()), dtype=torch.uint8)
    codec.encode(values, message)
    found = torch.empty_like(values)
    codec.decode(message, found)
    return found


# What is sent.


def gradient_numels(training: Training, layout: OffloadLayout, rank: int) -> Iterator[int]:
    """Of the sums that a rank sends in a step: one for each chunk that the rank with its number on another box owns."""
    node, local_rank = divmod(rank, training.num_local)
    for chunk in layout.chunks():
        owner_node, owner_local = divmod(chunk.owner, training.num_local)
        if owner_local == local_rank and owner_node != node:
            yield chunk.numel


def part_numel(block: Block, rank: int) -> int:
    first, last = block.rank_ranges[rank]
    return last - first
