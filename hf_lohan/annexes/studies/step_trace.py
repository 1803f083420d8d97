"""Traces one forward and backward on fake tensors, and records when each tensor is made, used and freed.

Layers run under torch's checkpointing. If layers repeat, only some are traced, each with the layer before it and the
layer after it. A traced layer stands for all equal layers.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from hf_lohan.activations.chunked_head import ChunkedLoss, chunked_head_of, whole_logits
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
from hf_lohan.planning.tracing.profile import modules_of, on_fake_tensors
from hf_lohan.planning.tracing.trace import forward_replaced, signature_of
from hf_lohan.planning.tracing.traced_blocks import run_trace

_PART: TypeAlias = tuple[int | None, str]
"""A part of a step: the index of a layer (None for parts outside the layers), and a name."""
_BEGIN: _PART = (None, "begin")
_HEAD_BACKWARD: _PART = (None, "head backward")
_END: _PART = (None, "end")
_SKIPPED: _PART = (None, "skipped")
_NEVER = sys.maxsize


@dataclass(frozen=True, slots=True)
class _Birth:
    """Identifies a tensor: the `number`-th tensor that was made in a part of the step."""

    part: _PART
    number: int


@dataclass(slots=True)
class _Part:
    """The operations of one part of a step. Indices of operations begin with 0 in each part."""

    operations: list[StepOperation] = field(default_factory=list)
    births: list[tuple[int, str, int]] = field(default_factory=list)
    """(index of the operation, name, bytes) of each tensor that is made."""
    uses: list[tuple[int, _Birth]] = field(default_factory=list)
    deaths: list[tuple[int, _Birth]] = field(default_factory=list)
    weight_uses: list[tuple[int, str]] = field(default_factory=list)
    gradients: list[tuple[_Birth, str]] = field(default_factory=list)
    """Tensors that are the gradients of weights."""


@dataclass(slots=True)
class StepTrace:
    """The operations and tensors of a step with one micro-batch."""

    operations: list[StepOperation] = field(default_factory=list)
    tensors: list[TensorLifetime] = field(default_factory=list)
    weight_uses: dict[str, list[int]] = field(default_factory=dict)
    """Maps the name of each weight to the indices of the operations that read it."""


class _DoesNotRepeat(Exception):
    """Layers use each other's tensors, so that one layer cannot stand for another."""


class _Recorder(FakeOperations):
    """Notes operations, and births, uses and deaths of storages, for the part `part`."""

    def __init__(self, fake_mode: FakeTensorMode, weights: Mapping[str, Tensor]) -> None:
        super().__init__(fake_mode)
        self.parts: dict[_PART, _Part] = {}
        self.part = _BEGIN
        self.block = ""
        self._times = 1
        self._alive: dict[int, tuple[_Birth, StorageWeakRef]] = {}
        self._weights: dict[int, str] = {}
        for name, weight in weights.items():  # a tied weight keeps its first name
            self._weights.setdefault(storage_id(weight), name)
        self._num_fakes: Counter[_Birth] = Counter()
        """Number of fake tensors for each tensor. The tensor counts as freed when the last of these is freed."""

    def to_fake(self, tensor: Tensor) -> Tensor:
        """Return a fake tensor that counts as the same tensor."""
        if isinstance(tensor, FakeTensor):
            return tensor
        with self.uncounted():
            fake = self.fake_mode.from_tensor(tensor)
        held = self._alive.get(storage_id(tensor))
        if held is not None and storage_id(fake) not in self._alive:  # the fake tensor is new
            self._alive[storage_id(fake)] = held[0], StorageWeakRef(fake.untyped_storage())
            self._num_fakes[held[0]] += 1
        return fake

    def repeat(self, times: int) -> None:
        """Let each of the next operations stand for ``times`` equal operations."""
        self._times = times

    def compute_experts(self, names: Sequence[str], flops: int, held: Sequence[Tensor]) -> None:
        """Note an operation for each expert, which uses the expert's weights and the tensors ``held``. ``flops``: FLOPs
        of all experts together."""
        part = self._now()
        births = [self._alive[key][0] for key in dict.fromkeys(map(storage_id, held)) if key in self._alive]
        for name in names:
            number = len(part.operations)
            part.operations.append(StepOperation(EXPERTS, self.block, flops / len(names), 0))
            part.weight_uses.append((number, name))
            part.uses += [(number, birth) for birth in births]

    def add_gradient(self, name: str, gradient: Tensor) -> None:
        """Note that the tensor is the gradient of a weight."""
        if (held := self._alive.get(storage_id(gradient))) is not None:
            self._now().gradients.append((held[0], name))

    def _now(self) -> _Part:
        return self.parts.setdefault(self.part, _Part())

    def note_before(self) -> None:
        """Note the tensors that died since the last operation."""
        part = self._now()
        number = len(part.operations)
        for key in [key for key, (_, ref) in self._alive.items() if ref.expired()]:
            birth = self._alive.pop(key)[0]
            if self._num_fakes[birth]:
                self._num_fakes[birth] -= 1
            else:
                part.deaths.append((number, birth))

    def note_call(self, func: Operation, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        part = self._now()
        number, name = len(part.operations), str(func)
        read, written = list(tensors_in((args, kwargs))), list(tensors_in(output))
        inputs = list(dict.fromkeys(map(storage_id, read)))
        outputs = list(dict.fromkeys(map(storage_id, written)))
        for tensor in written:
            key = storage_id(tensor)
            if key in self._alive or key in self._weights or key in inputs:
                continue
            storage = tensor.untyped_storage()
            of_several = f"[{outputs.index(key)}]" if len(outputs) > 1 else ""
            self._alive[key] = _Birth(self.part, len(part.births)), StorageWeakRef(storage)
            part.births.append((number, name + of_several, storage.nbytes()))
        moved_bytes = moved_bytes_of(func, args, kwargs, output)
        flops = self._times * flops_of(func, args, kwargs, output)
        part.operations.append(StepOperation(name, self.block, flops, self._times * moved_bytes))
        if not moved_bytes:
            return  # a view
        for key in dict.fromkeys((*inputs, *outputs)):
            if key in self._weights:
                part.weight_uses.append((number, self._weights[key]))
            elif key in self._alive:
                part.uses.append((number, self._alive[key][0]))


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
        self._recorder.part = _HEAD_BACKWARD
        with self._recorder.fake_mode, self._recorder:
            loss.backward()
        del loss
        self._recorder.note_before()


class _LayersOfStep:
    """Runs some layers of a model under a recorder. Other layers return the output of the layer before them."""

    def __init__(self, layers: Mapping[str, nn.Module], chosen: Sequence[int], recorder: _Recorder) -> None:
        self._layers = layers
        self._chosen = frozenset(chosen)
        self._last_chosen = max(chosen, default=-1)
        self._recorder = recorder
        self._last_output: Any = None
        self._last_called = -1

    @contextlib.contextmanager
    def replaced(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for number, (name, layer) in enumerate(self._layers.items()):
                stack.enter_context(forward_replaced(layer, self._forward(number, name, layer)))
            yield

    def _forward(self, number: int, name: str, layer: nn.Module) -> Callable[..., Any]:
        forward, recorder = layer.forward, self._recorder

        def run(*args: Any, **kwargs: Any) -> Any:
            with recorder.fake_mode, recorder:
                return forward(*args, **kwargs)

        def traced(*args: Any, **kwargs: Any) -> Any:
            if number <= self._last_called:
                raise ValueError(f"{name} does not run exactly once in a forward, so its tensors have no lifetimes")
            self._last_called = number
            if number not in self._chosen:
                recorder.part = _SKIPPED
                return self._last_output
            before = next(tensors_in(self._last_output), None)
            hidden = next(tensors_in((args, kwargs)), None)
            args, kwargs = tree_map_only(Tensor, recorder.to_fake, (args, kwargs))
            recorder.part, outside = (number, "forward"), recorder.block
            recorder.block = name
            if hidden is not None and hidden.requires_grad and hidden is not before:
                hidden.register_hook(self._enters((number, "below") if number else _END, ""))
            output = checkpoint(partial(run, **kwargs), *args, use_reentrant=False)
            recorder.part, recorder.block = (number, "after"), outside
            first = next(tensors_in(output), None)
            if first is not None and first.requires_grad:
                first.register_hook(self._enters((number, "backward"), name))
            self._last_output = output if number < self._last_chosen else None
            return output

        return traced

    def _enters(self, part: _PART, block: str) -> Callable[[Tensor], None]:
        recorder = self._recorder

        def enter(gradient: Tensor) -> None:
            recorder.part, recorder.block = part, block

        return enter


def _representatives(kinds: Sequence[Any]) -> list[int]:
    """Return for each layer the index of the first layer with the same kind and neighbours of the same kinds."""
    first: dict[Any, int] = {}
    padded = [None, *kinds, None]
    contexts = zip(padded, kinds, padded[2:], strict=False)
    return [first.setdefault(context, number) for number, context in enumerate(contexts)]


class _Composition:
    """Composes the step of all layers from the parts of the traced layers."""

    def __init__(self, recorder: _Recorder, representatives: Sequence[int], names: Sequence[str]) -> None:
        self._parts = recorder.parts
        self._representatives = representatives
        self._names = names
        self._num_uses = Counter(representatives)
        self._made: dict[_Birth, TensorLifetime] = {}
        self._step = StepTrace()

    def run(self) -> StepTrace:
        """Return the step. Raises `_DoesNotRepeat` if a part uses tensors that have no counterpart."""
        step, layers = self._step, list(enumerate(self._representatives))
        self._add(_BEGIN)
        for layer, traced in layers:
            self._add((layer, "forward"), traced)
            self._add((layer, "after"), traced)
        backward_begins = len(step.operations)
        self._add(_HEAD_BACKWARD)
        for layer, traced in reversed(layers):
            self._add((layer, "backward"), traced)
            self._add((layer, "below"), traced)
        self._add(_END)
        ends = len(step.operations)
        for tensor in step.tensors:
            tensor.died = min(tensor.died, ends)
            if tensor.kind != "gradient" and tensor.born < backward_begins < tensor.died:
                tensor.kind = "activation"
        return step

    def _add(self, key: _PART, traced: int | None = None) -> None:
        layer, part_name = key
        part = self._parts.get((traced, part_name))
        if part is None:  # a traced text does not pass through the layer
            return
        step, base = self._step, len(self._step.operations)
        for operation in part.operations:
            step.operations.append(replace(operation, block=self._named(operation.block, layer, traced)))
        for number, (at, name, num_bytes) in enumerate(part.births):
            block = step.operations[base + at].block
            tensor = TensorLifetime(name, block, "intermediate", num_bytes, base + at, _NEVER, [base + at])
            self._made[_Birth(key, number)] = tensor
            step.tensors.append(tensor)
        for at, birth in part.deaths:
            if (dead := self._counterpart(birth, layer, traced)) is not None:
                dead.died = base + at
        for at, birth in part.uses:
            used = self._counterpart(birth, layer, traced)
            if used is not None and used.uses[-1] != base + at:
                used.uses.append(base + at)
        for at, name in part.weight_uses:
            step.weight_uses.setdefault(self._named(name, layer, traced), []).append(base + at)
        for birth, name in part.gradients:
            if (gradient := self._counterpart(birth, layer, traced)) is not None:
                gradient.kind, gradient.name = "gradient", self._named(name, layer, traced)

    def _named(self, name: str, layer: int | None, traced: int | None) -> str:
        """Return the name in ``layer`` for the name ``name`` in the traced layer."""
        if layer is None or traced is None:
            return name
        own = self._names[traced]
        is_inside = name == own or name.startswith(f"{own}.")
        return self._names[layer] + name.removeprefix(own) if is_inside else name

    def _counterpart(self, birth: _Birth, layer: int | None, traced: int | None) -> TensorLifetime | None:
        """Return the tensor of ``layer`` for a tensor of the traced layer, or None if it was not traced."""
        of_layer, name = birth.part
        if birth.part == _SKIPPED:
            return None
        if of_layer is not None:
            if layer is not None and traced is not None and abs(of_layer - traced) <= 1:
                of_layer += layer - traced
            elif self._num_uses[of_layer] != 1:
                raise _DoesNotRepeat
        try:
            return self._made[_Birth((of_layer, name), birth.number)]
        except KeyError:
            raise _DoesNotRepeat from None


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
    weights have the name of its block. Raises ValueError if a layer runs more than once."""
    modules = modules_of(blocks)
    layers = {block.name: users[0] for block, users in modules.items() if block.size_class is SizeClass.LAYER}
    kinds, is_trained = (
        [],
        any(p.requires_grad for name, p in model.named_parameters() if not name.startswith(tuple(layers))),
    )
    for layer in layers.values():
        kinds.append((signature_of(layer), is_trained))
        is_trained = is_trained or any(parameter.requires_grad for parameter in layer.parameters())
    representatives = _representatives(kinds)
    chosen = sorted({near for one in representatives for near in (one - 1, one, one + 1) if 0 <= near < len(kinds)})
    shape = (batch_size, sequence_length)
    record = partial(_record, model, blocks, layers, shape, fused_attention, chunked_loss)
    try:
        return _Composition(record(chosen), representatives, list(layers)).run()
    except _DoesNotRepeat:
        every = range(len(kinds))
        return _Composition(record(every), every, list(layers)).run()


def _record(
    model: nn.Module,
    blocks: ModelBlocks,
    layers: Mapping[str, nn.Module],
    shape: tuple[int, int],
    fused_attention: bool,
    chunked_loss: ChunkedLoss | None,
    chosen: Sequence[int],
) -> _Recorder:
    """Run forward and backward with the ``chosen`` layers."""
    of_experts = {experts.module: experts for experts in find_experts(model).values()} if blocks.experts else {}
    with on_fake_tensors(model, torch.device("cpu")) as (fake_mode, tensors), contextlib.ExitStack() as stack:
        model.train()  # because dropout is part of a step
        weights = {name: tensors[name] for name, _ in model.named_parameters()}
        recorder = _Recorder(fake_mode, tensors)
        ids = torch.zeros(shape, dtype=torch.long)
        stack.enter_context(whole_logits(model))
        chunked_loss = chunked_loss and replace(chunked_loss, on_repeat=recorder.repeat)
        if (chunked_head := chunked_head_of(model, chunked_loss)) is not None:
            stack.callback(chunked_head.attach())
        if fused_attention:
            stack.enter_context(AttentionWithoutDropout())
        for block, users in modules_of(blocks).items():
            for module in users if block.size_class is not SizeClass.LAYER else ():
                stack.callback(module.register_forward_pre_hook(_enters_block(recorder, block.name)).remove)
        for name, weight in weights.items():
            if weight.requires_grad:
                stack.callback(weight.register_post_accumulate_grad_hook(_takes_gradient(recorder, name)).remove)
        for module, own in blocks.experts.items():
            computes = partial(recorder.compute_experts, [block.name for block in own])
            stack.enter_context(forward_replaced(module, forward_on_paper(of_experts[module], computes=computes)))
        stack.enter_context(_LayersOfStep(layers, chosen, recorder).replaced())
        stack.enter_context(recorder)
        step = _TracedStep(model, recorder)
        inputs = {"input_ids": ids, "labels": ids, "use_cache": False}
        functional_call(
            step, {f"model.{name}": tensor for name, tensor in tensors.items()}, kwargs=inputs, tie_weights=False
        )
    return recorder


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
