"""Counts the bytes that a codec saves between nodes, and measures its error in the first steps of a run."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from hf_lohan.ranks.collectives.block_codec import BlockCodec


class CodedTraffic:
    """Counts the bytes that one rank sends, with and without a codec. Thread-safe."""

    def __init__(self, name: str) -> None:
        """``name``: name of the values that are sent, for reports."""
        self.name = name
        self.exact_bytes = 0
        """Bytes before encoding."""
        self.sent_bytes = 0
        self._lock = threading.Lock()

    def count(self, exact_bytes: int, sent_bytes: int) -> None:
        with self._lock:
            self.exact_bytes += exact_bytes
            self.sent_bytes += sent_bytes

    def stop_measuring(self) -> None:
        """Stop measuring errors, because it costs a second pass over the values."""

    @property
    def relative_rms(self) -> float | None:
        """Root mean square of the errors divided by the root mean square of the values; None if nothing was
        measured."""
        return None

    @property
    def flushed_fraction(self) -> float | None:
        """Fraction of nonzero values that decode to zero; None if nothing was measured."""
        return None


class MeasuredCodec(CodedTraffic):
    """A codec that counts its bytes and measures its errors."""

    def __init__(self, name: str, codec: BlockCodec) -> None:
        super().__init__(name)
        self.codec = codec
        self._is_measuring = True
        self._squares = self._error_squares = 0.0
        self._num_values = self._num_flushed = 0

    def encode(self, values: Tensor, out: Tensor) -> Tensor:
        """Encode ``values`` at the beginning of ``out``. Returns the payload."""
        message = out[: self.codec.message_bytes(values.numel())]
        self.codec.encode(values, message)
        if self._is_measuring:
            self._measure(values, message)
        return message

    def stop_measuring(self) -> None:
        self._is_measuring = False

    @property
    def relative_rms(self) -> float | None:
        return (self._error_squares / self._squares) ** 0.5 if self._squares else None

    @property
    def flushed_fraction(self) -> float | None:
        return self._num_flushed / self._num_values if self._num_values else None

    def _measure(self, values: Tensor, message: Tensor) -> None:
        decoded = torch.empty(values.numel(), dtype=torch.float32)
        self.codec.decode(message, decoded)
        exact = values.detach().to(torch.float32)
        squares = float(exact.double().square().sum())
        errors = float((decoded - exact).double().square().sum())
        num_flushed = int(((exact != 0) & (decoded == 0)).sum())
        if errors != errors or squares == float("inf"):  # not finite, so the step is skipped
            return
        with self._lock:
            self._squares += squares
            self._error_squares += errors
            self._num_values += int(exact.count_nonzero())
            self._num_flushed += num_flushed
