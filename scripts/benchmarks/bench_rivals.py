"""Compares step time and memory of hf_lohan, training in memory, and DeepSpeed ZeRO-3 with NVMe optimizer offload.

    python scripts/benchmarks/bench_rivals.py  # against the model in memory
    python scripts/benchmarks/bench_rivals.py --deepspeed-python ds/bin/python  # and DeepSpeed
    python scripts/benchmarks/bench_rivals.py --compiled  # and both with compiled layers
    python scripts/benchmarks/bench_rivals.py --num-experts 16 --set experts=streamed  # a mixture, two experts a token

Each contender has a process, so that its memory can be measured. They take turns of three steps. DeepSpeed needs an
environment (`pip install deepspeed transformers`, libaio's headers, a compiler). It runs with `DS_ACCELERATOR=cpu` in
float32, with parameters in RAM, optimizer states on the drive, and pipelined reads and writes.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

STEPS_PER_TURN = 3
LEARNING_RATE = 1e-4
EXPERTS_PER_TOKEN = 2
READY = "ready"
COMPILED = ", compiled"
"""Ends the name of a contender with compiled layers."""
WORKER = "--worker"


# Functions in a contender's process.


def model_of(shape: dict[str, Any], num_experts: int) -> Any:
    """Return a Llama, or a Mixtral with ``num_experts``. Does not use our library, which DeepSpeed's environment does
    not have."""
    from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig

    heads = max(1, shape["hidden"] // 64)
    sizes = {
        "hidden_size": shape["hidden"],
        "num_hidden_layers": shape["layers"],
        "intermediate_size": shape["intermediate"],
        "vocab_size": shape["vocabulary"],
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "use_cache": False,
    }
    experts = {"num_local_experts": num_experts, "num_experts_per_tok": EXPERTS_PER_TOKEN}
    config = MixtralConfig(**sizes, **experts) if num_experts else LlamaConfig(**sizes)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def deepspeed_step(model: Any, batch: dict[str, Any], folder: str, max_grad_norm: float) -> Callable[[], None]:
    import deepspeed

    batch_size = len(batch["input_ids"])
    settings: dict[str, Any] = {
        "train_batch_size": batch_size,
        "train_micro_batch_size_per_gpu": batch_size,
        "gradient_clipping": max_grad_norm,
        "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE}},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {
                "device": "nvme",
                "nvme_path": folder,
                "buffer_count": 20,
                "pipeline_read": True,
                "pipeline_write": True,
            },
            "offload_param": {"device": "cpu"},
            "sub_group_size": 4 * 1024 * 1024,
        },
        "aio": {"block_size": 8 << 20, "queue_depth": 8, "single_submit": False, "overlap_events": True},
        "zero_allow_untested_optimizer": True,
    }
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29531")
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    engine, *_ = deepspeed.initialize(model=model, config=settings)

    def step() -> None:
        engine.backward(engine(**batch).loss)
        engine.step()

    return step


def our_step(
    model: Any,
    batch: dict[str, Any],
    folder: str,
    max_grad_norm: float,
    settings: dict[str, Any],
    *,
    is_compiled: bool,
) -> tuple[Callable[[], None], Callable[[], None]]:
    from accelerate.utils import TorchDynamoPlugin
    from benchmarking import offloaded_step

    from hf_lohan.config import OffloadConfig
    from hf_lohan.huggingface.attachment import offload_model
    from hf_lohan.huggingface.compiling import compile_model
    from hf_lohan.huggingface.offloaded_model import run_plan_of

    config = OffloadConfig.load({"activations": "recompute", **settings, "ssd": folder})
    engine = offload_model(model, config, torch_device="cpu", default_ssd_path=folder, hold_gradients=max_grad_norm > 0)
    compile_model(engine, run_plan_of(engine), TorchDynamoPlugin(backend="inductor" if is_compiled else "no"))
    return offloaded_step(engine, batch, max_grad_norm), engine.wait_for_updates


def _nothing_left() -> None:
    return


def turn_s(step: Callable[[], None], settle: Callable[[], None]) -> float:
    """Same as `benchmarking.turn`, but without our library."""
    step()
    began_s = time.perf_counter()
    for _ in range(STEPS_PER_TURN):
        step()
    seconds = (time.perf_counter() - began_s) / STEPS_PER_TURN
    settle()
    return seconds


def anonymous_bytes() -> int:
    """Return the current anonymous memory of this process."""
    with open("/proc/self/status", encoding="ascii") as status:
        fields = dict(line.split(":", 1) for line in status)
    return (int(fields["RssAnon"].split()[0]) + int(fields["RssShmem"].split()[0])) * 1024


def work(task: dict[str, Any]) -> None:
    """Take a turn for each line of standard input, and print the seconds per step and the bytes."""
    shape = task["shape"]
    generator = torch.Generator().manual_seed(1)
    size = (shape["batch_size"], shape["sequence_length"])
    ids = torch.randint(0, shape["vocabulary"], size, generator=generator)
    batch = {"input_ids": ids, "labels": ids}
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # keeps the output of libraries out of the answers
    settle = _nothing_left
    model = model_of(shape, task["num_experts"])
    side, is_compiled = task["side"].removesuffix(COMPILED), task["side"].endswith(COMPILED)
    if side == "deepspeed":
        step = deepspeed_step(model, batch, task["folder"], task["max_grad_norm"])
    elif side == "offloaded":
        step, settle = our_step(
            model, batch, task["folder"], task["max_grad_norm"], task["settings"], is_compiled=is_compiled
        )
    else:
        from accelerate.utils import compile_regions
        from benchmarking import in_memory_step

        model = compile_regions(model) if is_compiled else model
        step = in_memory_step(model, batch, task["max_grad_norm"])
    turn_s(step, settle)
    answers.write(f"{READY}\n")
    for _ in sys.stdin:
        seconds = turn_s(step, settle)
        answers.write(json.dumps({"step_s": seconds, "anonymous_bytes": anonymous_bytes()}) + "\n")


# Functions in the main process.


class Contender:
    """A process that takes turns on request."""

    def __init__(self, python: str, task: dict[str, Any], log: Path) -> None:
        self._log = log
        environment = {**os.environ, "DS_ACCELERATOR": "cpu", "TOKENIZERS_PARALLELISM": "false"}
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                [python, __file__, WORKER, json.dumps(task)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment,
            )
        self._expect(READY)

    def turn(self) -> dict[str, float]:
        assert self._process.stdin is not None
        self._process.stdin.write("turn\n")
        self._process.stdin.flush()
        answer: dict[str, float] = json.loads(self._expect(""))
        return answer

    def _expect(self, start: str) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line or not line.startswith(start):
            raise RuntimeError(f"a contender ended; its last output:\n{self._log.read_text()[-3000:]}")
        return line

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def measure(
    common: dict[str, Any], pythons: dict[str, str], folder: Path, *, max_grad_norm: float, num_turns: int
) -> dict[str, Any]:
    contenders: dict[str, Contender] = {}
    try:
        for side, python in pythons.items():
            place = folder / side
            place.mkdir()
            task = {**common, "side": side, "folder": str(place), "max_grad_norm": max_grad_norm}
            contenders[side] = Contender(python, task, folder / f"{side}.log")
        answers: dict[str, list[dict[str, float]]] = {side: [] for side in contenders}
        for _ in range(num_turns):
            for side, contender in contenders.items():
                answers[side].append(contender.turn())
    finally:
        for contender in contenders.values():
            contender.close()
    step_s = {side: statistics.median(answer["step_s"] for answer in of) for side, of in answers.items()}
    return {
        "max_grad_norm": max_grad_norm,
        "step_s": step_s,
        "step_s_spread": {
            side: [f(answer["step_s"] for answer in of) for f in (min, max)] for side, of in answers.items()
        },
        "step_s_all": {side: [answer["step_s"] for answer in of] for side, of in answers.items()},
        "anonymous_bytes": {side: max(answer["anonymous_bytes"] for answer in of) for side, of in answers.items()},
        "offloaded_over": {side: step_s["offloaded"] / step_s[side] for side in step_s},
    }


def show(results: list[dict[str, Any]]) -> None:
    table = Table(title="step time and memory, each in its own process (medians, interleaved)")
    for heading in ("clip at", "", "a step", "offloaded / this", "anonymous memory"):
        table.add_column(heading, justify="right")
    for result in results:
        for side in result["step_s"]:
            table.add_row(
                f"{result['max_grad_norm']:g}",
                side,
                f"{result['step_s'][side]:.3f} s",
                f"{result['offloaded_over'][side]:.3f}",
                f"{result['anonymous_bytes'][side] / 1e9:.2f} GB",
            )
        table.add_section()
    Console().print(table)


def ask() -> None:
    """Run the command. Imports our library, which DeepSpeed's environment does not have."""
    from benchmarking import Options, benchmark, parsed_settings

    globals()["Options"] = Options  # for the annotations below

    @benchmark("rivals", num_turns=4)
    def main(
        options: Options,
        *,
        max_grad_norm: Annotated[list[float] | None, typer.Option(help="may be given several times")] = None,
        deepspeed_python: Annotated[str | None, typer.Option(help="interpreter that has DeepSpeed")] = None,
        compiled: Annotated[bool, typer.Option("--compiled", help="also with torch.compile")] = False,
        num_experts: Annotated[int, typer.Option(help="experts of each layer; 0: a dense model")] = 0,
        set_: Annotated[list[str] | None, typer.Option("--set", help="any offload setting, name=value")] = None,
    ) -> dict[str, Any]:
        settings = {**options.budgets, **parsed_settings(set_)}
        common = {"shape": asdict(options.shape), "num_experts": num_experts, "settings": settings}
        pythons = {"in memory": sys.executable, "offloaded": sys.executable}
        if compiled:
            pythons |= {f"{side}{COMPILED}": python for side, python in pythons.items()}
        if deepspeed_python is not None:
            pythons["deepspeed"] = deepspeed_python
        results = []
        for norm in max_grad_norm or [0.0, 1.0]:
            folder = Path(tempfile.mkdtemp(prefix="lohan-bench-", dir=options.store or "."))
            try:
                results.append(measure(common, pythons, folder, max_grad_norm=norm, num_turns=options.num_turns))
            finally:
                shutil.rmtree(folder, ignore_errors=True)
        show(results)
        name = {"benchmark": "rivals_experts"} if num_experts else {}
        return {**name, "num_experts": num_experts, "settings": settings, "results": results}

    typer.run(main)


if __name__ == "__main__":
    if WORKER in sys.argv:
        work(json.loads(sys.argv[-1]))
    else:
        ask()
