"""How the store packs a parameter. The rest of the engine uses only the interface `PackedForm`."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cache
from importlib import import_module
from types import ModuleType

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
    """Return `triton_decoder`, which decodes in one kernel, for a CUDA tensor. None if torch operations must decode."""
    return _triton_decoder() if tensor.device.type == "cuda" else None


class Packer:
    """Packs one unit. Its elements are passed in order, any number at a time."""

    def __init__(
        self,
        numel: int,
        block: int,
        encode: Callable[[Tensor], tuple[Tensor, Tensor]],
        store_scales: Callable[[Tensor], Tensor],
        *,
        codes_in_byte: int = 1,
    ) -> None:
        """``encode`` returns the codes and scales of whole blocks of float32 values, flat. ``store_scales`` returns the
        stored bytes of the scales of all blocks."""
        self.num_taken = 0
        """Number of elements packed so far."""
        self._numel, self._block, self._codes_in_byte = numel, block, codes_in_byte
        self._encode, self._store_scales = encode, store_scales
        self._rest = torch.empty(0)
        self._scales: list[Tensor] = []

    @property
    def is_complete(self) -> bool:
        return self.num_taken == self._numel

    @torch.no_grad()
    def pack(self, values: Tensor) -> tuple[int, Tensor]:
        """Pack the next elements, flat, in the working dtype. Return the codes of the blocks that are now complete, as
        (first byte, codes)."""
        first_byte = (self.num_taken - self._rest.numel()) // self._codes_in_byte
        self.num_taken += values.numel()
        assert self.num_taken <= self._numel, f"more than the {self._numel} elements of the weight"
        values = values.to(torch.float32)
        values = torch.cat([self._rest, values]) if self._rest.numel() else values
        whole = values.numel() if self.is_complete else values.numel() - values.numel() % self._block
        self._rest = values[whole:].clone()
        if not whole:
            return first_byte, torch.empty(0, dtype=torch.uint8)
        codes, scales = self._encode(values[:whole])
        self._scales.append(scales)
        return first_byte, codes

    def pack_scales(self) -> Tensor:
        """Return the stored bytes of the unit's scales. All elements must be packed."""
        assert self.is_complete, f"{self.num_taken} of {self._numel} elements are packed"
        return self._store_scales(torch.cat(self._scales))


def stored_bytes(values: Tensor, num_bytes: int) -> Tensor:
    """Return the bytes of ``values``, with zeros after them."""
    stored, content = torch.zeros(num_bytes, dtype=torch.uint8), values.contiguous().view(torch.uint8).flatten()
    stored[: content.numel()] = content
    return stored


class PackedForm(ABC):
    """How a parameter is packed. Each unit, such as an expert or the whole parameter, is packed by itself.

    A unit is `unit_codes_bytes` of codes in one record, and `unit_scales_bytes` of scales (and other data for decoding)
    in another. Codes may be read, sent and decoded in any pieces that are cut at multiples of `cut_bytes`; all scales
    are needed. No method depends on where the bytes are stored.
    """

    unit_numel: int
    """Number of elements in a unit."""

    @property
    @abstractmethod
    def setting(self) -> str:
        """The name of the form in settings, such as "nf4"."""

    @property
    @abstractmethod
    def unit_codes_bytes(self) -> int: ...

    @property
    @abstractmethod
    def unit_scales_bytes(self) -> int: ...

    @property
    @abstractmethod
    def cut_bytes(self) -> int:
        """Decoding can start at any offset that is a multiple of this number of bytes, which divides 4 KiB."""

    @property
    def takes_rows(self) -> bool:
        """Whether a dense weight may be packed some rows at a time. If not, the whole weight must be given at once."""
        return True

    def codes_bytes(self, numel: int) -> int:
        """Bytes of the codes of ``numel`` elements, which are whole units."""
        return numel // self.unit_numel * self.unit_codes_bytes

    def scales_bytes(self, numel: int) -> int:
        """Bytes of the scales of ``numel`` elements, which are whole units."""
        return numel // self.unit_numel * self.unit_scales_bytes

    def packer(self) -> Packer:
        """Return a packer for one unit. Raises ValueError if this form cannot pack dense weights."""
        raise ValueError(f"dense weights cannot be packed as {self.setting}")

    def stored_order(self, values: Tensor) -> Tensor:
        """Return all elements of a weight, flat, in the order in which they are packed."""
        return values

    def elements(self, first: int, last: int) -> tuple[int, int]:
        """Return a range of elements that includes all elements with codes in the bytes [first, last)."""
        size = self.unit_codes_bytes
        unit, last_unit = first // size, (last - 1) // size
        low, _ = self._elements_of_unit(first - unit * size, min(last - unit * size, size))
        _, high = self._elements_of_unit(max(first - last_unit * size, 0), last - last_unit * size)
        return unit * self.unit_numel + low, last_unit * self.unit_numel + high

    def bytes_of(self, first: int, last: int) -> tuple[int, int]:
        """Return the range of code bytes from which the elements [first, last), and perhaps more, are decoded."""
        numel = self.unit_numel
        unit, last_unit = first // numel, (last - 1) // numel
        low, _ = self._bytes_of_unit(first - unit * numel, min(last - unit * numel, numel))
        _, high = self._bytes_of_unit(max(first - last_unit * numel, 0), last - last_unit * numel)
        return unit * self.unit_codes_bytes + low, last_unit * self.unit_codes_bytes + high

    @torch.no_grad()
    def decode_(self, out: Tensor, origin: int, codes: Tensor, first_byte: int, scales: Tensor) -> None:
        """Decode ``codes``, which begin at byte ``first_byte`` of the parameter's codes, to their places in ``out``.

        ``out`` is flat and contiguous. It begins with the parameter's element ``origin``, and has room for all elements
        that `elements` returns for these bytes. ``scales`` has the scales of all units. All tensors are on one device.
        """
        size, end = self.unit_codes_bytes, first_byte + codes.numel()
        for unit in range(first_byte // size, -(-end // size)):
            low, high = max(first_byte, unit * size), min(end, (unit + 1) * size)
            of_unit = scales[unit * self.unit_scales_bytes : (unit + 1) * self.unit_scales_bytes]
            of_part = codes[low - first_byte : high - first_byte]
            self._decode_unit_(out, origin - unit * self.unit_numel, of_part, low - unit * size, of_unit)

    @abstractmethod
    def _elements_of_unit(self, first: int, last: int) -> tuple[int, int]:
        """Same as `elements`, for bytes within a unit."""

    @abstractmethod
    def _bytes_of_unit(self, first: int, last: int) -> tuple[int, int]:
        """Same as `bytes_of`, for elements within a unit."""

    @abstractmethod
    def _decode_unit_(self, out: Tensor, origin: int, codes: Tensor, first_byte: int, scales: Tensor) -> None:
        """Same as `decode_`, within a unit. ``origin`` is negative if ``out`` begins before the unit."""
