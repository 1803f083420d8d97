"""Checks that refuse settings and models that offloading does not support exactly."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn
from transformers import Trainer, TrainingArguments
from transformers.optimization import AdafactorSchedule

from hf_lohan.config import OffloadConfig
from hf_lohan.engine import OffloadEngine
from hf_lohan.huggingface import arguments
from hf_lohan.huggingface.models.adapters import check_kinds
from hf_lohan.huggingface.optimizers import (
    OPTIM_NAMES,
    check_given,
    int8_advice,
    make_optimizer_choice,
    refused_optim_args,
)
from hf_lohan.huggingface.ranks import check_rank_accelerator, check_rank_arguments
from hf_lohan.optim import OffloadOptimizer
from hf_lohan.planning import check_together, why_not_together
from hf_lohan.wording import states_setting

_OTHERS = (DistributedType.DEEPSPEED, DistributedType.FSDP, DistributedType.MEGATRON_LM)
"""Launch types of accelerate that place weights themselves."""

_UNSUPPORTED_PRECISIONS = {
    "fp16": "needs loss scaling, which offload does not do",
    "fp8": "needs layers of another package, which cannot read streamed weights",
}
"""Values of accelerate's `mixed_precision` that are refused, with the reason."""

_SET_BY_TRAINER = {
    *("bf16", "default_ssd_path", "hold_gradients", "is_trained", "offload", "optimizer", "peft_config"),
    *("quantization_config", "sums_gradients", "torch_device"),
}
"""Arguments of `hf_lohan.from_pretrained` that a Trainer sets itself."""

_ONE_STEP_EACH = ("transformers", "hf_lohan")
"""Packages whose Trainer treats each micro-batch of a step independently."""


def check_given_model(model: Any, *, is_offloaded: bool, makes_models: bool) -> None:
    """Raise ValueError for an invalid first argument of a Trainer. ``makes_models``: whether the trainer itself loads
    models from paths, as TRL's trainers do."""
    if isinstance(model, TrainingArguments):
        raise ValueError(
            "TrainingArguments were passed as the first argument, which is the model; write Trainer(model=..., "
            'args=args, offload="lohan")'
        )
    if isinstance(model, str | Path) and not is_offloaded and not makes_models:
        raise ValueError(
            f"model={str(model)!r} is the path or the name of a model, and only an offloading Trainer loads it; set "
            'offload="lohan", or pass a model in memory'
        )


def check_has_model(settings: Mapping[str, Any]) -> None:
    """Raise ValueError if a Trainer that offloads has no model. ``settings``: its arguments by name."""
    if settings.get("model") is None and settings.get("model_init") is None:
        raise ValueError(
            "this Trainer was given no model to offload; pass model=..., which may be a checkpoint folder, a name in "
            "the Hub, or a model"
        )


def check_model_init_kwargs(model_init_kwargs: Mapping[str, Any], model: Any) -> None:
    """Raise ValueError if a Trainer cannot use `model_init_kwargs`, because it does not load the model itself."""
    if model_init_kwargs and not isinstance(model, str | Path):
        raise ValueError(
            "model_init_kwargs= is for a model that is given by its path or name; leave it out, or pass model='...'"
        )
    if taken := model_init_kwargs.keys() & _SET_BY_TRAINER:
        raise ValueError(
            f"model_init_kwargs has {min(taken)!r}, which Trainer sets itself; give it to Trainer or to its "
            "TrainingArguments"
        )


@contextlib.contextmanager
def ids_within_vocabulary(model: Any, inputs: Any) -> Iterator[None]:
    """In this context, raise ValueError instead of torch's IndexError if a token of the batch is not in the model's
    vocabulary."""
    try:
        yield
    except IndexError as error:
        embeddings = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
        num_words, ids = getattr(embeddings, "num_embeddings", None), inputs.get("input_ids")
        if num_words is None or ids is None or not ids.numel() or 0 <= ids.min() <= ids.max() < num_words:
            raise
        token = int(ids.max()) if ids.max() >= num_words else int(ids.min())
        raise ValueError(
            f"input_ids has the token {token}, and the model's vocabulary has {num_words} tokens; use the model's own "
            "tokenizer, or call resize_token_embeddings before the model is offloaded"
        ) from error


def check_arguments(args: TrainingArguments) -> None:
    """Raise ValueError for `TrainingArguments` that offload does not support."""
    optim = getattr(args.optim, "value", args.optim)
    checkpointing = getattr(args, "activation_checkpointing_kwargs", None)
    checkpointing = checkpointing or getattr(args, "gradient_checkpointing_kwargs", None) or {}
    launched = getattr(args, "mixed_precision", "no")
    refused = {
        "fp16=True needs loss scaling, which offload does not do; use bf16=True or float32": args.fp16,
        "fp16_full_eval=True casts the whole model, whose weights are in the store; leave it off": args.fp16_full_eval,
        "bf16_full_eval=True casts the whole model, whose weights are in the store; leave it off": args.bf16_full_eval,
        f"optim={optim!r} is not supported under offload; use one of {', '.join(OPTIM_NAMES)}{int8_advice(optim)}": (
            optim not in OPTIM_NAMES
        ),
        f"optim_args={args.optim_args!r} would be partly ignored with optim={optim!r}; use learning_rate, "
        "weight_decay, adam_beta1 and so on": refused_optim_args(optim, args.optim_args),
        "activation checkpointing with offload=True is not supported under offload; leave it off": (
            checkpointing.get("offload")
        ),
        "offload cannot be combined with DeepSpeed or FSDP; choose one of them": args.deepspeed or args.fsdp,
        "use_liger_kernel=True with its fused head reads the head's weights without calling the module; set "
        "liger_kernel_config={'fused_linear_cross_entropy': False}, which keeps Liger's other kernels": (
            args.use_liger_kernel and (args.liger_kernel_config or {}).get("fused_linear_cross_entropy", True)
        ),
        f"mixed_precision={launched!r}, set by the launcher, {_UNSUPPORTED_PRECISIONS.get(launched)}; launch with "
        "--mixed_precision bf16 or no": launched in _UNSUPPORTED_PRECISIONS,
    }
    for sentence, is_refused in refused.items():
        if is_refused:
            raise ValueError(sentence)
    check_rank_arguments(args)


def check_trl(settings: Mapping[str, Any], *, is_joint: bool, trains_fused_head: bool) -> None:
    """Raise ValueError for arguments of a TRL trainer that offload does not support. ``settings``: the arguments by
    name. ``is_joint``: whether the micro-batches of a step run together."""
    args = settings["args"]
    is_joint = is_joint and args.gradient_accumulation_steps > 1
    device_map = (getattr(args, "model_init_kwargs", None) or {}).get("device_map")
    refused = {
        "hf_lohan.TrainingArguments lack the arguments of TRL's trainers; add offload to TRL's class: class "
        "MyArguments(hf_lohan.LohanArguments, trl.SFTConfig)": type(args) is arguments.TrainingArguments,
        "activation_offloading=True is not needed, because offload keeps, swaps or recomputes activations as planned; "
        "leave it off, and set activations in the offload config": getattr(args, "activation_offloading", False),
        "sync_ref_model=True changes the reference model, whose weights are frozen in a separate store; leave it off "
        "under offload": getattr(args, "sync_ref_model", False),
        "use_vllm=True copies all weights to vLLM after each step; leave it off under offload, so that the streamed "
        "model generates": getattr(args, "use_vllm", False),
        "use_transformers_continuous_batching=True casts the whole model, whose weights are in the store; leave it off "
        "under offload": getattr(args, "use_transformers_continuous_batching", False),
        "cast_lm_head_to_fp32=True gives the head a different dtype from other blocks; leave it off under offload, or "
        "train in float32 with bf16=False": getattr(args, "cast_lm_head_to_fp32", False),
        f"device_map={device_map!r} places the whole model; leave it out of model_init_kwargs under offload": (
            device_map
        ),
        "vertical_micro_batches: true runs micro-batches together, but GRPO generates them one after the other; set "
        "it to false": is_joint and hasattr(args, "num_generations"),
        "vertical_micro_batches: true cannot separate the gradients of TRL's fused head by micro-batch; "
        "set it to false, or train adapters": is_joint and trains_fused_head,
    }
    for sentence, is_refused in refused.items():
        if is_refused:
            raise ValueError(sentence)


def why_trainer_runs_in_turn(trainer: Trainer) -> str | None:
    """Return why `vertical_micro_batches: auto` must not run a trainer's micro-batches together, or None if it may.
    Methods of other packages may count their calls, or use a micro-batch's result before the next micro-batch."""
    for name in ("training_step", "compute_loss", "get_batch_samples", "_prepare_inputs"):
        package = getattr(trainer, name).__module__.partition(".")[0]
        if package not in _ONE_STEP_EACH:
            return f"{type(trainer).__name__} overrides {name} (in {package})"
    if getattr(trainer, "num_row_ranks", 1) > 1:
        return "ranks that share rows (ranks.per_row) run the layers of one micro-batch at a time"
    if trainer.compute_loss_func is not None:
        return "compute_loss_func is set and may keep state from one micro-batch to the next"
    if trainer.args.neftune_noise_alpha is not None:
        return "neftune_noise_alpha would draw different random numbers"
    for callback in trainer.callback_handler.callbacks:
        if type(callback).on_substep_end.__module__.partition(".")[0] not in _ONE_STEP_EACH:
            return f"on_substep_end of {type(callback).__name__} would be called before the micro-batch runs"
    return why_not_together(trainer.model)


def check_runs_together(trainer: Trainer) -> None:
    """Raise ValueError if micro-batches that run together would draw different random numbers."""
    if trainer.args.neftune_noise_alpha is not None:
        raise ValueError(
            "vertical_micro_batches: true would draw the noise of neftune_noise_alpha in a different order; set "
            "vertical_micro_batches to false or auto, or leave neftune_noise_alpha out"
        )
    check_together(trainer.model)


def check_precision(mixed_precision: str) -> None:
    """Raise ValueError for a value of accelerate's `mixed_precision` that offload does not support."""
    if mixed_precision in _UNSUPPORTED_PRECISIONS:
        raise ValueError(
            f"mixed_precision={mixed_precision!r} {_UNSUPPORTED_PRECISIONS[mixed_precision]}; set mixed_precision to "
            "'bf16' or 'no' (lohan launch --mixed_precision bf16)"
        )


def check_accelerator(accelerator: Accelerator) -> None:
    """Raise ValueError for settings of an `Accelerator` that offload replaces or does not support."""
    check_precision(accelerator.mixed_precision)
    if accelerator.distributed_type in _OTHERS:
        raise ValueError(f"offload cannot be combined with {accelerator.distributed_type.value}; choose one of them")
    check_rank_accelerator(accelerator)


def check_model(model: Any) -> None:
    """Raise ValueError for a model that is wrapped, compiled, quantized or placed by a device map."""
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise ValueError(f"a model in {type(model).__name__} cannot be offloaded; pass the bare model")
    if hasattr(model, "_orig_mod"):
        raise ValueError("a model wrapped by torch.compile cannot be offloaded; pass the original model")
    modules = model.modules() if isinstance(model, nn.Module) else ()  # else a path, or None with `model_init`
    if any(getattr(module, "_compiled_call_impl", None) is not None for module in modules):
        raise ValueError("a model with compiled modules cannot be offloaded; leave model.compile() out under offload")
    parameters = model.named_parameters() if isinstance(model, nn.Module) else ()
    sharded = next((name for name, parameter in parameters if hasattr(parameter, "device_mesh")), None)
    if sharded is not None:
        raise ValueError(
            f"{sharded!r} is a DTensor (a shard of a parameter), but offload computes with whole parameters on each "
            "GPU; load the model without distributed_config, tp_plan and tp_size"
        )
    if isinstance(configs := getattr(model, "peft_config", None), Mapping):
        check_kinds(configs.values())
    if getattr(model, "is_quantized", False):
        raise ValueError("a quantized model cannot be offloaded; load it in float32 or bfloat16")
    if getattr(model, "hf_device_map", None):
        raise ValueError(
            "a model loaded with device_map= cannot be offloaded; load it without device_map, or pass its path"
        )


def check_optimizers(
    model: Any, optimizers: tuple[Any, Any], optimizer_cls_and_kwargs: Any, config: OffloadConfig
) -> None:
    """Raise ValueError for an optimizer or scheduler that cannot be used."""
    if optimizers[0] is not None:
        if not isinstance(model, nn.Module):
            raise ValueError(
                "an optimizer was passed together with a model's path, so it cannot have the model's parameters; load "
                "the model with hf_lohan.from_pretrained, or pass optimizer_cls_and_kwargs"
            )
        if config.optimizer != "auto":
            raise ValueError(f"optimizer={config.optimizer!r} and optimizers= are both set; leave one of them out")
        check_given(optimizers[0])
    check_schedule(optimizers[1])
    if optimizer_cls_and_kwargs is not None:
        make_optimizer_choice(optimizer_cls_and_kwargs)


def check_schedule(schedule: Any) -> None:
    """Raise ValueError for a scheduler that needs the optimizer's states."""
    if isinstance(schedule, AdafactorSchedule):
        raise ValueError(
            "AdafactorSchedule reads the optimizer's states, which are in the store; use "
            "Adafactor(relative_step=False, lr=...) with another scheduler, or without a scheduler in your own loop"
        )


def check_streamed(engine: OffloadEngine, *, bf16: bool, moment_dtype: str) -> None:
    """Raise ValueError if an offloaded model does not have the dtypes that a Trainer or an `Accelerator` asks for."""
    master = engine.layout.master
    if bf16 and master.working_dtype == torch.float32:
        raise ValueError(
            "the model was offloaded in float32, and bfloat16 weights were asked for; call "
            "from_pretrained(..., bf16=True), or leave bf16 and mixed_precision out"
        )
    has = {block.master.moment_dtype for block in engine.layout.blocks if block.state_numel}
    if moment_dtype != "float32" and has - {moment_dtype}:
        raise ValueError(
            f"the model was offloaded with {states_setting(max(has - {moment_dtype}))}, and "
            f"{states_setting(moment_dtype)} was asked for; give from_pretrained(..., offload=...) the same setting, "
            "or leave it out here, with optim='adamw_torch'"
        )


def check_optimizer(optimizer: Any) -> None:
    """Raise ValueError for an optimizer that does not update the store."""
    inner = getattr(optimizer, "optimizer", optimizer)
    if not isinstance(inner, OffloadOptimizer):
        raise ValueError(
            f"{type(inner).__name__} cannot update an offloaded model; return it from create_optimizer or pass it as "
            "optimizers=(optimizer, scheduler), so that it is replaced"
        )
