"""Decides the order of a step's micro-batches, and whether a model's numbers depend on this order.

A plan counts micro-batches that run together as one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from hf_lohan.compat.torch_private import has_gradient_hook, module_hooks
from hf_lohan.config import OffloadConfig
from hf_lohan.costs import BlockProfile, ModelProfile, OperationProfile, SizeClass
from hf_lohan.model import base_of
from hf_lohan.model.discovery import find_layers

_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_DRAWING = ("drop", "jitter")
"""Parts of names of settings that make a forward draw random numbers, such as `attention_dropout`, `resid_pdrop` and
`layerdrop`."""
_OF_OTHER_HEADS = ("summary_", "classifier_")
"""Prefixes of settings for modules that a causal language model does not have."""
_KNOWN_PACKAGES = ("transformers", "peft")
_KNOWN_HOOKS = (*_KNOWN_PACKAGES, "accelerate", "hf_lohan", "torch")


@dataclass(frozen=True, slots=True)
class MicroBatches:
    """The micro-batches of each step of a run."""

    number: int
    run_together: bool | None
    """Whether all micro-batches run a block before the next block is loaded. With None the plan decides."""

    @classmethod
    def of_run(cls, config: OffloadConfig, number: int) -> MicroBatches:
        """Return the micro-batches of a run with the order of `vertical_micro_batches`. A single micro-batch has no
        order."""
        setting = config.vertical_micro_batches if number > 1 else False
        return cls(number, None if setting == "auto" else setting)

    @property
    def sums_gradients(self) -> bool:
        """Whether a step may sum the gradients of several backwards."""
        return self.number > 1

    def holds_gradients(self, max_grad_norm: float) -> bool:
        """Return whether gradients wait for the end of the step, because their norm decides about clipping, or later
        backwards add to them."""
        return max_grad_norm > 0 or (self.number > 1 and self.run_together is not True)


def why_not_together(model: Any) -> str | None:
    """Return why the model's micro-batches do not run together by default; None if they may. A forward that draws
    random numbers would draw them in another order. Unknown code may keep state between micro-batches."""
    drawn = random_numbers_of(model)
    if drawn is not None:
        return f"the model draws random numbers ({drawn}), which would change"
    root = base_of(model)
    if type(root).__module__.partition(".")[0] not in _KNOWN_PACKAGES:
        return f"{type(root).__name__} is not a model of transformers, so its forward may keep state"
    for name, module in model.named_modules():
        if getattr(module, "running_mean", None) is not None:
            return f"{name} keeps running statistics, which the order of micro-batches would change"
    beside = layer_beside_text(model)
    if beside is not None:
        return f"text alone does not reach {beside}, and micro-batches that run together pass the same layers"
    if getattr(root.config, "output_router_logits", False):
        return "output_router_logits=True keeps the whole head of each micro-batch until the backward"
    for adapters in getattr(model, "peft_config", {}).values():
        if adapters.peft_type != "LORA" or adapters.use_dora:
            return f"adapters of {type(adapters).__name__} may compute different numbers in the other order"
    for name, parameter in model.named_parameters():
        if has_gradient_hook(parameter):
            return f"{name} has a hook on its gradient, which would not be called"
    for name, module in model.named_modules():
        for hook in module_hooks(module):
            package = getattr(hook, "__module__", None) or "builtins"  # a method of a list has None
            if package.partition(".")[0] not in _KNOWN_HOOKS:
                return f"{name or type(model).__name__} has a hook of {package}, which may keep state"
    return None


def random_numbers_of(model: Any) -> str | None:
    """Return the module or setting that makes a training forward draw random numbers; None if it draws none."""
    if any(isinstance(module, _DROPOUTS) and module.p > 0 for module in model.modules()):
        return "dropout"
    config: Any = getattr(base_of(model), "config", None)
    for name, value in _numbers(config.to_dict() if hasattr(config, "to_dict") else {}):
        if value and any(word in name for word in _DRAWING) and not name.startswith(_OF_OTHER_HEADS):
            return f"{name}={value:g}"
    return None


def layer_beside_text(model: Any) -> str | None:
    """Return the name of a layer that a batch of text alone does not reach, such as a layer of a vision tower, or
    None."""
    root = base_of(model)
    others = getattr(getattr(root, "config", None), "sub_configs", {})
    if not any("vision" in name or "audio" in name for name in others) or not hasattr(root, "get_decoder"):
        return None
    decoder = root.get_decoder()
    inside = set(decoder.modules()) if isinstance(decoder, nn.Module) else set()
    return next((name for name, layer in find_layers(root).items() if layer not in inside), None)


def check_same_layers(model: Any) -> None:
    """Raise ValueError for a model whose micro-batches may pass different layers."""
    beside = layer_beside_text(model)
    if beside is not None:
        raise ValueError(
            f"micro-batches that run together must pass the same layers, and text alone does not reach {beside}; run "
            "them one after the other (vertical_micro_batches: false or auto)"
        )


def check_together(model: Any) -> None:
    """Raise ValueError for a model whose micro-batches may pass different layers, or would draw different random
    numbers together than one after the other."""
    check_same_layers(model)
    drawn = random_numbers_of(model)
    if drawn is not None:
        raise ValueError(
            f"vertical_micro_batches: true would draw the model's random numbers ({drawn}) in a different order than "
            "one micro-batch after the other; set vertical_micro_batches to false or auto, or "
            f"{drawn.partition('=')[0]} to 0"
        )


def _numbers(settings: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _numbers(value)
        elif isinstance(value, int | float):
            yield name, float(value)


def profile_together(one: ModelProfile, number: int) -> ModelProfile:
    """Return the profile of ``number`` micro-batches that share the weights. FLOPs, moved bytes and activations of
    layers count all micro-batches. One micro-batch computes while the inputs of the others wait between two layers. A
    head keeps the activations of one micro-batch at a time."""
    if number == 1:
        return one
    waiting_bytes = number * max((layer.input_bytes for layer in one.layers), default=0)

    def of_all(operation: OperationProfile) -> OperationProfile:
        return replace(
            operation,
            flops=number * operation.flops,
            output_bytes=number * operation.output_bytes,
            parts=tuple(map(of_all, operation.parts)),
            moved_bytes=number * operation.moved_bytes,
        )

    def together(block: BlockProfile) -> BlockProfile:
        is_layer = block.size_class is SizeClass.LAYER
        of_each = (
            "flops",
            "input_bytes",
            "moved_bytes",
            "repeated_flops",
            "repeated_bytes",
            *(("saved_bytes",) if is_layer else ()),
        )
        return replace(
            block,
            **{name: number * getattr(block, name) for name in of_each},
            working_bytes=waiting_bytes + block.working_bytes if block.working_bytes else 0,
            operations=tuple(map(of_all, block.operations)),
            experts=block.experts and replace(block.experts, num_tokens=number * block.experts.num_tokens),
            rows=block.rows
            and replace(
                block.rows,
                loaded_bytes=number * block.rows.loaded_bytes,
                read_bytes=number * block.rows.read_bytes,
            ),
        )

    return replace(one, batch_size=number * one.batch_size, blocks=tuple(together(block) for block in one.blocks))
