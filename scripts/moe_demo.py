"""Fine-tune a mixture whose experts stream one by one, and print losses, routing and bytes.

python scripts/moe_demo.py moe_demo_out        (after moe_inputs.py; scripts/moe_demo.sh runs both)
"""

from __future__ import annotations

import itertools
import json
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import datasets
import text_data
import torch
import transformers
from quickstart import Progress, byte_table
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, ProgressCallback, TrainingArguments, default_data_collator

from hf_lohan import Trainer
from hf_lohan.costs import SizeClass
from hf_lohan.report.svg import Panel, svg
from hf_lohan.wording import format_bytes

CONFIG = Path(__file__).resolve().parents[1] / "configs" / "moe_demo.yaml"
BLOCK_SIZE = 64
NUM_EVAL_BLOCKS = 4
"""Number of blocks of each kind of text."""
MAX_STEPS = 5
MIN_IMPROVEMENT_FRACTION = 0.05

CELL, GAP, LEFT, TOP = 10, 34, 60, 60
"""Sizes in the picture, in pixels."""
STYLE = "text{font:12px sans-serif;fill:#333}.strong{font-weight:bold}.grid{stroke:#ccc}svg{background:#fff}"
COLOR = "#1f5fa8"

console = Console(highlight=False)


def training_arguments(output_dir: Path, *, max_steps: int = MAX_STEPS, batch_size: int = 4) -> TrainingArguments:
    """Return arguments for a short run, because each step moves all parameters."""
    return TrainingArguments(
        output_dir=str(output_dir),
        max_steps=max_steps,
        per_device_train_batch_size=batch_size,
        per_device_eval_batch_size=NUM_EVAL_BLOCKS,
        learning_rate=2e-4,
        warmup_steps=2,
        lr_scheduler_type="linear",
        max_grad_norm=0.0,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        dataloader_pin_memory=False,
        use_cpu=not torch.cuda.is_available(),
        seed=0,
    )


@contextmanager
def counted_routing(model: Any) -> Iterator[dict[str, Tensor]]:
    """Count the tokens that each router sends to each expert in this context. Yields the counts by the router's
    name."""
    counts: dict[str, Tensor] = {}
    hooks = []
    for name, module in model.named_modules():
        if not name.endswith("mlp.gate"):
            continue

        def count(_module: Any, _inputs: Any, output: tuple[Tensor, ...], name: str = name) -> None:
            (chosen,) = (tensor for tensor in output if not tensor.is_floating_point())
            tokens = torch.bincount(chosen.flatten().cpu(), minlength=output[0].shape[-1])
            counts[name] = counts.get(name, torch.zeros_like(tokens)) + tokens

        hooks.append(module.register_forward_hook(count))
    try:
        yield counts
    finally:
        for hook in hooks:
            hook.remove()


def evaluate(trainer: Trainer, held_out: Mapping[str, Any]) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Return, by kind of text, the held-out loss and each expert's share of the tokens [layers, experts]."""
    losses, shares = {}, {}
    for kind, blocks in held_out.items():
        with counted_routing(trainer.model) as counts:
            losses[kind] = trainer.evaluate(blocks)["eval_loss"]
        table = torch.stack(list(counts.values())).double()
        shares[kind] = table / table.sum(dim=1, keepdim=True)
    return losses, shares


def separation(shares: Mapping[str, Tensor]) -> float:
    """Return the total variation distance between two kinds' shares, averaged over layers and pairs of kinds. 0 means
    equal, and 1 disjoint."""
    pairs = itertools.combinations(shares.values(), 2)
    return torch.stack([(one - other).abs().sum(dim=1).mean() / 2 for one, other in pairs]).mean().item()


def routing_picture(stages: Mapping[str, Mapping[str, Tensor]]) -> str:
    """Return a standalone SVG with a table of layers by experts for each stage (rows) and kind of text (columns).
    Darker cells have a larger share of the layer's tokens."""
    first = next(iter(next(iter(stages.values())).values()))
    num_layers, num_experts = first.shape
    darkest = max(share.max().item() for shares in stages.values() for share in shares.values())
    width, height = num_experts * 2 * CELL, num_layers * CELL
    panels = []
    for row, (stage, shares) in enumerate(stages.items()):
        for column, (kind, share) in enumerate(shares.items()):
            left, top = LEFT + column * (width + GAP), TOP + row * (height + GAP + 20)
            box = (left, top, left + width, top + height)
            panel = Panel(*box, x=(0, num_experts), y=(0, num_layers))
            panel.text(left + width / 2, top - 10, f"{kind}, {stage}", anchor="middle", css="strong")
            for layer, expert in itertools.product(range(num_layers), range(num_experts)):
                opacity = share[layer, expert].item() / darkest
                panel.bar(expert, expert + 1, top + (layer + 0.5) * CELL, CELL, COLOR, opacity=round(opacity, 3))
            for expert in range(num_experts):
                panel.text(left + (expert + 0.5) * 2 * CELL, top + height + 10, str(expert), anchor="middle")
            if column == 0:
                for layer in {0, num_layers - 1}:
                    panel.text(left - 8, top + (layer + 0.5) * CELL, f"layer {layer}", anchor="end")
            panels.append(panel)
    num_columns, num_rows = len(next(iter(stages.values()))), len(stages)
    whole_width = LEFT + num_columns * (width + GAP)
    whole_height = TOP + num_rows * (height + GAP + 20)
    title = f"Which experts tokens go to; darkest: {darkest:.0%} of a layer's choices, evenly: {1 / num_experts:.1%}"
    panels[0].text(LEFT, 20, title)
    drawn = svg(title, whole_width, whole_height, panels)
    return drawn.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1).replace(
        ">", f"><style>{STYLE}</style>", 1
    )


def loss_table(before: Mapping[str, float], after: Mapping[str, float]) -> Table:
    table = Table("held-out loss", "before", "after", show_edge=False)
    for kind in before:
        table.add_row(kind, f"{before[kind]:.3f}", f"{after[kind]:.3f}")
    return table


def describe_slots(trainer: Trainer) -> str:
    """Return a description of the experts' slots. Raises ValueError if experts are not streamed one by one."""
    assert trainer.offload_engine is not None
    plan = trainer.offload_engine.layout.plan
    one_bytes, num_slots = plan.slot_bytes[SizeClass.EXPERT], plan.num_slots[SizeClass.EXPERT]
    if not num_slots:
        raise ValueError("the experts of this model come with their layers, so this would show nothing")
    num_experts = trainer.model.config.num_local_experts
    return (
        f"the experts of one layer take {format_bytes(num_experts * one_bytes)}; {num_slots} slots of "
        f"{format_bytes(one_bytes)} serve all of them, within {format_bytes(plan.gpu_pool_bytes)} of slots"
    )


def main(
    out: Path,
    *,
    offload: Any = str(CONFIG),
    block_size: int = BLOCK_SIZE,
    args: TrainingArguments | None = None,
    min_improvement_fraction: float = MIN_IMPROVEMENT_FRACTION,
) -> None:
    """Train, compare and export. Exits with status 1 if the held-out loss did not fall enough, or the export
    differs."""
    transformers.utils.logging.set_verbosity_error()
    if not sys.stderr.isatty():
        transformers.utils.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    run_folder, exported = out / "run", out / "finetuned"
    shutil.rmtree(exported, ignore_errors=True)
    tokenizer = AutoTokenizer.from_pretrained(out / "base")

    def blocks_in(file: Path) -> Any:
        documents = text_data.read_documents([str(file)])
        return text_data.make_blocks(documents, tokenizer, block_size=block_size, packing=True)

    train = datasets.concatenate_datasets([blocks_in(file) for file in sorted(out.glob("train-*.jsonl"))])
    held_out = {
        file.stem.removeprefix("heldout-"): blocks_in(file).take(NUM_EVAL_BLOCKS)
        for file in sorted(out.glob("heldout-*.jsonl"))
    }
    trainer = Trainer(
        model=str(out / "base"),
        args=args or training_arguments(run_folder),
        train_dataset=train,
        data_collator=default_data_collator,
        processing_class=tokenizer,
        offload=offload,
    )
    trainer.remove_callback(ProgressCallback)
    trainer.add_callback(Progress)
    console.print("held-out loss and routing before, from the weights on disk")
    before, shares_before = evaluate(trainer, held_out)
    console.print(describe_slots(trainer))
    console.print(f"fine-tuning, {trainer.args.max_steps} steps")
    trainer.train()
    console.print("held-out loss and routing after")
    after, shares_after = evaluate(trainer, held_out)
    trainer.save_model(str(exported))
    ids = torch.tensor([next(iter(held_out.values()))[0]["input_ids"]], device=trainer.args.device)
    with torch.no_grad():
        streamed = trainer.model.eval()(input_ids=ids).logits.clone()
    assert trainer.offload_engine is not None
    trainer.offload_engine.close()  # frees the engine's memory

    picture = out / "routing.svg"
    picture.write_text(routing_picture({"before": shares_before, "after": shares_after}))
    console.print(loss_table(before, after))
    console.print(byte_table(json.loads((run_folder / "lohan" / "summary.json").read_text())))
    far = [f"{separation(shares):.3f}" for shares in (shares_before, shares_after)]
    console.print(f"\n{picture}: which experts each kind of text goes to")
    console.print(f"kinds of text are {far[0]} apart before, {far[1]} after (0: alike, 1: no expert in common)")
    plain = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32).eval().to(ids.device)
    with torch.no_grad():
        in_memory = plain(input_ids=ids).logits
    if not torch.equal(in_memory, streamed):
        difference = (in_memory - streamed).abs().max().item()
        sys.exit(f"error: {exported}, loaded by plain transformers, has other logits, by up to {difference:g}")
    console.print(f"{exported}: an ordinary checkpoint; plain transformers loads it, to the same logits bit for bit")
    mean_before, mean_after = (sum(losses.values()) / len(losses) for losses in (before, after))
    improvement_fraction = 1 - mean_after / mean_before
    console.print(f"held-out loss: {mean_before:.3f} before, {mean_after:.3f} after ({improvement_fraction:.1%} lower)")
    if improvement_fraction < min_improvement_fraction:
        sys.exit(f"error: the held-out loss should have fallen by {min_improvement_fraction:.0%} or more")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
