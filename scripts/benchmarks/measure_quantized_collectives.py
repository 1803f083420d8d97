"""What quantized collectives do to the loss of a small Llama, trained from nothing on real text by two nodes of two.

    python scripts/benchmarks/measure_quantized_collectives.py --output quantized_collectives_quality.json

The ranks are computed one after the other in one process, and what they would send is really coded, summed and decoded
by `hf_lohan.ranks`. Each mode has the same weights to begin with and the same batches, for each seed. The text is this
project's own source and documents, byte by byte; a part at its end is held out.

With the losses come the errors of codecs, on the last step's gradients of one rank and on the weights: of layers'
matrices, for the block sizes that are used and others.

A seed changes weights and batches, so losses of two seeds differ by more than modes do. What counts is a mode's
difference to `exact` with the same seed, and how much that scatters over the seeds: training is chaotic, and a
difference that is smaller than the scatter is none.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import torch
import transformers
import typer
from benchmarking import ROOT, Options, benchmark
from rich.console import Console
from rich.table import Table
from torch import Tensor

from hf_lohan.ranks import GRADIENTS_INT4, GRADIENTS_INT8, WEIGHTS_INT8, BlockCodec
from hf_lohan.testing.models import VOCAB_SIZE, tiny_model

NUM_NODES, RANKS_PER_NODE = 2, 2
NUM_RANKS = NUM_NODES * RANKS_PER_NODE
NUM_LAST_STEPS = 50
"""Their mean loss is what is compared."""
NUM_HELD_OUT_ROWS = 64
BLOCK_NUMELS = (32, 64, 256, 2048, 4096)
LEARNING_RATE = 2e-3
WEIGHT_DECAY = 0.01
MAX_GRAD_NORM = 1.0

Reduce = Callable[[Sequence[Tensor]], Tensor]

console = Console(highlight=False)


@dataclass(frozen=True)
class Mode:
    """What of a step's traffic is coded, and how."""

    weights: BlockCodec | None = None
    gradients: BlockCodec | None = None
    within_nodes: bool = True
    """Whether gradients are coded on their way within a node, too."""

    def described(self) -> dict[str, Any]:
        codecs = {"weights": self.weights, "gradients": self.gradients}
        result: dict[str, Any] = {name: codec and asdict(codec) for name, codec in codecs.items()}
        for codec in filter(None, result.values()):
            codec["scale_dtype"] = str(codec["scale_dtype"]).removeprefix("torch.")
        return result | {"gradients_within_nodes": self.gradients is not None and self.within_nodes}


MODES = {
    "exact": Mode(),
    "qwZ int8": Mode(weights=WEIGHTS_INT8),
    "qgZ int8": Mode(gradients=GRADIENTS_INT8),
    "qgZ int4": Mode(gradients=GRADIENTS_INT4),
    "qgZ int4, between nodes only": Mode(gradients=GRADIENTS_INT4, within_nodes=False),
    "qwZ int8 + qgZ int4": Mode(weights=WEIGHTS_INT8, gradients=GRADIENTS_INT4),
}


def encoded(codec: BlockCodec, values: Tensor) -> Tensor:
    message = torch.empty(codec.message_bytes(values.numel()), dtype=torch.uint8)
    codec.encode(values, message)
    return message


def mean_of(gradients: Sequence[Tensor], mode: Mode) -> Tensor:
    """The ranks' mean, as it arrives by `mode`: first the sum within each node, then that over the nodes."""
    codec = mode.gradients
    mean = torch.empty_like(gradients[0])
    if codec is None:
        return sum_in_order([gradient * (1 / NUM_RANKS) for gradient in gradients], mean)
    of_nodes = []
    for first in range(0, NUM_RANKS, RANKS_PER_NODE):
        of_node = gradients[first : first + RANKS_PER_NODE]
        if mode.within_nodes:
            message = torch.empty(codec.message_bytes(mean.numel()), dtype=torch.uint8)
            codec.decode_sum_encode([encoded(codec, gradient) for gradient in of_node], message, mean.numel())
        else:
            message = encoded(codec, sum_in_order(of_node, torch.empty_like(mean)))
        of_nodes.append(message)
    codec.decode_sum_(of_nodes, mean, 1 / NUM_RANKS)
    return mean


def sum_in_order(parts: Sequence[Tensor], total: Tensor) -> Tensor:
    total.copy_(parts[0])
    for part in parts[1:]:
        total.add_(part)
    return total


class Run:
    """One model, trained by one mode."""

    def __init__(self, text: Tensor, options: Options, mode: Mode, seed: int) -> None:
        self.mode, self.seed, self.options = mode, seed, options
        self.model = tiny_model(
            "llama",
            seed=seed,
            hidden_size=options.hidden,
            num_layers=options.layers,
            intermediate_size=options.intermediate,
            vocab_size=options.vocabulary,
        ).train()
        self.parameters = list(self.model.parameters())
        self.sizes = [parameter.numel() for parameter in self.parameters]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
        length = options.sequence_length
        rows = text[: len(text) // length * length].view(-1, length)
        self.text, self.held_out = rows[:-NUM_HELD_OUT_ROWS].flatten(), rows[-NUM_HELD_OUT_ROWS:]

    def step(self, number: int) -> float:
        """The ranks' mean loss."""
        masters = [parameter.detach().clone() for parameter in self.parameters] if self.mode.weights else []
        if self.mode.weights is not None:
            self.put(self.as_sent(torch.cat([master.flatten() for master in masters]), self.mode.weights))
        losses, gradients = [], []
        for rank in range(NUM_RANKS):
            self.optimizer.zero_grad()
            batch = self.batch(number * NUM_RANKS + rank)
            loss = self.model(input_ids=batch, labels=batch).loss
            loss.backward()
            losses.append(loss.item())
            gradients.append(torch.cat([parameter.grad.flatten() for parameter in self.parameters]))
        if masters:
            self.put(torch.cat([master.flatten() for master in masters]))
        mean = mean_of(gradients, self.mode)
        for parameter, gradient in zip(self.parameters, mean.split(self.sizes), strict=True):
            parameter.grad = gradient.view_as(parameter)
        torch.nn.utils.clip_grad_norm_(self.parameters, MAX_GRAD_NORM)
        self.optimizer.step()
        return statistics.fmean(losses)

    @torch.no_grad()
    def put(self, weights: Tensor) -> None:
        for parameter, part in zip(self.parameters, weights.split(self.sizes), strict=True):
            parameter.copy_(part.view_as(parameter))

    @staticmethod
    def as_sent(weights: Tensor, codec: BlockCodec) -> Tensor:
        arrived = torch.empty_like(weights)
        codec.decode(encoded(codec, weights), arrived)
        return arrived

    def batch(self, number: int) -> Tensor:
        generator = torch.Generator().manual_seed(number + 1_000_003 * self.seed)
        length = self.options.sequence_length
        starts = torch.randint(0, len(self.text) - length, (self.options.batch_size,), generator=generator)
        return torch.stack([self.text[start : start + length] for start in starts.tolist()])

    def errors(self, step: int) -> dict[str, Any]:
        """Of codecs with float32 scales, by the size of blocks; of the codecs that are used, by name."""
        batch = self.batch(step * NUM_RANKS)
        self.optimizer.zero_grad()
        self.model(input_ids=batch, labels=batch).loss.backward()
        matrices = [p for name, p in self.model.named_parameters() if p.dim() == 2 and "layers" in name]
        gradients = torch.cat([parameter.grad.flatten() for parameter in matrices])
        weights = torch.cat([parameter.detach().flatten() for parameter in matrices])
        result: dict[str, Any] = {}
        for name, values, all_bits in (("gradients", gradients, (8, 4)), ("weights", weights, (8,))):
            for bits in all_bits:
                codecs = {numel: BlockCodec(bits, numel, torch.float32) for numel in BLOCK_NUMELS}
                result[f"{name} int{bits}"] = {numel: asdict(c.measured_error(values)) for numel, c in codecs.items()}
        used = {"GRADIENTS_INT8": GRADIENTS_INT8, "GRADIENTS_INT4": GRADIENTS_INT4}
        result["used"] = {name: asdict(codec.measured_error(gradients)) for name, codec in used.items()}
        result["used"]["WEIGHTS_INT8"] = asdict(WEIGHTS_INT8.measured_error(weights))
        return result

    @torch.no_grad()
    def held_out_loss(self) -> float:
        self.model.eval()
        return float(self.model(input_ids=self.held_out, labels=self.held_out).loss)


def real_text() -> Tensor:
    """Bytes of the package's source and of the documents."""
    files = [*sorted((ROOT / "hf_lohan").rglob("*.py")), *sorted((ROOT / "docs").glob("*.md"))]
    text = "".join(path.read_text(encoding="utf-8") for path in files)
    return torch.tensor(list(text.encode("ascii", "ignore")), dtype=torch.long)


def compared(name: str, runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A mode's losses, and how far they are from those of `exact`, seed by seed."""
    exact = {run["seed"]: run for run in runs if run["mode"] == "exact"}
    own = [run for run in runs if run["mode"] == name]
    result: dict[str, Any] = {}
    for figure in ("last_training_loss", "held_out_loss"):
        differences = [run[figure] - exact[run["seed"]][figure] for run in own]
        result[f"{figure}_mean"] = statistics.fmean(run[figure] for run in own)
        result[f"{figure}_minus_exact"] = differences
        result[f"{figure}_minus_exact_mean"] = statistics.fmean(differences)
        result[f"{figure}_minus_exact_scatter"] = statistics.stdev(differences) if len(differences) > 1 else None
    return result


def shown_as_table(modes: dict[str, Any], num_steps: int) -> Table:
    table = Table(title=f"{num_steps} steps; differences to exact: mean (scatter)")
    for column in ("mode", f"loss of the last {NUM_LAST_STEPS} steps", "difference", "held-out loss", "difference"):
        table.add_column(column)
    for name, figures in modes.items():
        row = [name]
        for figure in ("last_training_loss", "held_out_loss"):
            scatter = figures[f"{figure}_minus_exact_scatter"] or 0.0
            row += [f"{figures[f'{figure}_mean']:.4f}", f"{figures[f'{figure}_minus_exact_mean']:+.4f} ({scatter:.4f})"]
        table.add_row(*row)
    return table


@benchmark(
    "quantized_collectives_quality",
    hidden=96,
    layers=3,
    intermediate=192,
    vocabulary=VOCAB_SIZE,
    batch_size=4,
    sequence_length=64,
)
def main(
    options: Options,
    *,
    num_steps: int = 400,
    seed: Annotated[list[int] | None, typer.Option(help="may be given several times; default 0, 1, 2")] = None,
    mode: Annotated[
        list[str] | None, typer.Option(help="may be given several times; default all; exact is always")
    ] = None,
    num_threads: int = 1,
) -> dict[str, Any]:
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(num_threads)
    text = real_text()
    modes = {name: which for name, which in MODES.items() if not mode or name in ("exact", *mode)}
    runs, errors = [], []
    for number in seed or [0, 1, 2]:
        for name, which in modes.items():
            run, start = Run(text, options, which, number), time.perf_counter()
            losses = [run.step(step) for step in range(num_steps)]
            last = statistics.fmean(losses[-NUM_LAST_STEPS:])
            figures = {"mode": name, "seed": number, "last_training_loss": last, "held_out_loss": run.held_out_loss()}
            runs.append(figures | {"losses_of_every_tenth_step": losses[::10]})
            if name == "exact":
                errors.append(run.errors(num_steps))
            console.print(
                f"seed {number}, {name}: {last:.4f}, held out {figures['held_out_loss']:.4f} "
                f"({time.perf_counter() - start:.0f} s)"
            )
    figures_of_modes = {name: compared(name, runs) for name in modes}
    console.print(shown_as_table(figures_of_modes, num_steps))
    return {
        "num_steps": num_steps,
        "num_parameters": sum(run.sizes),
        "num_nodes": NUM_NODES,
        "ranks_per_node": RANKS_PER_NODE,
        "text_bytes": len(text),
        "coded": {name: which.described() for name, which in modes.items()},
        "modes": figures_of_modes,
        "errors_after_exact_runs": errors,
        "runs": runs,
    }


if __name__ == "__main__":
    typer.run(main)
