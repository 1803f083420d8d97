"""`Accelerator` for raw training loops, and the accelerator of an offloading Trainer."""

from __future__ import annotations

import contextlib
import functools
import logging
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import accelerate
import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn

from hf_lohan.checkpoint.optimizer_states import load_optimizer_states, save_optimizer_states
from hf_lohan.checkpoint.whole_folder import finish_files_together, unfinished_files_together
from hf_lohan.compat.accelerate_private import become, is_prepared, mark_prepared, prepared_models
from hf_lohan.compat.patches import replaced
from hf_lohan.config import ALL_AUTO, FITS_OR_NOT, ConfigError, offload_of_environment
from hf_lohan.engine import OffloadEngine
from hf_lohan.huggingface.arguments import BFLOAT16_MEANING, precision_asked
from hf_lohan.huggingface.attachment import offload_model
from hf_lohan.huggingface.compiling import check_compiling, compile_model
from hf_lohan.huggingface.guards import check_accelerator, check_model, check_precision, check_schedule, check_streamed
from hf_lohan.huggingface.local_run import settings_given
from hf_lohan.huggingface.models.adapters import saves_adapters
from hf_lohan.huggingface.models.reloading import reload_state_dict, reload_weights
from hf_lohan.huggingface.models.saving import StoredModel, StoredWeights, save_together
from hf_lohan.huggingface.models.state_dicts import (
    WEIGHTS_NAME,
    is_of_diffusers,
    save_shards,
    save_state_dict,
    saves_itself,
)
from hf_lohan.huggingface.offloaded_model import engine_of, run_plan_of
from hf_lohan.huggingface.optimizers import check_given, is_taken_over, rules_of, take_over
from hf_lohan.huggingface.ranks import links_to_other_ranks, stores_here
from hf_lohan.model import Rules
from hf_lohan.optim import OffloadOptimizer
from hf_lohan.planning import check_same_layers
from hf_lohan.ranks import bytes_of, check_equal
from hf_lohan.record import LoopRecord, record_folder

logger = logging.getLogger(__name__)

_MODEL_FOLDER = "lohan_model"
"""Folder in a saved state for adapters that PEFT saves. Earlier versions saved whole models there."""


@dataclass(kw_only=True)
class LohanPlugin:
    """Settings with which `Accelerator` offloads a model."""

    offload: Any = None
    """"lohan", a YAML path, a dict or an `OffloadConfig`. None means LOHAN_OFFLOAD in the environment, or "lohan"."""

    bf16: bool = False
    """Use bfloat16 working weights, with exact float32 masters in the store and without autocast.
    `Accelerator(mixed_precision="bf16")` means the same."""

    max_grad_norm: float | None = None
    """0 means that the loop does not clip, so updates run in backward. With None gradients wait for `step()`."""

    ssd_path: str | Path = "lohan_store"
    """The store's folder if `offload` has no path."""

    def __post_init__(self) -> None:
        if self.offload is None:
            self.offload = offload_of_environment() or ALL_AUTO
        if self.offload == FITS_OR_NOT:
            raise ConfigError(
                f"offload={self.offload!r} is for Trainer only, because an Accelerator does not know the batches "
                f"before the loop begins; give {ALL_AUTO!r} to offload, or use accelerate.Accelerator"
            )


class _PreparedOffloadOptimizer(AcceleratedOptimizer):
    """Reports a skipped step as mixed precision does, so that the scheduler does not advance."""

    @property
    def step_was_skipped(self) -> bool:
        return bool(self.optimizer.step_was_skipped)


class OffloadAwareAccelerator(accelerate.Accelerator):
    """An `Accelerator` that also handles offloaded models."""

    _num_row_ranks = 1
    """`prepare` gives this many neighbouring ranks the same batches of a data loader."""
    _is_saving_state = False

    def loading_for(self, num_row_ranks: int) -> contextlib.AbstractContextManager[None]:
        """In this context, `prepare` gives ``num_row_ranks`` neighbouring ranks the same batches of a data loader."""
        return replaced(self, _num_row_ranks=num_row_ranks)

    @property
    def num_processes(self) -> int:
        return int(super().num_processes) // self._num_row_ranks

    @property
    def process_index(self) -> int:
        return int(super().process_index) // self._num_row_ranks

    @property
    def offload_engine(self) -> OffloadEngine | None:
        """The engine of the prepared model, or None if no prepared model is offloaded."""
        for model in prepared_models(self):
            engine = engine_of(model)
            if engine is not None:
                return engine
        return None

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Same as in accelerate. In `run_micro_batches` the backward runs after the forwards of all micro-batches."""
        engine = self.offload_engine
        if engine is None or not engine.defers_backwards:
            with (
                engine.planned_memory.out_of_memory.added_to_errors()
                if engine is not None
                else contextlib.nullcontext()
            ):
                super().backward(loss, **kwargs)
            return
        if kwargs:
            raise ValueError(
                f"backward({', '.join(kwargs)}=...) is not supported within run_micro_batches; pass only the loss"
            )
        engine.defer_backward(loss / self.gradient_accumulation_steps)

    @contextlib.contextmanager
    def no_sync(self, model: Any) -> Iterator[None]:
        """Same as in accelerate: a backward within this context is not the last of its step."""
        engine = engine_of(model)
        was_final = engine is not None and engine.announce_backward(is_final=False)
        try:
            with super().no_sync(model):
                yield
        finally:
            if engine is not None:
                engine.announce_backward(is_final=was_final)

    def prepare_model(self, model: Any, device_placement: bool | None = None, evaluation_mode: bool = False) -> Any:
        """Same as in accelerate, but do not move or wrap an offloaded model, and do not register it for evaluation."""
        if (engine := engine_of(model)) is not None:
            if self.ddp_handler is not None and not self.ddp_handler.broadcast_buffers:
                engine.batches.keep_own_buffers()
            if not is_prepared(model):
                compile_model(engine, run_plan_of(engine), self.state.dynamo_plugin)
            mark_prepared(model)
            if evaluation_mode:
                return model
        return super().prepare_model(model, device_placement, evaluation_mode)

    @contextlib.contextmanager
    def autocast(self, autocast_handler: Any = None) -> Iterator[None]:
        """Do nothing. An offloaded model computes in its working dtype. Autocast would cache casts of weights whose
        slots are overwritten later."""
        yield

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        if not isinstance(optimizer, OffloadOptimizer):
            return super().prepare_optimizer(optimizer, device_placement=device_placement)
        # With device placement, accelerate would move the optimizer's state dict to the device and load it.
        prepared = super().prepare_optimizer(optimizer, device_placement=False)
        become(prepared, _PreparedOffloadOptimizer)
        return prepared

    def gather(self, tensor: Any) -> Any:
        """Same as in accelerate, but scalars (such as the number of items in a step) are sent over the engine's links,
        because errors of the links name a missing rank."""
        engine = self.offload_engine
        if engine is None or not engine.links.ranks.others or not isinstance(tensor, Tensor) or tensor.ndim:
            return super().gather(tensor)
        own = bytes_of(tensor.detach().cpu()).numpy().tobytes()
        gathered = b"".join(engine.links.all_gather("a number of each rank", own))
        return torch.frombuffer(bytearray(gathered), dtype=tensor.dtype).to(tensor.device)

    def clip_grad_norm_(
        self, parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0
    ) -> Tensor | None:
        """Clip the step's gradients exactly, although `.grad` is None. Returns the norm before clipping."""
        engine = self.offload_engine
        if engine is None:
            norm: Tensor | None = super().clip_grad_norm_(parameters, max_norm, norm_type)
            return norm
        clipped = {parameters} if isinstance(parameters, Tensor) else set(parameters)
        stored = {part.parameter for part in engine.parameter_slices}
        others = [p for p in clipped - stored if p.grad is not None]
        if others:
            raise ValueError(
                f"clip_grad_norm_ was called with a parameter of shape {tuple(others[0].shape)} that has a gradient "
                "but is not in the store; add parameters before the model is offloaded, and clip parameters of other "
                "models with torch.nn.utils.clip_grad_norm_"
            )
        missing = [p.name for p in engine.parameter_slices if p.parameter.requires_grad and p.parameter not in clipped]
        if missing:
            raise ValueError(
                f"clip_grad_norm_ was called without {missing[0]} and {len(missing) - 1} other parameters, but "
                "offload can only clip all parameters together; pass model.parameters()"
            )
        return engine.clip_grad_norm(float(max_norm), float(norm_type))

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        if self.offload_engine is not None:
            raise ValueError("clip_grad_value_ is not supported under offload; use clip_grad_norm_")
        super().clip_grad_value_(parameters, clip_value)

    def get_state_dict(self, model: Any, unwrap: bool = True) -> Any:
        """Return all weights, in RAM. Within `save_state` the dict is empty, because a hook streams the weights to the
        folder."""
        engine = engine_of(model)
        if engine is None:
            return super().get_state_dict(model, unwrap=unwrap)
        if self._is_saving_state:
            return {}
        weights = StoredWeights(StoredModel.from_engine(engine), model.named_parameters(remove_duplicate=False))
        return {name: weights.get(name, tensor) for name, tensor in model.state_dict().items()}


class Accelerator(OffloadAwareAccelerator):
    """`accelerate.Accelerator` whose `prepare` offloads the model and replaces its optimizer.

    ```python
    accelerator = Accelerator(lohan_plugin=LohanPlugin(offload="configs/lohan.yaml"))
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    ```
    """

    default_offload: ClassVar[Any] = None
    """The setting that is used without a plugin."""

    def __init__(self, *args: Any, lohan_plugin: LohanPlugin | None = None, **kwargs: Any) -> None:
        if (precision := precision_asked(*args, **kwargs)) == "fp8":
            check_precision(precision)  # must precede accelerate's error about a missing package
        super().__init__(*args, **kwargs)
        self.lohan_plugin = lohan_plugin or LohanPlugin(offload=self.default_offload)
        if lohan_plugin is not None:  # without a plugin, `_offload` does this
            check_accelerator(self)
        self._loop_record: LoopRecord | None = None
        self.register_save_state_pre_hook(self._save_offloaded)
        self.register_load_state_pre_hook(self._load_offloaded)

    def prepare(self, *objects: Any, **kwargs: Any) -> Any:
        """Same as in accelerate, but offload the model and replace its `torch.optim` optimizer with an optimizer that
        updates the store. If several optimizers share the parameters (such as Muon and AdamW), the last optimizer's
        `step()` takes the step."""
        optimizers = [item for item in objects if isinstance(item, torch.optim.Optimizer)]
        for optimizer in optimizers:
            check_given(optimizer)
        for item in objects:
            check_schedule(item)
        engine = self.offload_engine
        for item in objects:
            if isinstance(item, nn.Module):
                engine = self._offload_one(item, engine, rules_of(optimizers))
        ours = self._take_over([item for item in optimizers if not is_taken_over(item)], engine)
        return super().prepare(*(ours.get(id(item), item) for item in objects), **kwargs)

    def prepare_model(self, model: Any, device_placement: bool | None = None, evaluation_mode: bool = False) -> Any:
        """Same as in accelerate, but offload the model unless it is for evaluation only."""
        if not evaluation_mode:
            self._offload_one(model, self.offload_engine, rules_of([]))
        return super().prepare_model(model, device_placement, evaluation_mode)

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        """Same as in accelerate, but replace the optimizer with an optimizer that updates the store."""
        check_given(optimizer)
        if not is_taken_over(optimizer):
            optimizer = self._take_over([optimizer], self.offload_engine)[id(optimizer)]
        return super().prepare_optimizer(optimizer, device_placement)

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Same as in accelerate. Raises ValueError if no optimizer of the model was prepared."""
        engine = self.offload_engine
        if engine is not None and engine.optimizer is None:
            raise ValueError(
                "the model is offloaded, but its optimizer was not prepared, so nothing would be trained; pass the "
                "optimizer to prepare() too"
            )
        super().backward(loss, **kwargs)

    def run_micro_batches(self, micro_batches: Sequence[Callable[[], Any]]) -> list[Any]:
        """Run a step's micro-batches together, and return their results. An offloaded model runs all micro-batches
        through a block before it loads the next block. Each micro-batch calls its forward and `backward`.

        ```python
        losses = accelerator.run_micro_batches([partial(forward_and_backward, batch) for batch in batches])
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        ```

        Without an offloaded model the micro-batches run one after the other. Raises ValueError for a model with a tower
        for images or other inputs, because all micro-batches must pass through the same layers.
        """
        engine = self.offload_engine
        if engine is None:
            return [micro_batch() for micro_batch in micro_batches]
        if len(micro_batches) > 1:
            check_same_layers(engine.model)
        return engine.run_micro_batches(micro_batches)

    def _offload_one(self, model: nn.Module, engine: OffloadEngine | None, rules: Rules) -> OffloadEngine:
        """Return the engine of `model`. `engine` is the engine that this accelerator already has, or None."""
        models_engine = engine_of(model)
        if models_engine is None and engine is not None and not engine.is_closed:
            raise ValueError(
                f"an Accelerator offloads one model, and already has {type(engine.model).__name__}; leave "
                f"{type(model).__name__} out of prepare, or call free_memory() first to replace the model"
            )
        if models_engine is not None:
            asked = settings_given(self.lohan_plugin.offload).moment_dtype
            check_streamed(models_engine, bf16=self._computes_in_bfloat16, moment_dtype=asked)
            links = models_engine.links
            stores_here(models_engine.config, "", links).refuse_other_ranks(links.ranks.num_ranks)
        return models_engine or self._offload(model, rules)

    @property
    def _computes_in_bfloat16(self) -> bool:
        return self.lohan_plugin.bf16 or self.mixed_precision == "bf16"

    def _offload(self, model: nn.Module, rules: Rules) -> OffloadEngine:
        check_accelerator(self)
        check_model(model)
        plugin = self.lohan_plugin
        config = settings_given(plugin.offload)
        check_compiling(config, self.device, self.state.dynamo_plugin)
        if self.mixed_precision == "bf16" and not plugin.bf16:
            logger.warning(BFLOAT16_MEANING)
        if config.optimizer == "muon":
            raise ValueError(
                "optimizer='muon' is for Trainer only; leave it out, and prepare torch.optim.Muon over the layers' "
                "matrices together with an optimizer for the other parameters"
            )
        settings = {
            "gradient_accumulation_steps": self.gradient_accumulation_steps,
            "bf16": self._computes_in_bfloat16,
            "max_grad_norm": plugin.max_grad_norm,
        }
        advice = "give the Accelerator of all ranks the same arguments"
        check_equal("the arguments of the Accelerator", lambda: settings, links_to_other_ranks(), advice)
        return offload_model(
            model,
            config,
            torch_device=self.device,
            default_ssd_path=plugin.ssd_path,
            working_dtype=torch.bfloat16 if self._computes_in_bfloat16 else None,
            hold_gradients=plugin.max_grad_norm != 0 or self.gradient_accumulation_steps > 1,
            sums_gradients=self.gradient_accumulation_steps > 1,
            rules=rules,
        )

    def _take_over(
        self, optimizers: Sequence[torch.optim.Optimizer], engine: OffloadEngine | None
    ) -> dict[int, OffloadOptimizer]:
        """Replace the given optimizers. Returns a dict from the `id` of each given optimizer to its replacement."""
        if not optimizers:
            return {}
        if engine is None:
            raise ValueError("prepare the model together with its optimizer, or before it")
        taken, ours = take_over(optimizers, engine)
        if self.project_dir is not None or engine.timeline.is_tracing:
            if self._loop_record is None or self._loop_record.engine is not engine:
                folder = record_folder(Path(self.project_dir or "."), engine.links.ranks)
                write_line = print if self.is_main_process else logger.info
                self._loop_record = LoopRecord(engine, run_plan_of(engine), folder, write_line)
            self._loop_record.follow_optimizer(taken)
        return {id(theirs): our for theirs, our in zip(optimizers, ours, strict=True)}

    def log(self, values: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Same as in accelerate. Also write `loss`, `grad_norm`, `learning_rate` and `eval_loss` to
        `lohan/steps.jsonl`."""
        super().log(values, *args, **kwargs)
        if self._loop_record is not None:
            self._loop_record.log(values)

    def save_model(
        self,
        model: Any,
        save_directory: str | Path,
        max_shard_size: int | str | None = None,
        safe_serialization: bool = True,
    ) -> None:
        """Save the weights as sharded safetensors, streamed from the store. Calls the model's `save_pretrained` if it
        has one. Raises ValueError for `safe_serialization=False`."""
        kwargs: dict[str, Any] = {} if max_shard_size is None else {"max_shard_size": max_shard_size}
        engine = engine_of(model)
        _check_safe(engine, safe_serialization)
        if engine is None:
            super().save_model(model, save_directory, safe_serialization=safe_serialization, **kwargs)
        elif saves_itself(model) or is_of_diffusers(model):
            model.save_pretrained(save_directory, **kwargs)
        else:
            save = functools.partial(save_shards, folder=save_directory, **kwargs)
            save_together(StoredModel.from_engine(engine), save_directory, save)

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **kwargs: Any) -> Any:
        """Same as in accelerate, but the files of the new state replace those of an earlier state together, so that a
        killed process leaves one of both. Raises ValueError for `safe_serialization=False`."""
        engine = self.offload_engine
        _check_safe(engine, safe_serialization)
        if engine is None:
            return super().save_state(output_dir, safe_serialization, **kwargs)
        configuration = self.project_configuration
        is_numbered = configuration.automatic_checkpoint_naming
        folder = self._next_numbered_state() if is_numbered else Path(output_dir)  # type: ignore[arg-type]
        # Scripts list the folder of numbered states, and count every folder there as a state.
        new_in = folder.parent.parent if is_numbered else folder.parent
        with (
            replaced(self, _is_saving_state=True),
            replaced(configuration, automatic_checkpoint_naming=False),
            unfinished_files_together(engine.links, folder, new_in) as unfinished,
        ):
            super().save_state(str(unfinished), safe_serialization, **kwargs)
        if is_numbered and self.is_main_process:
            self._remove_old_states(folder.parent)
        return folder

    def _next_numbered_state(self) -> Path:
        """Return the folder of the next state, as accelerate names it."""
        folder = Path(self.project_dir, "checkpoints", f"checkpoint_{self.save_iteration}")
        if folder.exists():
            raise ValueError(
                f"{str(folder)!r} already exists; set project_configuration.iteration of the Accelerator to the number "
                "of the next state"
            )
        return folder

    def _remove_old_states(self, folder: Path) -> None:
        """Remove states above the limit of the project configuration. accelerate removes them before it saves."""
        limit = self.project_configuration.total_limit
        numbers = {path: re.search(r"\d+", path.name) for path in folder.iterdir()}
        states = sorted((int(found[0]), path) for path, found in numbers.items() if found is not None)
        for _, path in states[: -max(1, limit)] if limit is not None else ():
            shutil.rmtree(path)

    def end_training(self) -> None:
        """Same as in accelerate. Also end the record that `lohan report` reads. The record is in `lohan/` in the
        project folder. Without a project folder, only `trace: true` makes a record, in the working directory."""
        try:
            if self._loop_record is not None:
                self._loop_record.end_run()
        finally:
            super().end_training()

    def _save_offloaded(self, models: list[Any], weights: list[Any], output_dir: str) -> None:
        num_others = sum(engine_of(model) is None for model in models)
        for model in list(models):
            engine = engine_of(model)
            if engine is not None:
                weights.pop(models.index(model))
                if saves_adapters(model):
                    model.save_pretrained(Path(output_dir) / _MODEL_FOLDER)
                else:
                    save_state_dict(StoredModel.from_engine(engine), _weights_file(output_dir, num_others))
                save_optimizer_states(engine, output_dir)

    def _load_offloaded(self, models: list[Any], input_dir: str) -> None:
        if (engine := self.offload_engine) is not None:
            finish_files_together(engine.links, input_dir)
        for model in list(models):
            engine = engine_of(model)
            if engine is not None:
                models.remove(model)
                file = _weights_file(input_dir, len([other for other in models if engine_of(other) is None]))
                if file.is_file() and not saves_adapters(model):
                    reload_state_dict(engine, model, file)
                else:
                    reload_weights(engine, model, Path(input_dir) / _MODEL_FOLDER)
                load_optimizer_states(engine, input_dir)
                if self._loop_record is not None:
                    self._loop_record.resume()


def _check_safe(engine: OffloadEngine | None, safe_serialization: bool) -> None:
    if engine is not None and not safe_serialization:
        raise ValueError(
            f"safe_serialization={safe_serialization!r} is not supported under offload, because weights are streamed "
            "to safetensors files; leave it out"
        )


def _weights_file(folder: str, num_others: int) -> Path:
    """Return the file for the offloaded model's weights in a saved state. accelerate numbers the files of the
    ``num_others`` models in memory, and this file has the next number."""
    return Path(folder) / (f"{WEIGHTS_NAME}_{num_others}.safetensors" if num_others else f"{WEIGHTS_NAME}.safetensors")
