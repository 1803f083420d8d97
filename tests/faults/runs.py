"""A training run that may be interrupted anywhere, and `train`, which starts or resumes it. The fork server imports
this module once, so that each process starts with all imports done."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import json
import os
import signal
import sys
import threading
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from gloo_devices import gloo_between_cpus
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm
from transformers import (
    LlamaForCausalLM,
    MixtralForCausalLM,
    OPTForCausalLM,
    PrinterCallback,
    Qwen3MoeForCausalLM,
    TrainerCallback,
    TrainingArguments,
)
from transformers.utils.logging import disable_progress_bar
from write_calls import WriteCall, watch_write_calls

import hf_lohan
import hf_lohan.huggingface  # nothing is left to import when a process starts
from hf_lohan.compat.torch_private import FakeTensorMode
from hf_lohan.huggingface.ranks import links_to_other_ranks
from hf_lohan.testing.models import tiny_batch, tiny_model

IMPORTED_BY = os.getpid()
PRELOADED = (LlamaForCausalLM, MixtralForCausalLM, OPTForCausalLM, Qwen3MoeForCausalLM, hf_lohan.Trainer)
"""Classes that transformers and hf_lohan load lazily."""
tqdm.set_lock(threading.RLock())  # forked processes share tqdm's own lock, and a killed process may leave it locked

NUM_ROWS = 64
SMALL_BUDGETS = {"gpu_memory": "2MiB", "cpu_threads": 1, "_io_threads": 2}
OUTCOME_NAME = "outcome.safetensors"
FAILED, INTERRUPTED, TERMINATED = 3, 130, 143
TELL_STACKS = signal.SIGUSR1
"""Makes a process write the stacks of its threads to its output. An abort does the same."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """The hashable settings of a run. The folder `beside` holds files that must survive faults of `output_dir`."""

    output_dir: Path = Path()
    beside: Path = Path()
    ssd: str = "auto"
    cpu_memory: str = "4MiB"
    """4 MiB hold no record, 7 MiB hold most records and 64 MiB hold all."""
    family: Literal["llama", "opt", "mixtral", "qwen3_moe"] = "llama"
    """The experts of mixtures are streamed. Those of qwen3_moe are also updated lazily."""
    num_layers: int = 2
    num_steps: int = 12
    save_steps: int = 0
    resume: bool | str = "last_step"
    activations: Literal["recompute", "swap"] = "recompute"
    chunked_layers: int | Literal["auto"] = "auto"
    commit_every: int = 1
    parked: float | Literal["auto"] = "auto"
    """The share of updates that wait for the next forward."""
    optimizer: Literal["AdamW", "Muon"] = "AdamW"
    bf16: bool = False
    compiled: bool = False
    insists: bool = False
    """Ask for a resume even if no commit exists."""
    rank: int = 0
    num_ranks: int = 1
    port: int = 0
    """The port of the rendezvous."""
    net_timeout: int | str = "auto"
    embedding: str = "auto"
    transport: Literal["auto", "nccl"] = "auto"
    """With nccl, ranks on the CPU send weights by gloo in place of it."""


class Mishap(NamedTuple):
    """A fault or pause of one process at an exact place."""

    signals: tuple[int, ...] = ()
    event: str = "on_step_begin"
    step: int = 0
    """The process signals itself at this event of Trainer, in the step that sets `global_step` to `step`. The event
    "in_trace" has no step: it is a call from torch to Python, during planning, that must not raise."""

    write_call: WriteCall | None = None
    holds_at: int = 0
    """Wait for the parent at the end of this step."""


class Report(NamedTuple):
    """A message to the parent: started, begun (training), stepped, finished or failed."""

    what: str
    step: int = 0
    text: str = ""


class Outcome(NamedTuple):
    """One row per logged step, in order, and all parameters and optimizer states by `name.kind`."""

    rows: list[dict[str, float]]
    tensors: dict[str, Tensor]


def train(run: Run, mishap: Mishap, parent: Connection) -> None:
    """Train in a forked process. Exit with 0, with the code of the signal, or with `FAILED` after a "failed" report."""
    gc.freeze()  # a collection would touch, and so copy, all memory shared with the fork server
    assert os.getpid() != IMPORTED_BY, "the fork server could not import this module"
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have started us with SIGINT ignored
    output = os.open(run.beside / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.enable(file=output)
    faulthandler.register(TELL_STACKS, file=output)
    disable_progress_bar()
    if run.num_ranks > 1:
        os.environ.update(environment_of(run))
    trainer: Any = None
    watched = watch_write_calls(run.output_dir, mishap.write_call)
    parent.send(Report("started"))
    if mishap.event == "in_trace":
        signal_in_trace(mishap.signals)
    between_cpus = contextlib.ExitStack()  # until the process ends
    if run.transport == "nccl":
        between_cpus.enter_context(gloo_between_cpus())
    try:
        trainer = make_trainer(run, TellsParent(mishap, parent))
        trainer.train(resume_from_checkpoint=where_from(run))
        write_outcome(trainer, run.beside)
        parent.send(Report("finished", trainer.state.global_step, str(watched.num_calls)))
    except KeyboardInterrupt:
        traceback.print_exc()
        sys.exit(INTERRUPTED)
    except Exception as error:
        traceback.print_exc()
        parent.send(Report("failed", text=f"{type(error).__name__}: {error}"))
        sys.exit(FAILED)
    finally:
        if trainer is not None and trainer.offload_engine is not None:
            trainer.offload_engine.close()  # scripts close it at exit, but forked processes run no exit handlers
        if run.num_ranks > 1 and trainer is not None:
            links_to_other_ranks().close()


def environment_of(run: Run) -> dict[str, str]:
    """Return the environment that a launcher sets for each rank of one machine."""
    rank, num_ranks = str(run.rank), str(run.num_ranks)
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(run.port), "ACCELERATE_USE_CPU": "true"}
    return {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks, **meeting}


def where_from(run: Run) -> bool | str | None:
    """Return the argument for `train(resume_from_checkpoint=...)`."""
    if not run.insists and hf_lohan.last_step(run.output_dir) is None:
        return None
    return run.resume


def make_trainer(run: Run, callback: TrainerCallback) -> Any:
    """Build a trainer with all state that a resume could lose: clipping that sometimes scales gradients, a
    learning-rate schedule, weight decay and, in OPT, dropout."""
    arguments = TrainingArguments(
        str(run.output_dir), use_cpu=True, max_steps=run.num_steps, per_device_train_batch_size=2,
        learning_rate=2e-3, lr_scheduler_type="cosine", warmup_steps=2, weight_decay=0.1, max_grad_norm=2.5,
        logging_steps=1, save_strategy="steps" if run.save_steps else "no", save_steps=run.save_steps or 500,
        save_total_limit=2, bf16=run.bf16, torch_compile=run.compiled, report_to=[], disable_tqdm=True, seed=0,
    )  # fmt: skip
    numel = 16 if run.family != "qwen3_moe" else 2  # with few tokens some experts get none
    batches = (tiny_batch(sequence_length=numel, seed=seed) for seed in range(NUM_ROWS))
    rows = [{key: value[0] for key, value in batch.items()} for batch in batches]
    overrides = {"dropout": 0.1} if run.family == "opt" else {}
    model = tiny_model(run.family, num_layers=run.num_layers, **overrides)
    if run.bf16:  # of the values of float16 every 16th is a master that needs a tie code
        model = model.half().float()
    offload = {
        **SMALL_BUDGETS, "cpu_memory": run.cpu_memory, "ssd": run.ssd, "activations": run.activations,
        "chunks.layers": run.chunked_layers, "commit_every": run.commit_every, "_parked": run.parked,
        "ranks.timeout": run.net_timeout, "embedding": run.embedding, "ranks.transport": run.transport,
    }  # fmt: skip
    if run.family in ("mixtral", "qwen3_moe"):
        offload |= {"experts": "streamed", "experts.lazy": run.family == "qwen3_moe"}
    optimizer = (torch.optim.Muon, {"lr": 0.02}) if run.optimizer == "Muon" else None
    trainer = hf_lohan.Trainer(
        model, arguments, train_dataset=rows, offload=offload, callbacks=[callback], optimizer_cls_and_kwargs=optimizer
    )
    trainer.remove_callback(PrinterCallback)  # its output would hide the lines of a failure
    return trainer


def signal_in_trace(numbers: tuple[int, ...]) -> None:
    """Send these signals, once each, when torch re-enters a fake-tensor mode from its own dispatch. An exception there
    would leave the mode entered, and torch could not restore it. The patch stays for the rest of this process."""
    enter, left = FakeTensorMode.__enter__, list(numbers)

    def is_called(mode: FakeTensorMode) -> bool:
        calls = (frame for frame, _ in traceback.walk_stack(None) if frame.f_code.co_name == "__torch_dispatch__")
        return any(call.f_locals.get("self") is mode for call in calls)

    def entering(mode: FakeTensorMode) -> FakeTensorMode:
        entered = enter(mode)
        if left and is_called(mode):
            os.kill(os.getpid(), left.pop())
        return entered

    FakeTensorMode.__enter__ = entering


class TellsParent(TrainerCallback):
    """Sends reports to the parent and applies a mishap."""

    def __init__(self, mishap: Mishap, parent: Connection) -> None:
        self.mishap = mishap
        self.parent = parent

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.parent.send(Report("begun", state.global_step))

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.signal_at("on_step_begin", state.global_step + 1)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.signal_at("on_pre_optimizer_step", state.global_step + 1)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.signal_at("on_optimizer_step", state.global_step + 1)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.parent.send(Report("stepped", state.global_step))
        if state.global_step == self.mishap.holds_at:
            self.parent.recv()
        self.signal_at("on_step_end", state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.signal_at("on_log", state.global_step)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.signal_at("on_save", state.global_step)

    def signal_at(self, event: str, step: int) -> None:
        if (event, step) == (self.mishap.event, self.mishap.step):
            for number in self.mishap.signals:
                os.kill(os.getpid(), number)


def write_outcome(trainer: Any, folder: Path) -> None:
    """Write the outcome atomically, because the process may be killed here too."""
    keys = ("step", "loss", "grad_norm", "learning_rate", "epoch")
    rows = [{key: row[key] for key in keys} for row in trainer.state.log_history if "loss" in row]
    access = trainer.offload_engine.parameters
    tensors = {
        f"{name}.{kind}": access.read_flat(name, kind)
        for name, _ in trainer.model.named_parameters()
        for kind in ("param", *access.state_kinds(name))
    }
    save_file(tensors, folder / f"{OUTCOME_NAME}.new", metadata={"rows": json.dumps(rows)})
    os.replace(folder / f"{OUTCOME_NAME}.new", folder / OUTCOME_NAME)


def read_outcome(folder: Path) -> Outcome:
    with safe_open(folder / OUTCOME_NAME, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - `file` is not a mapping
        return Outcome(json.loads(file.metadata()["rows"]), tensors)


def assert_same(ours: Outcome, whole: Outcome) -> None:
    """Check equality bit for bit, and that each step is logged exactly once."""
    assert [row["step"] for row in ours.rows] == list(range(1, len(whole.rows) + 1))
    for our_row, row in zip(ours.rows, whole.rows, strict=True):
        assert our_row == row
    assert ours.tensors.keys() == whole.tensors.keys()
    for name, tensor in whole.tensors.items():
        assert torch.equal(ours.tensors[name].view(torch.uint8), tensor.view(torch.uint8)), name
