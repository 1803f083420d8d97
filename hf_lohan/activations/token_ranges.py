"""The chunks of a batch, and the keys and values that a chunk of a row sees."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TokenRange:
    """A chunk: the tokens [start, stop) of the rows [first_row, last_row)."""

    first_row: int
    last_row: int
    start: int
    stop: int
    shift: int = 0
    """The index of a token in its row, less the index of the token in this rank's tensors."""

    @property
    def in_row(self) -> TokenRange:
        """The same tokens, with indices in the whole row."""
        return TokenRange(self.first_row, self.last_row, self.start + self.shift, self.stop + self.shift)

    @property
    def index(self) -> tuple[slice, slice]:
        return slice(self.first_row, self.last_row), slice(self.start, self.stop)


def cut_batch(num_rows: int, length: int, chunk_tokens: int) -> list[list[TokenRange]]:
    """Return the chunks of a batch for each group of rows. Keys of one group are on the device together."""
    if length <= chunk_tokens:
        step = chunk_tokens // length
        return [[TokenRange(row, min(row + step, num_rows), 0, length)] for row in range(0, num_rows, step)]
    starts = range(0, length, chunk_tokens)
    return [
        [TokenRange(row, row + 1, start, min(start + chunk_tokens, length)) for start in starts]
        for row in range(num_rows)
    ]


@dataclass(frozen=True, slots=True)
class RowPieces:
    """The tokens of each row that one of several ranks computes.

    A row is cut into two pieces for each rank. Rank r has piece r from the start and piece r from the end, so that all
    ranks have equally many pairs of a query and an earlier key.
    """

    length: int
    """Number of tokens in a whole row."""
    number: int
    """The index of this rank among the ranks that share the row."""
    num_ranks: int

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """The tokens [start, stop) of the row in each of this rank's pieces."""
        num_pieces = 2 * self.num_ranks
        pieces = (self.number, num_pieces - 1 - self.number)
        bounds = [(piece * self.length // num_pieces, (piece + 1) * self.length // num_pieces) for piece in pieces]
        return [(start, stop) for start, stop in bounds if start < stop]

    @property
    def num_tokens(self) -> int:
        """Number of tokens of a row that this rank computes."""
        return sum(stop - start for start, stop in self.ranges)

    @property
    def most_tokens(self) -> int:
        """Largest number of tokens of a row that a rank computes."""
        return max(replace(self, number=number).num_tokens for number in range(self.num_ranks))

    def take(self, tensor: Tensor) -> Tensor:
        """Return this rank's tokens of a tensor [rows, tokens, ...]."""
        return torch.cat([tensor[:, start:stop] for start, stop in self.ranges], 1)

    def cut(self, num_rows: int, chunk_tokens: int | None) -> list[list[TokenRange]]:
        """Return this rank's chunks of a batch for each group of rows. Keys of one group are on the device together.
        All ranks have the same groups, because they wait for each other in each group. With None, pieces are whole."""
        if chunk_tokens is None or num_rows * self.most_tokens <= chunk_tokens:
            return [self._chunks_of(0, num_rows, self.length)]
        return [self._chunks_of(row, row + 1, chunk_tokens) for row in range(num_rows)]

    def _chunks_of(self, first_row: int, last_row: int, chunk_tokens: int) -> list[TokenRange]:
        chunks, num_before = [], 0
        for start, stop in self.ranges:
            shift = start - num_before
            chunks += [
                TokenRange(first_row, last_row, first - shift, min(first + chunk_tokens, stop) - shift, shift)
                for first in range(start, stop, chunk_tokens)
            ]
            num_before += stop - start
        return chunks


@dataclass(frozen=True, eq=False)
class CutRows:
    """The rows of a batch that several ranks share, and the data of all their tokens for masks."""

    pieces: RowPieces
    documents: Tensor | None
    """[rows, tokens of a row], the index of each token's document. None if each row is one document."""
    padding: Tensor | None
    """[rows, tokens of a row], false for padding. None without padding."""


class Empty(Protocol):
    """Allocates a contiguous tensor on the device of ``like``, and with the dtype of ``like`` unless ``dtype`` is
    given."""

    def __call__(self, shape: Sequence[int], like: Tensor, dtype: torch.dtype | None = None) -> Tensor: ...


def new_empty(shape: Sequence[int], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Allocate a tensor from PyTorch's allocator."""
    return like.new_empty(tuple(shape), dtype=dtype)


class NotCuttableError(Exception):
    """A layer must see all tokens at once. The text completes "because it ..."."""


class KeysTaken(BaseException):
    """Leaves a layer's forward when its keys and values are known. It is not an `Exception`, so no layer catches it."""


class ChunkKeys:
    """Stands in for the cache of one layer in a forward of chunks. It has the keys and values of a group of rows, and
    the sums of their gradients."""

    is_compileable = False

    def __init__(self, length: int, empty: Empty | None = None) -> None:
        """``empty`` allocates the tensors, which have ``length`` tokens."""
        self._length = length
        self._empty = empty or new_empty
        self._tensors: tuple[Tensor, ...] = ()
        """Keys and values, [rows, heads, length, size of a head]."""
        self._sums: list[Tensor | None] = [None, None]
        self._range: TokenRange | None = None
        self._first_key = 0
        self._only_keys = False
        self.num_updates = 0
        self.num_earlier = 0
        """Number of earlier tokens whose keys the last chunk saw."""

    @property
    def of_a_token(self) -> tuple[int, int]:
        """Number of elements of a token in all keys and values, and bytes per element. (0, 0) before the first
        chunk."""
        numel = sum(tensor.shape[1] * tensor.shape[3] for tensor in self._tensors)
        return numel, max((tensor.itemsize for tensor in self._tensors), default=0)

    @contextlib.contextmanager
    def at(self, tokens: TokenRange, first_key: int, *, only_keys: bool = False) -> Iterator[None]:
        """Run a chunk in this context. It sees the keys from ``first_key`` on. ``only_keys``: end its forward as soon
        as its keys are known."""
        self._range, self._first_key, self._only_keys, self.num_updates = tokens, first_key, only_keys, 0
        self.num_earlier = tokens.start - first_key
        try:
            yield
        except KeysTaken:
            pass
        finally:
            self._range = None

    # The interface of transformers' caches that layers use in training.

    def update(self, keys: Tensor, values: Tensor, *_args: Any, **_kwargs: Any) -> tuple[Tensor, Tensor]:
        tokens = self._range
        assert tokens is not None
        self.num_updates += 1
        if self.num_updates > 1 or any(
            t.dim() != 4 or t.shape[2] != tokens.stop - tokens.start for t in (keys, values)
        ):
            raise NotCuttableError("keeps keys of unsupported shape")
        self._keep(tokens, keys, values)
        if self._only_keys:
            raise KeysTaken
        return self._visible(keys, values)

    def _keep(self, tokens: TokenRange, keys: Tensor, values: Tensor) -> None:
        """Keep the keys and values of the running chunk for later chunks."""
        if not self._tensors:
            self._tensors = tuple(
                self._empty((t.shape[0], t.shape[1], self._length, t.shape[3]), t) for t in (keys, values)
            )
        with torch.no_grad():
            for all_tokens, own in zip(self._tensors, (keys, values), strict=True):
                all_tokens[:, :, tokens.start : tokens.stop] = own

    def _visible(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values that the running chunk sees, with a graph to its own ``keys`` and ``values``."""
        tokens = self._range
        assert tokens is not None
        if torch.is_grad_enabled() and (keys.requires_grad or values.requires_grad):
            seen: tuple[Tensor, Tensor] = _SeenKeys.apply(keys, values, self, tokens, self._first_key)  # type: ignore[no-untyped-call]
            return seen
        return self.seen(tokens, self._first_key)

    def get_seq_length(self, *_args: Any, **_kwargs: Any) -> int:
        return 0 if self._range is None else self._range.start

    # Gradients.

    def seen(self, tokens: TokenRange, first_key: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values from ``first_key`` to the end of a chunk."""
        keys, values = (tensor[:, :, first_key : tokens.stop] for tensor in self._tensors)
        return keys, values

    def gradient_of(self, number: int, gradient: Tensor | None, tokens: TokenRange, first_key: int) -> Tensor | None:
        """Return the gradient of a chunk's own keys (0) or values (1), including the gradients from later chunks.
        ``gradient`` covers all that the chunk has seen. Its part for earlier chunks is added to their sums."""
        if gradient is None:
            return None
        own, num_earlier = gradient[:, :, tokens.start - first_key :], tokens.start - first_key
        total = self._sums[number]
        if total is None and num_earlier:
            own_form = self._tensors[number]
            total = self._sums[number] = self._empty(own_form.shape, own_form, torch.float32).zero_()
        if total is None:
            return own
        if num_earlier:
            total[:, :, first_key : tokens.start] += gradient[:, :, :num_earlier]
        return (total[:, :, tokens.start : tokens.stop] + own).to(gradient.dtype)


class _SeenKeys(torch.autograd.Function):
    """Returns the keys and values that a chunk sees, with a graph to its own keys and values."""

    @staticmethod
    def forward(ctx: Any, keys: Tensor, values: Tensor, cache: ChunkKeys, tokens: TokenRange, first: int) -> Any:
        ctx.own = cache, tokens, first
        ctx.set_materialize_grads(False)
        return cache.seen(tokens, first)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        cache, tokens, first = ctx.own
        return (
            *(cache.gradient_of(n, gradient, tokens, first) for n, gradient in enumerate(gradients)),
            None,
            None,
            None,
        )
