"""python out_of_memory_in_turn.py FOLDER NUMBER... For each number, train a short run on the double in which the device
allocation of that number fails, and resume it. Check that the weights equal those of a run without failures. Print
"NUMBER ended" if the failure ended the run, and "NUMBER whole" if not."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from doubled_device import find_double
from trainer_runs import make_trainer

from hf_lohan.testing.models import tiny_model

ADVICE = ("CUDA out of memory.", "gpu_memory", "The next run continues from the last committed step")


def trainer_in(folder: Path) -> Any:
    offload = {"cpu_memory": "64MiB", "gpu_memory": "4MiB", "ssd": str(folder / "store"), "commit_every": 1}
    return make_trainer(folder / "run", tiny_model("llama", num_layers=2), offload=offload)


def outcome(trainer: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    names = [name for name, _ in trainer.model.named_parameters()]
    weights = {name: trainer.offload_engine.parameters.read_parameter(name) for name in names}
    trainer.offload_engine.close()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row], weights


def resumed_in(folder: Path) -> Any:
    trainer = trainer_in(folder)
    try:
        trainer.train(resume_from_checkpoint="last_step")
    except ValueError:  # the run ended before its first commit
        if trainer.offload_engine is not None:
            trainer.offload_engine.close()
        trainer = trainer_in(folder)
        trainer.train()
    return trainer


def main(folder: Path, numbers: list[int]) -> None:
    double: Any = find_double()
    whole = trainer_in(folder / "whole")
    whole.train()
    losses, weights = outcome(whole)
    for number in numbers:
        broken, ended = trainer_in(folder / str(number)), False
        double.fail_allocation(number)
        try:
            broken.train()
        except RuntimeError as error:
            ended = True
            assert all(text in str(error) for text in ADVICE), f"{number}: {error!r}"
        finally:
            double.fail_allocation(0)
        if ended and broken.offload_engine is not None:
            broken.offload_engine.close()
        final_losses, final = outcome(resumed_in(folder / str(number)) if ended else broken)
        assert final_losses == losses, number
        assert all(torch.equal(final[name], weight) for name, weight in weights.items()), number
        print(number, "ended" if ended else "whole", flush=True)
        shutil.rmtree(folder / str(number))


if __name__ == "__main__":
    main(Path(sys.argv[1]), [int(number) for number in sys.argv[2:]])
