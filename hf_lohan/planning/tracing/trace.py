"""Traces one forward through a model's blocks. Equal layers are traced once."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from hf_lohan.compat.torch_private import (
    FakeTensor,
    FakeTensorMode,
    StorageWeakRef,
    storage_id,
    tree_flatten,
    tree_map_only,
    without_torch_function,
)
from hf_lohan.model.experts import FusedExperts
from hf_lohan.planning.tracing.chunk_trace import LayersOnPaper
from hf_lohan.planning.tracing.experts_on_paper import forward_on_paper
from hf_lohan.planning.tracing.operations import (
    AttentionWithoutDropout,
    BlockTrace,
    LiveBytes,
    OperationTrace,
    tensors_in,
)

logger = logging.getLogger(__name__)

_SCALARS = (bool, int, float, str, type(None))
_LAYER_NUMBERS = frozenset({"layer_idx", "layer_id", "layer_number"})
"""Attributes that differ between equal layers."""


class ModelTrace:
    """The traces of all blocks of one forward. `layers` are traced one by one under `fake_mode`, and `experts` in them
    are one operation. Operations outside the layers count for the block of the module in `outer` that was called last,
    so the loss counts for the head. Outside the layers, token ids, positions and masks are real tensors, because models
    read their values."""

    def __init__(
        self,
        fake_mode: FakeTensorMode,
        layers: Sequence[nn.Module],
        outer: Sequence[tuple[nn.Module, str]],
        weights: Mapping[str, Tensor],
        tensors: Mapping[str, Tensor],
        experts: Sequence[FusedExperts] = (),
        on_paper: LayersOnPaper | None = None,
        attention: AttentionWithoutDropout | None = None,
    ) -> None:
        self._fake_mode = fake_mode
        self._layers = layers
        self._on_paper = on_paper
        self._attention = attention
        self._outer_modules = outer
        self._experts = experts
        self.of_layer: dict[nn.Module, BlockTrace] = {}
        self.of_outer: dict[str, BlockTrace] = {name: BlockTrace() for _, name in outer}
        first = next(iter(self.of_outer.values()), BlockTrace())
        self._operations = OperationTrace(first, fake_mode, weights)
        self._traced_layers: dict[Any, tuple[BlockTrace, Any]] = {}
        self._for_all_layers: list[Tensor] = []
        """Masks and positions, which exist until the backward ends."""
        self._last_output: list[Tensor] = []
        self._weights = [*weights.values()]
        self._not_saved: dict[int, StorageWeakRef] = {}
        """Weights, layers' inputs and tensors that are already counted. The references keep their keys from being used
        again."""
        self._skip([*tensors.values()])

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for module, name in self._outer_modules:
                stack.callback(module.register_forward_pre_hook(self._enter_outer(self.of_outer[name])).remove)
            for layer in self._layers:
                stack.enter_context(forward_replaced(layer, self._layer_forward(layer)))
            for experts in self._experts:
                stack.enter_context(
                    forward_replaced(experts.module, forward_on_paper(experts, self._operations.add_experts))
                )
            stack.enter_context(saved_tensors_hooks(self._save, lambda tensor: tensor))
            stack.enter_context(self._operations)
            # Graphs refer to the hook `_save`. With the graphs' tensors this is a cycle that the garbage collector
            # cannot see.
            stack.callback(self._not_saved.clear)
            stack.callback(self._traced_layers.clear)
            yield

    def repeat(self, times: int) -> None:
        """Count each of the next operations ``times`` times."""
        self._operations.target.times = times

    def _enter_outer(self, trace: BlockTrace) -> Callable[[nn.Module, Any], None]:
        def enter(module: nn.Module, args: Any) -> None:
            self._operations.target = trace

        return enter

    def _layer_forward(self, layer: nn.Module) -> Callable[..., Any]:
        forward = layer.forward

        def traced(*args: Any, **kwargs: Any) -> Any:
            kind = (signature_of(layer), _signature_of_inputs(args, kwargs))
            if kind not in self._traced_layers:
                with without_torch_function() if self._on_paper is not None else contextlib.nullcontext():
                    self._traced_layers[kind] = self._trace_layer(layer, forward, args, kwargs)
            self.of_layer[layer], output = self._traced_layers[kind]
            self._last_output = list(tensors_in(output))
            return output

        return traced

    def _trace_layer(
        self, layer: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any
    ) -> tuple[BlockTrace, Any]:
        self._for_all_layers += list(tensors_in((args, kwargs)))[1:]
        # A mask that is not yet computed stays a function for a layer in chunks.
        in_parts = tree_map_only(
            Tensor, lambda tensor: tensor if _is_function(tensor) else self._to_fake(tensor), (args, kwargs)
        )
        cut = None if self._on_paper is None else self._cut(self._on_paper, layer, *in_parts)
        args, kwargs = in_parts if cut is not None else tree_map_only(Tensor, self._to_fake, (args, kwargs))
        inputs = list(tensors_in((args, kwargs)))
        self._skip(inputs)
        trace = BlockTrace(input_bytes=inputs[0].nbytes if inputs else 0)
        outside, self._operations.target = self._operations.target, trace
        live, self._operations.live = self._operations.live, LiveBytes()
        try:
            with self._module_names(layer), self._fake_mode, self._operations:
                if cut is not None:
                    output = cut(self._operations)
                else:
                    output = forward(*args, **kwargs)
                    for fused in trace.fused.values():
                        fused.end(output)
                    self._trace_backward(list(tensors_in(output)), [*inputs, *layer.parameters()])
                trace.working_bytes += sum(tensor.untyped_storage().nbytes() for tensor in inputs[1:])
            return trace, tree_map_only(Tensor, _cut_off, output)
        finally:
            self._operations.target, self._operations.live = outside, live

    def _cut(
        self, on_paper: LayersOnPaper, layer: nn.Module, args: Any, kwargs: Any
    ) -> Callable[[OperationTrace], Any] | None:
        """Return a function that traces a layer in chunks; None if it runs whole."""
        with contextlib.ExitStack() as stack:
            if self._attention is not None:
                stack.enter_context(self._attention.with_dropout())
            stack.enter_context(self._operations.uncounted())
            stack.enter_context(self._fake_mode)
            return on_paper.cut(layer, args, kwargs)

    def trace_loss(self, loss: Tensor) -> None:
        """Trace the backward from the loss to the last layer's output."""
        self._trace_backward([loss], [*self._last_output, *self._weights])
        if self._operations.target.working_bytes:
            # No layer counts the output as its input.
            input_bytes = sum(tensor.untyped_storage().nbytes() for tensor in self._last_output)
            self._operations.target.working_bytes += input_bytes

    def _trace_backward(self, outputs: list[Tensor], inputs: list[Tensor]) -> None:
        """Record the peak memory of a block's forward and backward, with the gradients of all its weights. A backward
        that cannot be traced counts no memory."""
        operations = self._operations
        operations.is_in_backward = True
        try:
            roots = [output for output in outputs if output.requires_grad]
            torch.autograd.grad(
                roots,
                [tensor for tensor in inputs if tensor.requires_grad],
                [torch.empty_like(root) for root in roots],
                allow_unused=True,
            )
            operations.target.working_bytes = max(operations.target.working_bytes, operations.live.peak_bytes)
        except (RuntimeError, NotImplementedError, TypeError) as error:
            logger.info("a backward cannot be traced, so the plan does not count its memory: %s", error)
        finally:
            operations.is_in_backward = False

    def _skip(self, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            self._not_saved[storage_id(tensor)] = StorageWeakRef(tensor.untyped_storage())

    def _to_fake(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, FakeTensor):
            return tensor
        if _is_function(tensor):
            with self._fake_mode:
                return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        return self._fake_mode.from_tensor(tensor)

    @contextlib.contextmanager
    def _module_names(self, layer: nn.Module) -> Iterator[None]:
        names: list[str] = []

        def enter(name: str) -> Callable[[nn.Module, Any], None]:
            def hook(module: nn.Module, args: Any) -> None:
                names.append(self._operations.module)
                self._operations.module = name

            return hook

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            self._operations.module = names.pop()

        with contextlib.ExitStack() as stack:
            stack.callback(setattr, self._operations, "module", "")
            for name, module in layer.named_modules():
                if module is not layer:
                    stack.callback(module.register_forward_pre_hook(enter(name)).remove)
                    stack.callback(module.register_forward_hook(leave).remove)
            yield

    def _save(self, tensor: Tensor) -> Tensor:
        key, trace = storage_id(tensor), self._operations.target
        trace.num_run_again = len(trace.operations)
        if key not in self._not_saved:
            self._skip([tensor])
            trace.saved[key] = tensor.untyped_storage().nbytes()
            trace.saved_bytes += trace.saved[key]
        return tensor


def _is_function(tensor: Tensor) -> bool:
    """Return whether a tensor's class is a subclass of Tensor that computes values when they are needed."""
    return not isinstance(tensor, FakeTensor | nn.Parameter) and type(tensor) is not Tensor


def _cut_off(output: Tensor) -> Tensor:
    """Return the tensor without its graph."""
    return output.detach().requires_grad_(output.requires_grad)


@contextlib.contextmanager
def forward_replaced(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    previous = vars(module).get("forward")  # a wrapper may have set `forward` on the instance
    module.forward = forward
    try:
        yield
    finally:
        if previous is None:
            del module.forward
        else:
            module.forward = previous


def signature_of(layer: nn.Module) -> tuple[Any, ...]:
    """Return a key that is equal for layers that compute the same outputs from the same inputs."""
    modules = []
    for name, module in layer.named_modules():
        settings = {key: value for key, value in vars(module).items() if key not in _LAYER_NUMBERS}
        scalars = sorted((key, repr(value)) for key, value in settings.items() if isinstance(value, _SCALARS))
        modules.append((name, type(module).__qualname__, tuple(scalars)))
    parameters = tuple((name, *_tensor_signature(parameter)) for name, parameter in layer.named_parameters())
    buffers = tuple((name, *_tensor_signature(buffer)) for name, buffer in layer.named_buffers())
    return tuple(modules), parameters, buffers


def _signature_of_inputs(args: Any, kwargs: Any) -> tuple[Any, ...]:
    leaves, structure = tree_flatten((args, kwargs))
    forms: list[Any] = [str(structure)]
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            forms.append((_tensor_signature(leaf), leaf.stride()))
        else:
            forms.append(repr(leaf) if isinstance(leaf, _SCALARS) else type(leaf).__qualname__)
    return tuple(forms)


def _tensor_signature(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.dtype, tensor.requires_grad
