"""The setting `quantize`, and the bytes of packed weights.

A packed weight of n elements is n / 2 bytes of codes, two to a byte, and a scale for each block of `block` elements.
With double quantization a scale takes one byte, and 256 scales share a float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

QuantizeMethod: TypeAlias = Literal["auto", "none", "nf4", "fp4"]

BLOCK_SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
LARGEST_BLOCK = BLOCK_SIZES[-1]
SCALES_PER_SCALE = 256
"""Scales that share a scale of their own."""
SCALE_ALIGN_BYTES = 64
DECODED_PER_S = 2e9
"""Weights that a CPU decodes in a second: measured with two cores, which also copy and check what they read."""
MOVED_BYTES_PER_DECODED = 15
"""Bytes of device memory that torch's operations read and write for each weight that a device decodes."""
DEVICE_MEMORY_BYTES_PER_S = 5e11
"""For a device whose rate is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """In which form frozen weights are stored."""

    method: QuantizeMethod = "auto"
    """"nf4" and "fp4" store 4 bits a weight; "none" stores the working dtype; "auto" keeps the form of the
    checkpoint."""

    double: bool = True
    """Whether the scales are quantized, too."""

    block: int = 64
    """Elements that share a scale."""

    skip: tuple[str, ...] = ()
    """Modules that stay as they are, by name or by the end of the name."""

    def __post_init__(self) -> None:
        if self.method not in get_args(QuantizeMethod):
            raise ValueError(f"quantize: {self.method!r} is not allowed; choose {_choices(get_args(QuantizeMethod))}")
        if type(self.double) is not bool:
            raise ValueError(f"quantize: double: {self.double!r} is not allowed; choose true or false")
        if self.block not in BLOCK_SIZES or type(self.block) is not int:
            raise ValueError(f"quantize: block: {self.block!r} is not allowed; choose {_choices(BLOCK_SIZES)}")
        if not all(isinstance(name, str) and name for name in self.skip):
            raise ValueError(f"quantize: skip: {list(self.skip)!r} is not allowed; give a list of names of modules")

    @classmethod
    def parse(cls, value: object) -> Quantization:
        """Make a quantization of any spelling of the setting. Raises ValueError."""
        match value:
            case Quantization():
                return value
            case str():
                return cls(method=value)  # type: ignore[arg-type]
            case Mapping():
                if unknown := [key for key in value if key not in cls.__dataclass_fields__]:
                    fields = ", ".join(cls.__dataclass_fields__)
                    raise ValueError(f"quantize: the key {unknown[0]!r} is not allowed; the keys are {fields}")
                if value.get("method") not in PACKED_METHODS:
                    raise ValueError(
                        f"quantize: a table needs its method, and {value.get('method')!r} is not allowed; choose "
                        f"{_choices(PACKED_METHODS)}"
                    )
                skip = value.get("skip", ())
                return cls(**{**value, "skip": tuple(skip) if isinstance(skip, (list, tuple)) else (skip,)})
        raise ValueError(f"quantize: {value!r} is not allowed; give {_choices(get_args(QuantizeMethod))}, or a table")

    @property
    def packs(self) -> bool:
        """Whether frozen weights are stored in another form than their working dtype."""
        return self.method in PACKED_METHODS

    def to_setting(self) -> str | dict[str, Any]:
        """The setting in JSON's types: a word if the rest is at its default, else a table."""
        if self == Quantization(method=self.method):
            return self.method
        return {"method": self.method, "double": self.double, "block": self.block, "skip": list(self.skip)}

    def codes_bytes(self, numel: int) -> int:
        """Bytes of the codes of ``numel`` elements."""
        return -(-numel // 2)

    def num_scales(self, numel: int) -> int:
        return -(-numel // self.block)

    def scales_bytes(self, numel: int) -> int:
        """Bytes of the scales of a weight of ``numel`` elements, aligned."""
        num_scales = self.num_scales(numel)
        num_bytes = 4 * num_scales
        if self.double:
            num_bytes = num_scales + 4 * (-(-num_scales // SCALES_PER_SCALE) + 1)
        return -(-num_bytes // SCALE_ALIGN_BYTES) * SCALE_ALIGN_BYTES


PACKED_METHODS = ("nf4", "fp4")
FORM_OF_THE_CHECKPOINT = Quantization()


def _choices(values: tuple[object, ...]) -> str:
    return ", ".join(map(str, values[:-1])) + f" or {values[-1]}"
