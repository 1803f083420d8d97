"""A script with Trainer that several processes run together: `torchrun ... trained_by_ranks.py <folder> <what>...`.
Every run writes its log, and its weights by `save_model`, to `<folder>/<what>`. Without torchrun the script forks both
ranks of each `<what>`, because importing takes most of the time of a launch. Commas join runs of the same ranks.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

import hf_lohan
from hf_lohan.huggingface.ranks import links_to_other_ranks
from hf_lohan.ranks import Links, RankFailedError, RanksDisagreeError
from hf_lohan.testing.models import tiny_model

ON_CUDA = os.environ.get("LOHAN_TEST_DEVICE") == "cuda"
"""Each rank has a GPU. Gradients are sent by our sockets, and Trainer's own messages by gloo."""
NUM_RANKS = 2
NUM_STEPS = 6
OFFLOAD = {"cpu_memory": "64MiB", "gpu_memory": "16MiB", "cpu_threads": 1, "_io_threads": 1, "commit_every": 1}


_FOLDERS = {"stock": "stock", "alone": "alone", "fails": "failing", "asked": "asked", "last_step": "asked"} | {
    "killed": "killed",
    "after_kill": "killed",
    "rows": "by_rows",
}
"""The folder of checkpoints of each `what`, if it is not "run"."""


def rows(num: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """Return rows with labels of several lengths, so that batches have different weights."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(num):
        ids = torch.randint(5, 100, (16,), generator=generator)
        labels = ids.clone()
        labels[: int(torch.randint(1, 12, (), generator=generator))] = -100
        found.append({"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)})
    return found


def arguments(output_dir: Path, *, is_alone: bool) -> TrainingArguments:
    return TrainingArguments(
        str(output_dir), max_steps=NUM_STEPS, per_device_train_batch_size=2, per_device_eval_batch_size=2,
        gradient_accumulation_steps=NUM_RANKS if is_alone else 1, learning_rate=1e-2, weight_decay=0.1,
        max_grad_norm=0.5, logging_steps=1, eval_strategy="steps", eval_steps=2, save_steps=2, save_total_limit=2,
        use_cpu=not ON_CUDA, ddp_backend="gloo" if ON_CUDA and not is_alone else None, report_to=[],
        disable_tqdm=True, seed=3,
    )  # fmt: skip


class Signalled(TrainerCallback):
    """Sends a signal to rank 1 in the middle of a step."""

    def __init__(self, number: signal.Signals) -> None:
        self._number = number

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if (args.process_index, state.global_step) == (1, 3):
            os.kill(os.getpid(), self._number)


class Exchanged(TrainerCallback):
    """Notes the exchanges of all ranks by step."""

    def __init__(self) -> None:
        self.tags: list[list[str]] = [[]]
        all_gather = Links.all_gather

        def recorded(links: Links, tag: str, payload: bytes = b"") -> list[bytes]:
            self.tags[-1].append(tag)
            return all_gather(links, tag, payload)

        Links.all_gather = recorded  # type: ignore[method-assign]

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.tags.append([])


class Fails(TrainerCallback):
    """Raises on rank 1."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if (args.process_index, state.global_step) == (1, 3):
            raise RuntimeError("a callback of rank 1 does not want to go on")


def loop(folder: Path, what: str) -> None:
    """Train in a custom loop with an Accelerator or, in one process, with torch alone."""
    model = tiny_model("llama").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, fused=True)
    loader = torch.utils.data.DataLoader(rows(24, seed=1), batch_size=2)  # type: ignore[arg-type]
    norms = []
    if what == "stock_loop":
        for number, batch in enumerate(loader, start=1):
            (model(**batch).loss / NUM_RANKS).backward()
            if number % NUM_RANKS == 0:
                norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
                optimizer.step()
                optimizer.zero_grad()
        model.save_pretrained(folder / what)
    else:
        plugin = hf_lohan.LohanPlugin(offload=OFFLOAD, ssd_path=folder / "loop_store")
        accelerator = hf_lohan.Accelerator(cpu=True, project_dir=str(folder / "loop_run"), lohan_plugin=plugin)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for batch in loader:
            accelerator.backward(model(**batch).loss)
            norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            optimizer.zero_grad()
        for _ in range(2):  # the second replaces the first
            accelerator.save_state(str(folder / what / "state"))
        accelerator.load_state(str(folder / what / "state"))
        accelerator.unwrap_model(model).save_pretrained(folder / what)
        accelerator.end_training()
    if int(os.environ.get("RANK", "0")) == 0:
        (folder / what / "facts.json").write_text(json.dumps({"norms": norms}))


class StopsEarlier(TrainerCallback):
    """Ends the training of rank 1, as a callback does that watches its own clock."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop |= (args.process_index, state.global_step) == (1, 3)


def differ(folder: Path) -> None:
    """Begin runs in which rank 1 has something else, and write what each rank is told. The last run ends the ranks'
    connections."""
    rank = int(os.environ["RANK"])
    own, told = folder / "differ" / str(rank), dict[str, str]()
    for of_rank in range(NUM_RANKS) if rank == 0 else ():  # transformers saves on rank 0 only
        model = tiny_model("llama", num_layers=2)
        with torch.no_grad():
            model.lm_head.weight += of_rank
        model.save_pretrained(folder / "differ" / str(of_rank) / "model")
    links_to_other_ranks().barrier("the models to be saved")
    args = arguments(folder / "differ" / "run", is_alone=False)
    args.eval_strategy = "no"

    def refused(what: str, begin: Callable[[], Any]) -> None:
        try:
            begin()
            told[what] = "nothing"
        except (RanksDisagreeError, RankFailedError) as error:
            told[what] = str(error)

    refused("from_pretrained", lambda: hf_lohan.from_pretrained(own / "model", OFFLOAD, default_ssd_path=own / "store"))
    refused("by path", lambda: hf_lohan.Trainer(str(own / "model"), args, offload=OFFLOAD))
    refused(
        "generation",
        lambda: hf_lohan.load_for_generation(own / "model", OFFLOAD | {"ssd": str(own / "store")}, max_length=8),
    )
    plugin = hf_lohan.LohanPlugin(offload=OFFLOAD, ssd_path=own / "store", max_grad_norm=float(rank))
    accelerator = hf_lohan.Accelerator(cpu=True, lohan_plugin=plugin)
    refused("Accelerator", lambda: accelerator.prepare(tiny_model("llama")))
    model = tiny_model("llama")
    model.config.rms_norm_eps *= 1 + rank
    refused("config", lambda: hf_lohan.Trainer(model, args, offload=OFFLOAD)._ensure_engine())
    told["stores"] = " ".join(map(str, (folder / "differ").glob("**/manifest.json")))
    args.learning_rate *= 1 + rank
    trainer = hf_lohan.Trainer(tiny_model("llama"), args, train_dataset=rows(8, seed=1), offload=OFFLOAD)
    refused("train", trainer.train)
    (own / "told.json").write_text(json.dumps(told))


def fail_outside_train(folder: Path) -> None:
    """Raise on rank 0 while rank 1 waits for it. The real exit handlers run when the processes exit."""
    rank = int(os.environ["RANK"])
    os.dup2(os.open(folder / f"stderr-{rank}", os.O_CREAT | os.O_WRONLY), 2)
    accelerate.PartialState(cpu=True)
    links = links_to_other_ranks()
    links.barrier("the start")
    if rank == 0:
        raise OSError("the drive of my loop is full")
    links.barrier("the next step")


def main(folder: Path, what: str) -> None:
    torch.set_num_threads(1)
    if what == "outside":
        fail_outside_train(folder)
        return
    if what.endswith("loop"):
        loop(folder, what)
        return
    if what == "differ":
        differ(folder)
        return
    run = folder / (_FOLDERS.get(what, "run"))
    args = arguments(run, is_alone=what in ("stock", "alone"))
    model = tiny_model("llama")
    data: dict[str, Any] = {"train_dataset": rows(40, seed=1), "eval_dataset": rows(8, seed=2)}
    if what == "stock":
        trainer = Trainer(model, args, **data)
    else:
        callbacks: list[Any] = {
            "asked": [Signalled(signal.SIGTERM)],
            "killed": [Signalled(signal.SIGKILL)],
            "fails": [Fails()],
            "stops": [StopsEarlier()],
        }.get(what, [])
        more = {"embedding": "rows"} if what == "rows" else {}
        trainer = hf_lohan.Trainer(model, args, **data, callbacks=callbacks, offload=OFFLOAD | more)
    exchanged = Exchanged()
    trainer.add_callback(exchanged)
    checkpoint = str(folder / "run" / "checkpoint-4")
    resume: Any = {"last_step": "last_step", "after_kill": True, "alone": checkpoint}.get(what)
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(str(folder / what))
    if args.process_index == 0:
        facts = {"log": trainer.state.log_history, "wrapped": type(trainer.model_wrapped).__name__}
        facts["exchanged"] = exchanged.tags
        (folder / what / "facts.json").write_text(json.dumps(facts))


def is_forked_rank(what: str, statuses: dict[str, int]) -> bool:
    """Fork both ranks and note their exit statuses. Return True in a rank."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        os.environ["MASTER_PORT"] = str(free.getsockname()[1])
    os.environ |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    processes = []
    for rank in range(NUM_RANKS):
        os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
        processes.append(os.fork())
        if not processes[-1]:
            return True
    statuses |= dict.fromkeys(
        what.split(","), max(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in processes)
    )
    return False


if __name__ == "__main__":
    folder, statuses = Path(sys.argv[1]), dict[str, int]()
    is_launched = "RANK" in os.environ or sys.argv[2:] == ["stock"]  # which is one process
    for launch in sys.argv[2:]:
        if is_launched or is_forked_rank(launch, statuses):
            for what in launch.split(","):
                main(folder, what)
            if not is_launched:
                atexit._run_exitfuncs()
                os._exit(0)  # freeing all that was imported before the fork would copy it
    if not is_launched:
        (folder / "statuses.json").write_text(json.dumps(statuses))
