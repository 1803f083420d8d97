"""Decides for `offload="auto"` whether the run of a Trainer fits the device without offloading."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import TrainingArguments
from transformers.tokenization_utils_base import LARGE_INTEGER

from hf_lohan.compat.trl_private import is_supervised
from hf_lohan.config import FITS_OR_NOT, ConfigError
from hf_lohan.device import device_for
from hf_lohan.huggingface.arguments import is_mixed
from hf_lohan.huggingface.models.adapters import adding_adapters
from hf_lohan.huggingface.models.hub import Checkpoint, quantization_of
from hf_lohan.huggingface.models.recipe import load_dtype, model_class_of, weightless_model
from hf_lohan.model import MissedChangeError
from hf_lohan.planning import StepShape, stock_fit
from hf_lohan.report.run_data import STORE_FOLDER
from hf_lohan.wording import format_bytes

_ROWS_AT_ONCE = 10_000
_COLUMNS_OF_TEXT = frozenset(
    {"attention_mask", "completion", "input_ids", "labels", "messages", "position_ids", "prompt", "text"}
)
_COLUMNS_OF_TOKENS = ("input_ids", "labels", "decoder_input_ids")
_STATE_BYTES = 16
"""Bytes of a float32 weight, its gradient and AdamW's two moments."""
_AUTOCAST_BYTES = 2
"""Bytes of a weight's copy in 16 bits, which autocast keeps during a forward."""
_TEMPORARY_BYTES = 4
"""Temporary bytes for each weight during the step of an optimizer that is not fused."""


@dataclass(frozen=True)
class TrainingPlace:
    """Whether a run trains in memory, and a sentence with the reason."""

    in_memory: bool
    sentence: str


def choose_place(
    trainer_class: type, settings: Mapping[str, Any], loading: Mapping[str, Any], *, makes_models: bool
) -> TrainingPlace:
    """Choose between the stock Trainer and offloading. ``settings``: the arguments of a Trainer by name. ``loading``:
    its `model_init_kwargs`. Raises ConfigError for a trainer whose memory is not known."""
    if makes_models and not is_supervised(trainer_class):
        raise ConfigError(
            f"offload={FITS_OR_NOT!r} does not know the memory of {trainer_class.__name__}, which has more than one "
            "forward a step; give 'lohan' to offload, or None"
        )
    args = settings.get("args") or TrainingArguments("tmp_trainer")
    reason = _why_offloaded(settings, args)
    if reason is None:
        try:
            model = _model_to_plan(settings, args, loading)
            if any(p.requires_grad and p.dtype != torch.float32 for p in model.parameters()):
                reason = "the stock Trainer has no float32 masters for weights in bfloat16; load them in float32"
            else:
                return _by_plan(model, settings, args)
        except MissedChangeError as error:
            done = "trains this run in memory, with the stock Trainer, because it cannot be offloaded"
            return TrainingPlace(True, f"offload={FITS_OR_NOT!r} {done}: {error}")
        except ValueError as error:
            reason = f"the step in memory cannot be planned: {error}"
    return TrainingPlace(False, f"offload={FITS_OR_NOT!r} offloads this run: {reason}")


def load_in_memory(path: str | Path, args: TrainingArguments, loading: Mapping[str, Any]) -> Any:
    """Load the model of a path or name for the stock Trainer. Under autocast its weights are float32. ``loading``:
    further arguments of `from_pretrained`."""
    checkpoint, rest = Checkpoint.open(path, loading, weights=False), dict(loading)
    model_class, asked = rest.pop("model_class", None), rest.pop("dtype", "float32" if is_mixed(args) else "auto")
    config = checkpoint.take_config(rest)
    model_class = model_class or model_class_of(config, checkpoint.code)
    return model_class.from_pretrained(path, config=config, dtype=load_dtype(path, config, asked), **rest)


def _why_offloaded(settings: Mapping[str, Any], args: TrainingArguments) -> str | None:
    """Return the reason if a run is offloaded in any case, or None if its memory must be planned."""
    store = Path(args.output_dir) / STORE_FOLDER
    if args.world_size > 1:
        return f"it has {args.world_size} ranks, but 'auto' can only decide for one device"
    if args.n_gpu > 1:
        return f"the stock Trainer would use {args.n_gpu} GPUs at once, but 'auto' can only decide for one device"
    if store.exists():
        return f"{str(store)!r} has the store of a run that was offloaded"
    if settings.get("model") is None:
        return "its model is made later, by model_init"
    return None


def _model_to_plan(settings: Mapping[str, Any], args: TrainingArguments, loading: Mapping[str, Any]) -> nn.Module:
    """Return the model that the stock Trainer would train, without weights if it is not in memory."""
    model, peft_config = settings["model"], settings.get("peft_config")
    if isinstance(model, nn.Module) and peft_config is None:
        return model
    if isinstance(model, nn.Module):
        skeleton = weightless_model(model.config, getattr(model, "dtype", "auto"))
    else:
        loading = {**(getattr(args, "model_init_kwargs", None) or {}), **loading}
        is_float32 = is_mixed(args) or hasattr(args, "model_init_kwargs")  # only TRL has `model_init_kwargs`
        checkpoint = Checkpoint.open(model, loading, weights=False)
        model_class, asked = loading.pop("model_class", None), loading.pop("dtype", "float32" if is_float32 else "auto")
        config = checkpoint.take_config(loading)
        if quantization_of(config) is not None:
            raise ValueError("the checkpoint is quantized, and only offload decodes its weights for training")
        dtype = load_dtype(model, config, asked)
        skeleton = weightless_model(config, dtype, model_class=model_class, code=checkpoint.code)
    if peft_config is not None:
        with torch.device("meta"):
            skeleton = adding_adapters(peft_config)(skeleton)
    assert isinstance(skeleton, nn.Module)
    return skeleton


def _by_plan(model: nn.Module, settings: Mapping[str, Any], args: TrainingArguments) -> TrainingPlace:
    device = device_for(args.device)
    held_bytes = sum(p.nbytes for p in model.parameters() if p.device.type == device.torch_device.type)
    length, batch_size = longest_sequence(model, settings, args), args.train_batch_size
    if args.eval_strategy != "no":
        batch_size = max(batch_size, args.eval_batch_size)
    is_fused = getattr(args.optim, "value", args.optim) == "adamw_torch_fused"
    fit = stock_fit(
        model,
        device,
        StepShape(batch_size, length),
        memory_bytes=device.total_memory_bytes() + held_bytes,
        bytes_per_param=_STATE_BYTES + _AUTOCAST_BYTES * is_mixed(args) + _TEMPORARY_BYTES * (not is_fused),
        recomputes=args.gradient_checkpointing,
        has_text_alone=_has_text_alone(settings.get("train_dataset")),
    )
    memory = "the free RAM's" if device.memory_is_host else "the device's free"
    numbers = (
        f"it needs {format_bytes(fit.needed_bytes)} of {memory} {format_bytes(fit.memory_bytes)} for "
        f"{batch_size} x {length} tokens"
    )
    done = "trains this run in memory, with the stock Trainer" if fit.fits else "offloads this run"
    return TrainingPlace(fit.fits, f"offload={FITS_OR_NOT!r} {done}: {numbers}")


def _has_text_alone(dataset: Any) -> bool:
    """Return whether a stored dataset has only text columns. False if rows are created when they are read."""
    if isinstance(dataset, list | tuple):
        return all(isinstance(row, Mapping) and set(row) <= _COLUMNS_OF_TEXT for row in dataset)
    datasets = sys.modules.get("datasets")
    is_stored = datasets is not None and isinstance(dataset, datasets.Dataset)
    return is_stored and set(dataset.column_names) <= _COLUMNS_OF_TEXT


def longest_sequence(model: nn.Module, settings: Mapping[str, Any], args: TrainingArguments) -> int:
    """Return the number of tokens of the longest padded row. It is read from the training data if they are tokenized
    and stored, and from the evaluation data if training evaluates. Otherwise it is the maximum that the arguments or
    the model allow. Raises ValueError if none of them has a maximum."""
    longest = _longest_row(settings.get("train_dataset"))
    if longest and args.eval_strategy != "no":
        sets = settings.get("eval_dataset")
        longest = max(longest, *map(_longest_row, sets.values() if isinstance(sets, dict) else [sets]))
    most = getattr(args, "max_length", None)
    if longest and not getattr(args, "packing", False):
        length = min(longest, most) if most else longest
    else:
        length = most or getattr(getattr(model, "config", None), "max_position_embeddings", None)
    if not isinstance(length, int):
        raise ValueError("neither the data nor the model shows the maximum length of a sequence")
    return _padded(length, settings.get("data_collator"), args)


def _padded(length: int, collator: Any, args: TrainingArguments) -> int:
    """Return the number of tokens after the collator has padded a row of ``length`` tokens."""
    if getattr(collator, "padding", None) == "max_length":
        of_tokenizer = getattr(getattr(collator, "tokenizer", None), "model_max_length", 0)
        most = getattr(collator, "max_length", None) or of_tokenizer
        length = max(length, int(most) if most <= LARGE_INTEGER else 0)  # a tokenizer without a limit does not pad
    multiple = getattr(args if collator is None else collator, "pad_to_multiple_of", None)
    return -(-length // multiple) * multiple if isinstance(multiple, int) and multiple > 0 else length


def _longest_row(dataset: Any) -> int:
    """Return the length of the longest row of inputs or labels. Return 0 if rows are created when they are read,
    because reading could draw random numbers."""
    if isinstance(dataset, list | tuple):
        rows = [row for row in dataset if isinstance(row, Mapping) and "input_ids" in row]
        values = (row[name] for row in rows for name in _COLUMNS_OF_TOKENS if name in row)
        return max((len(value) for value in values if _is_sequence(value)), default=0)
    datasets = sys.modules.get("datasets")
    if datasets is None or not isinstance(dataset, datasets.Dataset) or "input_ids" not in dataset.column_names:
        return 0
    import pyarrow as pa  # a requirement of `datasets`
    import pyarrow.compute as pc

    columns = [name for name in _COLUMNS_OF_TOKENS if name in dataset.column_names]
    tables = dataset.select_columns(columns).with_format("arrow").iter(_ROWS_AT_ONCE)
    is_list = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    lists = (column for table in tables for column in table.columns if any(test(column.type) for test in is_list))
    return max((pc.max(pc.list_value_length(column)).as_py() or 0 for column in lists), default=0)


def _is_sequence(value: Any) -> bool:
    """Return whether a value of a row is a sequence. The label of a whole row is a number or a scalar tensor."""
    return isinstance(value, list | tuple) or getattr(value, "ndim", 0) > 0
