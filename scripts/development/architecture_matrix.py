"""Train every class of a task in the installed transformers, tiny and offloaded, and compare with memory.

    python scripts/development/architecture_matrix.py                             # causal LMs
    python scripts/development/architecture_matrix.py --only 'Qwen|Zamba'         # these alone, printed
    python scripts/development/architecture_matrix.py --task image-text-to-text   # models that read images
    python scripts/development/architecture_matrix.py --chunks                    # which layers run in chunks

After clipped steps from equal weights and batches, losses, gradient norms and weights must equal those of torch's
AdamW in memory, bit for bit. Models that read images train as a whole, with a frozen tower, and with a frozen text
model. With `--chunks` models train without dropout in chunks of some tokens, and their losses and weights must be near
those of whole layers. Classes run in child processes, so that a crash affects no other. `--results` keeps the outcomes
in a file, which a run with `--only` updates.
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
from dataclasses import asdict, dataclass, replace
from enum import Enum
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
IN_CHUNKS, WHOLE = "in chunks", "whole"
CHUNK_TOKENS = 9
"""Tokens of a chunk. Rows of 22 tokens have chunks of 9, 9 and 4."""
CHUNKED_LENGTH = 22
CHUNKS_TOLERANCE = 2e-5
"""Relative to the largest element, if that is above 1."""
CHUNKS_EPS = 1e-3
"""AdamW's usual eps would amplify the rounding of gradients near zero."""
ORDER = (EXACT, EXACT_KEPT, IN_CHUNKS, WHOLE, NOT_TRIED, REFUSED, WRONG, FAILED)
DRAFTS = "drafts tokens from the hidden states and keys of another model, and does not train by itself"
NOT_TRAINED_HERE = {
    "Gemma3nForConditionalGeneration": "its vision tower is from the package timm, which is not installed here",
    "Gemma4AssistantForCausalLM": DRAFTS,
    "Gemma4UnifiedAssistantForCausalLM": DRAFTS,
}
"""Classes without a tiny model that trains in memory, with the reason."""


class Task(str, Enum):
    """A group of classes, as transformers names it."""

    TEXT = "text-generation"
    IMAGES = "image-text-to-text"


HOW_TRIED = {
    Task.TEXT: f"A model takes {NUM_STEPS} steps.",
    Task.IMAGES: """A model trains three times: as a whole, with a frozen tower, and with a frozen text model.
The number and the size of its images change from step to step. One step has only text, unless the class needs images,
or only the tower is trained.""",
}


@dataclass(frozen=True)
class Outcome:
    model_class: str
    what: str
    why: str = ""
    """The reason, if the model is not exact, or does not run in chunks."""


# Training of one class, in a child process.


def try_class(
    name: str,
    folder: Path,
    activations: str = "recompute",
    experts: str = "with_layer",
    task: Task = Task.TEXT,
) -> Outcome:
    """Train the class in memory and offloaded, and compare. Streamed experts train without clipping."""
    if name in NOT_TRAINED_HERE:
        return Outcome(name, NOT_TRIED, NOT_TRAINED_HERE[name])
    settings = {"activations": activations, "experts": experts}
    if task is Task.TEXT:
        return try_training(name, folder, settings)
    from tiny_images import NOT_TRIED_WITH_IMAGES, NOTES, frozen_parts, mend

    if name in NOT_TRIED_WITH_IMAGES:
        return Outcome(name, NOT_TRIED, NOT_TRIED_WITH_IMAGES[name])
    mend(name)
    outcomes = []
    for frozen in frozen_parts(name):
        outcome = try_training(name, folder / (frozen or "all"), settings, task, frozen)
        if outcome.what not in (EXACT, EXACT_KEPT):
            return Outcome(name, outcome.what, f"{outcome.why} (with a frozen {frozen})" if frozen else outcome.why)
        outcomes.append(outcome)
    worst = max(outcomes, key=lambda outcome: ORDER.index(outcome.what))
    return replace(worst, why=NOTES.get(name, worst.why))


def try_training(
    name: str, folder: Path, settings: dict[str, Any], task: Task = Task.TEXT, frozen: str = ""
) -> Outcome:
    """Train the class once in memory and once offloaded, and compare."""
    from tiny_configs import tiny_model_of
    from tiny_images import batches_with_images, freeze

    experts = settings["experts"]
    max_norm = NO_CLIPPING if experts == "streamed" else MAX_NORM
    stock, model = tiny_model_of(name), tiny_model_of(name)
    if task is Task.TEXT:
        make_batch, num_steps = batches_of(stock), NUM_STEPS
    else:
        freeze(stock, frozen)
        freeze(model, frozen)
        batches = batches_with_images(stock, frozen)
        make_batch, num_steps = batches.__getitem__, len(batches)
    try:
        expected = train_in_memory(stock, make_batch, max_norm, num_steps)
    except Exception as error:
        return Outcome(name, FAILED, f"in memory: {one_line(error)}")
    try:
        kept, found = train_offloaded(model, make_batch, folder, settings, max_norm, num_steps)
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


def try_chunks(name: str, folder: Path) -> Outcome:
    """Train the class without dropout, in memory and in chunks, and compare. Layers in chunks differ from whole layers
    by the order of sums."""
    from tiny_configs import tiny_model_of

    from hf_lohan.huggingface.offloaded_model import run_plan_of

    if name in NOT_TRAINED_HERE:
        return Outcome(name, NOT_TRIED, NOT_TRAINED_HERE[name])
    stock, model = without_dropout(tiny_model_of(name)), without_dropout(tiny_model_of(name))
    make_batch = batches_of(stock, CHUNKED_LENGTH)
    try:
        expected = train_in_memory(stock, make_batch, eps=CHUNKS_EPS)
    except Exception as error:
        return Outcome(name, FAILED, f"in memory: {one_line(error)}")
    seen: list[tuple[bool, list[str]]] = []

    def see(engine: Any) -> None:
        plan = run_plan_of(engine)
        chunks = None if plan is None else plan.chunks
        seen.append((False, []) if chunks is None else (chunks.has_cut, chunks.reasons()))

    settings = {"activations": "recompute", "experts": "with_layer", "chunks.layers": CHUNK_TOKENS}
    try:
        _, found = train_offloaded(model, make_batch, folder, settings, see=see, eps=CHUNKS_EPS)
    except Exception as error:
        return Outcome(name, REFUSED if is_refusal(error) else FAILED, one_line(error))
    is_cut, reasons = seen[0]
    for what, one, other in zip(("loss", "weights"), expected[::2], found[::2], strict=True):
        if (difference := far_from(one, other)) is not None:
            return Outcome(name, WRONG, f"{what}: {difference}")
    return Outcome(name, IN_CHUNKS if is_cut else WHOLE, "; ".join(reasons))


def without_dropout(model: Any) -> Any:
    """Return the model, whose modules no longer draw random numbers."""
    configs = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}
    for owner in (*model.modules(), *configs.values()):
        is_dropout = "Dropout" in type(owner).__name__
        for attribute, value in list(vars(owner).items()):
            if isinstance(value, float) and ("drop" in attribute or (attribute == "p" and is_dropout)):
                setattr(owner, attribute, 0.0)
    return model


def far_from(expected: Any, found: Any) -> str | None:
    """Return where two results differ by more than `CHUNKS_TOLERANCE`; None if nowhere."""
    pairs = expected.items() if isinstance(expected, dict) else enumerate(expected)
    for key, value in pairs:
        largest = max(1.0, value.abs().max().item()) if value.numel() else 1.0
        distance = (value.double() - found[key].double()).abs().max().item() if value.numel() else 0.0
        if not distance <= CHUNKS_TOLERANCE * largest:
            return f"{key} differs by {distance:.2g}"
    return None


Batches = Callable[[int], dict[str, Any]]
Trained = tuple[list[Any], list[Any], dict[str, Any]]


def batches_of(model: Any, length: int = 16) -> Batches:
    """Return a maker of batches of token ids, which are also the labels, with the class's further inputs."""
    import torch
    from tiny_configs import VOCAB_SIZE, more_inputs

    def batch(step: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(100 + step)
        ids = torch.randint(5, VOCAB_SIZE - 20, (2, length), generator=generator)
        given = {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)}
        return more_inputs(type(model).__name__, model, given, generator)

    return batch


def losses_of(model: Any, make_batch: Batches, backward: Callable[[Any], None], num_steps: int) -> Iterator[Any]:
    import torch

    for step in range(num_steps):
        batch = make_batch(step)
        torch.manual_seed(step)  # for equal dropout
        output = model(**batch)
        loss = output[0] if isinstance(output, tuple) else output.loss
        backward(loss)
        yield loss.detach().clone()


def train_in_memory(
    model: Any, make_batch: Batches, max_norm: float = MAX_NORM, num_steps: int = NUM_STEPS, eps: float = 1e-8
) -> Trained:
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=eps, weight_decay=0.1, fused=True)
    losses, norms = [], []
    for loss in losses_of(model, make_batch, lambda loss: loss.backward(), num_steps):
        losses.append(loss)
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm))
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, {name: parameter.detach() for name, parameter in model.named_parameters()}


def train_offloaded(
    model: Any,
    make_batch: Batches,
    folder: Path,
    asked: dict[str, Any],
    max_norm: float = MAX_NORM,
    num_steps: int = NUM_STEPS,
    see: Callable[[Any], None] = lambda _engine: None,
    eps: float = 1e-8,
) -> tuple[bool, Trained]:
    """Train offloaded. Returns whether activations were kept, and the results. ``see`` gets the engine at the end."""
    import torch
    from accelerate.state import AcceleratorState, GradientState

    import hf_lohan

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    prepared = None
    for gpu_bytes in (1 << shift for shift in range(19, 29)):
        settings = {"gpu_memory": gpu_bytes, "cpu_memory": "64MiB", "prefetch_blocks": 1, **asked}
        plugin = hf_lohan.LohanPlugin(offload={**settings, "ssd": str(folder), "_io_threads": 2, "cpu_threads": 1})
        accelerator = hf_lohan.Accelerator(cpu=True, lohan_plugin=plugin)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=eps, weight_decay=0.1, fused=True)
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
        for loss in losses_of(model, make_batch, accelerator.backward, num_steps):
            losses.append(loss)
            norms.append(accelerator.clip_grad_norm_(model.parameters(), max_norm))
            optimizer.step()
            optimizer.zero_grad()
        if engine.peak_gpu_pool_bytes > gpu_bytes:
            raise AssertionError(f"{engine.peak_gpu_pool_bytes} bytes of device pools, {gpu_bytes} asked")
        see(engine)
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
    """Return whether the library refused the model with its own error."""
    import traceback

    frames = traceback.extract_tb(error.__traceback__)
    return "hf_lohan" in Path(frames[-1].filename).as_posix() and not isinstance(error, AssertionError)


def one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return (text if isinstance(error, ValueError) else f"{type(error).__name__}: {text}")[:300]


def run_child(task: Task, activations: str, experts: str, names: list[str]) -> None:
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
                store = Path(folder) / "store"
                if experts == IN_CHUNKS:
                    outcome = try_chunks(name, store)
                else:
                    outcome = try_class(name, store, activations, experts, task)
            except Exception as error:
                outcome = Outcome(name, FAILED, f"no tiny model: {one_line(error)}")
        print(json.dumps(asdict(outcome)), flush=True)


# All classes.


def class_names(task: Task = Task.TEXT) -> list[str]:
    """Return every class that the task's auto class may return, once."""
    from transformers.models.auto import modeling_auto

    mapping = {
        Task.TEXT: modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        Task.IMAGES: modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    }[task]
    return sorted(set(mapping.values()), key=str.lower)


def outcomes_of(
    names: list[str], activations: str = "recompute", experts: str = "with_layer", task: Task = Task.TEXT
) -> Iterator[Outcome]:
    """Run one child at a time, each for several classes. A child that dies loses one class."""
    waiting = list(names)
    while waiting:
        batch = waiting[:CLASSES_PER_CHILD]
        done = yield from child_outcomes(batch, activations, experts, task)
        waiting = [name for name in waiting if name not in done]


def child_outcomes(names: list[str], activations: str, experts: str, task: Task) -> Iterator[Outcome]:
    """Yield outcomes of these classes from a child process; return the classes that are done."""
    command = [sys.executable, __file__, "--child", task.value, activations, experts, *names]
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


def with_chunks(page: str, task: Task, known: dict[str, Outcome]) -> str:
    """Return the page with another column in the task's table, which shows whether layers run in chunks."""
    begin, end = (mark.format(task=task.value) for mark in (SECTION_BEGIN, SECTION_END))
    before, _, rest = page.partition(begin)
    section, _, after = rest.partition(end)
    text, rule, rows = section.partition("| offloaded |")
    cells = {}
    for row in (rule + rows).splitlines()[2:]:
        *outcome, names = (cell.strip() for cell in row.strip("|").split("|"))
        cells |= dict.fromkeys(re.findall("`(.*?)`", names), outcome[:2])
    in_chunks = {name: one.what + (f": {one.why.replace('|', '/')}" if one.why else "") for name, one in known.items()}
    table = table_of({name: (*cells[name], in_chunks.get(name, "")) for name in sorted(cells, key=str.lower)})
    return before + begin + text + table + end + after


def table_of(cells: dict[str, tuple[str, ...]]) -> str:
    """Return the table of what was found with each class. Classes with the same cells are in one row."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for name, found in cells.items():
        rows.setdefault(found, []).append(f"`{name}`")
    heads = ["offloaded", "reason and remedy", "in chunks", "classes"]
    heads = heads[: max(map(len, rows))] + heads[-1:]
    lines = [heads, ["---"] * len(heads), *([*found, ", ".join(names)] for found, names in rows.items())]
    text = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    return text.replace(" ---", "---").replace("--- ", "---")


SECTION_BEGIN, SECTION_END = "<!-- begin: {task} -->\n", "<!-- end: {task} -->\n"


def with_section(page: str, task: Task, outcomes: list[Outcome]) -> str:
    """The page with another section for the task."""
    begin, end = (mark.format(task=task.value) for mark in (SECTION_BEGIN, SECTION_END))
    before, _, rest = page.partition(begin)
    _, _, after = rest.partition(end)
    return before + begin + section_of(outcomes, task) + end + after


def section_of(outcomes: list[Outcome], task: Task = Task.TEXT) -> str:
    """The task's part of the page, as Markdown."""
    import torch
    import transformers

    counts = Counter(outcome.what for outcome in outcomes)
    exact = sum(counts[what] for what in (EXACT, EXACT_KEPT))
    auto_class = {Task.TEXT: "AutoModelForCausalLM", Task.IMAGES: "AutoModelForImageTextToText"}[task]
    text = f"""All {len(outcomes)} classes of `{auto_class}` in transformers {transformers.__version__}, with torch
{torch.__version__.partition("+")[0]}. {HOW_TRIED[task]}

**{exact} of {len(outcomes)} are exact**, {counts[EXACT_KEPT]} of them with activations that are kept, because the class
cannot recompute them. {counts[REFUSED]} refused, {counts[WRONG]} wrong, {counts[FAILED]} failed;
{counts[NOT_TRIED]} were not tried, for the reason in the table.

"""
    return text + table_of({one.model_class: (one.what, one.why.replace("|", "/")) for one in outcomes})


def main(
    task: Annotated[Task, typer.Option(help="the classes to try, and the part of the page to write")] = Task.TEXT,
    only: Annotated[str, typer.Option(help="a regular expression: classes whose names have a match")] = "",
    results: Annotated[Path | None, typer.Option(help="JSON file with earlier results, which are updated")] = None,
    activations: Annotated[str, typer.Option(help="as in the configuration; the page is of `recompute`")] = "recompute",
    experts: Annotated[str, typer.Option(help="the page is of `with_layer`; `streamed`: not clipped")] = "with_layer",
    chunks: Annotated[bool, typer.Option(help="see which classes run in chunks, for that column of the page")] = False,
    page: Annotated[Path, typer.Option(help="the page to write, if all classes are known")] = PAGE,
) -> None:
    """Try classes, print the outcomes, and write the page if all classes are known."""
    before = json.loads(results.read_text()) if results and results.exists() else []
    known = {one["model_class"]: Outcome(**one) for one in before}
    names = class_names(task)
    asked = [name for name in names if re.search(only, name)]
    began_s = time.monotonic()
    for outcome in outcomes_of(asked, activations, IN_CHUNKS if chunks else experts, task):
        known[outcome.model_class] = outcome
        print(f"{outcome.model_class:45s} {outcome.what:24s} {outcome.why}", flush=True)
        if results:  # now, because a run may be stopped
            results.write_text(json.dumps([asdict(known[name]) for name in names if name in known], indent=1))
    found = [known[name] for name in names if name in known]
    counts = Counter(one.what for one in found)
    print(", ".join(f"{counts[what]} {what}" for what in ORDER), f"in {time.monotonic() - began_s:.0f} s")
    if chunks:
        page.write_text(with_chunks(page.read_text(encoding="utf-8"), task, known), encoding="utf-8")
    elif len(found) == len(names) and (activations, experts) == ("recompute", "with_layer"):
        page.write_text(with_section(page.read_text(encoding="utf-8"), task, found), encoding="utf-8")
    if counts[WRONG] or counts[FAILED]:
        raise typer.Exit(1)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        run_child(Task(sys.argv[2]), sys.argv[3], sys.argv[4], sys.argv[5:])
    else:
        typer.run(main)
