"""Runs a norm outside the layers on some tokens at a time.

Norms compute in float32, so the last norm of a model takes several times the bytes of its input. A layer that runs in
chunks takes less than that.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hf_lohan.activations.layer_runs.module_state import ModuleState
from hf_lohan.activations.token_ranges import TokenRange, cut_batch
from hf_lohan.compat.torch_private import own_parameters, put_parameter


class ChunkedNorm:
    """Replaces a norm's forward. The new forward runs in chunks if the batch has more tokens than a chunk."""

    def __init__(self, norm: nn.Module, chunk_tokens: Callable[[], int | None]) -> None:
        """``chunk_tokens`` returns the number of tokens in a chunk, or None to run the norm whole."""
        self._norm = norm
        self._chunk_tokens = chunk_tokens
        self._before: Any = None
        self.on_repeat: Callable[[int], None] | None = None
        """Set by a trace, in which one chunk represents all equal chunks. The function is called with the number of
        these chunks before the chunk runs, and with 1 afterwards."""

    @contextlib.contextmanager
    def traced(self, chunk_tokens: Callable[[], int | None], on_repeat: Callable[[int], None]) -> Iterator[None]:
        """Run in chunks of ``chunk_tokens`` within this context, for a trace."""
        before = self._chunk_tokens, self.on_repeat, vars(self._norm).get("forward")
        self._chunk_tokens, self.on_repeat = chunk_tokens, on_repeat
        self.attach()
        try:
            yield
        finally:
            self._chunk_tokens, self.on_repeat, forward = before
            if forward is None:
                del self._norm.forward
            else:
                self._norm.forward = forward

    def attach(self) -> None:
        """Replace the norm's forward."""
        if getattr(vars(self._norm).get("forward"), "__self__", None) is not self:
            self._before = vars(self._norm).get("forward")  # a wrapper may have set `forward` on the instance
            self._norm.forward = self.forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        chunk_tokens = self._chunk_tokens()
        hidden = args[0] if len(args) == 1 and not kwargs else None
        if chunk_tokens is None or not isinstance(hidden, Tensor) or hidden.dim() != 3:
            return self.whole(*args, **kwargs)
        if hidden.shape[0] * hidden.shape[1] <= chunk_tokens:
            return self.whole(*args, **kwargs)
        groups = cut_batch(hidden.shape[0], hidden.shape[1], chunk_tokens)
        chunks = [tokens for group in groups for tokens in group]
        parameters = dict(own_parameters(self._norm))
        run = _NormRun(self, ModuleState(self._norm), tuple(parameters), chunks)
        return _InChunks.apply(run, hidden, *parameters.values())  # type: ignore[no-untyped-call]

    def whole(self, *args: Any, **kwargs: Any) -> Any:
        """Run the norm on all tokens at once."""
        if self._before is not None:
            return self._before(*args, **kwargs)
        return type(self._norm).forward(self._norm, *args, **kwargs)

    @contextlib.contextmanager
    def with_parameters(self, parameters: Mapping[str, nn.Parameter]) -> Iterator[None]:
        """Use these parameters within this context."""
        before = dict(own_parameters(self._norm))
        try:
            for name, parameter in parameters.items():
                put_parameter(self._norm, name, parameter)
            yield
        finally:
            for name, parameter in before.items():
                put_parameter(self._norm, name, parameter)


class _NormRun:
    """One forward of a norm in chunks."""

    def __init__(
        self, norm: ChunkedNorm, state: ModuleState, names: Sequence[str], chunks: Sequence[TokenRange]
    ) -> None:
        self.norm = norm
        self.state = state
        """The norm's state before the forward."""
        self.names = names
        self._chunks = chunks
        self.autocast_state: tuple[str, torch.dtype, bool] | None = None
        """The device type, and autocast's dtype and state in the forward."""

    def __iter__(self) -> Iterator[TokenRange]:
        """Yield the chunks. A trace gets the first chunk, which represents all but the last, and the last chunk."""
        repeat, num_alike = self.norm.on_repeat, len(self._chunks) - 1
        if repeat is None or num_alike < 2:
            yield from self._chunks
            return
        repeat(num_alike)
        yield self._chunks[0]
        repeat(1)
        yield self._chunks[-1]


class _InChunks(torch.autograd.Function):
    """A norm in chunks. The backward runs the chunks again, and sums the gradients of weights in float32."""

    @staticmethod
    def forward(ctx: Any, run: _NormRun, hidden: Tensor, *parameters: Tensor) -> Tensor:
        ctx.norm_run = run
        kind = hidden.device.type
        run.autocast_state = kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        ctx.save_for_backward(hidden, *parameters)
        output: Tensor | None = None
        for tokens in run:
            part = run.norm.whole(hidden[tokens.index])
            if output is None:
                output = part.new_empty((*hidden.shape[:2], *part.shape[2:]))
            output[tokens.index] = part
        assert output is not None
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        hidden, *weights = ctx.saved_tensors
        run: _NormRun = ctx.norm_run
        needs_hidden, needs_weight = ctx.needs_input_grad[1], ctx.needs_input_grad[2:]
        of_hidden = torch.empty_like(hidden) if needs_hidden else None
        sums: list[Tensor | None] = [None] * len(weights)
        leaves = [
            nn.Parameter(weight.detach(), requires_grad=needed)
            for weight, needed in zip(weights, needs_weight, strict=True)
        ]
        assert run.autocast_state is not None
        kind, dtype, is_enabled = run.autocast_state
        with (
            torch.autocast(kind, dtype=dtype, enabled=is_enabled),
            run.state.restored(),
            run.norm.with_parameters(dict(zip(run.names, leaves, strict=True))),
        ):
            for tokens in run:
                chunk = hidden[tokens.index].detach().requires_grad_(needs_hidden)
                with torch.enable_grad():
                    run.norm.whole(chunk).backward(gradient[tokens.index])
                if of_hidden is not None:
                    of_hidden[tokens.index] = chunk.grad
                for number, leaf in enumerate(leaves):
                    of_chunk, leaf.grad, total = leaf.grad, None, sums[number]
                    if of_chunk is not None:
                        sums[number] = of_chunk.float() if total is None else total.add_(of_chunk)
        return (
            None,
            of_hidden,
            *(None if total is None else total.to(leaf.dtype) for total, leaf in zip(sums, leaves, strict=True)),
        )


def norms_outside(model: nn.Module, layers: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the modules outside the layers that look like norms: they have no children, and weights of one
    dimension."""
    inside = {module for layer in layers for module in layer.modules()}
    return [
        module
        for module in model.modules()
        if module not in inside
        and not list(module.children())
        and "norm" in type(module).__name__.lower()
        and all(parameter.dim() == 1 for _, parameter in own_parameters(module))
        and not list(module.buffers(recurse=False))
    ]
