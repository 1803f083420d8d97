"""What the benchmarks share: a model, its steps in memory and offloaded, timing in turns, options, tables and JSON."""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table
from transformers import AutoModelForCausalLM, LlamaConfig

from hf_lohan.engine import OffloadEngine
from hf_lohan.optim import OffloadAdamW

LEARNING_RATE = 1e-4
STEPS_PER_TURN = 3


@dataclass(frozen=True)
class Shape:
    hidden: int
    layers: int
    intermediate: int
    vocabulary: int
    batch_size: int
    sequence_length: int
    bf16: bool

    def model(self) -> Any:
        config = LlamaConfig(
            hidden_size=self.hidden,
            num_hidden_layers=self.layers,
            intermediate_size=self.intermediate,
            vocab_size=self.vocabulary,
            num_attention_heads=max(1, self.hidden // 64),
            num_key_value_heads=max(1, self.hidden // 64),
            use_cache=False,
        )
        torch.manual_seed(0)
        dtype = torch.bfloat16 if self.bf16 else torch.float32
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).train()
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
        return model


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def timed(device: str, work: Callable[[], object]) -> float:
    synchronize(device)
    began_s = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - began_s


def in_memory_step(model: Any, batch: dict[str, torch.Tensor], max_grad_norm: float) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    parameters = list(model.parameters())

    def step() -> None:
        model(**batch).loss.backward()
        if max_grad_norm:
            torch.nn.utils.clip_grad_norm_(parameters, max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()

    return step


def offloaded_step(engine: OffloadEngine, batch: dict[str, torch.Tensor], max_grad_norm: float) -> Callable[[], None]:
    model: Any = engine.model
    optimizer = OffloadAdamW(model.parameters(), lr=LEARNING_RATE, engine=engine)

    def step() -> None:
        model(**batch).loss.backward()
        if max_grad_norm:
            engine.clip_grad_norm(max_grad_norm)
        optimizer.step()

    return step


def turn(step: Callable[[], None], settle: Callable[[], None] = lambda: None, *, device: str = "cpu") -> float:
    """Some steps in a row; seconds a step, as in a run: the first step finds nothing that the one before left to be
    done under it, so it is not timed, and neither is what the last one leaves (`settle`), which must not run under the
    other side's steps."""
    step()

    def steps() -> None:
        for _ in range(STEPS_PER_TURN):
            step()

    seconds = timed(device, steps)
    settle()
    return seconds / STEPS_PER_TURN


DeviceOption = Annotated[str, typer.Option(help="cpu or cuda")]
TurnsOption = Annotated[int, typer.Option(help=f"turns of {STEPS_PER_TURN} steps for each side")]
NormsOption = Annotated[list[float] | None, typer.Option(help="may be given several times")]
StoreOption = Annotated[Path | None, typer.Option(help="folder on the drive to measure; default: this one")]
OutputOption = Annotated[Path | None, typer.Option(help="write the figures as JSON")]


@contextmanager
def folder_in(store: Path | None) -> Iterator[Path]:
    """A new folder in `store`, or in the present one; it goes with all that is in it."""
    if store is not None:
        store.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="lohan-bench-", dir=store or "."))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def table_of(title: str, *headings: str) -> Table:
    """An empty table, figures to the right."""
    table = Table(title=title)
    for heading in headings:
        table.add_column(heading, justify="right")
    return table


def write_figures(output: Path | None, figures: dict[str, Any]) -> None:
    if output is not None:
        output.write_text(json.dumps(figures, indent=2) + "\n")
