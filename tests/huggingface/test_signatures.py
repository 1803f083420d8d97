"""Every argument of a method of another library that we replace has its meaning, or is refused."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from hf_lohan import Accelerator, OffloadTrainerMixin
from hf_lohan.huggingface.accelerator import OffloadAwareAccelerator
from hf_lohan.huggingface.optimizers import _OffloadedMuon
from hf_lohan.optim import OffloadOptimizer
from hf_lohan.optim.optimizer import JointOptimizer, OptimizerPart
from hf_lohan.testing.models import tiny_model

DONE, PASSED_ON, REFUSED = "done", "passed on", "refused"
NO_MEANING = "no meaning here: "
"""Followed by the reason."""

OVERRIDES: list[tuple[type, tuple[str, ...]]] = [
    (
        OffloadTrainerMixin,
        (
            *("transformers.Trainer", "trl.SFTTrainer", "trl.DPOTrainer"),
            *("trl.KTOTrainer", "trl.RewardTrainer", "trl.GRPOTrainer"),
        ),
    ),
    (OffloadAwareAccelerator, ("accelerate.Accelerator",)),
    (Accelerator, ("accelerate.Accelerator",)),
    *((ours, ("torch.optim.Optimizer",)) for ours in (OffloadOptimizer, OptimizerPart, JointOptimizer, _OffloadedMuon)),
]
"""Our classes, and those whose methods they override."""

OF_CLASSES: dict[str, dict[str, str]] = {
    "Trainer.__init__": {"model": DONE},
    "Trainer.train": {"resume_from_checkpoint": DONE},
    "Trainer.training_step": {"model": PASSED_ON, "inputs": PASSED_ON},
    "Trainer.compute_loss": {"model": PASSED_ON, "inputs": DONE},
    "Trainer.log": {"logs": DONE},
    "Trainer.get_total_train_batch_size": {"args": PASSED_ON},
    "Trainer.get_batch_samples": {"epoch_iterator": DONE},
    "Accelerator.prepare": {},
    "Accelerator.prepare_model": {"model": DONE, "device_placement": PASSED_ON, "evaluation_mode": DONE},
    "Accelerator.prepare_optimizer": {
        "optimizer": DONE,
        "device_placement": NO_MEANING + "the states are in the store; other optimizers are passed on with it",
    },
    "Accelerator.backward": {"loss": DONE},  # of the rest `inputs` is refused
    "Accelerator.no_sync": {"model": DONE},
    "Accelerator.log": {"values": DONE},
    "Accelerator.autocast": {"autocast_handler": NO_MEANING + "an offloaded model computes in its working dtype"},
    "Accelerator.gather": {"tensor": DONE},
    "Accelerator.clip_grad_norm_": {"parameters": DONE, "max_norm": DONE, "norm_type": REFUSED},  # but 2
    "Accelerator.clip_grad_value_": {"parameters": REFUSED, "clip_value": REFUSED},
    "Accelerator.get_state_dict": {"model": DONE, "unwrap": NO_MEANING + "an offloaded model is not wrapped"},
    "Accelerator.save_model": {
        "model": DONE,
        "save_directory": DONE,
        "max_shard_size": DONE,
        "safe_serialization": REFUSED,  # if it is false
    },
    "Accelerator.save_state": {"output_dir": DONE, "safe_serialization": REFUSED},
    "Optimizer.add_param_group": {"param_group": DONE},
    "Optimizer.step": {"closure": DONE},  # refused by one of several optimizers
    "Optimizer.zero_grad": {"set_to_none": DONE},
    "Optimizer.load_state_dict": {"state_dict": DONE},  # refused with moments
}
"""What becomes of each upstream parameter that our method names. What our method takes as `*args` and `**kwargs`
must go on to `super()`."""

OF_SAVE_PRETRAINED = {
    "PreTrainedModel": {
        "save_directory": DONE,
        "is_main_process": PASSED_ON,
        "state_dict": DONE,
        "push_to_hub": PASSED_ON,
        "max_shard_size": PASSED_ON,
        "variant": PASSED_ON,
        "token": PASSED_ON,
        "save_peft_format": PASSED_ON,
        "save_original_format": PASSED_ON,
        "distributed_checkpoint": REFUSED,
        "kwargs": PASSED_ON,
    },
    "PeftModel": {
        "save_directory": DONE,
        "safe_serialization": PASSED_ON,
        "selected_adapters": DONE,
        "save_embedding_layers": DONE,
        "is_main_process": PASSED_ON,
        "path_initial_model_for_weight_conversion": REFUSED,
        "kwargs": PASSED_ON,
    },
    "ModelMixin": {
        "save_directory": DONE,
        "is_main_process": DONE,
        "save_function": REFUSED,
        "safe_serialization": REFUSED,  # if it is false
        "variant": DONE,
        "max_shard_size": DONE,
        "push_to_hub": REFUSED,
        "use_flashpack": REFUSED,
        "kwargs": REFUSED,
    },
}

OF_MODELS: dict[str, str | dict[str, str]] = {
    "zero_grad": {"set_to_none": DONE},
    "resize_token_embeddings": REFUSED,
    "load_state_dict": REFUSED,
    "merge_and_unload": PASSED_ON,
    "unload": PASSED_ON,
}
"""Methods that are set on a model. A text stands for all parameters."""

ADVICE = "try it against upstream's method, do it or refuse it in a sentence, and add it to the tables of this test"


def upstream_class(name: str) -> type:
    """Return the library's own class, also where a script was run in this process, which has ours in its place."""
    library, _, class_name = name.rpartition(".")
    found: type = getattr(pytest.importorskip(library), class_name)
    return next(base for base in found.__mro__ if not base.__module__.startswith("hf_lohan"))


def overridden(ours: type, upstream: type) -> Iterator[tuple[str, Callable[..., Any], Callable[..., Any]]]:
    """Iterate over the overridden methods: name, our function, upstream's."""
    for base in ours.__mro__:
        for name, function in vars(base).items() if base.__module__.startswith("hf_lohan") else ():
            theirs = getattr(upstream, name, None)
            is_public = not name.startswith("_") or (name == "__init__" and not issubclass(ours, torch.optim.Optimizer))
            if inspect.isfunction(function) and callable(theirs) and is_public:
                yield name, function, theirs


def faults_of(method: str, ours: Callable[..., Any], theirs: Callable[..., Any]) -> Iterator[str]:
    """Yield a sentence for each upstream parameter with which nothing is done."""
    table = OF_CLASSES.get(method, {})
    parameters = inspect.signature(ours).parameters
    rest = {name: p.kind for name, p in parameters.items() if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    for name, theirs_is in list(inspect.signature(theirs).parameters.items())[1:]:
        is_rest = theirs_is.kind in (theirs_is.VAR_POSITIONAL, theirs_is.VAR_KEYWORD)
        if name in parameters.keys() - rest.keys():
            if name not in table:
                yield f"{method} takes {name}, and no table says what becomes of it; {ADVICE}"
            if theirs_is.kind is theirs_is.POSITIONAL_OR_KEYWORD and parameters[name].kind is theirs_is.KEYWORD_ONLY:
                yield f"{method} takes {name} by position upstream, and ours does not; {ADVICE}"
        elif (theirs_is.kind if is_rest else theirs_is.VAR_KEYWORD) not in rest.values():
            yield f"{method} does not take {name}, and upstream's does; {ADVICE}"
    source = inspect.getsource(ours)
    for name in rest:
        if "super()" not in source or len(re.findall(rf"\b{name}\b", source)) < 2:
            yield f"{method} takes {name}, and does not pass them on to super(); {ADVICE}"


@pytest.mark.parametrize(("ours", "upstream"), [(o, name) for o, names in OVERRIDES for name in names])
def test_each_argument_of_an_overridden_method_is_done_or_refused(ours: type, upstream: str) -> None:
    theirs = upstream_class(upstream)
    root = next(
        base
        for base in map(upstream_class, ("transformers.Trainer", "accelerate.Accelerator", "torch.optim.Optimizer"))
        if issubclass(theirs, base)
    )
    found = list(overridden(ours, theirs))
    assert found
    assert not [fault for name, *functions in found for fault in faults_of(f"{root.__name__}.{name}", *functions)]


def test_the_tables_have_no_other_methods() -> None:
    names = {
        f"{name.rpartition('.')[2]}.{method}"
        for ours, (name, *_) in OVERRIDES
        for method, *_ in overridden(ours, upstream_class(name))
    }
    assert not OF_CLASSES.keys() - names


def test_an_argument_without_an_entry_is_found() -> None:
    class Upstream:
        def save_model(self, model: Any, new: bool = False) -> None: ...

        def save_state(self, output_dir: str, another: int = 0) -> None: ...

    def save_model(self: Any, model: Any, new: bool = False) -> None: ...

    def save_state(self: Any, output_dir: str, **kwargs: Any) -> None: ...

    def save_nothing(self: Any, output_dir: str) -> None: ...

    (fault,) = faults_of("Accelerator.save_model", save_model, Upstream.save_model)
    assert "Accelerator.save_model takes new, and no table" in fault
    (fault,) = faults_of("Accelerator.save_state", save_state, Upstream.save_state)
    assert "takes kwargs, and does not pass them on" in fault
    (fault,) = faults_of("Accelerator.save_state", save_nothing, Upstream.save_state)
    assert "does not take another" in fault


def offloadable(kind: str) -> Any:
    if kind == "PreTrainedModel":
        return tiny_model("llama")
    if kind == "PeftModel":
        peft = pytest.importorskip("peft")
        return peft.get_peft_model(tiny_model("llama"), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    diffusers = pytest.importorskip("diffusers")
    return diffusers.DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4, num_layers=2, sample_size=8
    )


@pytest.mark.parametrize("kind", OF_SAVE_PRETRAINED)
def test_each_argument_of_a_method_that_a_model_gets_is_done_or_refused(kind: str, offload: Any) -> None:
    model = offloadable(kind)
    own = set(vars(model))
    offload(model)
    replaced = {
        name for name in vars(model).keys() - own if callable(getattr(type(model), name, None)) and name[0] != "_"
    }
    assert {"save_pretrained", "zero_grad"} <= replaced
    for name in replaced:
        entry = OF_SAVE_PRETRAINED[kind] if name == "save_pretrained" else OF_MODELS.get(name)
        assert entry is not None, f"{name} of a model is replaced, and no table has its parameters; {ADVICE}"
        names = list(inspect.signature(getattr(type(model), name)).parameters)[1:]
        missing = [] if isinstance(entry, str) else [each for each in names if each not in entry]
        assert not missing, f"{name} of {kind} takes {missing}, and no table says what becomes of it; {ADVICE}"


@pytest.mark.parametrize("entries", [*OF_CLASSES.values(), *OF_SAVE_PRETRAINED.values()])
def test_each_entry_says_what_becomes_of_a_parameter(entries: dict[str, str]) -> None:
    reasons = [entry.removeprefix(NO_MEANING) for entry in entries.values() if entry not in (DONE, PASSED_ON, REFUSED)]
    assert all(reason and reason not in entries.values() for reason in reasons)
