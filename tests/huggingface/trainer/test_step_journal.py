"""A journal with right checksums and wrong content is refused in one sentence by a resume and by `lohan verify`."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from short_runs import short_arguments
from typer.testing import CliRunner

import hf_lohan
from hf_lohan.cli import app
from hf_lohan.files import StorageError
from hf_lohan.store import Commit
from hf_lohan.store.commits import read_commit, write_commit
from hf_lohan.testing.models import tiny_batch, tiny_model

pytestmark = pytest.mark.storm

Change = Callable[[Commit], dict[str, Any]]


def a_trainer(folder: Path) -> Any:
    rows = tiny_batch(seed=3)["input_ids"].tolist()
    return hf_lohan.Trainer(
        tiny_model("llama"),
        short_arguments(folder, max_steps=2),
        train_dataset=Dataset.from_dict({"input_ids": rows, "labels": rows}),
        offload={"cpu_memory": "4MiB", "gpu_memory": "2MiB", "commit_every": 1},
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output folder of a run of two steps."""
    folder = tmp_path_factory.mktemp("run")
    trainer = a_trainer(folder)
    trainer.train()
    trainer.offload_engine.close()
    return folder


def without(name: str) -> Change:
    return lambda commit: {"journal": {key: content for key, content in commit.journal.items() if key != name}}


def with_file(name: str, content: bytes) -> Change:
    return lambda commit: {"journal": {**commit.journal, name: content}}


def with_fact(name: str, value: object) -> Change:
    return lambda commit: {"facts": {**commit.facts, name: value}}


def saved(content: object) -> bytes:
    stream = io.BytesIO()
    torch.save(content, stream)
    return stream.getvalue()


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (without("trainer_state.json"), "trainer_state.json: .*it is missing"),
        (without("optimizer.pt"), "optimizer.pt: .*it is missing"),
        (with_file("trainer_state.json", b"[]"), "trainer_state.json: "),
        (with_file("trainer_state.json", b'{"of": "something"}'), "trainer_state.json: TypeError"),
        (with_file("trainer_state.json", json.dumps({"global_step": 7}).encode()), "it is of step 7 of 0"),
        (with_file("scheduler.pt", b"no pickle"), "scheduler.pt: UnpicklingError"),
        (with_file("scheduler.pt", saved([1])), "scheduler.pt: TypeError"),
        (with_file("optimizer.pt", saved([1])), "optimizer.pt: TypeError"),
        (with_file("rng_state.pth", saved({"python": 1})), "rng_state.pth: TypeError"),
        (with_file("../outside", b""), "outside the journal's folder"),
        (with_fact("num_updates", [1]), "num_updates is "),
        (with_fact("global_step", "2"), "global_step is '2'"),
        (with_fact("trainer", {}), "its facts: KeyError"),
    ],
)
def test_a_wrong_journal_is_refused_in_one_sentence(change: Change, what: str, run: Path) -> None:
    store = str(run / "_lohan" / "store")
    sound = read_commit(store)
    assert sound is not None
    try:
        write_commit(replace(sound, **change(sound)), store)
        with pytest.raises(StorageError, match=rf"has a journal that no run has written \(.*{what}.*: resume from a "):
            a_trainer(run).train(resume_from_checkpoint="last_step")
        result = CliRunner().invoke(app, ["verify", str(run)])
        assert result.exit_code == 1 and "has a journal that no run has written" in result.stdout, result.stdout
        assert "0 granules and 1 other files are damaged" in result.stdout
    finally:
        write_commit(sound, store)
