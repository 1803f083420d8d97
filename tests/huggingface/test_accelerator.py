"""A loop with `hf_lohan.Accelerator` trains as the same loop in plain torch."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils import ProjectConfiguration
from equal_tensors import assert_same_tensors
from stored_weights import assert_stored, stored
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader

from hf_lohan import Accelerator, LohanPlugin, engine_of, from_pretrained
from hf_lohan.model import hidden_matrices
from hf_lohan.testing.models import FAMILIES, tiny_batch, tiny_model, tiny_rows

NUM_BATCHES = 8
MAX_NORM = 0.5


def rows() -> list[dict[str, Tensor]]:
    return tiny_rows(2 * NUM_BATCHES)


def loader() -> DataLoader[Any]:
    return DataLoader(rows(), batch_size=2)  # type: ignore[arg-type]


Make = Callable[[Any], list[torch.optim.Optimizer]]
"""Makes the optimizers of a model."""


def adamw(model: Any) -> list[torch.optim.Optimizer]:
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return [torch.optim.AdamW(groups, lr=2e-3, fused=True)]


def sgd(model: Any) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)]


def muon_and_adamw(model: Any) -> list[torch.optim.Optimizer]:
    matrices = hidden_matrices(model)
    of_layers = [p for p in model.parameters() if p in matrices]
    rest = [p for p in model.parameters() if p not in matrices]
    return [torch.optim.Muon(of_layers, lr=0.02), torch.optim.AdamW(rest, lr=1e-3, fused=True)]


def schedulers_of(optimizers: list[torch.optim.Optimizer]) -> list[LambdaLR]:
    return [LambdaLR(optimizer, lambda step: 1 / (1 + step)) for optimizer in optimizers]


def take_step(optimizers: list[Any], schedulers: list[Any]) -> None:
    """Each scheduler steps before the next optimizer, which has its own learning rate."""
    for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
        optimizer.step()
        scheduler.step()
    for optimizer in optimizers:
        optimizer.zero_grad()


def plain_loop(model: Any, *, accumulate: int, max_norm: float, make: Make = adamw) -> tuple[list[float], list[float]]:
    """Return losses and norms."""
    optimizers = make(model)
    schedulers = schedulers_of(optimizers)
    losses, norms = [], []
    for number, batch in enumerate(loader(), start=1):
        loss = model(**batch).loss
        losses.append(loss.item())
        (loss / accumulate).backward()
        if number % accumulate == 0:
            if max_norm:
                norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)))
            take_step(optimizers, schedulers)
    return losses, norms


class Prepared:
    """The results of `prepare`."""

    def __init__(
        self, model: Any, folder: Path, *, accumulate: int = 1, make: Make = adamw, project: Any = None, **plugin: Any
    ) -> None:
        offload = {"cpu_memory": "4MiB", "gpu_memory": "2MiB", "ssd": str(folder)}
        self.accelerator = Accelerator(
            cpu=True,
            gradient_accumulation_steps=accumulate,
            project_config=project,
            lohan_plugin=LohanPlugin(offload=offload, **plugin),
        )
        optimizers = make(model)
        num = len(optimizers)
        given = (model, loader(), *optimizers, *schedulers_of(optimizers))
        self.model, self.loader, *rest = self.accelerator.prepare(*given)
        self.optimizers, self.schedulers = rest[:num], rest[num:]

    def run(self, *, max_norm: float, skip: int = 0, stop: int = NUM_BATCHES) -> tuple[list[float], list[float]]:
        """Run the loop of Accelerate's documentation on batches [skip, stop)."""
        accelerator, losses, norms = self.accelerator, [], []
        batches = accelerator.skip_first_batches(self.loader, skip) if skip else self.loader
        for number, batch in enumerate(batches, start=skip):
            if number == stop:
                break
            with accelerator.accumulate(self.model):
                loss = self.model(**batch).loss
                losses.append(loss.item())
                accelerator.backward(loss)
                if accelerator.sync_gradients and max_norm:
                    norm = accelerator.clip_grad_norm_(self.model.parameters(), max_norm)
                    assert norm is not None
                    norms.append(float(norm))
                take_step(self.optimizers, self.schedulers)
        return losses, norms

    def close(self) -> None:
        engine = self.accelerator.offload_engine
        engine.close()


@pytest.fixture
def prepared(tmp_path: Path) -> Iterator[Callable[..., Prepared]]:
    made: list[Prepared] = []

    def make(model: Any, **options: Any) -> Prepared:
        made.append(Prepared(model, tmp_path / f"store{len(made)}", **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.covering(0)
@pytest.mark.parametrize("max_norm", [0.0, MAX_NORM])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_loop_equals_plain_torch(
    family: str, accumulate: int, max_norm: float, prepared: Callable[..., Prepared]
) -> None:
    stock = tiny_model(family).train()
    expected = plain_loop(stock, accumulate=accumulate, max_norm=max_norm)
    ours = prepared(tiny_model(family).train(), accumulate=accumulate)
    assert ours.run(max_norm=max_norm) == expected
    assert_stored(ours.model, stock)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_joint_micro_batches_equal_plain_torch(family: str, prepared: Callable[..., Prepared]) -> None:
    stock = tiny_model(family).train()
    expected_losses, expected_norms = plain_loop(stock, accumulate=4, max_norm=MAX_NORM)
    ours = prepared(tiny_model(family).train(), accumulate=4)
    accelerator, losses, norms = ours.accelerator, [], []

    def forward_and_backward(batch: dict[str, Tensor]) -> float:
        loss = ours.model(**batch).loss
        accelerator.backward(loss)
        return loss.item()

    batches = list(ours.loader)
    for first in range(0, NUM_BATCHES, 4):
        losses += accelerator.run_micro_batches([partial(forward_and_backward, b) for b in batches[first : first + 4]])
        norms.append(float(accelerator.clip_grad_norm_(ours.model.parameters(), MAX_NORM)))  # type: ignore[arg-type]
        take_step(ours.optimizers, ours.schedulers)
    assert (losses, norms) == (expected_losses, expected_norms)
    assert_stored(ours.model, stock)


def test_a_loop_that_promises_not_to_clip_updates_in_backward(prepared: Callable[..., Prepared]) -> None:
    stock = tiny_model("mixtral").train()
    expected = plain_loop(stock, accumulate=1, max_norm=0.0)
    ours = prepared(tiny_model("mixtral").train(), max_grad_norm=0)
    engine = ours.accelerator.offload_engine
    assert engine is not None and not engine.layout.holds_gradients
    assert ours.run(max_norm=0.0) == expected
    assert_stored(ours.model, stock)
    with pytest.raises(ValueError, match="max_grad_norm=0"):
        ours.run(max_norm=1.0, stop=1)


@pytest.mark.parametrize(
    ("family", "make"),
    [
        *(
            pytest.param(family, adamw, marks=[] if family in ("opt", "mixtral") else pytest.mark.slow)
            for family in FAMILIES
        ),
        ("llama", sgd),
        ("llama", muon_and_adamw),
    ],
)
def test_a_saved_state_resumes_elsewhere_to_the_bit(
    family: str, make: Make, prepared: Callable[..., Prepared], tmp_path: Path
) -> None:
    stock = tiny_model(family).train()
    expected = plain_loop(stock, accumulate=2, max_norm=MAX_NORM, make=make)
    first = prepared(tiny_model(family).train(), accumulate=2, make=make)
    losses, norms = first.run(max_norm=MAX_NORM, stop=4)
    first.accelerator.save_state(str(tmp_path / "state"))
    second = prepared(tiny_model(family, seed=5).train(), accumulate=2, make=make)
    second.run(max_norm=MAX_NORM, stop=2)  # loading must replace these moments and weights
    second.accelerator.load_state(str(tmp_path / "state"))
    more_losses, more_norms = second.run(max_norm=MAX_NORM, skip=4)
    assert (losses + more_losses, norms + more_norms) == expected
    assert_stored(second.model, stock)


class Counter:
    """An object of the user that is saved with the state."""

    def __init__(self, count: int = 0) -> None:
        self.count = count

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def copy_at_each_write(folder: Path, copies: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before each rename and each `torch.save` of a file in the folder, copy the folder. A process that is killed then
    leaves such a folder."""

    def copying(real: Callable[..., Any], source: Any, file: Any, **kwargs: Any) -> Any:
        if folder in Path(file).parents:
            shutil.copytree(folder, copies / f"{len(os.listdir(copies)):03d}")
        return real(source, file, **kwargs)

    for owner, name in ((os, "rename"), (os, "replace"), (torch, "save")):
        monkeypatch.setattr(owner, name, partial(copying, getattr(owner, name)))


def test_a_killed_save_over_an_earlier_state_leaves_one_of_both(
    prepared: Callable[..., Prepared], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = prepared(tiny_model("llama").train()), prepared(tiny_model("llama", seed=5).train())
    counters = Counter(), Counter()
    for one, counter in zip((first, second), counters, strict=True):
        one.accelerator.register_for_checkpointing(counter)
    saved, copies, weights = tmp_path / "saved", tmp_path / "copies", {}
    for folder in (saved, copies):
        folder.mkdir()
    for step in (1, 2):
        first.run(max_norm=MAX_NORM, skip=step - 1, stop=step)
        counters[0].count, weights[step] = step, stored(first.model)
        with monkeypatch.context() as patch:
            if step == 2:
                (saved / "state" / "other.txt").write_text("of the user")
                copy_at_each_write(saved, copies, patch)
            first.accelerator.save_state(str(saved / "state"))
    shutil.copytree(saved, copies / "last")
    steps = []
    for folder in sorted(copies.iterdir()):
        second.accelerator.load_state(str(folder / "state"))
        steps.append(counters[1].count)
        engine = second.accelerator.offload_engine
        assert {engine.step_counts[part] for part in engine.parameter_slices} == {steps[-1]}
        assert second.schedulers[0].scheduler.last_epoch == steps[-1]
        assert_same_tensors(stored(second.model), weights[steps[-1]])
        assert (folder / "state" / "other.txt").read_text() == "of the user"
    assert steps == sorted(steps) and steps.count(1) > 2 and steps.count(2) > 2
    assert not list((saved / "state").glob("_*"))


@pytest.mark.parametrize("is_numbered", [False, True])
def test_a_new_state_appears_when_it_is_complete(
    is_numbered: bool, prepared: Callable[..., Prepared], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved, copies = tmp_path / "saved", tmp_path / "copies"
    states = saved / "checkpoints" if is_numbered else saved
    for folder in (states, copies):
        folder.mkdir(parents=True)
    project = ProjectConfiguration(str(saved), automatic_checkpoint_naming=is_numbered, total_limit=2)
    ours = prepared(tiny_model("llama").train(), project=project)
    names = [f"checkpoint_{number}" for number in range(3)]
    with monkeypatch.context() as patch:
        copy_at_each_write(states, copies, patch)
        for name in names:
            assert ours.accelerator.save_state(None if is_numbered else str(states / name)) == states / name
    complete = {path.name: sorted(file.name for file in path.iterdir()) for path in states.glob("checkpoint_*")}
    assert sorted(complete) == (names[1:] if is_numbered else names) and len({*map(tuple, complete.values())}) == 1
    for copied in copies.glob("*/checkpoint_*"):
        assert sorted(file.name for file in copied.iterdir()) == complete[names[2]]
    if not is_numbered:
        with pytest.raises(ValueError, match=r"is incomplete, because its save was killed; delete it"):
            ours.accelerator.load_state(str(next(copies.glob("*/_unfinished*"))))
    else:
        assert {path.name for path in copies.glob("*/*")} < {*names}, "scripts count every folder as a state"
        assert {path.name for path in max(copies.iterdir()).iterdir()} == {*names[:2]}, "an old state went too early"
        ours.accelerator.load_state()
        project.iteration = 2
        with pytest.raises(ValueError, match=r"checkpoint_2' already exists; set project_configuration\.iteration"):
            ours.accelerator.save_state()


def test_a_state_of_an_earlier_version_is_loaded(tmp_path: Path) -> None:
    """Its model is in a separate folder, as `save_pretrained` writes it."""
    first, state = Prepared(tiny_model("mixtral").train(), tmp_path / "first"), tmp_path / "state"
    first.run(max_norm=MAX_NORM, stop=1)
    first.accelerator.save_state(str(state))
    expected = stored(first.model)
    (state / "model.safetensors").unlink()
    first.model.save_pretrained(state / "lohan_model")
    second = Prepared(tiny_model("mixtral", seed=5).train(), tmp_path / "second")
    second.accelerator.load_state(str(state))
    assert_same_tensors(stored(second.model), expected)
    for prepared in (first, second):
        prepared.close()


def test_a_streamed_model_is_loaded_for_its_optimizer(prepared: Callable[..., Prepared], tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path / "model")

    def load(folder: str, **settings: Any) -> Any:
        offload = {"cpu_memory": "4MiB", "gpu_memory": "2MiB", "ssd": str(tmp_path / folder)}
        return from_pretrained(tmp_path / "model", offload, torch_device="cpu", **settings).train()

    stock = tiny_model("llama").train()
    expected = plain_loop(stock, accumulate=1, max_norm=MAX_NORM, make=sgd)
    ours = prepared(load("told", optimizer=(torch.optim.SGD, {"momentum": 0.9})), make=sgd)
    assert ours.run(max_norm=MAX_NORM) == expected
    assert_stored(ours.model, stock)
    default = load("default")
    with pytest.raises(ValueError, match=r"SGD were offloaded for AdamW.*pass SGD when"):
        prepared(default, make=sgd)
    engine_of(default).close()


def test_muon_without_an_optimizer_for_the_rest_is_refused(prepared: Callable[..., Prepared]) -> None:
    model = tiny_model("llama").train()
    with pytest.raises(ValueError, match="requires a gradient but is in no param group"):
        prepared(model, make=lambda model: muon_and_adamw(model)[:1])
    engine_of(model).close()


def test_overwriting_the_steps_of_an_earlier_loop_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for goes_back, is_logged in ((False, False), (False, True), (True, False)):
        caplog.clear()
        ours = Prepared(tiny_model("llama").train(), tmp_path / "store")
        engine = engine_of(ours.model)
        if goes_back:
            engine.go_back_to_commit()
        ours.run(max_norm=MAX_NORM, stop=1)
        ours.close()
        assert ("(after update 1)" in caplog.text) == is_logged


def test_frozen_weights_in_the_optimizer_are_logged(
    prepared: Callable[..., Prepared], caplog: pytest.LogCaptureFixture
) -> None:
    """Torch could thaw and train them later. The store has no states for them, so the user must know at once."""
    model = tiny_model("llama")
    model.model.layers[0].requires_grad_(False)
    prepared(model)
    message = next(record.message for record in caplog.records if "stay frozen in this run" in record.message)
    assert "has 9 frozen parameters (such as model.layers.0." in message and "freeze them afterwards" in message


@pytest.mark.parametrize("family", FAMILIES)
def test_the_state_dict_equals_that_of_the_model(family: str, prepared: Callable[..., Prepared]) -> None:
    stock = tiny_model(family).state_dict()
    ours = prepared(tiny_model(family))
    state = ours.accelerator.get_state_dict(ours.model)
    assert_same_tensors(state, stock)


def test_a_plain_backward_divides_its_loss_once(prepared: Callable[..., Prepared]) -> None:
    class Divisions(TorchFunctionMode):
        count = 0

        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.count += function.__name__ in ("div", "__truediv__")
            return function(*args, **(kwargs or {}))

    ours = prepared(tiny_model("llama"))
    loss = ours.model(**tiny_batch()).loss
    with Divisions() as divisions:
        ours.accelerator.backward(loss)
    assert divisions.count == 1


def test_other_models_are_not_changed(prepared: Callable[..., Prepared]) -> None:
    """A loop may also have a reward model with its own optimizer."""
    ours = prepared(tiny_model("llama").train())
    small = nn.Linear(3, 3)
    state = ours.accelerator.get_state_dict(small)
    assert all(torch.equal(state[name], tensor) for name, tensor in small.state_dict().items())
