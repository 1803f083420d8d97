"""Train every causal-LM class of the installed transformers, tiny and offloaded, and compare with memory.

    python scripts/development/architecture_matrix.py                      # all; writes docs/architectures.md
    python scripts/development/architecture_matrix.py --only 'Qwen|Zamba'  # these alone, printed

After two clipped steps from equal weights and batches, losses, gradient norms and weights must equal those of torch's
AdamW in memory, to the bit. Classes run in child processes, so that a crash affects no other. `--results` keeps the
outcomes in a file, which a run with `--only` updates.
"""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "architectures.md"
NUM_STEPS = 2
MAX_NORM = 1.0
NO_CLIPPING = 1e9
NORM_TOLERANCE = 1e-5
"""Relative tolerance with streamed experts, whose norm is summed in float64."""
CLASSES_PER_CHILD = 24
MAX_SECONDS = 300.0
NICENESS = 5
EXACT, EXACT_KEPT, REFUSED, WRONG, FAILED = "exact", "exact, activations kept", "refused", "WRONG", "FAILED"
NOT_TRIED = "not tried"
ORDER = (EXACT, EXACT_KEPT, NOT_TRIED, REFUSED, WRONG, FAILED)
DRAFTS = "drafts tokens from the hidden states and keys of another model, and does not train by itself"
NOT_TRAINED_HERE = {
    "Gemma3nForConditionalGeneration": "its vision tower is one of the package timm, which is not installed here",
    "Gemma4AssistantForCausalLM": DRAFTS,
    "Gemma4UnifiedAssistantForCausalLM": DRAFTS,
}
"""Classes without a tiny model that trains in memory, with the reason."""


@dataclass(frozen=True)
class Outcome:
    model_class: str
    what: str
    why: str = ""
    """The reason, if the model is not exact."""


# One class, in a child.


def try_class(name: str, folder: Path, activations: str = "recompute", experts: str = "with_layer") -> Outcome:
    """Train the class in memory and offloaded, and compare. Streamed experts train without clipping."""
    from tiny_configs import tiny_model_of

    max_norm = NO_CLIPPING if experts == "streamed" else MAX_NORM

    if name in NOT_TRAINED_HERE:
        return Outcome(name, NOT_TRIED, NOT_TRAINED_HERE[name])
    stock = tiny_model_of(name)
    make_batch = batches_of(stock)
    try:
        expected = train_in_memory(stock, make_batch, max_norm)
    except Exception as error:
        return Outcome(name, FAILED, f"in memory: {one_line(error)}")
    try:
        settings = {"activations": activations, "experts": experts}
        kept, found = train_offloaded(tiny_model_of(name), make_batch, folder, settings, max_norm)
    except (ValueError, RuntimeError) as error:
        if is_refusal(error):
            return Outcome(name, REFUSED, one_line(error))
        return Outcome(name, FAILED, one_line(error))
    except Exception as error:
        return Outcome(name, FAILED, one_line(error))
    for what, one, other in zip(("loss", "norm", "weights"), expected, found, strict=True):
        tolerance = NORM_TOLERANCE if what == "norm" and experts == "streamed" else 0.0
        if (difference := first_difference(one, other, tolerance)) is not None:
            return Outcome(name, WRONG, f"{what}: {difference}")
    return Outcome(name, EXACT_KEPT if kept else EXACT)


Batches = Callable[[int], dict[str, Any]]
Trained = tuple[list[Any], list[Any], dict[str, Any]]


def batches_of(model: Any) -> Batches:
    """Make batches of token ids with themselves as labels, and the class's further inputs."""
    import torch
    from tiny_configs import VOCAB_SIZE, more_inputs

    def batch(seed: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(5, VOCAB_SIZE - 20, (2, 16), generator=generator)
        given = {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)}
        return more_inputs(type(model).__name__, model, given, generator)

    return batch


def losses_of(model: Any, make_batch: Batches, backward: Callable[[Any], None]) -> Iterator[Any]:
    import torch

    for step in range(NUM_STEPS):
        batch = make_batch(100 + step)
        torch.manual_seed(step)  # for equal dropout
        loss = model(**batch).loss
        backward(loss)
        yield loss.detach().clone()


def train_in_memory(model: Any, make_batch: Batches, max_norm: float = MAX_NORM) -> Trained:
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, fused=True)
    losses, norms = [], []
    for loss in losses_of(model, make_batch, lambda loss: loss.backward()):
        losses.append(loss)
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm))
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, {name: parameter.detach() for name, parameter in model.named_parameters()}


def train_offloaded(
    model: Any, make_batch: Batches, folder: Path, asked: dict[str, Any], max_norm: float = MAX_NORM
) -> tuple[bool, Trained]:
    """Train offloaded; returns whether activations were kept, and the results."""
    import torch
    from accelerate.state import AcceleratorState, GradientState

    import hf_lohan

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    prepared = None
    for gpu_bytes in (1 << shift for shift in range(19, 29)):
        settings = {"gpu_memory": gpu_bytes, "cpu_memory": "64MiB", "prefetch_blocks": 1, **asked}
        plugin = hf_lohan.LohanPlugin(offload={**settings, "ssd": str(folder), "io_threads": 2, "cpu_threads": 1})
        accelerator = hf_lohan.Accelerator(cpu=True, lohan_plugin=plugin)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, fused=True)
        try:
            prepared = accelerator.prepare(model, optimizer)
            break
        except ValueError as error:
            if "gpu_memory" not in str(error) or gpu_bytes == 1 << 28:
                raise
    assert prepared is not None
    model, optimizer = prepared
    engine = hf_lohan.engine_of(model)
    assert engine is not None
    try:
        losses, norms = [], []
        for loss in losses_of(model, make_batch, accelerator.backward):
            losses.append(loss)
            norms.append(accelerator.clip_grad_norm_(model.parameters(), max_norm))
            optimizer.step()
            optimizer.zero_grad()
        access = engine.parameters
        weights = {name: access.read_parameter(name) for name, _ in model.named_parameters()}
        return engine.config.activations == "keep", (losses, norms, weights)
    finally:
        engine.close()


def first_difference(expected: Any, found: Any, relative_tolerance: float = 0.0) -> str | None:
    import torch

    pairs = expected.items() if isinstance(expected, dict) else enumerate(expected)
    for key, value in pairs:
        if not torch.allclose(value, found[key], rtol=relative_tolerance, atol=0.0, equal_nan=False):
            distance = (value.double() - found[key].double()).abs().max().item()
            return f"{key} differs by {distance:.2g}"
    return None


def is_refusal(error: Exception) -> bool:
    """Return whether the library refused the model with its own error, rather than failed."""
    import traceback

    frames = traceback.extract_tb(error.__traceback__)
    return "hf_lohan" in Path(frames[-1].filename).as_posix() and not isinstance(error, AssertionError)


def one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return (text if isinstance(error, ValueError) else f"{type(error).__name__}: {text}")[:300]


def run_child(activations: str, experts: str, names: list[str]) -> None:
    """A line of JSON before and after each class."""
    os.nice(NICENESS)
    import torch

    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    sys.path.insert(0, str(ROOT))
    for name in names:
        print(json.dumps({"begins": name}), flush=True)
        with tempfile.TemporaryDirectory(prefix="lohan-matrix-") as folder:
            try:
                outcome = try_class(name, Path(folder) / "store", activations, experts)
            except Exception as error:
                outcome = Outcome(name, FAILED, f"no tiny model: {one_line(error)}")
        print(json.dumps(asdict(outcome)), flush=True)


# All of them.


def class_names() -> list[str]:
    """Return every class that `AutoModelForCausalLM` may return, once."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()), key=str.lower)


def outcomes_of(names: list[str], activations: str = "recompute", experts: str = "with_layer") -> Iterator[Outcome]:
    """Run one child at a time, each for several classes. A child that dies loses one class."""
    waiting = list(names)
    while waiting:
        batch = waiting[:CLASSES_PER_CHILD]
        done = yield from child_outcomes(batch, activations, experts)
        waiting = [name for name in waiting if name not in done]


def child_outcomes(names: list[str], activations: str, experts: str = "with_layer") -> Iterator[Outcome]:
    """Yield outcomes of these classes from a child process; return the classes that are done."""
    command = [sys.executable, __file__, "--child", activations, experts, *names]
    done: set[str] = set()
    running, began_s = names[0], time.monotonic()
    with tempfile.TemporaryFile("w+") as errors:
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        assert child.stdout is not None
        killer = Deadline(child)
        for line in child.stdout:
            if not line.startswith("{"):
                continue  # output of a model
            message = json.loads(line)
            killer.restart()
            if "begins" in message:
                running, began_s = message["begins"], time.monotonic()
            else:
                done.add(message["model_class"])
                yield Outcome(**message)
        killer.end()
        if child.wait() and running not in done:
            errors.seek(0)
            last = errors.read().strip().splitlines()[-1:] or [""]
            done.add(running)
            seconds = time.monotonic() - began_s
            why = f"the process ended with {child.returncode} after {seconds:.0f} s: {last[0]}"
            yield Outcome(running, FAILED, why[:300])
    return done


class Deadline:
    """Kills a child that prints nothing for `MAX_SECONDS`."""

    def __init__(self, child: subprocess.Popen[str]) -> None:
        self._child = child
        self.restart()

    def restart(self) -> None:
        import threading

        self.end()
        self._timer = threading.Timer(MAX_SECONDS, self._child.kill)
        self._timer.daemon = True
        self._timer.start()

    def end(self) -> None:
        timer = getattr(self, "_timer", None)
        if timer is not None:
            timer.cancel()


def page_of(outcomes: list[Outcome]) -> str:
    """The page, as Markdown."""
    import torch
    import transformers

    counts = Counter(outcome.what for outcome in outcomes)
    exact = sum(counts[what] for what in (EXACT, EXACT_KEPT))
    text = f"""# Architectures

All {len(outcomes)} classes of `AutoModelForCausalLM` in transformers {transformers.__version__}, tried by
`scripts/development/architecture_matrix.py` with torch {torch.__version__.partition("+")[0]}. A tiny model of each
takes {NUM_STEPS} clipped steps offloaded, with every block streamed and every layer recomputed, and the same steps
under torch's AdamW in memory. *Exact*: losses, gradient norms and weights are equal to the bit, in float32 on a CPU,
with the class's dropout.

**{exact} of {len(outcomes)} are exact**, {counts[EXACT_KEPT]} of them with activations that are kept, because the class
cannot recompute them. {counts[REFUSED]} are refused, {counts[WRONG]} wrong, {counts[FAILED]} fail;
{counts[NOT_TRIED]} were not tried, because they did not train in memory either.

| class | offloaded | why, and the way out |
|---|---|---|
"""
    rows = (f"| `{one.model_class}` | {one.what} | {one.why.replace('|', '/')} |\n" for one in outcomes)
    return text + "".join(rows)


def main(
    only: Annotated[str, typer.Option(help="a regular expression: classes whose names have a match")] = "",
    results: Annotated[Path | None, typer.Option(help="JSON file with earlier results, which are updated")] = None,
    activations: Annotated[str, typer.Option(help="as in the configuration; the page is of `recompute`")] = "recompute",
    experts: Annotated[str, typer.Option(help="the page is of `with_layer`; `streamed`: not clipped")] = "with_layer",
    page: Annotated[Path, typer.Option(help="the page to write, if all classes are known")] = PAGE,
) -> None:
    """Try classes, print what comes out, and write the page once every class is known."""
    before = json.loads(results.read_text()) if results and results.exists() else []
    known = {one["model_class"]: Outcome(**one) for one in before}
    names = class_names()
    asked = [name for name in names if re.search(only, name)]
    began_s = time.monotonic()
    for outcome in outcomes_of(asked, activations, experts):
        known[outcome.model_class] = outcome
        print(f"{outcome.model_class:45s} {outcome.what:24s} {outcome.why}", flush=True)
    found = [known[name] for name in names if name in known]
    if results:
        results.write_text(json.dumps([asdict(one) for one in found], indent=1))
    counts = Counter(one.what for one in found)
    print(", ".join(f"{counts[what]} {what}" for what in ORDER), f"in {time.monotonic() - began_s:.0f} s")
    if len(found) == len(names) and (activations, experts) == ("recompute", "with_layer"):
        page.write_text(page_of(found), encoding="utf-8")
    if counts[WRONG] or counts[FAILED]:
        raise typer.Exit(1)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        run_child(sys.argv[2], sys.argv[3], sys.argv[4:])
    else:
        typer.run(main)
