"""How the store packs a parameter. The rest of the engine asks a `PackedForm` only, and knows no particular one."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Protocol

import torch
from torch import Tensor

logger = logging.getLogger(__name__)


@cache
def _triton_decoder() -> ModuleType | None:
    try:
        decoder = import_module("hf_lohan.quantize.triton_decoder")
    except ImportError as error:
        logger.warning(
            "packed weights are decoded by torch operations, which is slower on a GPU, because Triton cannot be "
            "imported: %s",
            error,
        )
        return None
    logger.info("packed weights are decoded by a Triton kernel")
    return decoder


def kernels_for(tensor: Tensor) -> ModuleType | None:
    """The module that decodes to this tensor's device in one kernel, `triton_decoder`, or None for torch operations."""
    return _triton_decoder() if tensor.device.type == "cuda" else None


class WeightPacker(Protocol):
    """Packs one unit whose elements come in order, any number at a time."""

    @property
    def num_taken(self) -> int:
        """Elements that came so far."""

    @property
    def is_complete(self) -> bool: ...

    def pack(self, values: Tensor) -> tuple[int, Tensor]:
        """(first byte, codes) of what the elements up to here complete. ``values`` are the next elements, flat."""

    def pack_scales(self) -> Tensor:
        """The stored bytes of the unit's scales, once all elements have come."""


class PackedForm(ABC):
    """How a parameter is packed: each of its units, such as an expert or the whole parameter, by itself.

    A unit is `unit_codes_bytes` of codes in one record, and `unit_scales_bytes` of scales (and what else decoding
    needs) in another. Codes may be read, sent and decoded in any pieces that are cut at multiples of `cut_bytes`;
    scales are needed whole. No method knows where bytes lie.
    """

    unit_numel: int
    """Elements of a unit."""

    @property
    @abstractmethod
    def setting(self) -> str:
        """The form as users say it, such as "nf4"."""

    @property
    @abstractmethod
    def unit_codes_bytes(self) -> int: ...

    @property
    @abstractmethod
    def unit_scales_bytes(self) -> int: ...

    @property
    @abstractmethod
    def cut_bytes(self) -> int:
        """Codes are decoded from multiples of these bytes on. A divisor of 4 KiB."""

    @property
    def takes_rows(self) -> bool:
        """Whether the elements of a dense weight may be packed in their order. If not, they come whole."""
        return True

    def codes_bytes(self, numel: int) -> int:
        """Bytes of the codes of ``numel`` elements, which are whole units."""
        return numel // self.unit_numel * self.unit_codes_bytes

    def scales_bytes(self, numel: int) -> int:
        """Bytes of the scales of ``numel`` elements, which are whole units."""
        return numel // self.unit_numel * self.unit_scales_bytes

    def packer(self) -> WeightPacker:
        """A packer for one unit. Raises ValueError if weights are only taken as a checkpoint has them."""
        raise ValueError(f"dense weights cannot be packed as {self.setting}")

    def stored_order(self, values: Tensor) -> Tensor:
        """All elements of a weight, flat, in the order in which they are packed."""
        return values

    def elements(self, first: int, last: int) -> tuple[int, int]:
        """The elements [first, last) of a parameter among which the codes of these bytes are."""
        size = self.unit_codes_bytes
        unit, last_unit = first // size, (last - 1) // size
        low, _ = self._elements_of_unit(first - unit * size, min(last - unit * size, size))
        _, high = self._elements_of_unit(max(first - last_unit * size, 0), last - last_unit * size)
        return unit * self.unit_numel + low, last_unit * self.unit_numel + high

    def bytes_of(self, first: int, last: int) -> tuple[int, int]:
        """Bytes [first, last) of codes that decode the elements [first, last) and perhaps some around them."""
        numel = self.unit_numel
        unit, last_unit = first // numel, (last - 1) // numel
        low, _ = self._bytes_of_unit(first - unit * numel, min(last - unit * numel, numel))
        _, high = self._bytes_of_unit(max(first - last_unit * numel, 0), last - last_unit * numel)
        return unit * self.unit_codes_bytes + low, last_unit * self.unit_codes_bytes + high

    @torch.no_grad()
    def decode_(self, out: Tensor, origin: int, codes: Tensor, first_byte: int, scales: Tensor) -> None:
        """Decode ``codes``, those of the parameter from ``first_byte`` on, to their places in ``out``.

        ``out`` is flat and contiguous, and has the parameter's elements from ``origin`` on, at least those that
        `elements` says. ``scales`` are those of all units. All tensors are on one device.
        """
        size, end = self.unit_codes_bytes, first_byte + codes.numel()
        for unit in range(first_byte // size, -(-end // size)):
            low, high = max(first_byte, unit * size), min(end, (unit + 1) * size)
            of_unit = scales[unit * self.unit_scales_bytes : (unit + 1) * self.unit_scales_bytes]
            of_part = codes[low - first_byte : high - first_byte]
            self._decode_unit_(out, origin - unit * self.unit_numel, of_part, low - unit * size, of_unit)

    @abstractmethod
    def _elements_of_unit(self, first: int, last: int) -> tuple[int, int]:
        """As `elements`, for bytes within a unit."""

    @abstractmethod
    def _bytes_of_unit(self, first: int, last: int) -> tuple[int, int]:
        """As `bytes_of`, for elements within a unit."""

    @abstractmethod
    def _decode_unit_(self, out: Tensor, origin: int, codes: Tensor, first_byte: int, scales: Tensor) -> None:
        """As `decode_`, within a unit. ``origin`` is negative if ``out`` begins before the unit."""
