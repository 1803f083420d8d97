"""Gradient accumulation, micro-batch after micro-batch against block after block, in one interleaved run.

    python scripts/benchmarks/bench_micro_batches.py  # Llama 151M, 4 micro-batches of 1 x 64 and of 1 x 256
    python scripts/benchmarks/bench_micro_batches.py --num-micro-batches 16 --lengths 64 --max-grad-norm 0

One engine each, on a store of its own, with equal weights and batches, in turns of three steps (A A A A B B B B A ...;
a turn's first step is not timed). `in_turn` runs each micro-batch's forward and backward through all blocks; `vertical`
runs all micro-batches through a block before the next one (`OffloadEngine.run_micro_batches`). Afterwards weights and
moments are compared. Without clipping they must be equal to the bit; with it, the norm of a parameter larger than a
chunk is added up chunk by chunk in turn, which differs from torch's own sum, and is torch's to the bit vertical.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from benchmarking import (
    LEARNING_RATE,
    STEPS_PER_TURN,
    NormsOption,
    Options,
    Shape,
    benchmark,
    folder_in,
    in_turns,
    spread,
    table_of,
    turn,
)
from rich.console import Console

from hf_lohan.config import OffloadConfig
from hf_lohan.engine import OffloadEngine
from hf_lohan.huggingface import offload_model
from hf_lohan.optim import OffloadAdamW
from hf_lohan.wording import format_bytes

SIDES = ("in_turn", "vertical")


def accumulated_step(
    engine: OffloadEngine, batches: list[dict[str, torch.Tensor]], max_grad_norm: float, *, vertical: bool
) -> Callable[[], None]:
    model: Any = engine.model
    optimizer = OffloadAdamW(model.parameters(), lr=LEARNING_RATE, engine=engine)

    def micro_batch(batch: dict[str, torch.Tensor]) -> None:
        loss = model(**batch).loss / len(batches)
        if not engine.defer_backward(loss):
            loss.backward()

    def step() -> None:
        if vertical:
            engine.run_micro_batches([partial(micro_batch, batch) for batch in batches])
        else:
            for number, batch in enumerate(batches):
                is_final = number == len(batches) - 1
                engine.announce_backward(is_final=is_final)
                micro_batch(batch)
        if max_grad_norm:
            engine.clip_grad_norm(max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()

    return step


def all_equal(engines: dict[str, OffloadEngine]) -> bool:
    """Whether both have come to the same weights and moments."""
    first, second = (engine.parameters for engine in engines.values())
    names = [name for name, _ in engines["vertical"].model.named_parameters()]
    return all(
        torch.equal(first.read_parameter(name), second.read_parameter(name))
        and all(torch.equal(first.read_flat(name, k), second.read_flat(name, k)) for k in ("exp_avg", "exp_avg_sq"))
        for name in names
    )


def measure(
    shape: Shape,
    settings: dict[str, Any],
    folder: Path,
    *,
    device: str,
    num_micro_batches: int,
    max_grad_norm: float,
    num_turns: int,
) -> dict[str, Any]:
    batches = shape.batches(num_micro_batches, device)
    engines, steps = {}, {}
    for side in SIDES:
        config = OffloadConfig.load({**settings, "ssd": str(folder / side)})
        is_vertical = side == "vertical"
        engine = offload_model(
            shape.model(),
            config,
            torch_device=device,
            default_ssd_path=folder,
            hold_gradients=max_grad_norm > 0 or not is_vertical,
        )
        engines[side] = engine
        steps[side] = accumulated_step(engine, batches, max_grad_norm, vertical=is_vertical)
    try:
        for side in SIDES:
            turn(steps[side], engines[side].settle, device=device)
        before = {side: (engine.tiers.io.read_bytes, engine.tiers.io.write_bytes) for side, engine in engines.items()}
        figures = spread(
            "step_s",
            in_turns(
                {side: partial(turn, steps[side], engines[side].settle, device=device) for side in SIDES}, num_turns
            ),
        )
        num_steps = num_turns * (1 + STEPS_PER_TURN)
        read, written = (
            {side: (count(engine) - before[side][index]) / num_steps for side, engine in engines.items()}
            for index, count in enumerate((lambda e: e.tiers.io.read_bytes, lambda e: e.tiers.io.write_bytes))
        )
        return {
            "shape": asdict(shape),
            "num_micro_batches": num_micro_batches,
            "max_grad_norm": max_grad_norm,
            "num_parameters": engines["vertical"].layout.num_parameters,
            **figures,
            "vertical_over_in_turn": figures["step_s"]["vertical"] / figures["step_s"]["in_turn"],
            "read_bytes_per_step": read,
            "write_bytes_per_step": written,
            "weights_equal": all_equal(engines),
        }
    finally:
        for engine in engines.values():
            engine.close()


def show(results: list[dict[str, Any]]) -> None:
    table = table_of(
        "accumulated steps, one micro-batch after the other and vertical (medians, interleaved)",
        "micro-batches",
        "clip at",
        "in turn",
        "vertical",
        "ratio",
        "read in turn",
        "vertical",
        "equal",
    )
    for result in results:
        shape, step_s, read = result["shape"], result["step_s"], result["read_bytes_per_step"]
        table.add_row(
            f"{result['num_micro_batches']} of {shape['batch_size']} x {shape['sequence_length']}",
            f"{result['max_grad_norm']:g}",
            f"{step_s['in_turn']:.3f} s",
            f"{step_s['vertical']:.3f} s",
            f"{result['vertical_over_in_turn']:.3f}",
            format_bytes(int(read["in_turn"])),
            format_bytes(int(read["vertical"])),
            "yes" if result["weights_equal"] else "NO",
        )
    Console().print(table)


@benchmark("micro_batches", batch_size=1)
def main(
    options: Options,
    *,
    lengths: Annotated[list[int] | None, typer.Option(help="tokens; may be given several times")] = None,
    num_micro_batches: int = 4,
    activations: Annotated[str, typer.Option(help="where they wait for backward")] = "recompute",
    max_grad_norm: NormsOption = None,
) -> dict[str, Any]:
    with folder_in(options.store) as folder:
        results = [
            measure(
                replace(options.shape, sequence_length=length),
                {**options.budgets, "activations": activations},
                folder,
                device=options.device,
                num_micro_batches=num_micro_batches,
                max_grad_norm=norm,
                num_turns=options.num_turns,
            )
            for length in (lengths or [64, 256])
            for norm in (max_grad_norm or [1.0])
        ]
    show(results)
    return {"results": results}


if __name__ == "__main__":
    typer.run(main)
