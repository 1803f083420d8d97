"""Measures what small optimizer states cost: losses of a fine-tune with exact AdamW, with `stochastic_rounding: true`,
and with plain AdamW over bfloat16 weights, which has no masters and rounds to the nearest.

    bash scripts/quickstart.sh                                      # makes quickstart_out/base and its texts
    python scripts/benchmarks/small_states.py quickstart_out --num-seeds 5

It trains the last layers of SmolLM2-135M. The layers below are frozen, so their outputs are computed once. All sides
have the same bfloat16 forward and backward and the same order of rows, which the seed shuffles. Exact AdamW and plain
AdamW are torch's. The other side runs the update of an offloaded run (`hf_lohan.optim.update_records_`).
"""

from __future__ import annotations

import random
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from benchmarking import Options, benchmark, table_of
from rich.console import Console
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_lohan.optim import STOCHASTIC, AdamWGroup, Segment, master_format, update_records_

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import text_data

BETAS, EPS, WEIGHT_DECAY = (0.9, 0.999), 1e-8, 0.01
NUM_LAST = 100
"""Steps whose mean loss is reported."""
EXACT, ROUNDED, PLAIN = "exact", "stochastic_rounding", "plain bfloat16"

Rows = list[tuple[Tensor, Tensor]]
"""For each row, its tokens and what the frozen layers made of them."""
Update = Callable[[int, float], None]
"""Updates the weights with their gradients: the number of the step, the learning rate."""


class LastLayers(nn.Module):
    """The last layers of a Llama, with its norm and head. Only the layers are trained."""

    def __init__(self, model: Any, num_layers: int) -> None:
        super().__init__()
        self.layers, self._whole = model.model.layers[-num_layers:], [model]
        model.requires_grad_(False)
        self.layers.requires_grad_(True)

    def inputs(self, rows: Sequence[Tensor]) -> Rows:
        whole, first = self._whole[0], len(self._whole[0].model.layers) - len(self.layers)
        with torch.no_grad():
            return [(ids, whole.model(ids[None], output_hidden_states=True).hidden_states[first]) for ids in rows]

    def forward(self, ids: Tensor, hidden: Tensor) -> Tensor:
        whole = self._whole[0]
        positions = torch.arange(len(ids))[None]
        turned = whole.model.rotary_emb(hidden, positions)
        for layer in self.layers:
            found = layer(hidden, position_ids=positions, position_embeddings=turned)
            hidden = found[0] if isinstance(found, tuple) else found
        logits = whole.lm_head(whole.model.norm(hidden))[0, :-1].float()
        return nn.functional.cross_entropy(logits, ids[1:])


def with_torch(weights: list[nn.Parameter], *, has_masters: bool) -> Update:
    masters = [nn.Parameter(weight.detach().float()) for weight in weights] if has_masters else weights
    optimizer = torch.optim.AdamW(masters, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY)

    def update(_step: int, lr: float) -> None:
        optimizer.param_groups[0]["lr"] = lr
        for master, weight in zip(masters, weights, strict=True):
            assert weight.grad is not None
            master.grad = weight.grad.to(master.dtype)
        optimizer.step()
        for master, weight in zip(masters, weights, strict=True):
            weight.detach().copy_(master)

    return update


def with_rounding(named: dict[str, nn.Parameter], seed: int) -> Update:
    form = master_format(torch.bfloat16, STOCHASTIC)
    states = {
        name: {
            kind: torch.zeros(form.numel(kind, weight.numel()), dtype=form.state_dtype(kind))
            for kind in form.state_kinds
        }
        for name, weight in named.items()
    }
    workspace = [torch.empty(1 << 21, dtype=torch.uint8)]

    def update(step: int, lr: float) -> None:
        group = AdamWGroup(lr, *BETAS, EPS, WEIGHT_DECAY, rounding_seed=seed)
        for name, weight in named.items():
            assert weight.grad is not None
            records = {"param": weight.detach().view(-1), **states[name]}
            segments = [Segment(0, weight.numel(), group, step, parameter=name)]
            update_records_(records, weight.grad.view(-1), segments, form, position=0, private=workspace)

    return update


def mean_loss(model: LastLayers, rows: Rows) -> float:
    with torch.no_grad():
        return statistics.mean(float(model(*row)) for row in rows)


def train(model: LastLayers, rows: Rows, update: Update, *, num_steps: int, lr: float, seed: int) -> list[float]:
    """Return the loss of each step. The learning rate falls to zero in a line."""
    order = random.Random(seed)
    taken: Rows = []
    while len(taken) < num_steps:
        taken += order.sample(rows, len(rows))
    losses = []
    for step, row in enumerate(taken[:num_steps], 1):
        model.zero_grad()
        loss = model(*row)
        loss.backward()
        update(step, lr * (num_steps + 1 - step) / num_steps)
        losses.append(loss.item())
    return losses


@benchmark("small_states", sequence_length=64)
def main(
    options: Options,
    *,
    inputs: Annotated[Path, typer.Argument()] = Path("quickstart_out"),
    num_layers: int = 2,
    num_seeds: int = 5,
    num_steps: int = 400,
    learning_rate: float = 5e-5,
) -> dict[str, Any]:
    tokenizer = AutoTokenizer.from_pretrained(inputs / "base")
    model = LastLayers(AutoModelForCausalLM.from_pretrained(inputs / "base", dtype=torch.bfloat16), num_layers)
    of_texts = (
        text_data.make_blocks(
            text_data.read_documents([str(inputs / name)]),
            tokenizer,
            block_size=options.sequence_length,
            packing=True,
        )
        for name in ("train.jsonl", "heldout.jsonl")
    )
    train_rows, held_out = (
        [torch.tensor(block["input_ids"]) for block in blocks if len(block["input_ids"]) == options.sequence_length]
        for blocks in of_texts
    )
    rows, unseen = model.inputs(train_rows[:num_steps]), model.inputs(held_out[:32])
    named = dict(model.layers.named_parameters())
    begin = {name: weight.detach().clone() for name, weight in named.items()}
    makes: dict[str, Callable[[int], Update]] = {
        EXACT: lambda _seed: with_torch([*named.values()], has_masters=True),
        ROUNDED: lambda seed: with_rounding(named, seed),
        PLAIN: lambda _seed: with_torch([*named.values()], has_masters=False),
    }
    losses: dict[str, list[list[float]]] = {side: [] for side in makes}
    after: dict[str, list[float]] = {side: [] for side in makes}
    differences: dict[str, list[float]] = {ROUNDED: [], PLAIN: []}
    before = mean_loss(model, unseen)
    for seed in range(num_seeds):
        exact: dict[str, Tensor] = {}
        for side, make in makes.items():
            for name, weight in named.items():
                weight.detach().copy_(begin[name])
            losses[side].append(train(model, rows, make(seed), num_steps=num_steps, lr=learning_rate, seed=seed))
            after[side].append(mean_loss(model, unseen))
            weights = {name: weight.detach().float() for name, weight in named.items()}
            exact = exact or weights
            if side != EXACT:
                apart = sum(float((weights[name] - exact[name]).square().sum()) for name in named)
                moved = sum(float((exact[name] - begin[name].float()).square().sum()) for name in named)
                differences[side].append((apart / moved) ** 0.5)
            print(seed, side, statistics.mean(losses[side][-1][-NUM_LAST:]), after[side][-1], flush=True)
    last = {side: [statistics.mean(of[-NUM_LAST:]) for of in all_seeds] for side, all_seeds in losses.items()}
    table = table_of(
        f"{num_seeds} seeds, held-out loss before {before:.4f}", "", f"last {NUM_LAST} steps", "held out", ""
    )
    for side in makes:
        apart = f"{statistics.mean(differences[side]):.1%}" if side in differences else ""
        table.add_row(side, f"{statistics.mean(last[side]):.4f}", f"{statistics.mean(after[side]):.4f}", apart)
    Console().print(table)
    return {
        "num_layers": num_layers,
        "num_seeds": num_seeds,
        "num_steps": num_steps,
        "learning_rate": learning_rate,
        "held_out_before": before,
        "held_out_after": after,
        "last_losses": last,
        "update_differs_by": differences,
        "losses": losses,
    }


if __name__ == "__main__":
    typer.run(main)
