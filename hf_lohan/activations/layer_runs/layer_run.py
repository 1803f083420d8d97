"""Runs one forward of a layer in chunks, and its backward, which runs each chunk again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from hf_lohan.activations.layer_frame import LayerFrame, StoredTensor
from hf_lohan.activations.layer_runs.module_state import ModuleState, RandomNumbers
from hf_lohan.activations.token_ranges import ChunkKeys, Empty, NotCuttableError, TokenRange, new_empty
from hf_lohan.compat.torch_private import own_parameters, put_parameter


class LayerInputs(Protocol):
    """The inputs of one forward of a layer. They can be cut."""

    def refuse(self, *, within_rows: bool) -> None:
        """Raise NotCuttableError if some input cannot be cut."""

    def call(
        self,
        forward: Callable[..., Any],
        hidden: Tensor,
        tokens: TokenRange,
        cache: ChunkKeys | None,
        *,
        only_keys: bool = False,
    ) -> Any:
        """Return the output of ``forward`` for a chunk, whose hidden states are ``hidden``."""

    def recording(self) -> AbstractContextManager[list[tuple[str, Tensor]]]:
        """Return a context with the (name, output) pairs that the model records, such as the logits of routers."""

    def add_recorded(self, outputs: Sequence[tuple[str, Tensor]]) -> None:
        """Give the model the outputs that it would have recorded in a forward of the whole layer."""


class ChunkFrames(Protocol):
    """Makes the frames of a layer's chunks."""

    def begin_chunk(self, layer_name: str) -> LayerFrame | None:
        """Begin a chunk of a layer. None if everything is recomputed."""

    def begin_input(self, layer_name: str) -> LayerFrame | None:
        """Begin to store a layer's input. None if it stays on the device."""

    def empty(self, shape: Sequence[int], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Allocate a contiguous tensor. See `Empty`."""

    def end_layer(self, layer_name: str) -> None:
        """End a layer's forward."""


class CutLayer(Protocol):
    """A layer that runs in chunks."""

    layer: nn.Module
    name: str
    frames: ChunkFrames | None
    """None if the layer is only traced."""

    def whole(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer's own forward."""


class LayerRun:
    """One forward of a layer in chunks, and its backward."""

    def __init__(
        self,
        layer: CutLayer,
        inputs: LayerInputs,
        groups: Sequence[Sequence[TokenRange]],
        state: ModuleState | None = None,
        *,
        runs_again: bool = False,
    ) -> None:
        """``state``: the state before the forward, which all chunks read. Without it, as in a trace, chunks read the
        state that earlier chunks have left. ``runs_again``: a backward will run the chunks again."""
        self._layer = layer
        self._state = state
        self._has_run = False
        """Whether a chunk has run. The first chunk changes the state as a forward of the whole layer does."""
        self._random: dict[TokenRange, RandomNumbers] = {}
        """The state of the random generators before each chunk's forward."""
        self._runs_again = runs_again
        self._chunk_frames = layer.frames if runs_again else None
        self._empty: Empty = new_empty if self._chunk_frames is None else self._chunk_frames.empty
        self._inputs = inputs
        self._groups = groups
        self._form: Any = None
        self.recorded_names: list[str] = []
        """Names of the outputs that the model records from the layer."""
        self._is_flat: list[bool] = []
        """Whether rows and tokens are one dimension, for each recorded output."""
        self._frames: dict[TokenRange, LayerFrame] = {}
        self._input_frame: LayerFrame | None = None
        self._owners = _owners_of_trained(layer.layer)
        self.trained = [_parameter_of(owners[0]) for owners in self._owners]
        """The layer's parameters with a gradient."""
        if any(type(tensor) is Tensor for tensor in self.trained):
            raise ValueError(
                f"{layer.name} was called with other tensors in place of its parameters, as torch.func.functional_call "
                "does, which layers in chunks do not use in the backward; set chunks.layers: false"
            )
        self._autocast_state: tuple[Any, ...] = ()

    # Forward.

    def forward(self, hidden: Tensor) -> list[Tensor]:
        """Return the output, and the recorded outputs."""
        kind = hidden.device.type
        self._autocast_state = (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
        frames = self._chunk_frames
        outputs: list[Tensor] = []
        for group in self._groups:
            cache = self.begin_group(hidden, group)
            for tokens in group:
                frame = None if frames is None else frames.begin_chunk(self._layer.name)
                if frame is not None:
                    self._frames[tokens] = frame
                with frame.contexts()[0] if frame is not None else contextlib.nullcontext():
                    parts = self.call(hidden[tokens.index], tokens, cache)
                if not outputs:
                    outputs = [self._empty((*hidden.shape[:2], *part.shape[2:]), part) for part in parts]
                if [part.shape[2:] for part in parts] != [output.shape[2:] for output in outputs]:
                    raise NotCuttableError("returns outputs of different shapes for different chunks")
                for output, part in zip(outputs, parts, strict=True):
                    output[tokens.index] = part
                del parts
        return [
            outputs[0],
            *(o.flatten(0, 1) if flat else o for o, flat in zip(outputs[1:], self._is_flat, strict=True)),
        ]

    def begin_group(self, hidden: Tensor, group: Sequence[TokenRange]) -> ChunkKeys | None:
        """Return the stand-in for the cache of a group of rows. None if each of its chunks has whole rows."""
        return ChunkKeys(group[-1].stop, self._empty) if len(group) > 1 else None

    def store_input(self, hidden: Tensor) -> Tensor | StoredTensor:
        """Return the object that is kept for the layer's input."""
        frames, name = self._chunk_frames, self._layer.name
        frame = self._input_frame = None if frames is None else frames.begin_input(name)
        stored = hidden if frame is None else frame.store_saved(hidden)
        if self._layer.frames is not None:
            self._layer.frames.end_layer(name)
        return stored

    def load_input(self, stored: StoredTensor) -> Tensor:
        assert self._input_frame is not None
        return self._input_frame.load_saved(stored)

    def call(
        self, hidden: Tensor, tokens: TokenRange, cache: ChunkKeys | None, *, only_keys: bool = False
    ) -> list[Tensor]:
        """Return a chunk's output and its recorded outputs, [rows, tokens, ...]. ``only_keys``: run the layer only
        until ``cache`` has its keys, and return nothing."""
        with contextlib.ExitStack() as stack:
            if self._state is not None and (self._has_run or only_keys):
                stack.enter_context(self._state.restored())
            if tokens in self._random:
                stack.enter_context(self._random[tokens].again())
            elif self._runs_again:
                self._random[tokens] = RandomNumbers(hidden)
            stack.enter_context(_without_checkpointing(self._layer.layer))
            named = stack.enter_context(self._inputs.recording())
            output = self._inputs.call(self._layer.whole, hidden, tokens, cache, only_keys=only_keys)
        if only_keys:
            return []
        self._has_run = True
        if cache is not None and not cache.num_updates:
            raise NotCuttableError("has no keys and values")
        first = output[0] if isinstance(output, tuple | list) and output else output
        rest = output[1:] if isinstance(output, tuple | list) else ()
        shape = hidden.shape[:2]
        if not isinstance(first, Tensor) or any(part is not None for part in rest) or first.shape[:2] != shape:
            raise NotCuttableError("returns more than hidden states")
        self._form = type(output)((None, *rest)) if isinstance(output, tuple | list) else None
        self.recorded_names, recorded = [name for name, _ in named], [part for _, part in named]
        if not all(isinstance(part, Tensor) for part in recorded):
            raise NotCuttableError("records outputs of unsupported shape")
        self._is_flat = [part.shape[:2] != shape for part in recorded]
        if any(flat and part.shape[0] != shape.numel() for flat, part in zip(self._is_flat, recorded, strict=True)):
            raise NotCuttableError("records outputs of unsupported shape")
        return [
            first,
            *(part.unflatten(0, shape) if flat else part for part, flat in zip(recorded, self._is_flat, strict=True)),
        ]

    def in_form(self, output: Tensor) -> Any:
        """Return the output in the form in which the layer returns it."""
        return output if self._form is None else type(self._form)((output, *self._form[1:]))

    # Backward.

    def backward(
        self, hidden: Tensor, gradients: Sequence[Tensor | None], *, needs_hidden: bool
    ) -> tuple[Tensor | None, list[Any]]:
        """Return the gradients of the hidden states and of the trained parameters. ``gradients`` are for the output and
        the recorded outputs."""
        shape, is_flat = hidden.shape[:2], [False, *self._is_flat]
        gradients = [
            of_output.unflatten(0, shape) if flat and of_output is not None else of_output
            for of_output, flat in zip(gradients, is_flat, strict=True)
        ]
        of_hidden: Tensor | None = None
        if needs_hidden:
            of_hidden = self._empty(hidden.shape, hidden) if hidden.is_contiguous() else torch.empty_like(hidden)
        kind, dtype, is_enabled = self._autocast_state
        sums: list[Tensor | None] = [None] * len(self._owners)
        with torch.autocast(kind, dtype=dtype, enabled=is_enabled), self._leaves(sums):
            for group in reversed(self._groups):
                self.run_group_back(hidden, gradients, of_hidden, group)
        of_trained: list[Tensor | None] = []
        for number, parameter in enumerate(self.trained):
            total, sums[number] = sums[number], None
            of_trained.append(None if total is None else total.to(parameter.dtype))
        return of_hidden, of_trained

    def run_group_back(
        self,
        hidden: Tensor,
        gradients: Sequence[Tensor | None],
        of_hidden: Tensor | None,
        group: Sequence[TokenRange],
    ) -> None:
        """Rerun a group's forward and backward. Writes the gradients of its hidden states to ``of_hidden``."""
        cache = self.begin_group(hidden, group)
        if cache is not None:
            with torch.no_grad():
                for tokens in group[:-1]:
                    self.call(hidden[tokens.index], tokens, cache, only_keys=True)
        for tokens in reversed(group):
            self.run_back(hidden, gradients, of_hidden, tokens, cache)

    def run_back(
        self,
        hidden: Tensor,
        gradients: Sequence[Tensor | None],
        of_hidden: Tensor | None,
        tokens: TokenRange,
        cache: ChunkKeys | None,
    ) -> None:
        chunk = hidden[tokens.index].detach().requires_grad_(of_hidden is not None)
        frame = self._frames.get(tokens)
        with torch.enable_grad():
            with frame.recomputing() if frame is not None else contextlib.nullcontext():
                outputs = self.call(chunk, tokens, cache)
            roots = [
                (output, of_output[tokens.index])
                for output, of_output in zip(outputs, gradients, strict=True)
                if output.requires_grad and of_output is not None
            ]
            if roots:
                torch.autograd.backward([output for output, _ in roots], [of_output for _, of_output in roots])
        if of_hidden is not None:
            of_hidden[tokens.index] = 0 if chunk.grad is None else chunk.grad

    @contextlib.contextmanager
    def _leaves(self, sums: list[Tensor | None]) -> Iterator[None]:
        """Replace the layer's parameters with leaves. Their gradients are added to ``sums`` in float32."""

        def add(number: int, leaf: Tensor) -> None:
            gradient, leaf.grad = leaf.grad, None
            if gradient is None:  # autograd calls this also for a leaf whose part of the graph has no gradient
                return
            total = sums[number]
            if total is None:
                is_sum = self.num_backwards == 1 or gradient.dtype == torch.float32
                sums[number] = gradient if is_sum else self._in_float32(gradient)
            else:
                total += gradient

        before: list[tuple[nn.Module, str, nn.Parameter]] = []
        try:
            for number, owners in enumerate(self._owners):
                parameter = _parameter_of(owners[0])
                leaf = nn.Parameter(parameter.data)
                leaf.register_post_accumulate_grad_hook(lambda leaf, number=number: add(number, leaf))
                for module, name in owners:
                    before.append((module, name, parameter))
                    put_parameter(module, name, leaf)
            yield
        finally:
            for module, name, parameter in before:
                put_parameter(module, name, parameter)

    def _in_float32(self, gradient: Tensor) -> Tensor:
        with torch.no_grad():
            return self._empty(gradient.shape, gradient, torch.float32).copy_(gradient)

    @property
    def num_backwards(self) -> int:
        """Number of gradients that a parameter may get."""
        return sum(map(len, self._groups))


class RunInChunks(torch.autograd.Function):
    """A layer in chunks. The backward runs the chunks again."""

    @staticmethod
    def forward(ctx: Any, run: LayerRun, hidden: Tensor, *_trained: Tensor) -> tuple[Tensor, ...]:
        ctx.layer_run = run
        ctx.set_materialize_grads(False)
        outputs = run.forward(hidden)
        stored = run.store_input(hidden)
        ctx.stored = None if stored is hidden else stored
        if stored is hidden:
            ctx.save_for_backward(hidden)
        ctx.mark_non_differentiable(*(output for output in outputs if not output.is_floating_point()))
        return tuple(outputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        if all(gradient is None for gradient in gradients):
            return (None,) * len(ctx.needs_input_grad)
        run: LayerRun = ctx.layer_run
        hidden = ctx.saved_tensors[0] if ctx.stored is None else run.load_input(ctx.stored)
        of_hidden, of_trained = run.backward(hidden, gradients, needs_hidden=ctx.needs_input_grad[1])
        return (None, of_hidden, *of_trained)


def _owners_of_trained(layer: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """Return the modules and names of each parameter of a layer that gets a gradient."""
    owners: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in layer.modules():
        for name, parameter in own_parameters(module):
            if parameter.requires_grad:
                owners.setdefault(parameter, []).append((module, name))
    return list(owners.values())


def _parameter_of(owner: tuple[nn.Module, str]) -> nn.Parameter:
    return dict(own_parameters(owner[0]))[owner[1]]


@contextlib.contextmanager
def _without_checkpointing(layer: nn.Module) -> Iterator[None]:
    """Have the layer run without checkpointing, because its chunks are run again anyway."""
    settings = vars(layer)
    before = settings.get("gradient_checkpointing")
    if before:
        settings["gradient_checkpointing"] = False
    try:
        yield
    finally:
        if before:
            settings["gradient_checkpointing"] = before
