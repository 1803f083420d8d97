"""Runs a layer on some tokens at a time (MEMO's token-wise fraction), so that only a chunk's work is on the device.

Rows are cut from each other first. A row that is longer than a chunk is cut within: each chunk attends to the keys of
the chunks before it, as in generation with a cache. The backward runs each chunk again, last chunk first. It sums the
chunks' gradients of weights, keys and values in float32.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from hf_lohan.activations import anchor_name
from hf_lohan.activations.chunked_norms import ChunkedNorm
from hf_lohan.activations.layer_frame import LayerFrame, StoredTensor, is_random
from hf_lohan.activations.token_ranges import ChunkKeys, NotCuttableError, TokenRange, cut_batch
from hf_lohan.compat.torch_private import TorchDispatchMode, own_parameters, put_parameter, schema_of

logger = logging.getLogger(__name__)

_NUM_TRIED = 8
"""Tokens of the trial that compares a layer in two chunks with the whole layer."""


class _RandomOperations(TorchDispatchMode):
    """Finds operations that draw random numbers."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if is_random(func) and (anchor_name(func) is None or _dropout_of(func, args, kwargs) > 0):
            self.found = True
        return func(*args, **kwargs)


def _dropout_of(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    """Return the dropout of an attention kernel, which is marked as random even without dropout."""
    for position, argument in enumerate(schema_of(operation).arguments):
        if argument.name == "dropout_p":
            return float(kwargs.get("dropout_p", args[position] if position < len(args) else 0.0))
    return 1.0


class LayerInputs(Protocol):
    """The inputs of one forward of a layer, which can be cut."""

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
        """Return a context that returns what the model records of its modules, such as routers' logits, by name."""

    def add_recorded(self, outputs: Sequence[tuple[str, Tensor]]) -> None:
        """Give the model what it would have recorded of a forward of the whole layer."""


InputsOf: TypeAlias = Callable[[nn.Module, tuple[Any, ...], Mapping[str, Any]], tuple[Tensor | None, LayerInputs]]


class ChunkFrames(Protocol):
    """Makes the frames of a layer's chunks."""

    def begin_chunk(self, layer_name: str) -> LayerFrame | None:
        """Begin a chunk of a layer. None if everything is recomputed."""

    def begin_input(self, layer_name: str) -> LayerFrame | None:
        """Begin to store a layer's input. None if it stays on the device."""

    def end_layer(self, layer_name: str) -> None:
        """End a layer's forward."""


class ChunkedLayer:
    """Replaces a layer's forward by one that runs in chunks if the batch has more tokens than a chunk."""

    def __init__(
        self,
        layer: nn.Module,
        name: str,
        chunk_tokens: Callable[[], int | None],
        inputs_of: InputsOf,
        frames: ChunkFrames,
        on_cut: Callable[[], None] = lambda: None,
    ) -> None:
        """``chunk_tokens`` returns the tokens of a chunk, or None to run whole layers. ``on_cut`` is called when the
        layer has run in chunks."""
        self.layer = layer
        self.name = name
        self._chunk_tokens = chunk_tokens
        self._inputs_of = inputs_of
        self._frames = frames
        self._on_cut = on_cut
        self.is_whole = False
        """Whether the layer runs whole, for example to be traced."""
        self._before = vars(layer).get("forward")
        self.reason_on_paper: str | None = None
        """Why the last trace found the layer whole; completes "because each ..."."""
        self._reasons: dict[tuple[bool, bool], str | None] = {}
        """Why the layer stays whole, or None if it is cut, by whether rows are cut within and whether it trains. An
        evaluation draws no random numbers."""

    def attach(self) -> None:
        """Replace the layer's forward."""
        self._before = vars(self.layer).get("forward")  # a wrapper may have set it on the instance
        self.layer.forward = self.forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        run = self._run_of(args, kwargs)
        if run is None:
            return self.whole(*args, **kwargs)
        inputs, hidden, groups = run
        layer_run = LayerRun(self, inputs, groups, has_frames=torch.is_grad_enabled())
        output, *recorded = _Chunks.apply(layer_run, hidden, *layer_run.trained)  # type: ignore[no-untyped-call]
        inputs.add_recorded(list(zip(layer_run.recorded_names, recorded, strict=True)))
        self._on_cut()
        return layer_run.in_form(output)

    @property
    def reasons(self) -> list[str]:
        """Why the layer stays whole, in some case."""
        return [reason for reason in self._reasons.values() if reason is not None]

    def whole(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer on all tokens at once."""
        if self._before is not None:
            return self._before(*args, **kwargs)
        return type(self.layer).forward(self.layer, *args, **kwargs)

    def applies(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Return whether a call of the layer runs in chunks."""
        return self._run_of(args, kwargs) is not None

    def cut_on_paper(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], chunk_tokens: int
    ) -> tuple[LayerInputs, Tensor, list[list[TokenRange]]] | None:
        """Return inputs, hidden states and chunks of a call on fake tensors. None if the layer would run whole, as far
        as it shows without values."""
        self.reason_on_paper = None
        hidden, inputs = self._inputs_of(self.layer, args, kwargs)
        if hidden is None or hidden.dim() != 3 or hidden.shape[0] * hidden.shape[1] <= chunk_tokens:
            return None
        within_rows = hidden.shape[1] > chunk_tokens
        self.reason_on_paper = self._find_reason(hidden, inputs, within_rows=within_rows, on_paper=True)
        if self.reason_on_paper is not None:
            return None
        return inputs, hidden, cut_batch(hidden.shape[0], hidden.shape[1], chunk_tokens)

    def _run_of(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[LayerInputs, Tensor, list[list[TokenRange]]] | None:
        chunk_tokens = self._chunk_tokens()
        if chunk_tokens is None or self.is_whole:
            return None
        hidden, inputs = self._inputs_of(self.layer, args, kwargs)
        if hidden is None or hidden.dim() != 3 or hidden.shape[0] * hidden.shape[1] <= chunk_tokens:
            return None
        within_rows = hidden.shape[1] > chunk_tokens
        case = within_rows, any(module.training for module in self.layer.modules())
        if case not in self._reasons:
            self._reasons[case] = self._find_reason(hidden, inputs, within_rows=within_rows)
        if self._reasons[case] is not None:
            return None
        try:
            inputs.refuse(within_rows=within_rows)
        except NotCuttableError as error:
            self._log(str(error))
            return None
        return inputs, hidden, cut_batch(hidden.shape[0], hidden.shape[1], chunk_tokens)

    def _find_reason(
        self, hidden: Tensor, inputs: LayerInputs, *, within_rows: bool, on_paper: bool = False
    ) -> str | None:
        try:
            inputs.refuse(within_rows=within_rows)
            self._try(hidden, inputs, within_rows=within_rows, on_paper=on_paper)
        except NotCuttableError as error:
            self._log(str(error))
            return str(error)
        return None

    def _log(self, reason: str) -> None:
        message = "%s layers (such as %s) are not cut into chunks, because each %s"
        if (type(self.layer), reason) not in _logged:
            _logged.add((type(self.layer), reason))
            logger.info(message, type(self.layer).__name__, self.name, reason)

    def _try(self, hidden: Tensor, inputs: LayerInputs, *, within_rows: bool, on_paper: bool) -> None:
        """Raise NotCuttableError if the layer's outputs for some tokens differ when it runs in two chunks. On paper
        there are no values to compare."""
        num_rows, length = hidden.shape[0], min(hidden.shape[1], _NUM_TRIED)
        rows, tokens = (1, length) if within_rows else (min(2, num_rows), length)
        whole = [[TokenRange(0, rows, 0, tokens)]]
        halves = cut_batch(rows, tokens, -(-tokens // 2) if within_rows else tokens)
        fork: AbstractContextManager[None] = contextlib.nullcontext()
        if on_paper:
            tried = hidden.new_empty(rows, tokens, hidden.shape[2])
        else:
            generator = torch.Generator().manual_seed(0)
            # Small hidden states, because layers normalize them and add to them.
            tried = torch.randn(rows, tokens, hidden.shape[2], generator=generator).to(hidden) * 0.01
            devices = [hidden.device] if hidden.device.type != "cpu" else []
            fork = torch.random.fork_rng(devices, device_type=hidden.device.type if devices else "cuda")
        with fork, torch.no_grad(), _RandomOperations() as random:
            try:
                first = LayerRun(self, inputs, whole).forward(tried)[0]
                second = LayerRun(self, inputs, halves).forward(tried)[0]
            except NotCuttableError:
                raise
            except (AttributeError, NotImplementedError, TypeError) as error:
                raise NotCuttableError(f"uses its cache in another way ({error})") from error
            except RuntimeError as error:
                if type(error) is not RuntimeError:  # memory or the device failed
                    raise
                raise NotCuttableError(f"does not compute a part of its inputs ({error})") from error
        if random.found:
            raise NotCuttableError("draws random numbers")
        if on_paper:
            return
        change = (first - tried).float().norm()
        if not (first - second).float().norm() <= _tolerance(hidden.dtype) * change:
            raise NotCuttableError("mixes tokens in another way than by attention")


_logged: set[tuple[type, str]] = set()


class ChunkedLayers:
    """The layers of a model that may run in chunks."""

    def __init__(
        self,
        layers: Mapping[nn.Module, str],
        inputs_of: InputsOf,
        frames: ChunkFrames,
        masks_pending: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
        norms: Sequence[nn.Module] = (),
    ) -> None:
        """``layers`` has the name of each layer. ``inputs_of`` returns the hidden states and the other inputs of a
        call. In the context ``masks_pending``, a forward makes no masks of all pairs of tokens. ``norms``: norms
        outside the layers."""
        self.chunk_tokens: int | None = None
        """Tokens of a chunk. None runs whole layers."""
        self.masks_pending = masks_pending
        self._is_attached = False
        self.of_layer = {
            layer: ChunkedLayer(layer, name, lambda: self.chunk_tokens, inputs_of, frames, self.note_cut)
            for layer, name in layers.items()
        }
        self._local = threading.local()
        """Whether a layer has run in chunks in each thread's forward."""
        self.norms = [ChunkedNorm(norm, self._tokens_of_norms) for norm in norms]

    def reasons(self) -> list[str]:
        """Return why layers stay whole, each reason once. It completes "because each ..."."""
        found = (reason for chunked in self.of_layer.values() for reason in chunked.reasons)
        return list(dict.fromkeys(found))

    def begin_forward(self) -> None:
        """Begin a forward of the model on this thread."""
        self._local.is_cut = False

    def note_cut(self) -> None:
        """Note that a layer has run in chunks in this thread's forward."""
        self._local.is_cut = True

    @property
    def has_cut(self) -> bool:
        """Whether a layer has run in chunks in this thread's forward."""
        return getattr(self._local, "is_cut", False)

    def _tokens_of_norms(self) -> int | None:
        """Return the tokens of a norm's chunk. Norms before the layers, and after whole layers, run whole."""
        return self.chunk_tokens if self.has_cut else None

    def cut(self, chunk_tokens: int | None) -> None:
        """Run layers in chunks of this number of tokens from the next layer on. None runs whole layers. The first
        number replaces the layers' forwards."""
        self.chunk_tokens = chunk_tokens
        if chunk_tokens is not None and not self._is_attached:
            self._is_attached = True
            for chunked in self.of_layer.values():
                chunked.attach()
            for norm in self.norms:
                norm.attach()


@contextlib.contextmanager
def whole_layers(model: nn.Module) -> Iterator[None]:
    """Have the layers of a model run whole within this context."""
    replaced = [
        chunked
        for module in model.modules()
        if isinstance(chunked := getattr(vars(module).get("forward"), "__self__", None), ChunkedLayer)
    ]
    for chunked in replaced:
        chunked.is_whole = True
    try:
        yield
    finally:
        for chunked in replaced:
            chunked.is_whole = False


def _tolerance(dtype: torch.dtype) -> float:
    return 1e-3 if dtype.itemsize >= torch.float32.itemsize else 0.05


class LayerRun:
    """One forward of a layer in chunks, and its backward."""

    def __init__(
        self,
        chunked: ChunkedLayer,
        inputs: LayerInputs,
        groups: Sequence[Sequence[TokenRange]],
        *,
        has_frames: bool = False,
    ) -> None:
        self._chunked = chunked
        self._has_frames = has_frames
        self._inputs = inputs
        self._groups = groups
        self._form: Any = None
        self.recorded_names: list[str] = []
        """Names of what the model records of the layer."""
        self._is_flat: list[bool] = []
        """By recorded output, whether rows and tokens are one dimension."""
        self._frames: dict[TokenRange, LayerFrame] = {}
        self._input_frame: LayerFrame | None = None
        self._owners = _owners_of_trained(chunked.layer)
        self.trained = [_parameter_of(owners[0]) for owners in self._owners]
        """The layer's parameters with a gradient."""
        self._autocast_state: tuple[Any, ...] = ()

    # Forward.

    def forward(self, hidden: Tensor) -> list[Tensor]:
        """Return the output, and what was recorded."""
        kind = hidden.device.type
        self._autocast_state = (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
        frames, name = self._chunked._frames, self._chunked.name
        outputs: list[Tensor] = []
        for group in self._groups:
            cache = ChunkKeys(group[-1].stop) if len(group) > 1 else None
            for tokens in group:
                frame = frames.begin_chunk(name) if self._has_frames else None
                if frame is not None:
                    self._frames[tokens] = frame
                with frame.contexts()[0] if frame is not None else contextlib.nullcontext():
                    parts = self.call(hidden[tokens.index], tokens, cache)
                if not outputs:
                    outputs = [part.new_empty((*hidden.shape[:2], *part.shape[2:])) for part in parts]
                if [part.shape[2:] for part in parts] != [output.shape[2:] for output in outputs]:
                    raise NotCuttableError("returns other outputs for other tokens")
                for output, part in zip(outputs, parts, strict=True):
                    output[tokens.index] = part
                del parts
        return [
            outputs[0],
            *(o.flatten(0, 1) if flat else o for o, flat in zip(outputs[1:], self._is_flat, strict=True)),
        ]

    def store_input(self, hidden: Tensor) -> Tensor | StoredTensor:
        """Return what is kept of the layer's input."""
        frames, name = self._chunked._frames, self._chunked.name
        frame = self._input_frame = frames.begin_input(name) if self._has_frames else None
        stored = hidden if frame is None else frame.store_input(hidden)
        frames.end_layer(name)
        return stored

    def load_input(self, stored: StoredTensor) -> Tensor:
        assert self._input_frame is not None
        return self._input_frame.load_input(stored)

    def call(
        self, hidden: Tensor, tokens: TokenRange, cache: ChunkKeys | None, *, only_keys: bool = False
    ) -> list[Tensor]:
        """Return a chunk's output and what was recorded, [rows, tokens, ...]. ``only_keys``: run the layer only until
        ``cache`` has its keys, and return nothing."""
        with _without_checkpointing(self._chunked.layer), self._inputs.recording() as named:
            output = self._inputs.call(self._chunked.whole, hidden, tokens, cache, only_keys=only_keys)
        if only_keys:
            return []
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
            raise NotCuttableError("records outputs of another form")
        self._is_flat = [part.shape[:2] != shape for part in recorded]
        if any(flat and part.shape[0] != shape.numel() for flat, part in zip(self._is_flat, recorded, strict=True)):
            raise NotCuttableError("records outputs of another form")
        return [
            first,
            *(part.unflatten(0, shape) if flat else part for part, flat in zip(recorded, self._is_flat, strict=True)),
        ]

    def in_form(self, output: Tensor) -> Any:
        """Return the output as the layer returns it."""
        return output if self._form is None else type(self._form)((output, *self._form[1:]))

    # Backward.

    def backward(
        self, hidden: Tensor, gradients: Sequence[Tensor | None], *, needs_hidden: bool
    ) -> tuple[Tensor | None, list[Any]]:
        """Return the gradients of the hidden states and of the trained parameters. ``gradients`` are those of the
        output and of what was recorded."""
        shape, is_flat = hidden.shape[:2], [False, *self._is_flat]
        gradients = [
            of_output.unflatten(0, shape) if flat and of_output is not None else of_output
            for of_output, flat in zip(gradients, is_flat, strict=True)
        ]
        of_hidden = torch.empty_like(hidden) if needs_hidden else None
        kind, dtype, is_enabled = self._autocast_state
        sums: list[Tensor | None] = [None] * len(self._owners)
        with torch.autocast(kind, dtype=dtype, enabled=is_enabled), self._leaves(sums):
            for group in reversed(self._groups):
                cache = ChunkKeys(group[-1].stop) if len(group) > 1 else None
                if cache is not None:
                    with torch.no_grad():
                        for tokens in group[:-1]:
                            self.call(hidden[tokens.index], tokens, cache, only_keys=True)
                for tokens in reversed(group):
                    self._run_back(hidden, gradients, of_hidden, tokens, cache)
        of_trained: list[Tensor | None] = []
        for number, parameter in enumerate(self.trained):
            total, sums[number] = sums[number], None
            of_trained.append(None if total is None else total.to(parameter.dtype))
        return of_hidden, of_trained

    def _run_back(
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
        """Put leaves into the layer, whose gradients are added to ``sums`` in float32 as they come."""

        def add(number: int, leaf: Tensor) -> None:
            gradient, leaf.grad = leaf.grad, None
            assert gradient is not None
            total = sums[number]
            if total is None:
                sums[number] = gradient if self._num_chunks == 1 else gradient.float()
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

    @property
    def _num_chunks(self) -> int:
        return sum(map(len, self._groups))


class _Chunks(torch.autograd.Function):
    """A layer in chunks. The backward runs them again."""

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
