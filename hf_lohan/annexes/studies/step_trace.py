"""Traces one forward and backward on fake tensors, and records when each tensor is made, used and freed.

Layers run under torch's checkpointing.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from hf_lohan.activations.chunked_head import ChunkedLoss
from hf_lohan.activations.kernel_names import Operation
from hf_lohan.annexes.studies.lifetimes import (
    StepLifetimes,
    StepOperation,
    TensorLifetime,
    Weight,
    step_lifetimes,
)
from hf_lohan.compat.torch_private import (
    FakeTensor,
    FakeTensorMode,
    StorageWeakRef,
    storage_id,
    tree_map_only,
)
from hf_lohan.config import ResolvedConfig
from hf_lohan.costs import SizeClass
from hf_lohan.model import discover_blocks
from hf_lohan.model.block import ParamSlice
from hf_lohan.model.discovery import ModelBlocks
from hf_lohan.model.experts import find_experts
from hf_lohan.planning import PlannedStep
from hf_lohan.planning.layout import chunked_loss_of
from hf_lohan.planning.tracing.experts_on_paper import NAME as EXPERTS
from hf_lohan.planning.tracing.experts_on_paper import forward_on_paper
from hf_lohan.planning.tracing.operations import (
    AttentionWithoutDropout,
    FakeOperations,
    flops_of,
    moved_bytes_of,
    tensors_in,
)
from hf_lohan.planning.tracing.profile import loss_in_chunks, modules_of, on_fake_tensors
from hf_lohan.planning.tracing.trace import forward_replaced
from hf_lohan.planning.tracing.traced_blocks import run_trace

_NEVER = sys.maxsize


@dataclass(slots=True)
class StepTrace:
    """The operations and tensors of a step with one micro-batch."""

    operations: list[StepOperation] = field(default_factory=list)
    tensors: list[TensorLifetime] = field(default_factory=list)
    weight_uses: dict[str, list[int]] = field(default_factory=dict)
    """Maps the name of each weight to the indices of the operations that read it."""


class _Recorder(FakeOperations):
    """Adds operations, and births, uses and deaths of storages, to the trace `step`."""

    def __init__(self, fake_mode: FakeTensorMode, weights: Mapping[str, Tensor]) -> None:
        super().__init__(fake_mode)
        self.step = StepTrace()
        self.block = ""
        """The block that computes now."""
        self._times = 1
        self._backward_begins = _NEVER
        self._alive: dict[int, tuple[TensorLifetime, StorageWeakRef]] = {}
        self._weights: dict[int, str] = {}
        for name, weight in weights.items():  # a tied weight keeps its first name
            self._weights.setdefault(storage_id(weight), name)
        self._num_fakes: Counter[int] = Counter()
        """Number of fake tensors of each tensor, by its `id`. It counts as freed when the last of them is freed."""

    def to_fake(self, tensor: Tensor) -> Tensor:
        """Return a fake tensor that counts as the same tensor."""
        if isinstance(tensor, FakeTensor):
            return tensor
        with self.uncounted():
            fake = self.fake_mode.from_tensor(tensor)
        held = self._alive.get(storage_id(tensor))
        if held is not None and storage_id(fake) not in self._alive:  # the fake tensor is new
            self._alive[storage_id(fake)] = held[0], StorageWeakRef(fake.untyped_storage())
            self._num_fakes[id(held[0])] += 1
        return fake

    def repeat(self, times: int) -> None:
        """Make each of the next operations stand for ``times`` equal operations."""
        self._times = times

    def compute_experts(self, names: Sequence[str], flops: int, held: Sequence[Tensor]) -> None:
        """Record an operation for each expert, which uses the expert's weights and the tensors ``held``. ``flops``:
        FLOPs of all experts together."""
        keys = [key for key in dict.fromkeys(map(storage_id, held)) if key in self._alive]
        for name in names:
            self.step.operations.append(StepOperation(EXPERTS, self.block, flops / len(names), 0))
            self.step.weight_uses.setdefault(name, []).append(len(self.step.operations) - 1)
            self._note_uses(keys)

    def add_gradient(self, name: str, gradient: Tensor) -> None:
        """Record that the tensor is the gradient of a weight."""
        if (held := self._alive.get(storage_id(gradient))) is not None:
            held[0].kind, held[0].name = "gradient", name

    def begin_backward(self) -> None:
        self._backward_begins = len(self.step.operations)

    def end(self) -> StepTrace:
        """Return the trace of the step, which ends now."""
        self.note_before()
        ends = len(self.step.operations)
        for tensor in self.step.tensors:
            tensor.died = min(tensor.died, ends)
            if tensor.kind != "gradient" and tensor.born < self._backward_begins < tensor.died:
                tensor.kind = "activation"
        return self.step

    def note_before(self) -> None:
        """Record the tensors that died since the last operation."""
        for key in [key for key, (_, ref) in self._alive.items() if ref.expired()]:
            tensor = self._alive.pop(key)[0]
            if self._num_fakes[id(tensor)]:
                self._num_fakes[id(tensor)] -= 1
            else:
                tensor.died = len(self.step.operations)

    def note_call(self, func: Operation, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        number, name = len(self.step.operations), str(func)
        read, written = list(tensors_in((args, kwargs))), list(tensors_in(output))
        inputs = list(dict.fromkeys(map(storage_id, read)))
        outputs = list(dict.fromkeys(map(storage_id, written)))
        for tensor in written:
            key = storage_id(tensor)
            if key in self._alive or key in self._weights or key in inputs:
                continue
            storage = tensor.untyped_storage()
            own_name = f"{name}[{outputs.index(key)}]" if len(outputs) > 1 else name
            made = TensorLifetime(
                own_name, self.block, "intermediate", storage.nbytes(), born=number, died=_NEVER, uses=[number]
            )
            self._alive[key] = made, StorageWeakRef(storage)
            self.step.tensors.append(made)
        moved_bytes = moved_bytes_of(func, args, kwargs, output)
        flops = self._times * flops_of(func, args, kwargs, output)
        self.step.operations.append(StepOperation(name, self.block, flops, self._times * moved_bytes))
        if moved_bytes:  # the operation is not a view
            self._note_uses(dict.fromkeys((*inputs, *outputs)))

    def _note_uses(self, keys: Iterable[int]) -> None:
        """Record that the last operation uses these storages."""
        number = len(self.step.operations) - 1
        for key in keys:
            if key in self._weights:
                self.step.weight_uses.setdefault(self._weights[key], []).append(number)
            elif key in self._alive and self._alive[key][0].uses[-1] != number:
                self._alive[key][0].uses.append(number)


class _TracedStep(nn.Module):
    """Runs a model's forward and backward in one call, because layers run again in the backward."""

    def __init__(self, model: nn.Module, recorder: _Recorder) -> None:
        super().__init__()
        self.model = model
        self._recorder = recorder

    def forward(self, **inputs: Any) -> None:
        output = self.model(**inputs)
        loss = output if isinstance(output, Tensor) else output.loss
        del output  # frees the logits, as Trainer does
        self._recorder.begin_backward()
        with self._recorder.fake_mode, self._recorder:
            loss.backward()


class _LayersOfStep:
    """Makes forwards that run a model's layers under a recorder."""

    def __init__(self, recorder: _Recorder) -> None:
        self._recorder = recorder
        self._last_number = -1
        self._last_output: Callable[[], Tensor | None] = lambda: None

    def forward_of(self, number: int, name: str, layer: nn.Module) -> Callable[..., Any]:
        """Return the forward for layer ``number``. Raises ValueError if it is called before the layers before it, or
        twice."""
        forward, recorder = layer.forward, self._recorder

        def run(*args: Any, **kwargs: Any) -> Any:
            with recorder.fake_mode, recorder:
                return forward(*args, **kwargs)

        def traced(*args: Any, **kwargs: Any) -> Any:
            if number <= self._last_number:
                raise ValueError(f"{name} does not run exactly once in a forward, so its tensors have no lifetimes")
            self._last_number = number
            hidden = next(tensors_in((args, kwargs)), None)
            args, kwargs = tree_map_only(Tensor, recorder.to_fake, (args, kwargs))
            outside, recorder.block = recorder.block, name
            if hidden is not None and hidden.requires_grad and hidden is not self._last_output():
                hidden.register_hook(partial(self._enter, ""))
            output = checkpoint(partial(run, **kwargs), *args, use_reentrant=False)
            recorder.block = outside
            first = next(tensors_in(output), None)
            if first is not None:
                self._last_output = weakref.ref(first)
                if first.requires_grad:
                    first.register_hook(partial(self._enter, name))
            return output

        return traced

    def _enter(self, block: str, _gradient: Tensor) -> None:
        """Begin the backward of a block."""
        self._recorder.block = block


def trace_step(
    model: nn.Module,
    blocks: ModelBlocks,
    *,
    batch_size: int,
    sequence_length: int,
    fused_attention: bool = False,
    chunked_loss: ChunkedLoss | None = None,
) -> StepTrace:
    """Trace the forward and backward of one micro-batch. Layers are recomputed. Arguments are those of `trace_model`.
    Gradients of weights are freed when they are complete. Each expert that is streamed is one operation, and its
    weights have the name of its block. Raises ValueError if a layer runs more than once. Takes 0.2 seconds a layer."""
    of_experts = {experts.module: experts for experts in find_experts(model).values()} if blocks.experts else {}
    with on_fake_tensors(model, torch.device("cpu")) as (fake_mode, tensors), contextlib.ExitStack() as stack:
        model.train()  # because dropout is part of a step
        recorder = _Recorder(fake_mode, tensors)
        ids = torch.zeros(batch_size, sequence_length, dtype=torch.long)
        stack.enter_context(loss_in_chunks(model, chunked_loss, recorder.repeat))
        if fused_attention:
            stack.enter_context(AttentionWithoutDropout())
        layers = _LayersOfStep(recorder)
        of_blocks = modules_of(blocks)
        in_order = [(block.name, users[0]) for block, users in of_blocks.items() if block.size_class is SizeClass.LAYER]
        for block, users in of_blocks.items():
            for module in users if block.size_class is not SizeClass.LAYER else ():
                stack.callback(module.register_forward_pre_hook(_enters_block(recorder, block.name)).remove)
        for name, _ in model.named_parameters():
            if tensors[name].requires_grad:
                stack.callback(tensors[name].register_post_accumulate_grad_hook(_takes_gradient(recorder, name)).remove)
        for module, own in blocks.experts.items():
            computes = partial(recorder.compute_experts, [block.name for block in own])
            stack.enter_context(forward_replaced(module, forward_on_paper(of_experts[module], computes=computes)))
        for number, (name, layer) in enumerate(in_order):
            stack.enter_context(forward_replaced(layer, layers.forward_of(number, name, layer)))
        stack.enter_context(recorder)
        functional_call(
            _TracedStep(model, recorder),
            {f"model.{name}": tensor for name, tensor in tensors.items()},
            kwargs={"input_ids": ids, "labels": ids, "use_cache": False},
            tie_weights=False,
        )
        return recorder.end()


def _enters_block(recorder: _Recorder, name: str) -> Callable[[nn.Module, Any], None]:
    def enter(module: nn.Module, args: Any) -> None:
        recorder.block = name

    return enter


def _takes_gradient(recorder: _Recorder, name: str) -> Callable[[Tensor], None]:
    def take(weight: Tensor) -> None:
        if weight.grad is None:  # weights of experts, because fake experts compute nothing
            return
        recorder.add_gradient(name, weight.grad)
        weight.grad = None

    return take


def lifetimes_of_step(
    planned: PlannedStep,
    model: nn.Module,
    config: ResolvedConfig,
    *,
    fused_attention: bool = False,
) -> StepLifetimes:
    """Return the lifetimes of the tensors of one planned micro-batch, of its gradients and of its update.

    Layers are recomputed, whatever the plan keeps or swaps. Arguments are those of `plan_step`, and ``model`` is the
    model of the plan. Raises ValueError for a model in which a layer runs more than once.
    """
    layout, shape = planned.layout, planned.shape
    found = layout.model_blocks if layout.model_blocks.experts or layout.packs else discover_blocks(model)
    trace = partial(
        trace_step,
        model,
        found,
        batch_size=shape.batch_size,
        sequence_length=shape.sequence_length,
        fused_attention=fused_attention,
        chunked_loss=chunked_loss_of(config),
    )
    traced = run_trace(model, trace, "cpu")
    weights = []
    for block in layout.blocks:
        dtype, state_bytes_per_param = block.master.working_dtype, block.master.state_bytes_per_param
        gradient_dtype = dtype if layout.keeps_gradient_dtypes else torch.float32
        is_expert = block.size_class is SizeClass.EXPERT
        for part in block.slices:
            weights.append(
                Weight(
                    name=part.name,
                    block=block.name,
                    num_bytes=_stored_bytes(part, dtype),
                    state_bytes=int(part.numel * state_bytes_per_param) if part.trainable else 0,
                    gradient_bytes=part.numel * gradient_dtype.itemsize if part.trainable else 0,
                    uses=traced.weight_uses.get(block.name if is_expert else part.name, ()),
                )
            )
    return step_lifetimes(traced.operations, traced.tensors, weights, planned.hardware)


def _stored_bytes(part: ParamSlice, dtype: torch.dtype) -> int:
    if part.packed is None:
        return part.numel * dtype.itemsize
    return part.packed.codes_bytes(part.numel) + part.packed.scales_bytes(part.numel)
