"""Counts the bytes that a codec saves on a link, and measures its error in the first steps of a run."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from hf_lohan.ranks.collectives.block_codec import BlockCodec
from hf_lohan.ranks.collectives.block_operators import dequantize_sum_quantize_
from hf_lohan.ranks.collectives.rank_order_sum import CodedValues

_MEASURED_TILE_NUMEL = 256 * 1024
"""Number of elements that are decoded at once to measure errors, so that a device needs little memory."""
Hop: TypeAlias = Literal["between", "within"]


class CodedTraffic:
    """Counts the bytes that one rank sends, with and without a codec. Thread-safe."""

    def __init__(self, name: str, hop: Hop = "between") -> None:
        """``name``: name of the values that are sent, for reports. ``hop``: the link, between nodes or between a node's
        RAM and its devices."""
        self.name = name
        self.hop = hop
        self.exact_bytes = 0
        """Bytes before encoding."""
        self.sent_bytes = 0
        self._lock = threading.Lock()
        self._is_measuring = True
        self._squares = self._error_squares = 0.0
        self._num_values = self._num_flushed = 0

    @property
    def key(self) -> str:
        """The name in a run's summary."""
        return self.name if self.hop == "between" else f"{self.name}_within"

    def count(self, exact_bytes: int, sent_bytes: int) -> None:
        with self._lock:
            self.exact_bytes += exact_bytes
            self.sent_bytes += sent_bytes

    def stop_measuring(self) -> None:
        """Stop measuring errors, because it costs a second pass over the values."""
        self._is_measuring = False

    @property
    def relative_rms(self) -> float | None:
        """Root mean square of the errors, relative to the values. None if nothing was measured."""
        return (self._error_squares / self._squares) ** 0.5 if self._squares else None

    @property
    def flushed_fraction(self) -> float | None:
        """Fraction of nonzero values that decode to zero; None if nothing was measured."""
        return self._num_flushed / self._num_values if self._num_values else None


class MeasuredCodec(CodedTraffic):
    """A codec that counts its bytes and measures its errors."""

    def __init__(
        self, name: str, codec: BlockCodec, hop: Hop = "between", *, same_as: MeasuredCodec | None = None
    ) -> None:
        """``same_as``: a codec that measures the same values, because they are coded once for both links."""
        super().__init__(name, hop)
        self.codec = codec
        self._same_as = same_as

    def encode(self, values: Tensor, out: Tensor) -> Tensor:
        """Encode ``values`` at the beginning of ``out``. Returns the payload."""
        message = out[: self.codec.message_bytes(values.numel())]
        self.codec.encode(values, message)
        if self._is_measuring:
            self._measure(values, message)
        return message

    def encode_sum(self, parts: Sequence[CodedValues], num_ranks: int, out: Tensor) -> Tensor | None:
        """Encode the sum of coded parts as `encode` does, in one operation. Returns None if no operation exists for the
        two codecs, or if errors are measured."""
        ours, theirs, numel = self.codec, parts[0].codec, parts[0].num_values
        blocks = theirs.block_numel, ours.block_numel
        if self._is_measuring or ours.num_bits != theirs.num_bits or blocks[1] not in (blocks[0], 2 * blocks[0]):
            return None
        message = out[: ours.message_bytes(numel)]
        dequantize_sum_quantize_(
            [part.codes for part in parts],
            [part.scales for part in parts],
            ours.num_bits,
            theirs.block_numel,
            ours.block_numel,
            numel,
            1.0 / num_ranks,
            message[: ours.codes_bytes(numel)].view(torch.int8),
            message[ours.codes_bytes(numel) :].view(ours.scale_dtype),
        )
        return message

    @property
    def relative_rms(self) -> float | None:
        return super().relative_rms if self._same_as is None else self._same_as.relative_rms

    @property
    def flushed_fraction(self) -> float | None:
        return super().flushed_fraction if self._same_as is None else self._same_as.flushed_fraction

    def _measure(self, values: Tensor, message: Tensor) -> None:
        squares = errors = 0.0
        num_values = num_flushed = 0
        for start, decoded in self.codec.decoded_tiles(message, values.numel(), _MEASURED_TILE_NUMEL):
            exact = values.detach()[start : start + decoded.numel()].to(torch.float32)
            squares += float(exact.double().square().sum())
            errors += float((decoded - exact).double().square().sum())
            num_values += int(exact.count_nonzero())
            num_flushed += int(((exact != 0) & (decoded == 0)).sum())
        if errors != errors or squares == float("inf"):  # not finite, so the step is skipped
            return
        with self._lock:
            self._squares += squares
            self._error_squares += errors
            self._num_values += num_values
            self._num_flushed += num_flushed
