"""Ranks that train with rows of the embeddings or with whole tables, and one process of stock torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from engines import ONE_GENERATOR, RANK_SETTINGS, open_engine, resolved
from torch import Tensor
from trained_nodes import quiet_bytes

from hf_lohan.device import Device
from hf_lohan.engine import OffloadEngine
from hf_lohan.optim import OffloadAdamW
from hf_lohan.planning import lay_out
from hf_lohan.ranks import Links
from hf_lohan.testing.models import tiny_batch, tiny_model
from hf_lohan.testing.thread_ranks import run_ranks

LR = 1e-3
WORDS = "model.embed_tokens.weight"
Batch = dict[str, Tensor]


def small_model(family: str = "llama", **overrides: Any) -> Any:
    """Return a model with a table of four granules."""
    return tiny_model(family, vocab_size=1501, hidden_size=40, **overrides)


def untied_gpt2() -> Any:
    return small_model("gpt2", tie_word_embeddings=False)


def random_batch(step: int, rank: int, micro: int) -> Batch:
    batch = tiny_batch(seed=1000 * step + 10 * rank + micro)
    ids = batch["input_ids"] * 5  # rows of all ranks
    return {**batch, "input_ids": ids, "labels": ids.clone()}


@dataclass
class Trained:
    """The results of a rank."""

    losses: list[Tensor] = field(default_factory=list)
    norms: list[Tensor] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    """Weights and moments."""
    sent: Mapping[str, int] = field(default_factory=dict)
    rows_bytes: int | None = None
    """Bytes of rows that came to the device; None if the table was loaded."""
    layout: Any = None


@dataclass(frozen=True)
class Run:
    """A training by several ranks."""

    num_ranks: int = 2
    num_local: int = 2
    make_model: Callable[[], Any] = small_model
    batch: Callable[[int, int, int], Batch] = random_batch
    """Returns the batch of a step, a rank and a micro-batch."""
    max_norm: float = 0.0
    accumulation: int = 1
    num_steps: int = 3
    together: bool = False
    """Whether micro-batches run together."""
    dtype: torch.dtype = torch.float32
    settings: Mapping[str, Any] = field(default_factory=dict)
    make_device: Callable[[], Device | None] = lambda: None
    before_step: Callable[[OffloadEngine, int], object] = lambda _engine, _step: None
    after_step: Callable[[OffloadEngine, int], object] = lambda _engine, _step: None

    def ranks(self, folder: Path, embedding: str, **options: Any) -> list[Trained]:
        folder.mkdir(exist_ok=True)
        devices = [self.make_device() for _ in range(self.num_ranks)]

        def train(links: Links) -> Trained:
            return self.train_rank(links, folder, embedding, devices[links.ranks.rank])

        return run_ranks(self.num_ranks, train, num_local=self.num_local, **options)

    def train_rank(self, links: Links, folder: Path, embedding: str, device: Device | None = None) -> Trained:
        rank = links.ranks.rank
        with ONE_GENERATOR:
            model = self.make_model().to(self.dtype).train()
        defaults = {**RANK_SETTINGS, "cpu_memory": "8MiB", "gpu_memory": "4MiB", "_resident_records": "none"}
        settings = {**defaults, **self.settings, "embedding": embedding}
        config = resolved(folder / f"rank-{rank}", **settings)
        holds = self.max_norm > 0 or self.accumulation > 1
        layout = lay_out(model, config, working_dtype=self.dtype, hold_gradients=holds, ranks=links.ranks)
        engine = open_engine(model, layout, config, device, links)
        before, found = dict(links.sent_bytes), Trained(layout=layout)
        try:
            optimizer = OffloadAdamW(model.parameters(), lr=LR, weight_decay=0.1, engine=engine)
            for step in range(self.num_steps):
                self._run_step(engine, step, rank, found)
                if self.max_norm:
                    found.norms.append(engine.clip_grad_norm(self.max_norm))
                self.before_step(engine, step)
                optimizer.step()
                optimizer.zero_grad()
                self.after_step(engine, step)
            quiet_bytes(engine, links, before)
            found.sent = {channel: links.sent_bytes[channel] - before[channel] for channel in links.sent_bytes}
            found.rows_bytes = engine.embedding_rows.num_bytes if engine.embedding_rows is not None else None
            for name, _ in model.named_parameters():
                found.tensors[name] = engine.parameters.read_parameter(name)
                for kind in ("exp_avg", "exp_avg_sq"):
                    found.tensors[f"{name} {kind}"] = engine.parameters.read_flat(name, kind)
            return found
        finally:
            engine.close()

    def _run_step(self, engine: OffloadEngine, step: int, rank: int, found: Trained) -> None:
        def run(micro: int) -> None:
            loss = engine.model(**self.batch(step, rank, micro)).loss
            if not engine.defer_backward(loss / self.accumulation):
                (loss / self.accumulation).backward()
            found.losses.append(loss.detach())

        if self.together:
            engine.run_micro_batches([lambda micro=micro: run(micro) for micro in range(self.accumulation)])
            return
        for micro in range(self.accumulation):
            engine.announce_backward(is_final=micro == self.accumulation - 1)
            run(micro)

    def stock(self) -> Trained:
        """Train one process in memory with the batches of all ranks."""
        model, found = self.make_model().train(), Trained()
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.1, fused=True)
        for step in range(self.num_steps):
            for rank in range(self.num_ranks):
                for micro in range(self.accumulation):
                    loss = model(**self.batch(step, rank, micro)).loss
                    (loss / self.accumulation / self.num_ranks).backward()
                    found.losses.append(loss.detach())
            if self.max_norm:
                found.norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), self.max_norm))
            optimizer.step()
            optimizer.zero_grad()
        for name, parameter in model.named_parameters():
            found.tensors[name] = parameter.detach()
            for kind in ("exp_avg", "exp_avg_sq"):
                found.tensors[f"{name} {kind}"] = optimizer.state[parameter][kind].view(-1)
        return found


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same bits, in which 0.0 differs from -0.0."""
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def assert_same(ours: list[Trained], whole: list[Trained]) -> None:
    for of_rank, expected in zip(ours, whole, strict=True):
        assert of_rank.rows_bytes is not None and expected.rows_bytes is None
        assert all(map(same_bits, of_rank.losses, expected.losses))
        assert all(map(same_bits, of_rank.norms, expected.norms))
        for name, tensor in expected.tensors.items():
            assert same_bits(of_rank.tensors[name], tensor), name


def assert_stock(ours: list[Trained], stock: Trained) -> None:
    for rank, of_rank in enumerate(ours):
        assert all(map(same_bits, of_rank.losses, stock.losses[rank :: len(ours)]))
        for name, tensor in stock.tensors.items():
            assert same_bits(of_rank.tensors[name], tensor), name
