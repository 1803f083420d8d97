"""Creates the models of TRL's trainers. The policy (the trained model) is streamed to its store, and a frozen reference
model to a second store. Both share the budgets."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoProcessor, GenerationConfig, TrainingArguments
from transformers.utils import is_torchvision_available, is_vision_available

from hf_lohan.compat.transformers_private import build_from_config
from hf_lohan.compat.trl_private import (
    generations,
    has_fused_head,
    makes_models,
    models_made_by,
    restore_generations,
    restore_step_facts,
    step_facts,
)
from hf_lohan.config import OffloadConfig, ResolvedConfig, SsdPath
from hf_lohan.costs import BudgetError
from hf_lohan.device import device_for
from hf_lohan.engine import OffloadEngine
from hf_lohan.huggingface.arguments import NOT_GIVEN, by_name, names_of
from hf_lohan.huggingface.attachment import from_pretrained, offload_model
from hf_lohan.huggingface.guards import check_trl
from hf_lohan.huggingface.models.hub import CODE_ARGUMENTS, Checkpoint
from hf_lohan.huggingface.models.recipe import model_class_of
from hf_lohan.huggingface.offloaded_model import engine_of
from hf_lohan.huggingface.ranks import links_to_other_ranks
from hf_lohan.huggingface.trainer_mixin import TrainerMixin
from hf_lohan.planning.layout import resolved_here
from hf_lohan.report.run_data import STORE_FOLDER

logger = logging.getLogger(__name__)

REFERENCE_FOLDER = "ref"
"""Name of the folder for the reference's store, in each folder of the policy's store."""
_GPU_SHARE, _CPU_SHARE = 2, 4
"""The reference may use 1/2 of `gpu_memory` and 1/4 of `cpu_memory`. The policy gets the rest."""
_PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
_PROCESSOR_PACKAGES = {"pillow": "pil", "torchvision": "torchvision"}
"""Maps packages of image processors to their names in the errors of transformers."""
_FACTS_NAME, _GENERATIONS_NAME = "trl_facts.json", "trl_generations.pt"


class TrlModelsMixin(TrainerMixin):
    """Has no effect in trainers that are not TRL's."""

    _stream_model: Callable[..., Any]
    _reference: Any = None

    @property
    def _makes_models(self) -> bool:
        return makes_models(type(self))

    @contextlib.contextmanager
    def _replacing_models(self, settings: dict[str, Any]) -> Iterator[None]:
        """In this context, the constructor of a TRL trainer gets its models from this class. ``settings``: its
        arguments by name."""
        if not self._makes_models:
            yield
            return
        assert self._offload_config is not None
        args, is_joint = settings["args"], self._offload_config.vertical_micro_batches is True
        trains_fused_head = has_fused_head(type(self)) and not _has_adapters(settings)
        check_trl(settings, is_joint=is_joint, trains_fused_head=trains_fused_head)
        if isinstance(settings["model"], Path):
            settings["model"] = str(settings["model"])
        if isinstance(settings["model"], str) and settings.get("processing_class") is None:
            _check_processor(settings["model"], getattr(args, "model_init_kwargs", None) or {})
        ref_model = settings.get("ref_model")
        if ref_model is not None and engine_of(ref_model) is None:
            self._add_reference(args, functools.partial(_drain_frozen, ref_model))
        makes_policy = iter([True] if isinstance(settings["model"], str) else [])
        awaiting_adapters: dict[int, Callable[..., Any]] = {}

        def make(stock: Callable[..., Any], path: str, architecture: Any = None, **kwargs: Any) -> Any:
            if not next(makes_policy, False):
                return self._make_reference(args, path, architecture, kwargs)
            if needs_reference(type(self), settings):
                self._make_reference(args, path, architecture, kwargs)
            loading = _loading(path, architecture, kwargs)
            if settings.get("peft_config") is None:
                return self._stream_model(path, args, **loading)
            skeleton = _skeleton(loading)
            awaiting_adapters[id(skeleton)] = functools.partial(
                self._stream_model_with_adapters, skeleton, path, args, loading
            )
            return skeleton

        def adapt(stock: Callable[..., Any], model: Any, peft_config: Any, **kwargs: Any) -> Any:
            return awaiting_adapters.get(id(model), functools.partial(stock, model))(peft_config, **kwargs)

        with models_made_by(type(self), make, adapt):
            yield

    def _stream_model_with_adapters(
        self, skeleton: Any, path: str, args: TrainingArguments, loading: Mapping[str, Any], peft_config: Any
    ) -> Any:
        """Stream a model with adapters. The adapters must exist before the engine, so they are added to the skeleton.
        TRL may have changed the configs of the skeleton."""
        model = self._stream_model(path, args, **{**loading, "config": skeleton.config}, peft_config=peft_config)
        if hasattr(skeleton, "generation_config"):
            model.get_base_model().generation_config = skeleton.generation_config
        return model

    # The reference model.

    def _make_reference(self, args: TrainingArguments, path: str, architecture: Any, kwargs: Mapping[str, Any]) -> Any:
        if self._reference is None:
            if not path:
                raise ValueError(
                    "the model has no path (name_or_path) from which to load its reference; pass "
                    "ref_model=copy.deepcopy(model), or set precompute_ref_log_probs=True"
                )
            load = functools.partial(
                from_pretrained, path, bf16=args.bf16, is_trained=False, **_loading(path, architecture, kwargs)
            )
            self._add_reference(args, load)
        return self._reference

    def _add_reference(self, args: TrainingArguments, make: Callable[..., Any]) -> None:
        """Create the reference with ``make`` and a part of the budgets. Subtract its memory from the budgets."""
        assert self._offload_config is not None
        folder = Path(args.output_dir) / STORE_FOLDER
        whole = resolved_here(self._offload_config, device_for(args.device), folder, links_to_other_ranks())
        try:
            self._reference = make(
                offload=_part_for_reference(whole), torch_device=args.device, default_ssd_path=folder,
                hold_gradients=False,
            )  # fmt: skip
        except BudgetError as error:
            raise BudgetError(
                f"the reference model, which may use 1/{_GPU_SHARE} of gpu_memory and 1/{_CPU_SHARE} of cpu_memory, "
                f"does not fit: {error} (for the reference alone), or train adapters, which need no reference model"
            ) from error
        engine = engine_of(self._reference)
        assert engine is not None
        self._offload_config = _subtract_reference(whole, engine)

    # Forwards before training.

    def _precompute_ref_logps(self, *args: Any, **kwargs: Any) -> Any:
        self._ensure_engine()
        return super()._precompute_ref_logps(*args, **kwargs)

    # Counters of TRL's trainers. They are in the journal of each step.

    def _write_step_facts(self, folder: str) -> None:
        facts = step_facts(self)
        if facts:
            (Path(folder) / _FACTS_NAME).write_text(json.dumps(facts), encoding="utf-8")
            batches = generations(self)
            if batches is not None:
                torch.save(batches, Path(folder) / _GENERATIONS_NAME)

    def _read_step_facts(self, folder: str) -> None:
        facts, batches = Path(folder) / _FACTS_NAME, Path(folder) / _GENERATIONS_NAME
        if facts.exists():
            restore_step_facts(self, json.loads(facts.read_text(encoding="utf-8")))
        if batches.exists():
            restore_generations(self, torch.load(batches, map_location=self.args.device, weights_only=True))


def initialize_before(trainer_class: type[Any]) -> None:
    """Make a TRL class initialize offloading before its own constructor. Under `lohan launch`, this class derives from
    an offloading Trainer."""
    stock_init = vars(trainer_class).get("__init__")
    names = names_of(stock_init) if stock_init is not None else None
    if stock_init is not None and names is not None:

        @functools.wraps(stock_init)
        def init(self: Any, *given: Any, offload: Any = NOT_GIVEN, **named: Any) -> None:
            settings = by_name(trainer_class.__name__, names, given, named)
            if self._is_initialized or not self._initialize_offload((), settings, offload):
                stock_init(self, **settings)
            else:
                self._construct(functools.partial(stock_init, self), settings)

        setattr(trainer_class, "__init__", init)  # noqa: B010 - for mypy
    stock_pass = vars(trainer_class).get("_precompute_ref_logps")
    if stock_pass is not None:

        @functools.wraps(stock_pass)
        def precompute(self: Any, *args: Any, **kwargs: Any) -> Any:
            self._ensure_engine()
            return stock_pass(self, *args, **kwargs)

        setattr(trainer_class, "_precompute_ref_logps", precompute)  # noqa: B010


def needs_reference(trainer_class: type, settings: Mapping[str, Any]) -> bool:
    """Return whether a trainer of TRL will create a reference model. With adapters it disables the adapters instead."""
    args = settings["args"]
    if settings.get("ref_model") is not None or _has_adapters(settings):
        return False
    if hasattr(args, "precompute_ref_log_probs"):
        return not args.precompute_ref_log_probs
    return hasattr(args, "num_generations") and args.beta != 0.0


def _has_adapters(settings: Mapping[str, Any]) -> bool:
    return settings.get("peft_config") is not None or hasattr(settings["model"], "peft_config")


def _loading(path: str, architecture: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `from_pretrained` for the model that TRL would load. TRL's default dtype is float32."""
    asked = {name: value for name, value in kwargs.items() if name == "quantization_config"}
    rest = {name: value for name, value in kwargs.items() if name not in ("device_map", "dtype", *asked)}
    dtype = kwargs.get("dtype", torch.float32)
    checkpoint = Checkpoint.open(path, rest)
    config = checkpoint.take_config(rest)
    if architecture is None:
        architecture = model_class_of(config, checkpoint.code)
    return {"dtype": dtype or "auto", "model_class": architecture, "config": config, **rest, **asked}


def _check_processor(path: str, arguments: Mapping[str, Any]) -> None:
    """Raise ValueError if packages for the image processor of a model are missing. TRL loads the processor only after
    the model, which may be streamed for hours."""
    checkpoint = Checkpoint.open(path, arguments)
    if not any((Path(checkpoint.folder) / name).exists() for name in _PROCESSOR_FILES):
        return
    try:
        AutoProcessor.from_pretrained(checkpoint.folder, **checkpoint.code)
    except (ImportError, ValueError) as error:
        text = str(error).lower()
        absent = {"pillow": not is_vision_available(), "torchvision": not is_torchvision_available()}
        missing = [package for package, named in _PROCESSOR_PACKAGES.items() if absent[package] and named in text]
        if missing:
            raise ValueError(
                f"the processor of {path!r} needs packages that are not installed; pip install {' '.join(missing)}, or "
                "pass processing_class"
            ) from error


def _skeleton(loading: Mapping[str, Any]) -> Any:
    with torch.device("meta"):
        code = {name: value for name, value in loading.items() if name in CODE_ARGUMENTS and value}
        skeleton = build_from_config(loading["model_class"], loading["config"], torch.float32, code)
    if getattr(skeleton, "generation_config", None) is not None:
        with contextlib.suppress(OSError):  # a checkpoint may have no generation config
            skeleton.generation_config = GenerationConfig.from_pretrained(loading["config"].name_or_path)
    return skeleton


def _drain_frozen(model: nn.Module, *, offload: OffloadConfig, **kwargs: Any) -> nn.Module:
    model.requires_grad_(False)
    offload_model(model, offload, **kwargs)
    return model


def _part_for_reference(whole: ResolvedConfig) -> ResolvedConfig:
    """Return the configuration of a reference. It has no backward, and its store has one version of each record."""
    return replace(
        whole,
        gpu_memory=whole.gpu_memory // _GPU_SHARE,
        cpu_memory=whole.cpu_memory // _CPU_SHARE,
        ssd=tuple(replace(ssd, path=_folder_of_reference(ssd)) for ssd in whole.ssd),
        activations="keep",
        durability="checkpoint",
        optimizer_state_dtype="float32",
        stochastic_rounding=False,
        save_dtype="auto",
        trace=False,
    )


def _folder_of_reference(ssd: SsdPath) -> str:
    return str(Path(ssd.path) / REFERENCE_FOLDER)


def _subtract_reference(whole: ResolvedConfig, reference: OffloadEngine) -> ResolvedConfig:
    """Return the configuration of the policy, with the budgets and capacities that the reference does not use."""
    store = reference.tiers.store
    taken_bytes = {path.path: taken for path, taken in zip(store.paths, store.layout.file_bytes, strict=True)}
    return replace(
        whole,
        gpu_memory=whole.gpu_memory - reference.layout.plan.gpu_pool_bytes,
        device_memory=(
            whole.device_memory - reference.layout.plan.gpu_pool_bytes if whole.device_memory != "auto" else "auto"
        ),
        cpu_memory=whole.cpu_memory - reference.layout.cpu_bytes,
        ssd=tuple(
            replace(ssd, capacity=max(0, ssd.capacity - taken_bytes[_folder_of_reference(ssd)]))
            if isinstance(ssd.capacity, int)
            else ssd
            for ssd in whole.ssd
        ),
    )
