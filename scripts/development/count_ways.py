"""Count the files that a gradient, a weight, a checkpoint being loaded and a setting pass through, and find calls that
climb.

    python scripts/development/count_ways.py

A tiny Llama trains on the CPU device with one rank, while all Python calls within `hf_lohan` are traced on all threads.

**A gradient's path** is the files of all calls that its accumulate hook, the end of the backward, clipping and the end
of the step make on the computing thread, and of all calls on the worker's thread, the threads of its kernels, and I/O
threads, until the step's records are written. The step clips, so gradients wait for the norm. Files that only a commit
needs are printed and not counted. New weights that go to a slot are on a weight's path from there on.

**A weight's path** is the files of all calls on the thread that loads blocks, and on I/O threads, in a forward without
updates: from the choice of a load to the slot that shows the block.

**A checkpoint's path** is the visits of files by `from_pretrained` and what it calls on its thread, until a call leaves
the room `huggingface`. A function counts where it is first called, and calls one after the other in one file are one
visit. So a file counts again each time that the path returns to it.

**A setting's path** is the visits of files that read settings, from `from_pretrained` to the end of a step. Reads one
after the other in one file are one visit.

Not counted are the room `threads` and the module `timeline`, through which all calls of a thread pass and which change
nothing, and files of which only properties and operators (`x.numel`, `x in y`) are used.

**A climb** is a call on the path of a gradient or a weight into a room on a higher floor (`FLOORS` of
`tests/test_house.py`) than the caller's. Three kinds of calls begin a new chain and are no climbs: a thread's loop runs
a command, the end of an I/O request or of a delivery runs its callbacks, torch runs a hook. Nor is a call of a method
whose class inherits it from an interface (a base class) in the caller's room, a lower one, or another library. For
climbs, more steps are traced: with updates in backward, with guesses, and with forwards whose weights come from
updates.

Exits with 1 if a path has more than `MOST` files or visits, or if there is a climb.
"""

from __future__ import annotations

import ast
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

from hf_lohan.config import OffloadConfig
from hf_lohan.device import CpuDevice
from hf_lohan.engine import OffloadEngine, ParameterAccess, drain_model, open_tiers
from hf_lohan.model import adamw_everywhere
from hf_lohan.optim import OffloadAdamW
from hf_lohan.planning import lay_out
from hf_lohan.testing.models import tiny_batch, tiny_model

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = f"{ROOT / 'hf_lohan'}/"
MOST = {"gradient": 31, "weight": 16, "checkpoint": 73, "setting": 30}
GRADIENT_ROOTS = {
    ("engine/model_hooks.py", "_on_gradient"),
    ("updates/arrival.py", "flush"),
    ("updates/step.py", "clip_gradients"),
    ("updates/step.py", "finish_step"),
}
"""Functions on the computing thread."""
NO_STOPS = ("threads", "timeline")
SETTINGS = {field.name for field in fields(OffloadConfig)}
CALLBACKS = ("files/io_engine.py", "updates/handover.py")
"""Files that run the callbacks of requests, and of deliveries (`OnDelivered`)."""


def read_floors() -> dict[str, int]:
    """Return the floor of each room."""
    for node in ast.parse((ROOT / "tests/test_house.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "FLOORS":
            floors: dict[str, int] = eval(compile(ast.Expression(node.value), "FLOORS", "eval"))
            return floors
    raise ValueError("tests/test_house.py has no FLOORS")


FLOORS = read_floors()


def file_of(frame: FrameType) -> str:
    """Return the file relative to the package; empty for files outside it."""
    name = frame.f_code.co_filename
    return name[len(PACKAGE) :] if name.startswith(PACKAGE) else ""


def room_of(file: str) -> str:
    return file.partition("/")[0].removesuffix(".py")


def chain_of(frame: FrameType) -> list[tuple[str, str, FrameType]]:
    """Return (file, function, frame) of the package's frames, innermost first."""
    chain = []
    current: FrameType | None = frame
    while current is not None:
        if file := file_of(current):
            chain.append((file, current.f_code.co_name, current))
        current = current.f_back
    return chain


def is_attribute(frame: FrameType) -> bool:
    """Return whether the call is a property or an operator."""
    name = frame.f_code.co_name
    if name.startswith("__") and name not in ("__init__", "__call__"):
        return True
    owner = type(frame.f_locals.get("self"))
    return isinstance(next((vars(base)[name] for base in owner.__mro__ if name in vars(base)), None), property)


def is_inherited(frame: FrameType, floor: int) -> bool:
    """Return whether a method implements an interface of another library, or one on a floor that is not above
    ``floor``."""
    for base in type(frame.f_locals.get("self")).__mro__[1:-1]:
        package, _, module = base.__module__.partition(".")
        is_below = package != "hf_lohan" or FLOORS[module.partition(".")[0]] <= floor
        if frame.f_code.co_name in vars(base) and is_below:
            return True
    return False


class Trace:
    """Records the files on both paths, and climbs, while it is on."""

    def __init__(self) -> None:
        self.is_on = False
        self.gradient: dict[str, None] = {}
        self.commit: dict[str, None] = {}
        self.weight: dict[str, None] = {}
        self.io: dict[str, None] = {}
        """Files on I/O threads."""
        self.climbs: set[str] = set()

    def __call__(self, frame: FrameType, event: str, _argument: Any) -> None:
        if not self.is_on or event != "call" or not file_of(frame):
            return
        chain = chain_of(frame)
        stops = [(file, name) for file, name, _ in chain if room_of(file) not in NO_STOPS]
        if not stops:
            return
        way = self._way_of(stops)
        if way is None:
            return
        self._note_climb(chain)
        if room_of(chain[0][0]) not in NO_STOPS and not is_attribute(frame):
            way[chain[0][0]] = None

    def _way_of(self, stops: list[tuple[str, str]]) -> dict[str, None] | None:
        """Return the path of a call, by the calls that contain it, innermost first."""
        if threading.current_thread() is threading.main_thread():
            return self.gradient if GRADIENT_ROOTS.intersection(stops) else None
        outermost = room_of(stops[-1][0])
        if threading.current_thread().name.startswith("lohan-io"):
            return self.io
        if outermost in ("weights", "experts"):
            return self.weight
        if outermost == "engine":
            return self.commit
        return self.weight if any(room_of(file) == "weights" for file, _ in stops) else self.gradient

    def _note_climb(self, chain: list[tuple[str, str, FrameType]]) -> None:
        (file, name, frame), *callers = chain
        if not callers or room_of(callers[0][0]) == "threads" or callers[0][0] in CALLBACKS:
            return
        caller = callers[0]
        floor = FLOORS[room_of(caller[0])]
        if FLOORS[room_of(file)] > floor and not is_inherited(frame, floor):
            self.climbs.add(f"{caller[0]} {caller[1]} -> {file} {name}")


def make_engine(folder: str, **settings: Any) -> OffloadEngine:
    holds_gradients = settings.pop("holds_gradients", True)
    config = OffloadConfig.load(
        {
            "cpu_memory": "3MiB",
            "gpu_memory": "1MiB",
            "prefetch_blocks": 1,
            "ssd": folder,
            "_io_threads": 2,
            "_io_piece_bytes": 1 << 20,
            **settings,
        }
    ).resolve(host_memory_bytes=1 << 30, device_memory_bytes=1 << 30, num_cpus=2, default_ssd_path=folder)
    device, model = CpuDevice(), tiny_model("llama")
    layout = lay_out(
        model,
        config,
        working_dtype=torch.float32,
        hold_gradients=holds_gradients,
        sums_gradients=False,
        memory_is_host=True,
        rules=adamw_everywhere,
    )
    tiers = open_tiers(layout, config, device)
    drain_model(layout.blocks, ParameterAccess(tiers.store, layout.blocks, tiers.states))
    return OffloadEngine(model, layout, tiers, config)


def run_step(engine: OffloadEngine, optimizer: OffloadAdamW, max_norm: float | None) -> None:
    engine.model(**tiny_batch()).loss.backward()
    if max_norm is not None:
        engine.clip_grad_norm(max_norm)
    optimizer.step()
    optimizer.zero_grad()


def trace_run(run: Callable[[OffloadEngine, OffloadAdamW, Trace], None], **settings: Any) -> Trace:
    """Trace what ``run`` does with an engine while it has switched the trace on."""
    trace = Trace()
    threading.setprofile(trace)
    sys.setprofile(trace)
    try:
        with tempfile.TemporaryDirectory() as folder:
            engine = make_engine(folder, **settings)
            run(engine, OffloadAdamW(engine.model.parameters(), engine=engine), trace)
            trace.is_on = False
            engine.close()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return trace


def one_clipped_step(engine: OffloadEngine, optimizer: OffloadAdamW, trace: Trace) -> None:
    run_step(engine, optimizer, 1e-3)
    engine.wait_for_updates()
    trace.is_on = True
    run_step(engine, optimizer, 1e-3)
    engine.wait_for_updates()


def one_forward(engine: OffloadEngine, optimizer: OffloadAdamW, trace: Trace) -> None:
    run_step(engine, optimizer, 1e-3)
    engine.wait_for_updates()
    trace.is_on = True
    with torch.no_grad():
        engine.model(**tiny_batch())


def several_steps(engine: OffloadEngine, optimizer: OffloadAdamW, trace: Trace) -> None:
    trace.is_on = True
    for _ in range(4):
        run_step(engine, optimizer, 1e3 if engine.layout.holds_gradients else None)
    engine.wait_for_updates()


class Visits:
    """Records the visits of files by `from_pretrained`, and those of files that read settings."""

    def __init__(self) -> None:
        self.of_checkpoint: list[str] = []
        self.of_settings: list[str] = []
        self._called: set[CodeType] = set()

    def on_call(self, frame: FrameType, event: str, _argument: Any) -> None:
        code = frame.f_code
        if event != "call" or not file_of(frame) or code in self._called or code.co_name.startswith("<"):
            return
        (file, _, _), *callers = chain_of(frame)
        self._called.add(code)
        is_inside = all(room_of(caller) == "huggingface" for caller, _, _ in callers)
        if not callers or not is_inside or room_of(file) in NO_STOPS or is_attribute(frame):
            return
        visit(self.of_checkpoint, file)

    def on_read(self, config: OffloadConfig, name: str) -> Any:
        if name in SETTINGS:
            file = file_of(sys._getframe(2))
            if file and room_of(file) not in ("config", "annexes"):  # the check that each config makes of itself
                visit(self.of_settings, file)
        return object.__getattribute__(config, name)


def visit(visits: list[str], file: str) -> None:
    if visits[-1:] != [file]:
        visits.append(file)


def trace_loading() -> Visits:
    """Trace `from_pretrained`, and the settings in one step after it."""
    from hf_lohan import engine_of, from_pretrained

    visits = Visits()
    with tempfile.TemporaryDirectory() as folder:
        tiny_model("llama").save_pretrained(folder)
        OffloadConfig.__getattribute__ = lambda config, name: visits.on_read(config, name)
        sys.setprofile(visits.on_call)
        try:
            model = from_pretrained(folder, {"cpu_memory": "16MiB", "gpu_memory": "4MiB", "ssd": f"{folder}/store"})
        finally:
            sys.setprofile(None)
        engine = engine_of(model)
        assert engine is not None
        run_step(engine, OffloadAdamW(model.parameters(), engine=engine), 1.0)
        engine.close()
        del OffloadConfig.__getattribute__
    return visits


def main() -> int:
    gradient = trace_run(one_clipped_step)
    weight = trace_run(one_forward)
    traces = [
        gradient,
        weight,
        trace_run(several_steps),
        trace_run(several_steps, holds_gradients=False, cpu_memory="64MiB"),
        trace_run(several_steps, _clip="speculate"),
    ]
    climbs = sorted(set().union(*(trace.climbs for trace in traces)))
    is_good = not climbs
    for name, files in (("gradient", {**gradient.gradient, **gradient.io}), ("weight", {**weight.weight, **weight.io})):
        print(f"A {name}'s path: {len(files)} files, at most {MOST[name]}")
        print(*(f"  {file}" for file in files), sep="\n")
        is_good = is_good and len(files) <= MOST[name]
    print("A commit's further files:", *(set(gradient.commit) - set(gradient.gradient)))
    print(f"Climbs: {len(climbs)}", *(f"  {climb}" for climb in climbs), sep="\n")
    visits = trace_loading()
    for name, of_way in (("checkpoint", visits.of_checkpoint), ("setting", visits.of_settings)):
        print(f"A {name}'s path: {len(of_way)} visits of {len({*of_way})} files, at most {MOST[name]} visits")
        print(*(f"  {file}" for file in of_way), sep="\n")
        is_good = is_good and len(of_way) <= MOST[name]
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
