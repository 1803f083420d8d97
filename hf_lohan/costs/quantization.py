"""The setting `quantize`, and the bytes of packed weights.

A weight of n elements in nf4 or fp4 is n / 2 bytes of codes, two to a byte, and a scale for each block of `block`
elements. With double quantization a scale takes one byte, and 256 scales share a float32. Matrices of other quantized
checkpoints have the codes and scales of the checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeAlias, get_args

QuantizeMethod: TypeAlias = Literal["auto", "none", "nf4", "fp4", "int8"]
CodeKind: TypeAlias = Literal[
    "float8_e4m3fn", "float8_e5m2", "int8", "int8_of_127", "fp4", "int4_in_int32", "int8_in_int32"
]
"""Forms of a checkpoint's codes. `float8_*` and `int8` are dtypes of torch. `int8_of_127` is int8 in units of
scale / 127. `fp4` is two E2M1 numbers in a byte. The others are packed in int32, as offsets from -8 and -128."""

DEFAULT_BLOCK = 64
BLOCK_SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
LARGEST_BLOCK = BLOCK_SIZES[-1]
SCALES_PER_SCALE = 256
"""Number of scales that share a scale."""
SCALE_ALIGN_BYTES = 64
DECODED_PER_S = 2e9
"""Weights that a CPU decodes in a second. Measured with two cores, which also copy and verify the codes."""
MOVED_BYTES_PER_DECODED = 15
"""Bytes of device memory that torch's operations read and write for each weight that a device decodes."""
DEVICE_MEMORY_BYTES_PER_S = 5e11
"""Assumed bandwidth of a device's memory if it is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedMatrix:
    """How a checkpoint stores a matrix: codes, row by row, and scales that blocks of codes share."""

    rows: int
    columns: int
    codes: CodeKind
    scales: str
    """dtype of the scales. A uint8 value s stands for the scale 2 ** (s - 127)."""
    block: tuple[int, int]
    """Rows and columns that share a scale."""
    has_zero_points: bool = False
    """Whether there is a zero point (int8, the code that decodes to 0) for each row and block of columns."""
    is_transposed: bool = False
    """Whether the weight is the transposed matrix."""

    @property
    def numel(self) -> int:
        return self.rows * self.columns

    @property
    def bits(self) -> int:
        """Bits of each code."""
        return 4 if self.codes in ("fp4", "int4_in_int32") else 8

    @property
    def cut_bytes(self) -> int:
        """Size of the words that contain codes. Each row begins with a new word."""
        return 4 if self.codes.endswith("int32") else 1

    @property
    def row_bytes(self) -> int:
        return round_up(-(-self.columns * self.bits // 8), self.cut_bytes)

    @property
    def codes_bytes(self) -> int:
        return self.rows * self.row_bytes

    @property
    def grid(self) -> tuple[int, int]:
        """Blocks of rows, and blocks of columns."""
        return -(-self.rows // self.block[0]), -(-self.columns // self.block[1])

    @property
    def zero_points_start(self) -> int:
        """First byte of the zero points, which follow the scales."""
        return round_up(self.grid[0] * self.grid[1] * _ITEMSIZES[self.scales], SCALE_ALIGN_BYTES)

    @property
    def scales_bytes(self) -> int:
        """Bytes of scales and zero points, aligned."""
        zero_points = self.rows * self.grid[1] if self.has_zero_points else 0
        return self.zero_points_start + round_up(zero_points, SCALE_ALIGN_BYTES)


EncodedWeights: TypeAlias = tuple[tuple[str, tuple[EncodedMatrix, ...]], ...]
"""Pairs of a parameter's name and the consecutive matrices of each of its units (experts, or the whole parameter)."""

_ITEMSIZES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e8m0fnu": 1, "float8_e4m3fn": 1, "uint8": 1}


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """The form in which frozen weights are stored."""

    method: str = "auto"
    """"nf4" and "fp4" store 4 bits a weight, "int8" 8; "none" stores the working dtype; "auto" keeps the form of the
    checkpoint."""

    double: bool = True
    """Whether the scales are quantized, too."""

    block: int = DEFAULT_BLOCK
    """Elements that share a scale."""

    skip: tuple[str, ...] = ()
    """Modules that are not quantized, by name or by the end of the name."""

    weights: EncodedWeights = field(default=(), repr=False)
    """Packed weights that have the form of their checkpoint. `method` is then the method of the checkpoint."""

    def __post_init__(self) -> None:
        if self.weights:
            return
        if self.method not in get_args(QuantizeMethod):
            raise ValueError(f"quantize: {self.method!r} is not allowed; choose {_choices(get_args(QuantizeMethod))}")
        if type(self.double) is not bool:
            raise ValueError(f"quantize: double: {self.double!r} is not allowed; choose true or false")
        if self.block not in BLOCK_SIZES or type(self.block) is not int:
            raise ValueError(f"quantize: block: {self.block!r} is not allowed; choose {_choices(BLOCK_SIZES)}")
        if self.method == "int8" and (self.double, self.block) != (True, DEFAULT_BLOCK):
            raise ValueError("quantize: int8 has a scale for each row, and no double or block; leave them out")
        if not all(isinstance(name, str) and name for name in self.skip):
            raise ValueError(f"quantize: skip: {list(self.skip)!r} is not allowed; give a list of names of modules")
        for pattern in self.skip:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(
                    f"quantize: skip: {pattern!r} is neither the end of a name nor a regular expression ({error}); "
                    "write the end of a module's name, such as down_proj"
                ) from None

    @classmethod
    def parse(cls, value: object) -> Quantization:
        """Make a quantization from any spelling of the setting. Raises ValueError."""
        match value:
            case Quantization():
                return value
            case str():
                return cls(method=value)
            case {"method": str(method), "weights": Mapping() as weights}:  # from a run's description
                return cls(method=method, weights=_weights_of(weights))
            case Mapping():
                allowed = [name for name in cls.__dataclass_fields__ if name != "weights"]
                if unknown := [key for key in value if key not in allowed]:
                    fields = ", ".join(allowed)
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
        """Whether frozen weights are stored in a form other than their working dtype."""
        return bool(self.weights) or self.method in PACKED_METHODS

    def to_setting(self) -> str | dict[str, Any]:
        """Return the setting in JSON's types: a string if the other fields have their defaults, else a table."""
        if self.weights:
            groups: dict[tuple[EncodedMatrix, ...], list[str]] = {}
            for name, matrices in self.weights:
                groups.setdefault(matrices, []).append(name)
            weights = {" ".join(names): [asdict(matrix) for matrix in of] for of, names in groups.items()}
            return {"method": self.method, "weights": weights}
        if self == Quantization(method=self.method):
            return self.method
        if self.method == "int8":
            return {"method": self.method, "skip": list(self.skip)}
        return {"method": self.method, "double": self.double, "block": self.block, "skip": list(self.skip)}

    def codes_bytes(self, numel: int) -> int:
        """Return the bytes of the codes of ``numel`` elements."""
        return -(-numel // 2)

    def num_scales(self, numel: int) -> int:
        return -(-numel // self.block)

    def scales_bytes(self, numel: int) -> int:
        """Return the bytes of the scales of a weight of ``numel`` elements, aligned."""
        num_scales = self.num_scales(numel)
        num_bytes = 4 * num_scales
        if self.double:
            num_bytes = num_scales + 4 * (-(-num_scales // SCALES_PER_SCALE) + 1)
        return round_up(num_bytes, SCALE_ALIGN_BYTES)


def _weights_of(groups: Mapping[str, Any]) -> EncodedWeights:
    return tuple(
        (name, tuple(EncodedMatrix(**{**matrix, "block": tuple(matrix["block"])}) for matrix in matrices))
        for names, matrices in groups.items()
        for name in names.split(" ")
    )


PACKED_METHODS = ("nf4", "fp4", "int8")
FORM_OF_THE_CHECKPOINT = Quantization()


def _choices(values: tuple[object, ...]) -> str:
    return ", ".join(map(str, values[:-1])) + f" or {values[-1]}"
