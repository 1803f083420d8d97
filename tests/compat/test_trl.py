"""The private API of TRL that we use. A failure names what an upgrade has changed."""

from __future__ import annotations

import inspect
import sys
from typing import Any

import pytest
from transformers import Trainer

from hf_lohan.compat import trl_private as private
from hf_lohan.testing.models import tiny_model

trl = pytest.importorskip("trl")

KINDS = ("SFT", "DPO", "KTO", "Reward", "GRPO")


@pytest.mark.parametrize("kind", KINDS)
def test_trainers_make_models_with_the_replaced_function(kind: str) -> None:
    trainer_class = getattr(trl, f"{kind}Trainer")
    source = inspect.getsource(trainer_class.__init__)
    assert f"{private.MAKES_MODELS}(" in source, f"trl.{kind}Trainer loads checkpoints into memory by another function"
    assert f"model = {private.ADDS_ADAPTERS}(model, peft_config" in source, f"trl.{kind}Trainer adds adapters elsewhere"
    assert private.makes_models(trainer_class) and not private.makes_models(Trainer)


@pytest.mark.parametrize("name", [private.MAKES_MODELS, private.ADDS_ADAPTERS])
def test_the_replacements_are_called_and_removed(name: str) -> None:
    module = sys.modules[trl.DPOTrainer.__module__]
    stock = getattr(module, name)
    calls: list[Any] = []

    class Derived(trl.DPOTrainer):  # type: ignore[misc, name-defined]
        pass

    def ours(*arguments: Any, **named: Any) -> None:
        calls.append((arguments, named))

    with private.models_made_by(Derived, ours, ours):
        getattr(module, name)("first", second="second")
    assert calls == [((stock, "first"), {"second": "second"})]
    assert getattr(module, name) is stock


def test_the_replaced_functions_have_the_expected_arguments() -> None:
    module = sys.modules[trl.SFTTrainer.__module__]
    made, adapted = (getattr(module, name) for name in (private.MAKES_MODELS, private.ADDS_ADAPTERS))
    assert list(inspect.signature(made).parameters) == ["model_id", "architecture", "kwargs"]
    assert list(inspect.signature(adapted).parameters)[:2] == ["model", "peft_config"]


@pytest.mark.parametrize("kind", KINDS)
def test_default_arguments_equal_the_trainers(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer_class = getattr(trl, f"{kind}Trainer")
    assert f'args = {kind}Config(f"{{model_name}}-{kind}")' in inspect.getsource(trainer_class.__init__)
    # The real config is not made: it defaults to bfloat16, which some machines lack.
    monkeypatch.setattr(sys.modules[trainer_class.__module__], f"{kind}Config", lambda folder: (kind, folder))
    assert private.default_arguments(trainer_class, "models/tiny") == (kind, f"tiny-{kind}")
    assert private.default_arguments(Trainer, tiny_model("llama")) is None


@pytest.mark.parametrize("kind", KINDS)
def test_the_kept_state_has_the_expected_names(kind: str) -> None:
    source = inspect.getsource(getattr(trl, f"{kind}Trainer"))
    names = {"_metrics", "_total_train_tokens"} | (set(private.STEP_FACTS) if kind == "GRPO" else set())
    missing = [name for name in names if f"self.{name.removeprefix('self.')}" not in source]
    assert not missing, f"{missing} no longer exist, so a resumed run would log other numbers"


@pytest.mark.parametrize("kind", ["DPO", "KTO"])
def test_reference_log_probs_are_computed_in_the_overridden_method(kind: str) -> None:
    source = inspect.getsource(getattr(trl, f"{kind}Trainer").__init__)
    assert "self._precompute_ref_logps(" in source, "the model would run before it is offloaded"


def test_the_command_line_uses_the_replaced_launcher() -> None:
    from accelerate.commands import launch as accelerate_launch
    from trl.cli.accelerate_launcher import launch_training_script

    launcher = inspect.signature(launch_training_script).parameters["launch_command_fn"].default
    assert launcher is accelerate_launch.launch_command, "`trl sft` starts its script with another launcher"
