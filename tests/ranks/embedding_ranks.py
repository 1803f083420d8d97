"""Ranks that train with rows of the embeddings or with whole tables, and one process of stock torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import training_ranks
from torch import Tensor
from trained_nodes import quiet_bytes
from training_ranks import assert_same_run, rank_engine, stock_steps, take_steps, weights_of

from hf_lohan.device import Device
from hf_lohan.engine import OffloadEngine
from hf_lohan.ranks import Links
from hf_lohan.testing.models import tiny_batch, tiny_model
from hf_lohan.testing.thread_ranks import run_ranks

MOMENTS = ("exp_avg", "exp_avg_sq")
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
class Trained(training_ranks.Trained):
    """The results of a rank. Weights and moments are in `weights`."""

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
        settings = {"cpu_memory": "8MiB", "gpu_memory": "4MiB", "_resident_records": "none", **self.settings}
        holds = self.max_norm > 0 or self.accumulation > 1
        with rank_engine(
            links,
            folder,
            lambda: self.make_model().to(self.dtype),
            dtype=self.dtype,
            hold_gradients=holds,
            device=device,
            embedding=embedding,
            **settings,
        ) as engine:
            before, found = dict(links.sent_bytes), Trained(layout=engine.layout)
            take_steps(
                engine,
                lambda step, micro: engine.model(**self.batch(step, links.ranks.rank, micro)).loss,
                self.num_steps,
                num_micro=self.accumulation,
                max_norm=self.max_norm,
                is_joint=self.together,
                before_step=self.before_step,
                after_step=self.after_step,
                into=found,
            )
            quiet_bytes(engine, links, before)
            found.sent = {channel: links.sent_bytes[channel] - before[channel] for channel in links.sent_bytes}
            found.rows_bytes = engine.embedding_rows.num_bytes if engine.embedding_rows is not None else None
            found.weights = weights_of(engine)
            for name in [*found.weights]:
                for kind in MOMENTS:
                    found.weights[f"{name} {kind}"] = engine.parameters.read_flat(name, kind)
            return found

    def stock(self) -> training_ranks.Trained:
        """Train one process in memory with the batches of all ranks."""
        model = self.make_model().train()
        found, optimizer = stock_steps(
            model,
            lambda step, rank, micro: model(**self.batch(step, rank, micro)).loss,
            self.num_steps,
            self.num_ranks,
            num_micro=self.accumulation,
            max_norm=self.max_norm,
        )
        for name, parameter in model.named_parameters():
            for kind in MOMENTS:
                found.weights[f"{name} {kind}"] = optimizer.state[parameter][kind].view(-1)
        return found


def assert_same(ours: list[Trained], whole: list[Trained]) -> None:
    for of_rank, expected in zip(ours, whole, strict=True):
        assert of_rank.rows_bytes is not None and expected.rows_bytes is None
        assert_same_run(of_rank, expected)


def assert_stock(ours: list[Trained], stock: training_ranks.Trained) -> None:
    for rank, of_rank in enumerate(ours):
        assert_same_run(of_rank, stock, rank, len(ours))
