"""Measures the speed of the codecs for slow links (blocks in 8 and 4 bits, step deltas), and the links on which they
pay.

    python scripts/benchmarks/bench_codecs.py

One thread codes. On a CPU the times are CPU times, which other load does not change. On links below
`pays_below_gbit_s`, coding, sending and decoding one after the other are faster than sending uncoded values. If the
three overlap, a codec pays up to `keeps_up_to_gbit_s`, which is 16 or 32 bits times the slower rate of encoding and
decoding. The figures also have the time of a copy from bfloat16 to float32.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import typer
from benchmarking import Options, benchmark, in_turns, spread, synchronize, table_of
from rich.console import Console
from torch import Tensor

from hf_lohan.ranks import GRADIENTS_INT4, GRADIENTS_INT8, WEIGHTS_INT8, BlockCodec, StepDelta
from hf_lohan.ranks.collectives.block_operators import dequantize_sum_, dequantize_sum_quantize_

CODECS = {
    "gradients, int8": (GRADIENTS_INT8, torch.float32),
    "gradients, int4": (GRADIENTS_INT4, torch.float32),
    "weights, int8": (WEIGHTS_INT8, torch.bfloat16),
}
"""Each codec has the dtype that would be sent without it."""
CHANGED_FRACTIONS = {"5e-6": (0.015, 0.003), "2e-5": (0.045, 0.005), "1e-4": (0.155, 0.025)}
"""Fractions of weights that a step changes, and that it changes by more than one ulp, by the learning rate of a
fine-tune of SmolLM2-135M."""
NUM_PARTS = 4

Work = Callable[[], object]


def rate(device: str, numel: int, work: Work) -> float:
    """Return the rate in elements per second."""
    clock = time.process_time if device == "cpu" else time.perf_counter
    work()
    synchronize(device)
    began_s = clock()
    work()
    synchronize(device)
    return numel / (clock() - began_s)


def block_works(codec: BlockCodec, dtype: torch.dtype, numel: int, device: str) -> dict[str, Work]:
    values = (torch.randn(numel, device=device) * 1e-3).to(dtype)
    messages = [torch.empty(codec.message_bytes(numel), dtype=torch.uint8, device=device) for _ in range(NUM_PARTS)]
    for message in messages:
        codec.encode(values, message)
    out, total, recoded = torch.empty_like(values), torch.empty_like(values, dtype=torch.float32), messages[0].clone()
    form, codes_bytes = (codec.num_bits, codec.block_numel), codec.codes_bytes(numel)
    codes, scales = recoded[:codes_bytes].view(torch.int8), recoded[codes_bytes:].view(codec.scale_dtype)
    parts = (
        [message[:codes_bytes].view(torch.int8) for message in messages],
        [message[codes_bytes:].view(codec.scale_dtype) for message in messages],
    )
    return {
        "encode": lambda: codec.encode(values, recoded),
        "decode": lambda: codec.decode(messages[0], out),
        f"sum of {NUM_PARTS}": lambda: dequantize_sum_(*parts, *form, 1 / NUM_PARTS, total),
        f"sum of {NUM_PARTS}, encoded": lambda: dequantize_sum_quantize_(
            *parts, *form, codec.block_numel, numel, 1 / NUM_PARTS, codes, scales
        ),
    }


def a_step(numel: int, changed: float, by_more: float) -> tuple[Tensor, Tensor]:
    """Return weights before and after a step."""
    old = (torch.randn(numel) * 0.03).bfloat16()
    chance = torch.rand(numel)
    size = torch.where(chance < by_more, 3, torch.where(chance < changed, 1, 0))
    signs = torch.randint(0, 2, (numel,)) * 2 - 1
    return old, (old.view(torch.int16) + size * signs).to(torch.int16).view(torch.bfloat16)


def delta_works(delta: StepDelta, old: Tensor, new: Tensor) -> tuple[dict[str, Work], int]:
    out = torch.empty(delta.max_bytes(old.numel()), dtype=torch.uint8)
    num_bytes = delta.encode(old, new, out)
    applied = old.clone()  # adding the differences repeatedly always takes the same time
    return {"encode": lambda: delta.encode(old, new, out), "decode": lambda: delta.apply_(applied, out[:num_bytes])}, (
        num_bytes
    )


def figures_of(works: dict[str, Work], numel: int, num_bytes: int, raw_bytes: int, options: Options) -> dict[str, Any]:
    device = options.device
    turns = in_turns(
        {name: lambda work=work: rate(device, numel, work) for name, work in works.items()}, options.num_turns
    )
    result = {"bits_per_value": 8 * num_bytes / numel, **spread("elements_per_s", turns)}
    encode, decode = result["elements_per_s"]["encode"], result["elements_per_s"]["decode"]
    saved_bits = 8 * (raw_bytes - num_bytes) / numel
    result["pays_below_gbit_s"] = saved_bits / (1 / encode + 1 / decode) / 1e9
    result["keeps_up_to_gbit_s"] = 8 * raw_bytes / numel * min(encode, decode) / 1e9
    return result


@benchmark("codecs", num_turns=5)
def main(options: Options, *, numel: int = 8 << 20) -> dict[str, Any]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    device, codecs = options.device, {}
    for name, (codec, dtype) in CODECS.items():
        works = block_works(codec, dtype, numel, device)
        codecs[name] = figures_of(works, numel, codec.message_bytes(numel), dtype.itemsize * numel, options)
    for rate_name, fractions in CHANGED_FRACTIONS.items():
        works, num_bytes = delta_works(StepDelta(), *a_step(numel, *fractions))
        codecs[f"step delta, lr {rate_name}"] = figures_of(works, numel, num_bytes, 2 * numel, options)
    narrow, wide = torch.zeros(numel, dtype=torch.bfloat16, device=device), torch.zeros(numel, device=device)
    copies = in_turns({"copy": lambda: rate(device, numel, lambda: wide.copy_(narrow))}, options.num_turns)
    table = table_of("million values a second, one thread", "", "bits", "encode", "decode", "sum", "pays below, Gbit/s")
    for name, figures in codecs.items():
        speeds = figures["elements_per_s"]
        shown = [
            f"{speeds[kind] / 1e6:.0f}" if kind in speeds else ""
            for kind in ("encode", "decode", f"sum of {NUM_PARTS}")
        ]
        table.add_row(name, f"{figures['bits_per_value']:.2f}", *shown, f"{figures['pays_below_gbit_s']:.1f}")
    Console().print(table)
    return {"numel": numel, "num_threads": 1, "codecs": codecs, **spread("copy_elements_per_s", copies)}


if __name__ == "__main__":
    typer.run(main)
