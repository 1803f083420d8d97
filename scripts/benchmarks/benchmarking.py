"""Options, models, steps, timing and output that the benchmarks share.

A benchmark is a function of `Options` and its own options, decorated with `benchmark`:

    @benchmark("step", cpu_memory="1GiB")
    def main(options: Options, *, schedule: str = "optimized") -> dict[str, Any]: ...

`--output FILE.json` writes its result with command, commit and hardware. `--output FOLDER` writes a file named by
benchmark and hardware, and replaces the last one.
"""

from __future__ import annotations

import inspect
import json
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import torch
import typer
import yaml
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig

from hf_lohan.device import device_for
from hf_lohan.engine import OffloadEngine
from hf_lohan.hardware.machine import device_name
from hf_lohan.optim import OffloadAdamW
from hf_lohan.threads import usable_cpus

LEARNING_RATE = 1e-4
STEPS_PER_TURN = 3
ROOT = Path(__file__).resolve().parents[2]

BatchesOption = Annotated[list[str] | None, typer.Option(help="such as 2x256; may be given several times")]
NormsOption = Annotated[list[float] | None, typer.Option(help="may be given several times")]


@dataclass(frozen=True)
class Shape:
    """A Llama, or a Mixtral of its sizes, and its batch."""

    hidden: int
    layers: int
    intermediate: int
    vocabulary: int
    batch_size: int
    sequence_length: int
    bf16: bool

    def model(self, *, head_dim: int = 64, heads_per_key: int = 1, num_experts: int = 0) -> Any:
        """Return a Llama, or a Mixtral with ``num_experts`` in each layer, of which a token chooses two."""
        num_heads = max(heads_per_key, self.hidden // head_dim)
        sizes: dict[str, Any] = {
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "intermediate_size": self.intermediate,
            "vocab_size": self.vocabulary,
            "num_attention_heads": num_heads,
            "num_key_value_heads": num_heads // heads_per_key,
            "use_cache": False,
        }
        experts = {"num_local_experts": num_experts, "num_experts_per_tok": 2}
        config = MixtralConfig(**sizes, **experts) if num_experts else LlamaConfig(**sizes)
        torch.manual_seed(0)
        dtype = torch.bfloat16 if self.bf16 else torch.float32
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).train()
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
        return model

    def batches(self, number: int, device: str) -> list[dict[str, torch.Tensor]]:
        generator = torch.Generator().manual_seed(1)
        size = (number, self.batch_size, self.sequence_length)
        tokens = torch.randint(0, self.vocabulary, size, generator=generator).to(device)
        return [{"input_ids": ids, "labels": ids} for ids in tokens]

    def batch(self, device: str) -> dict[str, torch.Tensor]:
        return self.batches(1, device)[0]


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of every benchmark."""

    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu"
    hidden: int = 1024
    layers: int = 8
    intermediate: int = 4096
    vocabulary: int = 8192
    batch_size: int = 2
    sequence_length: int = 256
    bf16: Annotated[bool, typer.Option("--bf16", help="bfloat16 weights, with exact float32 masters")] = False
    cpu_memory: str = "512MiB"
    gpu_memory: str = "512MiB"
    num_turns: Annotated[int, typer.Option(help=f"turns of {STEPS_PER_TURN} steps for each side")] = 3
    store: Annotated[Path | None, typer.Option(help="folder on the drive to measure; default: this one")] = None
    output: Annotated[Path | None, typer.Option(help="write the figures: a JSON file, or a folder for one")] = None

    @property
    def shape(self) -> Shape:
        return Shape(**{field.name: getattr(self, field.name) for field in fields(Shape)})

    def shapes(self, batches: list[str] | None) -> list[Shape]:
        """Return shapes with each of the batches, or with the default batch."""
        sizes = [map(int, batch.split("x")) for batch in batches or [f"{self.batch_size}x{self.sequence_length}"]]
        return [replace(self.shape, batch_size=rows, sequence_length=length) for rows, length in sizes]

    @property
    def budgets(self) -> dict[str, str]:
        return {"cpu_memory": self.cpu_memory, "gpu_memory": self.gpu_memory}


def parsed_settings(given: list[str] | None) -> dict[str, Any]:
    """Parse `name=value` pairs with YAML values. Raises BadParameter."""
    settings = {}
    for text in given or []:
        name, separator, value = text.partition("=")
        if not separator:
            raise typer.BadParameter(f"--set {text} names no value; write --set name=value")
        settings[name] = yaml.safe_load(value)
    return settings


def benchmark(name: str, **defaults: Any) -> Callable[[Callable[..., dict[str, Any]]], Callable[..., None]]:
    """Make a command from a measuring function. `defaults` are defaults of the shared options."""

    def decorate(measure: Callable[..., dict[str, Any]]) -> Callable[..., None]:
        shared, own = get_type_hints(Options, include_extras=True), get_type_hints(measure, include_extras=True)
        parameters = [
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=defaults.get(field.name, field.default),
                annotation=shared[field.name],
            )
            for field in fields(Options)
        ]
        _, *extra = inspect.signature(measure).parameters.values()
        parameters += [
            parameter.replace(annotation=own[parameter.name], kind=inspect.Parameter.KEYWORD_ONLY)
            for parameter in extra
        ]

        def command(**given: Any) -> None:
            options = Options(**{field.name: given.pop(field.name) for field in fields(Options)})
            result = measure(options, **given)
            write_figures(options, name, result)

        command.__doc__ = sys.modules[measure.__module__].__doc__
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {}
        return command

    return decorate


def write_figures(options: Options, name: str, result: Mapping[str, Any]) -> None:
    if options.output is None:
        return
    name = result.get("benchmark", name)
    facts = facts_of(options.device)
    path = options.output
    if path.suffix != ".json":
        path.mkdir(parents=True, exist_ok=True)
        path /= f"{name}_{slug(options.device)}.json"
    head: dict[str, Any] = {"benchmark": name, **facts, "shape": asdict(options.shape), "budgets": options.budgets}
    path.write_text(json.dumps(head | dict(result), indent=2) + "\n")
    Console().print(f"wrote {path}")


def facts_of(device: str) -> dict[str, Any]:
    """Return the command, the commit and the hardware."""
    arguments = [Path(word).name if Path(word).is_absolute() else word for word in sys.argv[1:]]
    measured = ("hf_lohan", "scripts")  # other figures may have been written before
    commit, changed = (
        subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
        for words in (("describe", "--always"), ("status", "--porcelain", "--", *measured))
    )
    return {
        "command": shlex.join(["python", f"scripts/benchmarks/{Path(sys.argv[0]).name}", *arguments]),
        "commit": f"{commit}-dirty" if changed else commit or None,
        "hardware": device_for(torch.device(device)).describe()
        | {"name": device_name(device_for(torch.device(device))), "num_cpus": usable_cpus()}
        | {"torch": torch.__version__},
    }


def slug(device: str) -> str:
    """Return the hardware for a file name, such as "cpu_2cores" or "nvidia_geforce_rtx_4090"."""
    if device == "cpu":
        return f"cpu_{usable_cpus()}cores"
    return re.sub(r"\W+", "_", device_name(device_for(torch.device(device))).lower()).strip("_")


# Steps and their times.


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
        optimizer.zero_grad()

    return step


def turn(step: Callable[[], None], settle: Callable[[], None] = lambda: None, *, device: str = "cpu") -> float:
    """Return the seconds per step of a few steps. The first step is not timed, because no updates of an earlier step
    run during it. `settle`, which finishes the last step's updates, is not timed either."""
    step()

    def steps() -> None:
        for _ in range(STEPS_PER_TURN):
            step()

    seconds = timed(device, steps)
    settle()
    return seconds / STEPS_PER_TURN


def in_turns(sides: Mapping[str, Callable[[], float]], num_turns: int) -> dict[str, list[float]]:
    """Return the results of each side, which run in turns (A B C A B C ...)."""
    values: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(num_turns):
        for side, take_turn in sides.items():
            values[side].append(take_turn())
    return values


def spread(name: str, values: Mapping[str, list[float]]) -> dict[str, Any]:
    """Return the median of the values as `name`, their minimum and maximum, and all values."""
    return {
        name: {side: statistics.median(of) for side, of in values.items()},
        f"{name}_spread": {side: [min(of), max(of)] for side, of in values.items()},
        f"{name}_all": dict(values),
    }


def pairs_ratio(values: Mapping[str, list[float]], over: str, under: str) -> float:
    """Return the median of the turns' ratios, which other load of the machine affects less."""
    return statistics.median(a / b for a, b in zip(values[over], values[under], strict=True))


@contextmanager
def folder_in(store: Path | None) -> Iterator[Path]:
    """Yield a new folder in `store` or the working directory. It is deleted afterwards."""
    if store is not None:
        store.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="lohan-bench-", dir=store or "."))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def table_of(title: str, *headings: str) -> Table:
    """Return an empty table with figures aligned to the right."""
    table = Table(title=title)
    for heading in headings:
        table.add_column(heading, justify="right")
    return table
