"""The methods of an offloaded model that work on its store, and those that cannot."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from hf_lohan.activations import ChunkedHead
from hf_lohan.config import OffloadConfig
from hf_lohan.engine import OffloadEngine, OutOfMemoryAdvice
from hf_lohan.huggingface.models.adapters import PendingMerges, merge_through_store, refuse_allocation
from hf_lohan.huggingface.models.saving import StoredModel, save_pretrained_from_store
from hf_lohan.huggingface.models.state_dicts import is_of_diffusers, save_diffusers_model
from hf_lohan.model import has_adapters, is_of_peft, is_peft_model
from hf_lohan.planning import RunPlan

_ATTRIBUTE = "_lohan"


@dataclass(frozen=True)
class Attached:
    """What an offloaded model has."""

    engine: OffloadEngine
    plan: RunPlan | None = None
    chunked_head: ChunkedHead | None = None
    """The head that computes large logits in chunks."""

    def remember(self, model: nn.Module) -> None:
        setattr(model, _ATTRIBUTE, self)


def _attached_to(model: nn.Module) -> Attached | None:
    attached = getattr(model, _ATTRIBUTE, None)
    assert attached is None or isinstance(attached, Attached)
    return attached


def engine_of(model: nn.Module) -> OffloadEngine | None:
    """Return the engine of a model; None if the model is not offloaded."""
    attached = _attached_to(model)
    return None if attached is None else attached.engine


def run_plan_of(engine: OffloadEngine) -> RunPlan | None:
    """Return the plan of an attached engine; None if it has none."""
    attached = _attached_to(engine.model)
    return None if attached is None else attached.plan


def chunked_head_at(model: nn.Module) -> ChunkedHead | None:
    """Return the head that computes a model's large logits in chunks; None if the model has no such head."""
    attached = _attached_to(model)
    return None if attached is None else attached.chunked_head


@contextlib.contextmanager
def answering_out_of_memory(model: Callable[[], nn.Module], config: OffloadConfig) -> Iterator[None]:
    """In this context, add advice to out-of-memory errors, even before the model has an engine."""
    try:
        yield
    except RuntimeError as error:
        engine = engine_of(model())
        (OutOfMemoryAdvice(config) if engine is None else engine.planned_memory.out_of_memory).add_to(error)
        raise


def use_store(engine: OffloadEngine, model: Any) -> None:
    """Have the methods of a model work on the weights and gradients of the engine, or refuse."""
    _save_from_store(engine, model)
    model.zero_grad = functools.partial(_zero_grad, engine)
    for name, advice in _REFUSED_METHODS.items():
        if hasattr(model, name):
            setattr(model, name, functools.partial(_refuse, name, advice))
    if has_adapters(model):
        packed = {part.parameter for part in engine.parameter_slices if part.packed is not None}
        merge_through_store(model, functools.partial(_use_as_base, engine), packed)
    refuse_allocation(model)


def _use_as_base(engine: OffloadEngine, base: Any, merges: PendingMerges) -> None:
    Attached(engine).remember(base)
    _save_from_store(engine, base, merges)


def _save_from_store(engine: OffloadEngine, model: Any, merges: PendingMerges | None = None) -> None:
    stored = replace(StoredModel.from_engine(engine), model=model, merges=merges)
    if isinstance(model, PreTrainedModel) or is_peft_model(model):
        model.save_pretrained = functools.partial(save_pretrained_from_store, stored, type(model).save_pretrained)
    elif is_of_diffusers(model):
        model.save_pretrained = functools.partial(save_diffusers_model, stored)
    elif hasattr(model, "save_pretrained") and not is_of_peft(model):  # PEFT itself refuses to save mixed adapters
        model.save_pretrained = functools.partial(_refuse_saving, type(model).__name__)


_REFUSED_METHODS = {
    "resize_token_embeddings": "resize the embeddings before the model is offloaded: pass a model in memory, or "
    "the path of a checkpoint that was saved with its new size",
    "load_state_dict": "resume from a checkpoint, or load the weights before the model is offloaded",
}


def _refuse(name: str, advice: str, *args: Any, **kwargs: Any) -> None:
    raise ValueError(f"{name} cannot change weights in the store; {advice}")


def _refuse_saving(class_name: str, *args: Any, **kwargs: Any) -> None:
    raise ValueError(
        f"save_pretrained of {class_name} cannot read weights from the store, because {class_name} is not a class of "
        "transformers, PEFT or diffusers; use accelerator.save_model(model, folder) or trainer.save_model(folder), "
        "which save the state dict"
    )


def _zero_grad(engine: OffloadEngine, set_to_none: bool = True) -> None:
    """Do what `Module.zero_grad` does, and also drop gradients in host memory."""
    engine.drop_gradients(to_none=set_to_none)
    type(engine.model).zero_grad(engine.model, set_to_none)
