"""Runs a layer on some tokens at a time (MEMO's token-wise fraction), so that only a chunk's work is on the device.

A batch is split between rows first. A row that is longer than a chunk is split within the row: each chunk attends to
the keys of the chunks before it, as in generation with a cache. The backward runs each chunk again, last chunk first.
It sums the chunks' gradients of weights, keys and values in float32.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from hf_lohan.activations.chunked_norms import ChunkedNorm
from hf_lohan.activations.layer_frame import is_random
from hf_lohan.activations.layer_runs.layer_run import ChunkFrames, LayerInputs, LayerRun, RunInChunks
from hf_lohan.activations.layer_runs.module_state import ModuleState, state_kept
from hf_lohan.activations.layer_runs.shared_rows import RowsOfRanks, SharedRun
from hf_lohan.activations.token_ranges import NotCuttableError, TokenRange, cut_batch
from hf_lohan.compat.torch_private import TorchDispatchMode, schema_of

logger = logging.getLogger(__name__)

_NUM_TRIED = 8
"""Number of tokens in the trial that compares a layer in two chunks with the whole layer."""


class _EvenDraws(TorchDispatchMode):
    """Replaces random numbers by equal numbers, so that the outputs of two runs can be compared."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shapes: list[torch.Size] = []
        """Shapes of the drawn tensors."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not is_random(func):
            return func(*args, **kwargs)
        schema = schema_of(func)
        if len(schema.returns) > 1:  # a kernel with dropout; attention kernels are tagged as random even without it
            names = [argument.name for argument in schema.arguments]
            kwargs = {**dict(zip(names, args, strict=False)), **kwargs}
            name = "dropout_p" if "dropout_p" in names else "p"
            dropout = kwargs.get(name, 0.0)
            first, *rest = func(**{**kwargs, name: 0.0})
            self.shapes += [first.shape] if dropout > 0 else []
            return first, *rest
        drawn = func(*args, **kwargs)
        if not drawn.is_floating_point() and drawn.dtype != torch.bool:
            raise NotCuttableError("draws random indices")
        self.shapes.append(drawn.shape)
        return drawn.fill_(0.5)


def _draws_for_tokens(whole: Sequence[torch.Size], parts: Sequence[torch.Size], shares: Sequence[float]) -> bool:
    """Return whether each draw is for tokens, and not for rows or layers. ``whole``: shapes of the draws for all
    tokens. ``parts``: shapes of the draws for consecutive parts. ``shares``: the fraction of each part."""

    def is_for_tokens(of_all: torch.Size, of_part: torch.Size, share: float) -> bool:
        return len(of_all) == len(of_part) and any(
            part < size and part == round(size * share) for size, part in zip(of_all, of_part, strict=True)
        )

    expected = [(shape, share) for share in shares for shape in whole]
    return len(parts) == len(expected) and all(
        is_for_tokens(of_all, of_part, share) for (of_all, share), of_part in zip(expected, parts, strict=True)
    )


InputsOf: TypeAlias = Callable[[nn.Module, tuple[Any, ...], Mapping[str, Any]], tuple[Tensor | None, LayerInputs]]


class ChunkedLayer:
    """Replaces a layer's forward. The new forward runs in chunks if the batch has more tokens than a chunk."""

    def __init__(
        self,
        layer: nn.Module,
        name: str,
        chunk_tokens: Callable[[], int | None],
        inputs_of: InputsOf,
        frames: ChunkFrames | None,
        on_cut: Callable[[], None] = lambda: None,
    ) -> None:
        """``chunk_tokens`` returns the number of tokens in a chunk, or None to run whole layers. ``on_cut`` is called
        when the layer has run in chunks."""
        self.layer = layer
        self.name = name
        self._chunk_tokens = chunk_tokens
        self._inputs_of = inputs_of
        self.frames = frames
        self._on_cut = on_cut
        self.shared_rows: Callable[[], RowsOfRanks | None] = lambda: None
        """Returns the rows of the running forward whose other tokens are on other ranks. None if rows are whole."""
        self.is_whole = False
        """Whether the layer runs whole, for example to be traced."""
        self._before = vars(layer).get("forward")
        self.reason_on_paper: str | None = None
        """Why the layer cannot be cut, in the last trace on fake tensors. The text completes "because each ..."."""
        self._reasons: dict[tuple[bool, bool], str | None] = {}
        """Maps (whether rows are split, whether the layer trains) to the reason why the layer stays whole, or to None
        if it is cut. An evaluation draws no random numbers."""
        self._reasons_on_paper: dict[tuple[Any, ...], str | None] = {}
        """The reasons found by traces. Keys are the tried sizes, the dtype and the device."""

    def attach(self) -> None:
        """Replace the layer's forward."""
        self._before = vars(self.layer).get("forward")  # a wrapper may have set `forward` on the instance
        self.layer.forward = self.forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        run = self._run_of(args, kwargs)
        if run is None:
            return self.whole(*args, **kwargs)
        inputs, hidden, groups = run
        state, rows, runs_again = ModuleState(self.layer), self.shared_rows(), torch.is_grad_enabled()
        layer_run = (
            LayerRun(self, inputs, groups, state, runs_again=runs_again)
            if rows is None
            else SharedRun(self, inputs, groups, state, rows, runs_again=runs_again)
        )
        output, *recorded = RunInChunks.apply(layer_run, hidden, *layer_run.trained)  # type: ignore[no-untyped-call]
        inputs.add_recorded(list(zip(layer_run.recorded_names, recorded, strict=True)))
        self._on_cut()
        return layer_run.in_form(output)

    @property
    def reasons(self) -> list[str]:
        """The reasons why the layer stays whole in some cases."""
        return [reason for reason in self._reasons.values() if reason is not None]

    def whole(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer on all tokens at once."""
        if self._before is not None:
            return self._before(*args, **kwargs)
        return type(self.layer).forward(self.layer, *args, **kwargs)

    def run_whole(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function that runs the layer, and have the layer run whole meanwhile."""
        before, self.is_whole = self.is_whole, True
        try:
            return function(*args)
        finally:
            self.is_whole = before

    def applies(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Return whether a call of the layer runs in chunks."""
        return self._run_of(args, kwargs) is not None

    def cut_on_paper(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], chunk_tokens: int
    ) -> tuple[LayerInputs, Tensor, list[list[TokenRange]]] | None:
        """Return inputs, hidden states and chunks of a call on fake tensors. None if the layer would run whole, as far
        as fake tensors show this."""
        self.reason_on_paper = None
        hidden, inputs = self._inputs_of(self.layer, args, kwargs)
        if hidden is None or hidden.dim() != 3 or hidden.shape[0] * hidden.shape[1] <= chunk_tokens:
            return None
        within_rows = hidden.shape[1] > chunk_tokens
        tried = within_rows, min(2, hidden.shape[0]), min(hidden.shape[1], _NUM_TRIED), hidden.dtype, hidden.device
        if tried not in self._reasons_on_paper:
            self._reasons_on_paper[tried] = self._find_reason(hidden, inputs, within_rows=within_rows, on_paper=True)
        self.reason_on_paper = self._reasons_on_paper[tried]
        if self.reason_on_paper is not None:
            return None
        return inputs, hidden, cut_batch(hidden.shape[0], hidden.shape[1], chunk_tokens)

    def _run_of(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[LayerInputs, Tensor, list[list[TokenRange]]] | None:
        chunk_tokens, shared = self._chunk_tokens(), self.shared_rows()
        if (chunk_tokens is None and shared is None) or self.is_whole:
            return None
        hidden, inputs = self._inputs_of(self.layer, args, kwargs)
        if shared is not None:
            return self._run_of_shared(shared, hidden, inputs)
        assert chunk_tokens is not None
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

    def _run_of_shared(
        self, shared: RowsOfRanks, hidden: Tensor | None, inputs: LayerInputs
    ) -> tuple[LayerInputs, Tensor, list[list[TokenRange]]]:
        """Return inputs, hidden states and chunks of a call for this rank's tokens. Raises ValueError if the layer
        needs all tokens of a row."""
        reason: str | None = "has inputs of unsupported shape"
        if hidden is not None and hidden.dim() == 3 and hidden.shape[1] == shared.pieces.num_tokens:
            case = True, any(module.training for module in self.layer.modules())
            if case not in self._reasons:
                self._reasons[case] = self._find_reason(hidden, inputs, within_rows=True, may_draw=False)
            reason = self._reasons[case]
        if hidden is None or reason is not None:
            raise ValueError(
                f"ranks.per_row cannot divide the tokens of {type(self.layer).__name__} layers (such as {self.name}) "
                f"among ranks, because each {reason}; leave ranks.per_row out"
            )
        return inputs, hidden, shared.pieces.cut(hidden.shape[0], self._chunk_tokens())

    def _find_reason(
        self, hidden: Tensor, inputs: LayerInputs, *, within_rows: bool, may_draw: bool = True, on_paper: bool = False
    ) -> str | None:
        try:
            inputs.refuse(within_rows=within_rows)
            self._try(hidden, inputs, within_rows=within_rows, may_draw=may_draw, on_paper=on_paper)
        except NotCuttableError as error:
            self._log(str(error))
            return str(error)
        return None

    def _log(self, reason: str) -> None:
        message = "%s layers (such as %s) are not cut into chunks, because each %s"
        if (type(self.layer), reason) not in _logged:
            _logged.add((type(self.layer), reason))
            logger.info(message, type(self.layer).__name__, self.name, reason)

    def _try(self, hidden: Tensor, inputs: LayerInputs, *, within_rows: bool, may_draw: bool, on_paper: bool) -> None:
        """Raise NotCuttableError if the layer's outputs differ in two chunks, if it draws random numbers for something
        other than tokens, or if it changes its tensors. ``on_paper``: with fake tensors, which have no values to
        compare."""
        num_rows, length = hidden.shape[0], min(hidden.shape[1], _NUM_TRIED)
        rows, tokens = (1, length) if within_rows else (min(2, num_rows), length)
        whole = [[TokenRange(0, rows, 0, tokens)]]
        halves = cut_batch(rows, tokens, -(-tokens // 2) if within_rows else tokens)
        kept: AbstractContextManager[None] = contextlib.nullcontext()  # a trace keeps the whole model's state
        if on_paper:
            tried = hidden.new_empty(rows, tokens, hidden.shape[2])
        else:
            generator = torch.Generator().manual_seed(0)
            # Hidden states are small, so that the residual sum rounds the layer's output less. Layers normalize them.
            tried = torch.randn(rows, tokens, hidden.shape[2], generator=generator).to(hidden) * 0.01
            kept = state_kept(self.layer, hidden.device)

        def run(groups: Sequence[Sequence[TokenRange]]) -> tuple[Tensor, list[torch.Size]]:
            with torch.no_grad(), _EvenDraws() as draws:
                output = LayerRun(self, inputs, groups).forward(tried)[0]
            return output, draws.shapes

        def unchanged(groups: Sequence[Sequence[TokenRange]]) -> tuple[Tensor, list[torch.Size]]:
            state = ModuleState(self.layer)
            with state.restored():
                found = run(groups)
                if (name := state.changed_tensor()) is not None:
                    raise NotCuttableError(f"changes {name}")
            return found

        with kept:
            try:
                first, drawn = (run if on_paper else unchanged)(whole)
                second, drawn_again = (run if on_paper else unchanged)(halves)
            except NotCuttableError:
                raise
            except (AttributeError, NotImplementedError, TypeError) as error:
                raise NotCuttableError(f"uses unsupported functions of its cache ({error})") from error
            except RuntimeError as error:
                if type(error) is not RuntimeError:  # memory or the device failed
                    raise
                raise NotCuttableError(f"cannot compute a part of its inputs ({error})") from error
        if drawn and not may_draw:
            raise NotCuttableError("draws random numbers")
        sizes = [(chunk.last_row - chunk.first_row) * (chunk.stop - chunk.start) for group in halves for chunk in group]
        if not _draws_for_tokens(drawn, drawn_again, [size / (rows * tokens) for size in sizes]):
            raise NotCuttableError("draws random numbers for more than a token")
        if on_paper:
            return
        change = (first - tried).float().norm()
        if not (first - second).float().norm() <= _tolerance(hidden.dtype) * change:
            raise NotCuttableError("mixes tokens by other means than attention")


_logged: set[tuple[type, str]] = set()


class ChunkedLayers:
    """The layers of a model that may run in chunks."""

    def __init__(
        self,
        layers: Mapping[nn.Module, str],
        inputs_of: InputsOf,
        frames: ChunkFrames | None,
        masks_pending: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
        norms: Sequence[nn.Module] = (),
    ) -> None:
        """``layers`` has the name of each layer. ``inputs_of`` returns the hidden states and the other inputs of a
        call. In the context ``masks_pending``, a forward makes no masks of all pairs of tokens. ``norms``: norms
        outside the layers."""
        self.chunk_tokens: int | None = None
        """Number of tokens in a chunk; None while layers run whole."""
        self.masks_pending = masks_pending
        self.shared_rows: RowsOfRanks | None = None
        """The rows of the running forward, if their other tokens are on other ranks."""
        self._is_attached = False
        self.of_layer = {
            layer: ChunkedLayer(layer, name, lambda: self.chunk_tokens, inputs_of, frames, self.note_cut)
            for layer, name in layers.items()
        }
        for chunked in self.of_layer.values():
            chunked.shared_rows = lambda: self.shared_rows
        self._local = threading.local()
        """Whether a layer has run in chunks in each thread's forward."""
        self.norms = [ChunkedNorm(norm, self._tokens_of_norms) for norm in norms]

    def reasons(self) -> list[str]:
        """Return why layers stay whole, each reason once. It completes "because each ..."."""
        found = (reason for chunked in self.of_layer.values() for reason in chunked.reasons)
        return list(dict.fromkeys(found))

    def begin_forward(self, shared_rows: RowsOfRanks | None = None) -> None:
        """Begin a forward on this thread. ``shared_rows``: its rows, if their other tokens are on other ranks."""
        self.shared_rows = shared_rows
        self._local.is_cut = False

    def end_forward(self) -> None:
        """End a forward of the model."""
        self.shared_rows = None

    def note_cut(self) -> None:
        """Record that a layer has run in chunks in this thread's forward."""
        self._local.is_cut = True

    @property
    def has_cut(self) -> bool:
        """Whether a layer has run in chunks in this thread's forward."""
        return getattr(self._local, "is_cut", False)

    def _tokens_of_norms(self) -> int | None:
        """Return the number of tokens in a norm's chunk. Norms before the layers, and after whole layers, run whole."""
        return self.chunk_tokens if self.has_cut else None

    def cut(self, chunk_tokens: int | None) -> None:
        """Run layers in chunks of this number of tokens from the next layer on, or whole with None. The first call
        with a number replaces the layers' forwards."""
        self.chunk_tokens = chunk_tokens
        if chunk_tokens is not None:
            self.attach()

    def attach(self) -> None:
        """Replace the forwards of layers and norms, once."""
        if not self._is_attached:
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
