"""Computes a head's logits and their loss in chunks of tokens, so that not all logits exist at once.

In a training forward with labels the head returns `PendingLogits`. Their cross entropy runs chunk by chunk. Its
backward also runs chunk by chunk, and recomputes each chunk's logits.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import handle_torch_function, has_torch_function

from hf_lohan.activations.pending_logits import LogitsOperation, Pending, PendingLogits
from hf_lohan.compat.torch_private import version_of


@dataclass(frozen=True, slots=True)
class ChunkedLoss:
    """Sizes that decide whether the loss is computed in chunks, and the size of a chunk."""

    over_bytes: int
    """The loss is computed in chunks if the logits would be larger than this in float32."""
    chunk_bytes: int
    """Size of a chunk's logits in float32. The computation uses a few times this memory."""
    on_repeat: Callable[[int], None] | None = None
    """Set by a trace, which runs each shape of chunk once. One chunk then represents all equal chunks. The function is
    called with the number of equal chunks before the chunk runs, and with 1 afterwards."""


@dataclass(frozen=True, slots=True)
class _Loss:
    """The loss of a chunk of the head's logits."""

    operations: tuple[LogitsOperation, ...]
    ignore_index: int
    label_smoothing: float
    rows: int
    """Number of tokens in a chunk."""
    on_repeat: Callable[[int], None] | None = None

    def starts(self, num_tokens: int) -> Iterator[int]:
        """Yield the first token of each chunk."""
        starts = range(0, num_tokens, self.rows)
        if self.on_repeat is None or len(starts) < _MANY_CHUNKS:
            yield from starts
            return
        yield starts[0]
        self.on_repeat(len(starts) - 2)
        yield starts[1]
        self.on_repeat(1)
        yield starts[-1]

    def chunk_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the sum of the loss over a chunk, in float32."""
        for operation in self.operations:
            logits = operation(logits)
        options: dict[str, Any] = {"ignore_index": self.ignore_index, "label_smoothing": self.label_smoothing}
        return F.cross_entropy(logits, labels, reduction="sum", **options).float()


@dataclass(slots=True)
class Smoothing:
    """Smoothing of one forward's labels, for Trainer's `label_smoothing_factor`."""

    epsilon: float
    labels: Tensor
    """[batch, sequence], as in the batch. The target of each token is the next token's label."""
    ignore_index: int = -100
    total: Tensor | None = None
    """Sum of the cross entropy over all tokens, in float32, without terms that the model adds. None before the loss."""

    def shifted(self, num_tokens: int) -> Tensor | None:
        """Return ``num_tokens`` targets: one for each token, or for each token except the last of each sequence. None
        if neither has this number."""
        if num_tokens == self.labels.numel():
            return F.pad(self.labels, (0, 1), value=self.ignore_index)[:, 1:].flatten()
        return self.labels[:, 1:].flatten() if num_tokens == self.labels[:, 1:].numel() else None

    def loss(self, num_items: Tensor | int | None) -> Tensor:
        """Return the sum of the loss divided by ``num_items``, or by the number of tokens with labels if None. Raises
        RuntimeError if the forward computed its loss in another way."""
        if self.total is None:
            raise self.refusal()
        if num_items is None:
            num_items = (self.labels[:, 1:] != self.ignore_index).sum()
        return self.total / (num_items.to(self.total.device) if isinstance(num_items, Tensor) else num_items)

    def refusal(self) -> RuntimeError:
        return RuntimeError(
            f"label_smoothing_factor={self.epsilon} does not work in chunks, because this model computes its loss "
            "in its own way; set chunks.loss: false"
        )


class ChunkedHead:
    """Replaces the forward of a model's head. The new forward computes logits later, without calling the head."""

    def __init__(self, model: nn.Module, head: nn.Linear, chunked_loss: ChunkedLoss) -> None:
        self.chunked_loss = chunked_loss
        self._model = model
        self._head = head
        self._last_step: Callable[[], object] = lambda: None
        self._local = threading.local()
        """State of each thread, because micro-batches run in threads."""

    @property
    def vocabulary(self) -> int:
        """Number of logits per token."""
        return self._head.out_features

    def applies_to(self, num_tokens: int) -> bool:
        """Return whether the loss of ``num_tokens`` tokens is computed in chunks."""
        return num_tokens * self.vocabulary * torch.float32.itemsize > self.chunked_loss.over_bytes

    def attach(self, last_step: Callable[[], object] = lambda: None) -> Callable[[], None]:
        """Replace the head's forward, and return a function that restores it. ``last_step`` returns a new object after
        each step, because an optimizer's writes do not always change the parameters' versions."""
        self._last_step = last_step
        head: Any = self._head
        before = vars(head).get("forward")  # a wrapper may have set `forward` on the instance
        handles = [
            self._model.register_forward_pre_hook(self._begin, with_kwargs=True),
            self._model.register_forward_hook(self._end, always_call=True),
        ]
        head.forward = self._forward

        def detach() -> None:
            for handle in handles:
                handle.remove()
            if before is None:
                del head.forward
            else:
                head.forward = before

        return detach

    @contextlib.contextmanager
    def smoothing(self, smoothing: Smoothing) -> Iterator[None]:
        """Smooth the labels of forwards that this thread runs within the context."""
        self._local.smoothing = smoothing
        try:
            yield
        finally:
            self._local.smoothing = None

    # The model's forward.

    def _begin(self, _module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if self._smoothing is not None:
            kwargs = {**kwargs, "labels": self._smoothing.labels}
        has_labels = kwargs.get("labels") is not None or kwargs.get("shift_labels") is not None
        self._local.is_in_forward = has_labels and torch.is_grad_enabled()
        return args, kwargs

    def _end(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        self._local.is_in_forward = False

    @property
    def is_in_forward(self) -> bool:
        return getattr(self._local, "is_in_forward", False)

    @property
    def _smoothing(self) -> Smoothing | None:
        return getattr(self._local, "smoothing", None)

    def _version(self) -> tuple[object, ...]:
        """Return a value that changes when the head's weights change."""
        parameters = [parameter for parameter in (self._head.weight, self._head.bias) if parameter is not None]
        is_trained = any(parameter.requires_grad for parameter in parameters)
        return (self._last_step() if is_trained else None, *map(version_of, parameters))

    def _forward(self, hidden: Tensor) -> Tensor:
        num_tokens = hidden.shape[:-1].numel()
        is_large = self._smoothing is not None or self.applies_to(num_tokens)
        if self.is_in_forward and is_large and torch.is_grad_enabled():
            return PendingLogits.from_pending(Pending(self, hidden, self.vocabulary, self._version()))
        return F.linear(hidden, self._head.weight, self._head.bias)

    # LogitsSource.

    def compute_logits(self, pending: Pending) -> Tensor:
        """Return whole logits. Raises RuntimeError if they need a graph after the forward, or if the head changed."""
        if not self.is_in_forward and torch.is_grad_enabled():
            raise RuntimeError(
                "the loss of this training forward was computed in chunks, so its outputs.logits have no graph; set "
                "chunks.loss: false, or read them in torch.no_grad()"
            )
        if pending.version != self._version():
            raise RuntimeError(
                "outputs.logits were read after the head's weights had changed; read them before optimizer.step(), or "
                "set chunks.loss: false"
            )
        logits = F.linear(pending.hidden, self._head.weight, self._head.bias)
        for operation in pending.operations:
            logits = operation(logits)
        return logits

    def compute_loss(self, pending: Pending, labels: Tensor, options: dict[str, Any]) -> Tensor | None:
        """Return `F.cross_entropy` of pending logits [tokens, vocabulary], or None if ``options`` need the logits."""
        smoothing = options.pop("label_smoothing", 0.0)
        ignore_index, reduction = options.pop("ignore_index", -100), options.pop("reduction", "mean")
        has_others = any(value is not None for value in options.values())
        if has_others or reduction not in ("sum", "mean") or labels.dim() != 1 or pending.hidden.dim() != 2:
            return None
        rows = max(1, self.chunked_loss.chunk_bytes // (self.vocabulary * torch.float32.itemsize))
        smoothed = self._smoothing
        if smoothed is not None:
            # Trainer's smoother always shifts the labels, even if the model does not shift them.
            shifted = smoothed.shifted(labels.numel())
            if shifted is None or smoothed.total is not None:
                raise smoothed.refusal()
            labels, ignore_index, smoothing = shifted, smoothed.ignore_index, smoothed.epsilon
        loss = _Loss(pending.operations, ignore_index, smoothing, rows, self.chunked_loss.on_repeat)
        total = chunked_cross_entropy(pending.hidden, self._head.weight, self._head.bias, labels, loss)
        if smoothed is not None:
            smoothed.total = total
        return (total if reduction == "sum" else total / (labels != ignore_index).sum()).to(pending.dtype)


def chunked_head_of(model: Any, chunked_loss: ChunkedLoss | None) -> ChunkedHead | None:
    """Return a chunked head for the model. None without ``chunked_loss`` or if the head is not a plain linear layer."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if chunked_loss is None or type(head) is not nn.Linear or has_foreign_forward(head):
        return None
    return ChunkedHead(model, head, chunked_loss)


def has_foreign_forward(head: nn.Module) -> bool:
    """Return whether another library has replaced the head's forward."""
    return "forward" in vars(head) and not _is_chunked(vars(head)["forward"])


def _is_chunked(forward: Any) -> bool:
    return isinstance(getattr(forward, "__self__", None), ChunkedHead)


@contextlib.contextmanager
def whole_logits(model: Any) -> Iterator[None]:
    """Have the model's head return whole logits within this context."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    chunked_forward = vars(head).get("forward") if type(head) is nn.Linear else None
    if head is None or not _is_chunked(chunked_forward):
        yield
        return
    del head.forward
    try:
        yield
    finally:
        head.forward = chunked_forward


def chunked_cross_entropy(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, loss: _Loss) -> Tensor:
    """Return the loss's sum over all tokens, in float32. Supports `__torch_function__`, so weights may be absent."""
    if has_torch_function((weight, bias)):
        absent = tuple(tensor for tensor in (weight, bias) if tensor is not None)
        handled: Tensor = handle_torch_function(chunked_cross_entropy, absent, hidden, weight, bias, labels, loss)
        return handled
    apply: Any = _ChunkedCrossEntropy.apply
    total: Tensor = apply(hidden, weight, bias, labels, loss)
    return total


class _ChunkedCrossEntropy(torch.autograd.Function):
    """The loss of all chunks. The backward computes logits again, and sums gradients of weight and bias in float32."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, loss: _Loss) -> Tensor:
        ctx.save_for_backward(hidden, weight, bias, labels)
        ctx.loss = loss
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        for start in loss.starts(len(hidden)):
            rows, rows_labels = hidden[start : start + loss.rows], labels[start : start + loss.rows]
            total = total + loss.chunk_loss(F.linear(rows, weight, bias), rows_labels)
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        hidden, weight, bias, labels = ctx.saved_tensors
        loss: _Loss = ctx.loss
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_weight else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if needs_bias else None
        for start in loss.starts(len(hidden)):
            rows = hidden[start : start + loss.rows]
            logits = F.linear(rows, weight, bias).requires_grad_()
            with torch.enable_grad():
                (grad_logits,) = torch.autograd.grad(
                    loss.chunk_loss(logits, labels[start : start + loss.rows]), logits, gradient
                )
            del logits
            if grad_hidden is not None:
                grad_hidden[start : start + loss.rows] = grad_logits @ weight
            if grad_weight is not None:
                _add_product_(grad_weight, grad_logits, rows)
            if grad_bias is not None:
                grad_bias += grad_logits.sum(0, dtype=torch.float32)
        grad_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        grad_bias = None if grad_bias is None else grad_bias.to(bias.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None


def _add_product_(total: Tensor, grad_logits: Tensor, rows: Tensor) -> None:
    """Add the product of transposed ``grad_logits`` [tokens, vocabulary] and ``rows`` [tokens, hidden] to ``total``
    [vocabulary, hidden], in float32."""
    if grad_logits.dtype == torch.float32:
        total.addmm_(grad_logits.t(), rows)
        return
    for part, columns in zip(total.split(_COLUMNS), grad_logits.split(_COLUMNS, dim=1), strict=True):
        if total.device.type == "cpu":
            part.addmm_(columns.t().float(), rows.float())
        else:
            part += torch.mm(columns.t(), rows, out_dtype=torch.float32)


_MANY_CHUNKS = 8
"""A trace runs every chunk if there are fewer than this number."""
_COLUMNS = 1 << 14
"""Number of columns of the vocabulary in one matrix product, if its factors are not float32."""
