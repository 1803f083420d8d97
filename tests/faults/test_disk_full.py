"""A small real disk becomes full at some instant of a run. The run continues, because its files are allocated at the
start, or fails with one error that tells where bytes are missing and how many. With free space again it resumes from
its last committed step, bit for bit."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import Child, finish
from runs import FAILED, Mishap, Outcome, Run, assert_same, read_outcome
from safetensors.torch import save_file
from short_runs import short_arguments
from small_file_system import MIB, fill, small_file_system, take_ballast_away
from transformers import TrainerCallback
from write_calls import WriteCall

import hf_lohan
from hf_lohan.files import StorageError
from hf_lohan.files.directories import temporary_folder
from hf_lohan.huggingface.models.saving import StoredModel
from hf_lohan.huggingface.models.state_dicts import save_state_dict
from hf_lohan.testing.models import tiny_batch, tiny_model

RUN = Run(family="opt", num_steps=6, save_steps=2)
NUM_INSTANTS = 20
NEEDED_AND_FREE = re.compile(
    r"needs [\d,]+ bytes.* (free space|capacity)[^;]* is [\d,]+ bytes"
    r"|needs [\d,]+ bytes and [\d,]+ are left"
    # The sizes of other libraries' files are unknown; the error tells how far the write got.
    r"|[\d,]+ bytes of it were written and [\d,]+ bytes were free"
)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_file_system(tmp_path, 64 * MIB) as disk:
        yield disk


@pytest.fixture(scope="module")
def num_write_calls(tmp_path_factory: pytest.TempPathFactory) -> int:
    """The number of write calls of a run on such a disk."""
    folder = tmp_path_factory.mktemp("counted")
    with small_file_system(folder, 64 * MIB) as disk:
        return finish(on(disk, folder, RUN)).num_write_calls


def on(disk: Path, beside: Path, run: Run) -> Run:
    """Return the run with all its output on the disk."""
    (disk / "out").mkdir()
    return replace(run, output_dir=disk / "out", beside=beside)


def check_free_space_error(message: str, disk: Path) -> None:
    assert "\n" not in message
    assert str(disk) in message
    assert NEEDED_AND_FREE.search(message), message


@pytest.mark.slow
@pytest.mark.parametrize("instant", range(NUM_INSTANTS))
def test_a_disk_full_from_a_random_write_call(
    instant: int, num_write_calls: int, disk: Path, undisturbed: Callable[[Run], Outcome], tmp_path: Path
) -> None:
    number = 1 + instant * (num_write_calls * 17 // 20) // NUM_INSTANTS  # counts differ a little from run to run
    run = on(disk, tmp_path, RUN)
    child = Child(run, Mishap(write_call=WriteCall(number, "fill")))
    code = child.end()
    assert take_ballast_away(disk), "the run made too few write calls for this instant"
    print(f"call {number} of {num_write_calls}: exit code {code}, {child.error or 'went on'}")
    assert code in (0, FAILED), child.output_tail()
    if code == FAILED:
        assert (hf_lohan.last_step(run.output_dir) or 0) >= child.last_step - 2
        finish(run)
    assert_same(read_outcome(tmp_path), undisturbed(RUN))
    if code == FAILED:
        check_free_space_error(child.error, disk)


@pytest.mark.parametrize(
    "save",
    [
        lambda tensor, path: path.write_bytes(tensor.numpy().tobytes()),
        lambda tensor, path: torch.save(tensor, path),
        lambda tensor, path: save_file({"tensor": tensor}, path),
    ],
    ids=["python", "torch", "safetensors"],
)
def test_a_full_disk_of_temporary_files_is_named(
    save: Callable[[torch.Tensor, Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = ""
    with small_file_system(tmp_path, MIB) as disk:
        monkeypatch.setattr(tempfile, "tempdir", str(disk))
        try:
            with temporary_folder() as folder:
                save(torch.ones(MIB), Path(folder) / "file")
        except StorageError as error:  # `pytest.raises` would keep torch's writer and its open file alive
            message = str(error)
        assert not list(disk.glob("lohan-*"))
        assert re.search(rf"{disk} \(No space left on device\): [\d,]+ bytes are free; .* set TMPDIR", message), message


class FillsDisk(TrainerCallback):
    def __init__(self, disk: Path) -> None:
        self.disk = disk

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        fill(str(self.disk))


def test_a_disk_that_fills_outside_the_store_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{name: ids[0] for name, ids in tiny_batch(sequence_length=8, seed=seed).items()} for seed in range(4)]
    arguments = short_arguments(tmp_path / "out", max_steps=2)
    offload = {"cpu_memory": "4MiB", "gpu_memory": "2MiB", "commit_every": 1}
    with small_file_system(tmp_path, 4 * MIB) as disk:
        monkeypatch.setattr(tempfile, "tempdir", str(disk))
        full = FillsDisk(disk)
        trainer = hf_lohan.Trainer(
            tiny_model("llama"), arguments, train_dataset=rows, offload=offload, callbacks=[full]
        )
        with pytest.raises(StorageError, match=rf"temporary files {disk} \(No space.*; free space there, or set"):
            trainer.train()  # the journal of the first step
        save_state = partial(save_state_dict, StoredModel.from_engine(trainer.offload_engine))
        for save in (trainer.save_model, trainer.model.save_pretrained, save_state):
            with pytest.raises(StorageError, match=rf"cannot (save the model to|write) {disk}/final.*; free space"):
                save(str(disk / "final"))
        take_ballast_away(disk)
        trainer.remove_callback(full)
        trainer.train("last_step" if hf_lohan.last_step(tmp_path / "out") else None)
        assert hf_lohan.last_step(tmp_path / "out") == 2
        trainer.offload_engine.close()
