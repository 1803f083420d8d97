"""After a power cut at a random call of a run, the store verifies and the run resumes bit for bit."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from recorded_disk import PowerCut, RecordedDisk
from runs import Outcome, Run, assert_same, make_trainer, read_outcome, where_from, write_outcome
from transformers import TrainerCallback

import hf_lohan
from hf_lohan.cli.stores import verify_stores

pytestmark = [pytest.mark.slow, pytest.mark.storm, pytest.mark.timeout(900)]
NUM_CUTS = 20
STORE = Path("out") / "_lohan" / "store"


class TellsDisk(TrainerCallback):
    """Marks on the disk each step whose commit has returned."""

    def __init__(self, disk: RecordedDisk | None = None) -> None:
        self.disk = disk
        self.trainer: Any = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        committed = self.trainer.offload_engine.tiers.store.committed
        if self.disk is not None and committed is not None and committed.facts["is_resumable"]:
            self.disk.mark(committed.facts["global_step"])


def train(run: Run, disk: RecordedDisk | None = None) -> Outcome:
    callback = TellsDisk(disk)
    callback.trainer = trainer = make_trainer(run, callback)
    trainer.train(resume_from_checkpoint=where_from(run))
    write_outcome(trainer, run.beside)
    trainer.offload_engine.close()
    return read_outcome(run.beside)


@pytest.mark.parametrize(
    "run",
    [
        Run(num_steps=6),
        Run(num_steps=9, commit_every=2, cpu_memory="64MiB"),
        Run(family="mixtral", num_steps=6, commit_every=2, cpu_memory="7MiB"),
        Run(num_steps=6, bf16=True),
    ],
    ids=["each-step", "all-records-in-ram", "experts-one-by-one", "bfloat16"],
)
def test_cut_at_random_calls(run: Run, undisturbed: Callable[[Run], Outcome], ram_folder: Path, tmp_path: Path) -> None:
    whole = undisturbed(run)
    first = replace(run, output_dir=ram_folder / "first" / "out", beside=tmp_path)
    (ram_folder / "first" / STORE).mkdir(parents=True)
    with RecordedDisk(ram_folder / "first" / STORE) as disk:
        assert_same(train(first, disk), whole)
    random, cut, durable, steps = Random(run.num_steps), PowerCut(), 0, []
    cut.add_folder(".")
    loading = next(number for number, call in enumerate(disk.calls) if call.name == "mark")
    instants = {*random.sample(range(loading), 4), *random.sample(range(loading, len(disk.calls)), NUM_CUTS - 4)}
    for number, call in enumerate(disk.calls):
        if call.name == "mark":
            durable = max(durable, call.mark)
        else:
            cut.apply(call)
        if number not in instants:
            continue
        image = ram_folder / "image"
        cut.write_image(image / STORE, random)
        shutil.copytree(ram_folder / "first" / "out" / "lohan", image / "out" / "lohan")
        found = hf_lohan.last_step(image / "out")
        assert (found or 0) >= durable, "a returned commit was lost"
        if found is not None:
            assert verify_stores([str(image / "out")])
        assert_same(train(replace(run, output_dir=image / "out", beside=tmp_path)), whole)
        steps.append(found)
        shutil.rmtree(image)
    print(Counter(steps))
    assert len(steps) == NUM_CUTS and len(set(steps)) > 2
