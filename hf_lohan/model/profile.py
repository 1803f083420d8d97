"""Measures what a model's step consists of, without weights and without computing."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from hf_lohan.compat.torch_private import FakeTensorMode
from hf_lohan.hardware import MatrixShape
from hf_lohan.model.operations import BlockTrace
from hf_lohan.model.trace import ModelTrace
from hf_lohan.planner import SizeClass
from hf_lohan.planner.model_profile import BlockProfile, ModelProfile


@dataclass(frozen=True, kw_only=True)
class BlockToProfile:
    """One block of the model: what it owns, and whose forwards are its work."""

    name: str
    size_class: SizeClass
    parameters: Sequence[nn.Parameter]
    modules: Sequence[nn.Module]
    """The decoder layer; or those modules outside the layers that use the parameters."""

    @property
    def is_layer(self) -> bool:
        return self.size_class is SizeClass.LAYER


@dataclass(frozen=True, kw_only=True)
class TracedModel:
    """What one forward was seen to do."""

    profile: ModelProfile
    matrix_shapes: tuple[MatrixShape, ...]
    """Of all its matrix products, most FLOPs first: what to measure a device with."""


def profile_model(model: nn.Module, blocks: Sequence[BlockToProfile], **options: Any) -> ModelProfile:
    """The profile alone; for the options see `trace_model`."""
    return trace_model(model, blocks, **options).profile


def trace_model(
    model: nn.Module,
    blocks: Sequence[BlockToProfile],
    *,
    batch_size: int,
    sequence_length: int,
    device: torch.device | str = "cpu",
    fused_attention: bool = False,
) -> TracedModel:
    """Trace one forward of a causal LM over `batch_size` sequences that fill `sequence_length`.

    Runs on fake tensors: shapes only, so any size takes seconds, and parameters may be on meta. Of layers that are
    alike only the first is traced. Trace before anything hooks into the model (an offload engine, say).

    Args:
        blocks: all blocks in forward order, the layers among them; each parameter in exactly one.
        device: where the forward would run: kernels have different names there. Only a device that this torch has.
        fused_attention: attention as on an accelerator, whose fused kernels have dropout; the CPU's have none.
    """
    parameters = [parameter for block in blocks for parameter in block.parameters]
    assert parameters, "a model without parameters has no blocks"
    fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
    with fake_mode:
        tensors = _fake_tensors(model, torch.device(device))
    with _training(model), contextlib.ExitStack() as stack:
        trace = ModelTrace(
            fake_mode,
            layers=[block.modules[0] for block in blocks if block.is_layer],
            outer=[(module, block.name) for block in blocks if not block.is_layer for module in block.modules],
            weights=list(tensors.values()),
        )
        ids = torch.zeros(batch_size, sequence_length, dtype=torch.long, device=device)
        if fused_attention:
            stack.enter_context(_AttentionWithoutDropout())
        stack.enter_context(trace())
        output = functional_call(model, tensors, kwargs={"input_ids": ids, "labels": ids, "use_cache": False})
        loss = output if isinstance(output, Tensor) else output.loss
        del output  # and with it the logits, as Trainer does
        trace.trace_loss(loss)
    profile = ModelProfile(
        blocks=tuple(_block_profile(block, trace) for block in blocks),
        batch_size=batch_size,
        sequence_length=sequence_length,
        param_itemsize=parameters[0].element_size(),
    )
    return TracedModel(profile=profile, matrix_shapes=_matrix_shapes(trace))


def _matrix_shapes(trace: ModelTrace) -> tuple[MatrixShape, ...]:
    counts: Counter[MatrixShape] = Counter()
    for block in (*trace.of_layer.values(), *trace.of_outer.values()):
        counts.update(block.products)
    shapes = (replace(shape, count=count) for shape, count in counts.items())
    return tuple(sorted(shapes, key=lambda shape: -shape.count * shape.flops))


def _fake_tensors(model: nn.Module, device: torch.device) -> dict[str, Tensor]:
    """What stands in for the parameters and buffers: memory of no bytes, on a device that computes."""
    named = (*model.named_parameters(), *model.named_buffers())
    return {
        name: torch.empty(tensor.shape, dtype=tensor.dtype, device=device, requires_grad=tensor.requires_grad)
        for name, tensor in named
    }


@contextlib.contextmanager
def _training(model: nn.Module) -> Iterator[None]:
    """Dropout is part of a step."""
    was_training = {module: module.training for module in model.modules()}
    model.train()
    try:
        yield
    finally:
        for module, training in was_training.items():
            module.training = training


class _AttentionWithoutDropout(TorchFunctionMode):
    """Lets the CPU choose its fused kernel, which moves and keeps what an accelerator's with dropout does."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is F.scaled_dot_product_attention:
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            kwargs.pop("dropout_p", None)
        return func(*args, **kwargs)


def _block_profile(block: BlockToProfile, trace: ModelTrace) -> BlockProfile:
    seen = trace.of_layer.get(block.modules[0]) if block.is_layer else trace.of_outer.get(block.name)
    seen = seen or BlockTrace()  # its modules did not run
    num_params = sum(parameter.numel() for parameter in block.parameters)
    return BlockProfile(
        name=block.name,
        size_class=block.size_class,
        num_params=num_params,
        num_trainable_params=sum(p.numel() for p in block.parameters if p.requires_grad),
        param_bytes=sum(p.numel() * p.element_size() for p in block.parameters),
        flops=seen.flops,
        input_bytes=seen.input_bytes if block.is_layer else 0,
        operations=tuple(seen.operations[: seen.num_run_again]) if block.is_layer else (),
        saved_bytes=seen.saved_bytes,
        working_bytes=seen.working_bytes,
        moved_bytes=seen.moved_bytes,
    )
