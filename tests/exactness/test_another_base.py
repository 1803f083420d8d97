"""A model over another base in the folder of a run is refused before it overwrites what the run's last step needs."""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from covering import slow_but
from interrupted_runs import COMMIT_EACH_STEP, SETTINGS, InterruptAfter, Outcome, assert_same, interrupt, train_to_end
from trajectories import arguments, dataset

import hf_lohan
from hf_lohan.annexes.resharding.reshard import reshard
from hf_lohan.engine import ParameterAccess, parameter_access
from hf_lohan.files import ForeignStoreError
from hf_lohan.testing.models import tiny_model

peft = pytest.importorskip("peft")

CHANGED = "model.layers.2.mlp.down_proj.weight"
"""The only weight that differs in the other base."""


def base(*, is_other: bool = False) -> Any:
    model = tiny_model("llama")
    if is_other:
        with torch.no_grad():
            model.get_parameter(CHANGED)[-1, -1] += 0.5
    return model


@pytest.fixture
def bases(tmp_path: Path) -> Path:
    base().save_pretrained(tmp_path / "base")
    base(is_other=True).save_pretrained(tmp_path / "other")
    return tmp_path


def over_path(folder: Path, path: Path, quantize: str, *callbacks: Any, **settings: Any) -> Any:
    """A Trainer of adapters over a base that streams."""
    torch.manual_seed(1)
    return hf_lohan.Trainer(
        str(path),
        arguments(folder, **{**SETTINGS, **settings}),
        train_dataset=dataset(),
        eval_dataset=dataset(2),
        callbacks=list(callbacks),
        offload={**COMMIT_EACH_STEP, "quantize": quantize},
        peft_config=peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM"),
    )


def in_memory(folder: Path, model: Any, *callbacks: Any, num_trained: int = 1, **settings: Any) -> Any:
    """A Trainer for a model in memory, of which only the last layers are trained."""
    model.requires_grad_(False)
    for layer in model.model.layers[-num_trained:] if num_trained else ():
        layer.self_attn.requires_grad_(True)
    return hf_lohan.Trainer(
        model,
        arguments(folder, **{**SETTINGS, **settings}),
        train_dataset=dataset(),
        eval_dataset=dataset(2),
        callbacks=list(callbacks),
        offload=COMMIT_EACH_STEP,
    )


IN_MEMORY = "in memory"
Undisturbed = Callable[[str], Outcome]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """Return a function that returns the outcome of an uninterrupted run of a model in memory, or of adapters over a
    base that streams with this `quantize`. Each run is made once."""
    folder = tmp_path_factory.mktemp("undisturbed")
    base().save_pretrained(folder / "base")

    @functools.cache
    def outcome(kind: str) -> Outcome:
        is_streamed = kind != IN_MEMORY
        return train_to_end(
            over_path(folder / kind, folder / "base", kind) if is_streamed else in_memory(folder / kind, base())
        )

    return outcome


@pytest.mark.parametrize("quantize", slow_but(["nf4"], ["none", "nf4"]))
def test_adapters_over_another_base_are_refused_and_the_run_resumes(
    quantize: str, bases: Path, undisturbed: Undisturbed
) -> None:
    interrupt(over_path(bases / "run", bases / "base", quantize, InterruptAfter(3)))
    store = bases / "run" / "_lohan" / "store"
    before = {path.name: path.read_bytes() for path in store.glob("*.safetensors")}
    with pytest.raises(ForeignStoreError) as caught:
        over_path(bases / "run", bases / "other", quantize)
    message = str(caught.value)
    assert message.startswith(f"{store} holds the steps of a run over another base: its frozen weights differ")
    assert f"first in base_model.model.{CHANGED}; load the base of that run to continue from there" in message
    assert {path.name: path.read_bytes() for path in store.glob("*.safetensors")} == before
    assert hf_lohan.last_step(bases / "run") == 3
    resumed = train_to_end(over_path(bases / "run", bases / "base", quantize), resume="last_step")
    assert_same(resumed, undisturbed(quantize))


@pytest.mark.slow
def test_a_base_that_an_older_version_rounded_half_up_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every 16th weight of float16 is half way between two of bfloat16."""
    base().half().float().save_pretrained(tmp_path / "base")
    write = parameter_access.write_masters

    def write_half_up(records: Any, block: Any, first: int, *memory: Any, is_trained: bool, **settings: Any) -> None:
        master, working, _, bounce = memory
        if is_trained:
            return write(records, block, first, *memory, is_trained=is_trained, **settings)
        working.view(torch.int16).copy_((master.view(torch.int32) + 0x8000) >> 16)
        return records.write_unaligned(block.name, "param", first, working, bounce, **settings)

    monkeypatch.setattr(parameter_access, "write_masters", write_half_up)
    interrupt(over_path(tmp_path / "run", tmp_path / "base", "none", InterruptAfter(3), bf16=True))
    monkeypatch.undo()
    store = tmp_path / "run" / "_lohan" / "store"
    resumed = over_path(tmp_path / "run", tmp_path / "base", "none", bf16=True)
    name = f"base_model.model.{CHANGED}"
    weight = resumed.offload_engine.parameters.read_parameter(name)
    masters = base().get_parameter(CHANGED).detach().half().float()
    assert not torch.equal(weight, masters.bfloat16()), "the weights of the run stay"
    train_to_end(resumed, resume="last_step")
    assert hf_lohan.last_step(tmp_path / "run") == SETTINGS["max_steps"] and store.exists()


@pytest.mark.slow
@pytest.mark.parametrize("quantize", slow_but(["none"], ["none", "nf4"]))
def test_a_streamed_base_other_than_that_of_another_number_of_ranks_is_refused(
    quantize: str, bases: Path, undisturbed: Undisturbed
) -> None:
    """The old stores stay, and the run goes on over its own base."""
    interrupt(over_path(bases / "run", bases / "base", quantize, InterruptAfter(3)))
    store = bases / "run" / "_lohan" / "store"
    reshard([[str(store)]], 2, removes_old=True)
    before = {path: path.read_bytes() for path in store.glob("rank-*/*.safetensors")}
    assert before
    trainer = over_path(bases / "run", bases / "other", quantize)
    with pytest.raises(ForeignStoreError) as caught:
        trainer.train(resume_from_checkpoint="last_step")
    message = str(caught.value)
    assert message.startswith(f"{store}/rank-0-of-2.g1 holds the steps of a run over another base: its frozen weights")
    assert f"first in base_model.model.{CHANGED}; load the base of that run to continue from there" in message
    assert trainer.offload_engine.is_closed, "its store may have weights of both bases"
    assert {path: path.read_bytes() for path in store.glob("rank-*/*.safetensors")} == before
    resumed = train_to_end(over_path(bases / "run", bases / "base", quantize), resume="last_step")
    assert_same(resumed, undisturbed(quantize))


@pytest.mark.slow
def test_a_partly_frozen_model_over_another_base_is_refused_and_stays_in_memory(
    tmp_path: Path, undisturbed: Undisturbed
) -> None:
    interrupt(in_memory(tmp_path / "run", base(), InterruptAfter(3)))
    other = base(is_other=True)
    weights = {name: parameter.detach().clone() for name, parameter in other.named_parameters()}
    trainer = in_memory(tmp_path / "run", other)
    for use in (trainer.evaluate, lambda: trainer.train(resume_from_checkpoint="last_step")):
        with pytest.raises(ForeignStoreError, match=f"first in {CHANGED}; load the base of that run"):
            use()
    assert all(torch.equal(parameter, weights[name]) for name, parameter in other.named_parameters())
    assert_same(train_to_end(in_memory(tmp_path / "run", base()), resume="last_step"), undisturbed(IN_MEMORY))


@pytest.mark.slow
def test_a_step_is_lost_if_a_frozen_weight_is_changed_by_hand(tmp_path: Path) -> None:
    train_to_end(in_memory(tmp_path / "run", base(), max_steps=2))
    trainer = in_memory(tmp_path / "run", base())
    trainer.evaluate()
    weight = trainer.model.get_parameter(CHANGED)
    with torch.no_grad(), hf_lohan.gathered_parameters(weight):
        weight[-1, -1] += 0.5
    with pytest.raises(ValueError, match="a later write, such as one in gathered_parameters, replaced"):
        trainer.train(resume_from_checkpoint="last_step")
    trainer.offload_engine.close()


def test_training_that_begins_anew_over_another_base_is_refused(tmp_path: Path, undisturbed: Undisturbed) -> None:
    """As if the model was streamed, which is loaded before anybody knows whether `train` will resume."""
    interrupt(in_memory(tmp_path / "run", base(), InterruptAfter(3)))
    with pytest.raises(ForeignStoreError, match="or delete that store if its steps are no longer needed"):
        in_memory(tmp_path / "run", base(is_other=True)).train()
    assert_same(train_to_end(in_memory(tmp_path / "run", base()), resume="last_step"), undisturbed(IN_MEMORY))


@pytest.mark.slow
def test_a_run_that_trains_all_weights_does_not_depend_on_the_loaded_ones(bases: Path) -> None:
    """Each trained weight has two versions, so loading overwrites none."""

    def make(folder: str, base: str, *callbacks: Any) -> Any:
        return hf_lohan.Trainer(
            str(bases / base),
            arguments(bases / folder, **SETTINGS),
            train_dataset=dataset(),
            callbacks=list(callbacks),
            offload=COMMIT_EACH_STEP,
        )

    expected = train_to_end(make("whole", "base"))
    interrupt(make("run", "base", InterruptAfter(3)))
    assert_same(train_to_end(make("run", "other"), resume="last_step"), expected)


def _load_and_die(folder: Path, path: Path, weight: str) -> None:
    """Load the base, and kill this process when it has written a weight, or has been refused to."""
    write_elements = ParameterAccess.write_elements

    def watched(access: ParameterAccess, name: str, *args: Any) -> None:
        try:
            write_elements(access, name, *args)
        finally:
            if name.endswith(weight):
                os.kill(os.getpid(), signal.SIGKILL)

    ParameterAccess.write_elements = watched  # type: ignore[method-assign, assignment]
    over_path(folder, path, "none")


@pytest.mark.covering(0)
@pytest.mark.parametrize("name", ["base", "other"])
def test_a_process_that_is_killed_while_it_loads_leaves_the_last_step(
    name: str, bases: Path, undisturbed: Undisturbed
) -> None:
    interrupt(over_path(bases / "run", bases / "base", "none", InterruptAfter(3)))
    for weight in ("embed_tokens.weight", CHANGED, *(["norm.weight"] if name == "base" else [])):
        process = multiprocessing.get_context("fork").Process(
            target=_load_and_die, args=(bases / "run", bases / name, weight)
        )
        process.start()
        process.join(60)
        assert process.exitcode == -signal.SIGKILL
    resumed = train_to_end(over_path(bases / "run", bases / "base", "none"), resume="last_step")
    assert_same(resumed, undisturbed("none"))
