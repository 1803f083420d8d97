"""A raw loop with `hf_lohan.Accelerator` trains as the same loop in plain torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from hf_lohan import Accelerator, LohanPlugin, engine_of
from hf_lohan.config import ConfigError
from hf_lohan.optim import OffloadAdamW
from hf_lohan.report import write_report
from hf_lohan.testing.models import FAMILIES, tiny_batch, tiny_model

NUM_BATCHES = 8
MAX_NORM = 0.5


def rows() -> list[dict[str, Tensor]]:
    return [{name: value[0] for name, value in tiny_batch(seed=seed).items()} for seed in range(2 * NUM_BATCHES)]


def loader() -> DataLoader[Any]:
    return DataLoader(rows(), batch_size=2)  # type: ignore[arg-type]


def optimizer_and_scheduler(model: Any) -> tuple[torch.optim.AdamW, LambdaLR]:
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=2e-3, fused=True)
    return optimizer, LambdaLR(optimizer, lambda step: 1 / (1 + step))


def plain_loop(model: Any, *, accumulate: int, max_norm: float) -> tuple[list[float], list[float]]:
    """(losses, norms)."""
    optimizer, scheduler = optimizer_and_scheduler(model)
    losses, norms = [], []
    for number, batch in enumerate(loader(), start=1):
        loss = model(**batch).loss
        losses.append(loss.item())
        (loss / accumulate).backward()
        if number % accumulate == 0:
            if max_norm:
                norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return losses, norms


class Prepared:
    """Everything that `prepare` returns."""

    def __init__(self, model: Any, folder: Path, *, accumulate: int = 1, **plugin: Any) -> None:
        offload = {"cpu_memory": "4MiB", "gpu_memory": "2MiB", "ssd": str(folder)}
        self.accelerator = Accelerator(
            cpu=True,
            gradient_accumulation_steps=accumulate,
            lohan_plugin=LohanPlugin(offload=offload, **plugin),
        )
        optimizer, scheduler = optimizer_and_scheduler(model)
        self.model, self.optimizer, self.loader, self.scheduler = self.accelerator.prepare(
            model, optimizer, loader(), scheduler
        )

    def run(self, *, max_norm: float, skip: int = 0, stop: int = NUM_BATCHES) -> tuple[list[float], list[float]]:
        """The loop of accelerate's documentation, over batches [skip, stop)."""
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
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
        return losses, norms

    def weights(self) -> dict[str, Tensor]:
        engine = engine_of(self.model)
        assert engine is not None
        access = engine.parameters
        return {name: access.read_parameter(name) for name, _ in self.model.named_parameters()}

    def close(self) -> None:
        engine = self.accelerator.offload_engine
        assert engine is not None
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


def assert_same(ours: dict[str, Tensor], model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        assert torch.equal(ours[name], parameter), name


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
    assert_same(ours.weights(), stock)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_micro_batches_together_equal_plain_torch(family: str, prepared: Callable[..., Prepared]) -> None:
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
        ours.optimizer.step()
        ours.scheduler.step()
        ours.optimizer.zero_grad()
    assert (losses, norms) == (expected_losses, expected_norms)
    assert_same(ours.weights(), stock)


def test_a_loop_that_promises_not_to_clip_updates_in_backward(prepared: Callable[..., Prepared]) -> None:
    stock = tiny_model("mixtral").train()
    expected = plain_loop(stock, accumulate=1, max_norm=0.0)
    ours = prepared(tiny_model("mixtral").train(), max_grad_norm=0)
    engine = ours.accelerator.offload_engine
    assert engine is not None and not engine.layout.holds_gradients
    assert ours.run(max_norm=0.0) == expected
    assert_same(ours.weights(), stock)
    with pytest.raises(ValueError, match="max_grad_norm=0"):
        ours.run(max_norm=1.0, stop=1)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_state_goes_on_elsewhere_to_the_bit(
    family: str, prepared: Callable[..., Prepared], tmp_path: Path
) -> None:
    stock = tiny_model(family).train()
    expected = plain_loop(stock, accumulate=2, max_norm=MAX_NORM)
    first = prepared(tiny_model(family).train(), accumulate=2)
    losses, norms = first.run(max_norm=MAX_NORM, stop=4)
    first.accelerator.save_state(str(tmp_path / "state"))
    second = prepared(tiny_model(family, seed=5).train(), accumulate=2)
    second.run(max_norm=MAX_NORM, stop=2)  # moments and weights that must be gone
    second.accelerator.load_state(str(tmp_path / "state"))
    more_losses, more_norms = second.run(max_norm=MAX_NORM, skip=4)
    assert (losses + more_losses, norms + more_norms) == expected
    assert_same(second.weights(), stock)


def test_the_scheduler_of_the_caller_drives_the_offloaded_optimizer(prepared: Callable[..., Prepared]) -> None:
    ours = prepared(tiny_model("llama").train())
    inner = ours.optimizer.optimizer
    assert isinstance(inner, OffloadAdamW)
    assert [group["weight_decay"] for group in inner.param_groups] == [0.1, 0.0]
    ours.run(max_norm=0.0, stop=3)
    assert inner.group(0).lr == 2e-3 / 4


def test_a_saved_model_is_an_ordinary_one(prepared: Callable[..., Prepared], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    ours = prepared(tiny_model("qwen3_moe").train())
    ours.run(max_norm=0.0, stop=2)
    ours.accelerator.save_model(ours.model, tmp_path / "saved")
    assert_same(ours.weights(), AutoModelForCausalLM.from_pretrained(tmp_path / "saved"))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_state_dict_is_that_of_the_model(family: str, prepared: Callable[..., Prepared]) -> None:
    stock = tiny_model(family).state_dict()
    ours = prepared(tiny_model(family))
    state = ours.accelerator.get_state_dict(ours.model)
    assert state.keys() == stock.keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in stock.items())


def test_other_models_are_treated_as_always(prepared: Callable[..., Prepared]) -> None:
    """A reward model beside the offloaded one, with an optimizer of its own."""
    ours = prepared(tiny_model("llama").train())
    small = nn.Linear(3, 3)
    state = ours.accelerator.get_state_dict(small)
    assert all(torch.equal(state[name], tensor) for name, tensor in small.state_dict().items())


# What is refused.


@pytest.fixture
def accelerator(tmp_path: Path) -> Accelerator:
    offload = {"cpu_memory": "4MiB", "gpu_memory": "2MiB", "ssd": str(tmp_path / "store")}
    return Accelerator(cpu=True, lohan_plugin=LohanPlugin(offload=offload))


def test_autocast_is_refused() -> None:
    with pytest.raises(ValueError, match=r"mixed_precision='bf16'.*LohanPlugin\(bf16=True\)"):
        Accelerator(cpu=True, mixed_precision="bf16", lohan_plugin=LohanPlugin())


def test_an_optimizer_before_its_model_is_refused(accelerator: Accelerator) -> None:
    model = tiny_model("llama")
    with pytest.raises(ValueError, match="prepare the model together with its optimizer"):
        accelerator.prepare(torch.optim.AdamW(model.parameters()))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda params: torch.optim.SGD(params, lr=0.1), "SGD cannot be offloaded; use torch.optim.AdamW"),
        (lambda params: torch.optim.Adam(params), "Adam cannot be offloaded"),
        (lambda params: torch.optim.AdamW(params, amsgrad=True), "without amsgrad"),
        (lambda params: torch.optim.AdamW(params, maximize=True), "and maximize"),
    ],
    ids=["sgd", "adam", "amsgrad", "maximize"],
)
def test_other_optimizers_are_refused_before_a_weight_is_touched(
    make: Callable[[Any], torch.optim.Optimizer], message: str, accelerator: Accelerator
) -> None:
    model = tiny_model("llama")
    with pytest.raises(ValueError, match=message):
        accelerator.prepare(model, make(model.parameters()))
    untouched = all(bool(parameter.isfinite().all()) for parameter in model.parameters())
    if (engine := engine_of(model)) is not None:
        engine.close()
    assert untouched


def test_an_optimizer_that_has_stepped_is_refused(accelerator: Accelerator) -> None:
    model = tiny_model("llama")
    optimizer = torch.optim.AdamW(model.parameters())
    model(**tiny_batch()).loss.backward()
    optimizer.step()
    with pytest.raises(ValueError, match="only a fresh"):
        accelerator.prepare(model, optimizer)
    if (engine := engine_of(model)) is not None:
        engine.close()


@pytest.mark.parametrize(
    ("offload", "message"),
    [({"gpu_memroy": "1GiB"}, "gpu_memory"), ("nowhere.yaml", r"nowhere\.yaml"), (7, "offload=7 is not allowed")],
    ids=["misspelt", "no_file", "no_config"],
)
def test_a_plugin_with_a_wrong_configuration_is_refused(offload: Any, message: str) -> None:
    accelerator = Accelerator(cpu=True, lohan_plugin=LohanPlugin(offload=offload))
    with pytest.raises(ConfigError, match=message):
        accelerator.prepare(tiny_model("llama"))


def test_a_plugin_takes_keywords_only_and_known_ones() -> None:
    with pytest.raises(TypeError):
        LohanPlugin("lohan")  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        LohanPlugin(offlaod="lohan")  # type: ignore[call-arg]


def a_loop(project: Path | None, store: Path, *, num_steps: int, trace: bool = False, log: bool = True) -> None:
    plugin = LohanPlugin(offload={"cpu_memory": "4MiB", "gpu_memory": "2MiB", "ssd": str(store), "trace": trace})
    accelerator = Accelerator(
        cpu=True, project_dir=project and str(project), lohan_plugin=plugin, gradient_accumulation_steps=2
    )
    model, optimizer = accelerator.prepare(model := tiny_model("llama"), torch.optim.AdamW(model.parameters()))
    for _ in range(num_steps):
        for _ in range(2):
            with accelerator.accumulate(model):
                loss = model(**tiny_batch()).loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        if log:
            accelerator.log({"loss": loss.item(), "accuracy": 0.5})
    accelerator.end_training()
    engine = engine_of(model)
    assert engine is not None
    engine.close()


def test_a_trace_is_written_when_training_ends(tmp_path: Path) -> None:
    a_loop(tmp_path / "project", tmp_path / "store", num_steps=1, trace=True)
    events = json.loads((tmp_path / "project" / "lohan" / "trace.json").read_text())["traceEvents"]
    assert {"compute", "ssd read", "ssd write", "cpu optimizer", "step"} <= {event.get("cat") for event in events}


def test_a_loop_in_a_project_can_be_reported_on(tmp_path: Path) -> None:
    a_loop(tmp_path / "project", tmp_path / "store", num_steps=3)
    folder = tmp_path / "project" / "lohan"
    lines = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3]
    assert {line["num_tokens"] for line in lines} == {2 * tiny_batch()["input_ids"].numel()}
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["is_finished"] and summary["num_steps"] == 3
    assert "3 steps" in write_report(tmp_path / "project").read_text()


def test_a_loop_without_a_project_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    a_loop(None, tmp_path / "store", num_steps=1, log=False)
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_what_a_loop_logs_need_not_be_numbers(tmp_path: Path) -> None:
    plugin = LohanPlugin(offload={"cpu_memory": "4MiB", "gpu_memory": "2MiB", "ssd": str(tmp_path / "store")})
    accelerator = Accelerator(cpu=True, project_dir=str(tmp_path), lohan_plugin=plugin)
    model, optimizer = accelerator.prepare(model := tiny_model("llama"), torch.optim.AdamW(model.parameters()))
    accelerator.backward(model(tiny_batch()["input_ids"], labels=tiny_batch()["labels"]).loss)
    optimizer.step()
    no_numbers = {"learning_rate": [1e-3], "loss": {"train": 1.0}, "eval_loss": None}
    accelerator.log({**no_numbers, "grad_norm": torch.tensor(2.0)})
    engine = engine_of(model)
    assert engine is not None
    engine.close()
    accelerator.end_training()  # what is known of the steps is written all the same
    (line,) = (json.loads(line) for line in (tmp_path / "lohan" / "steps.jsonl").read_text().splitlines())
    assert line["grad_norm"] == 2.0 and "learning_rate" not in line and "loss" not in line
    assert line["num_tokens"] == tiny_batch()["input_ids"].numel()


def test_steps_and_arguments_within_micro_batches_are_refused(accelerator: Accelerator) -> None:
    model, optimizer = accelerator.prepare(model := tiny_model("llama"), torch.optim.AdamW(model.parameters()))

    def steps_too_early() -> None:
        accelerator.backward(model(**tiny_batch()).loss)
        optimizer.step()

    def weighs() -> None:
        accelerator.backward(model(**tiny_batch()).loss, gradient=torch.tensor(2.0))

    with pytest.raises(RuntimeError, match="after run_micro_batches"):
        accelerator.run_micro_batches([steps_too_early, steps_too_early])
    with pytest.raises(ValueError, match="not supported within run_micro_batches"):
        accelerator.run_micro_batches([weighs, weighs])
    losses = accelerator.run_micro_batches([lambda: accelerator.backward(model(**tiny_batch()).loss)] * 2)
    assert losses == [None, None]
    optimizer.step()
    engine = engine_of(model)
    assert engine is not None
    engine.close()
