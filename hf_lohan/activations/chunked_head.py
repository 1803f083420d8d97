"""A head whose loss takes the logits some tokens at a time, so that all of them are never there at once.

In a training forward with labels the head gives out `PendingLogits`. The cross entropy of them runs chunk by chunk, and
so does its backward, which makes each chunk's logits again.
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

from hf_lohan.activations.pending_logits import Pending, PendingLogits, Step
from hf_lohan.compat.torch_private import version_of


@dataclass(frozen=True, slots=True)
class ChunkedLoss:
    """When logits are taken in chunks, and how large those are."""

    over_bytes: int
    """Logits that would be larger in float32."""
    chunk_bytes: int
    """Of a chunk's logits in float32. A few times as much is in use at once."""


@dataclass(frozen=True, slots=True)
class _Loss:
    """Of a chunk of logits, as they come from the head."""

    steps: tuple[Step, ...]
    ignore_index: int
    label_smoothing: float
    rows: int
    """Tokens in a chunk."""

    def of(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The sum over a chunk, in float32."""
        for step in self.steps:
            logits = step(logits)
        options: dict[str, Any] = {"ignore_index": self.ignore_index, "label_smoothing": self.label_smoothing}
        return F.cross_entropy(logits, labels, reduction="sum", **options).float()


@dataclass(slots=True)
class Smoothing:
    """Of the labels of one forward, by Trainer's `label_smoothing_factor`."""

    epsilon: float
    labels: Tensor
    """[batch, sequence], as the batch has them: each is what the token before it is to give."""
    ignore_index: int = -100
    total: Tensor | None = None
    """The cross entropy's sum over all tokens, in float32, without what the model adds to it; once there is one."""

    def shifted(self, num_tokens: int) -> Tensor | None:
        """The labels of so many tokens: of all, or of all but each sequence's last. None for other numbers."""
        if num_tokens == self.labels.numel():
            return F.pad(self.labels, (0, 1), value=self.ignore_index)[:, 1:].flatten()
        return self.labels[:, 1:].flatten() if num_tokens == self.labels[:, 1:].numel() else None

    def loss(self, num_items: Tensor | int | None) -> Tensor:
        """The sum over ``num_items``; None: over the tokens that have labels. Raises RuntimeError if the forward has
        computed its loss in another way."""
        if self.total is None:
            raise self.refusal()
        if num_items is None:
            num_items = (self.labels[:, 1:] != self.ignore_index).sum()
        return self.total / (num_items.to(self.total.device) if isinstance(num_items, Tensor) else num_items)

    def refusal(self) -> RuntimeError:
        return RuntimeError(
            f"label_smoothing_factor={self.epsilon} cannot be followed in chunks: the model computes its loss in a way "
            "of its own; set chunked_loss: false"
        )


class ChunkedHead:
    """Stands in for the forward of a model's head. Its logits are made when they are needed, and read its weight
    without calling it."""

    def __init__(self, model: nn.Module, head: nn.Linear, chunked_loss: ChunkedLoss) -> None:
        self.chunked_loss = chunked_loss
        self._model = model
        self._head = head
        self._last_step: Callable[[], object] = lambda: None
        self._here = threading.local()
        """Micro-batches have threads of their own."""

    @property
    def vocabulary(self) -> int:
        """How many logits a token has."""
        return self._head.out_features

    def applies_to(self, num_tokens: int) -> bool:
        """Whether the logits of so many tokens are taken in chunks."""
        return num_tokens * self.vocabulary * torch.float32.itemsize > self.chunked_loss.over_bytes

    def attach(self, last_step: Callable[[], object] = lambda: None) -> Callable[[], None]:
        """Stand in from now on. Returns what takes it off again. ``last_step`` gives another object behind each step of
        an optimizer that writes to weights where the parameters do not show it."""
        self._last_step = last_step
        head: Any = self._head
        before = vars(head).get("forward")  # set on the instance by whoever wrapped it
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
        """Within, a forward of this thread is given the labels and smooths them. Its logits are taken in chunks
        however small."""
        self._here.smoothing = smoothing
        try:
            yield
        finally:
            self._here.smoothing = None

    # The model's forward.

    def _begin(self, _module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if self._smoothing is not None:
            kwargs = {**kwargs, "labels": self._smoothing.labels}
        has_labels = kwargs.get("labels") is not None or kwargs.get("shift_labels") is not None
        self._here.is_in_forward = has_labels and torch.is_grad_enabled()
        return args, kwargs

    def _end(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        self._here.is_in_forward = False

    @property
    def is_in_forward(self) -> bool:
        """Whether a training forward with labels runs in this thread."""
        return getattr(self._here, "is_in_forward", False)

    @property
    def _smoothing(self) -> Smoothing | None:
        return getattr(self._here, "smoothing", None)

    def _version(self) -> tuple[object, ...]:
        """Of the head's numbers: another one when they have changed."""
        own = [parameter for parameter in (self._head.weight, self._head.bias) if parameter is not None]
        is_trained = any(parameter.requires_grad for parameter in own)
        return (self._last_step() if is_trained else None, *map(version_of, own))

    def _forward(self, hidden: Tensor) -> Tensor:
        """The head's own."""
        num_tokens = hidden.shape[:-1].numel()
        is_large = self._smoothing is not None or self.applies_to(num_tokens)
        if self.is_in_forward and is_large and torch.is_grad_enabled():
            return PendingLogits.of(Pending(self, hidden, self.vocabulary, self._version()))
        return F.linear(hidden, self._head.weight, self._head.bias)

    # What becomes of pending logits.

    def logits_of(self, pending: Pending) -> Tensor:
        """The true ones. Raises RuntimeError where they would need a graph that the forward, which is over, would have
        had to make, or the head as it was before a step."""
        if not self.is_in_forward and torch.is_grad_enabled():
            raise RuntimeError(
                "the loss of this training forward was computed some tokens at a time, so its outputs.logits are not "
                "there to compute with; set chunked_loss: false, or read them under torch.no_grad()"
            )
        if pending.version != self._version():
            raise RuntimeError(
                "the head has changed since the training forward whose outputs.logits are read, and its old weights "
                "are gone; read them before optimizer.step(), or set chunked_loss: false"
            )
        logits = F.linear(pending.hidden, self._head.weight, self._head.bias)
        for step in pending.steps:
            logits = step(logits)
        return logits

    def loss_of(self, pending: Pending, labels: Tensor, options: dict[str, Any]) -> Tensor | None:
        """`F.cross_entropy` of pending logits [tokens, vocabulary]; None for options that need the logits."""
        smoothing = options.pop("label_smoothing", 0.0)
        ignore_index, reduction = options.pop("ignore_index", -100), options.pop("reduction", "mean")
        has_others = any(value is not None for value in options.values())
        if has_others or reduction not in ("sum", "mean") or labels.dim() != 1 or pending.hidden.dim() != 2:
            return None
        rows = max(1, self.chunked_loss.chunk_bytes // (self.vocabulary * torch.float32.itemsize))
        smoothed = self._smoothing
        if smoothed is not None:
            # The model's own labels may not be shifted, and Trainer's smoother always shifts.
            shifted = smoothed.shifted(labels.numel())
            if shifted is None or smoothed.total is not None:
                raise smoothed.refusal()
            labels, ignore_index, smoothing = shifted, smoothed.ignore_index, smoothed.epsilon
        loss = _Loss(pending.steps, ignore_index, smoothing, rows)
        total = chunked_cross_entropy(pending.hidden, self._head.weight, self._head.bias, labels, loss)
        if smoothed is not None:
            smoothed.total = total
        return (total if reduction == "sum" else total / (labels != ignore_index).sum()).to(pending.dtype)


def chunked_head_of(model: Any, chunked_loss: ChunkedLoss | None) -> ChunkedHead | None:
    """For the head of a model, if it is a plain product; None for others, and where nothing is taken in chunks."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if chunked_loss is None or type(head) is not nn.Linear or has_foreign_forward(head):
        return None
    return ChunkedHead(model, head, chunked_loss)


def has_foreign_forward(head: nn.Module) -> bool:
    """Whether somebody else has set a forward on the head, which may do more than its class's."""
    return "forward" in vars(head) and not _is_stand_in(vars(head)["forward"])


def _is_stand_in(forward: Any) -> bool:
    return isinstance(getattr(forward, "__self__", None), ChunkedHead)


@contextlib.contextmanager
def head_as_it_is(model: Any) -> Iterator[None]:
    """Within, the model's head gives out whole logits, if a `ChunkedHead` stands in for it."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    stands_in = vars(head).get("forward") if type(head) is nn.Linear else None
    if head is None or not _is_stand_in(stands_in):
        yield
        return
    del head.forward
    try:
        yield
    finally:
        head.forward = stands_in


def chunked_cross_entropy(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, loss: _Loss) -> Tensor:
    """The sum over all tokens, in float32. As torch's own functions, it lets weights be brought that are absent."""
    if has_torch_function((weight, bias)):
        absent = tuple(tensor for tensor in (weight, bias) if tensor is not None)
        handled: Tensor = handle_torch_function(chunked_cross_entropy, absent, hidden, weight, bias, labels, loss)
        return handled
    apply: Any = _ChunkedCrossEntropy.apply
    total: Tensor = apply(hidden, weight, bias, labels, loss)
    return total


class _ChunkedCrossEntropy(torch.autograd.Function):
    """The sum over all tokens. Saves what it is given, and makes each chunk's logits twice. Gradients of the weight and
    the bias are summed in float32."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, loss: _Loss) -> Tensor:
        ctx.save_for_backward(hidden, weight, bias, labels)
        ctx.loss = loss
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        for rows, of_rows in zip(hidden.split(loss.rows), labels.split(loss.rows), strict=True):
            total = total + loss.of(F.linear(rows, weight, bias), of_rows)
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        hidden, weight, bias, labels = ctx.saved_tensors
        loss: _Loss = ctx.loss
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        of_hidden = torch.empty_like(hidden) if needs_hidden else None
        of_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_weight else None
        of_bias = torch.zeros_like(bias, dtype=torch.float32) if needs_bias else None
        for start in range(0, len(hidden), loss.rows):
            rows = hidden[start : start + loss.rows]
            logits = F.linear(rows, weight, bias).requires_grad_()
            with torch.enable_grad():
                (of_logits,) = torch.autograd.grad(loss.of(logits, labels[start : start + loss.rows]), logits, gradient)
            del logits
            if of_hidden is not None:
                of_hidden[start : start + loss.rows] = of_logits @ weight
            if of_weight is not None:
                _add_product_(of_weight, of_logits, rows)
            if of_bias is not None:
                of_bias += of_logits.sum(0, dtype=torch.float32)
        of_weight = None if of_weight is None else of_weight.to(weight.dtype)
        of_bias = None if of_bias is None else of_bias.to(bias.dtype)
        return of_hidden, of_weight, of_bias, None, None


def _add_product_(total: Tensor, of_logits: Tensor, rows: Tensor) -> None:
    """``total`` [vocabulary, hidden], float32, plus the product of [tokens, vocabulary] and [tokens, hidden]."""
    if of_logits.dtype == torch.float32:
        total.addmm_(of_logits.t(), rows)
        return
    for part, columns in zip(total.split(_COLUMNS), of_logits.split(_COLUMNS, dim=1), strict=True):
        if total.device.type == "cpu":
            part.addmm_(columns.t().float(), rows.float())
        else:
            part += torch.mm(columns.t(), rows, out_dtype=torch.float32)


_COLUMNS = 1 << 14
"""Of the vocabulary, in one product whose result is float32 and whose factors are not."""
