"""The capabilities of a machine in numbers, measured on this machine or written by hand for another.

A profile is checked when it is read. Every error names the key, the value and the allowed values.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, fields, replace
from functools import partial
from typing import Any, TypeVar

from hf_lohan.wording import UNIT_BYTES


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceProfile:
    flops_per_s: float
    """Measured with the model's matrix shapes (LoHan's THP_G). Data sheets have larger numbers."""
    memory_bytes: int
    attention_flops_per_s: float | None = None
    """Rate of fused attention. Its backward counts twice the FLOPs of its forward. None: `flops_per_s`."""
    memory_bytes_per_s: float | None = None
    """Bandwidth of elementwise operations. With None they are assumed to take no time."""
    shares_cpu: bool = False
    """Whether the CPU is the device. The same cores then also copy, run the optimizer and serve the drives."""
    grows_segments: bool = True
    """Whether the device's allocator has segments that grow and waste less memory (torch's `expandable_segments`)."""
    moves_files: bool = False
    """Whether weights and swapped activations bypass host memory between SSDs and device, so that the CPU computes no
    checksums of them. A run with `gpu_direct` sets it."""
    name: str = ""

    def compute_s(self, flops: float, attention_flops: float = 0.0) -> float:
        """Return the seconds that ``flops`` take. They include ``attention_flops`` of fused attention."""
        if self.attention_flops_per_s is None:
            return flops / self.flops_per_s
        return (flops - attention_flops) / self.flops_per_s + attention_flops / self.attention_flops_per_s


GPU_LINKS = ("nvlink", "pcie", "none")
"""Links between the GPUs of a machine."""
ASSUMED_NVLINK_BYTES_PER_S = 45e9
"""The rate of NVLink if it is not known: 80% of the rate of the bridge of two RTX 3090. This bridge has four links of
14.06 GB/s in each direction. Server cards have more and faster links. Not measured."""

COMPUTING_RATES = ("flops_per_s", "attention_flops_per_s", "memory_bytes_per_s")
"""Fields of `DeviceProfile` that depend on the shapes of a batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SsdProfile:
    """One drive, or one path. A drive is simplex, which means that reading and writing share its time."""

    read_bytes_per_s: float
    write_bytes_per_s: float
    capacity_bytes: int
    endurance_bytes: int | None = None
    """Bytes that may be written in the drive's life (the data sheet's TBW); None if unknown."""
    path: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class CpuProfile:
    memory_bytes: int
    optimizer_params_per_s: float
    """Rate of AdamW over chunks in RAM, while the device computes. If the CPU is the device, AdamW is measured alone,
    because the two times are added."""
    checksum_bytes_per_s: float | None = None
    """Rate of checksums of SSD reads and writes. With None they are assumed to take no time."""
    memory_bytes_per_s: float | None = None
    """Bandwidth of a node's RAM, reads plus writes, which all its ranks share. With None (unknown) RAM is never the
    limit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HardwareProfile:
    """A machine. `device` and the links describe one device. `ssd`: the paths over which a store is striped. Their
    rates add up, unless `ssd_together_read_bytes_per_s` and `ssd_together_write_bytes_per_s` were measured."""

    device: DeviceProfile
    h2d_bytes_per_s: float
    d2h_bytes_per_s: float
    ssd: tuple[SsdProfile, ...]
    cpu: CpuProfile
    duplex_bytes_per_s: float | None = None
    """Sum of both directions at the same time. With None neither direction slows the other (PCIe)."""
    ssd_together_read_bytes_per_s: float | None = None
    ssd_together_write_bytes_per_s: float | None = None
    ssd_mixed_bytes_per_s: float | None = None
    """Sum of reads and writes if all paths read and write the same number of bytes at the same time. With None reads
    and writes share the time (simplex)."""
    net_bytes_per_s: float | None = None
    """Payload rate from this machine to others while it receives at the same rate; None without other machines."""
    gpu_link: str = ""
    """One of `GPU_LINKS`, if all pairs of GPUs of the machine have it. "" if it is not known."""
    gpu_link_bytes_per_s: float | None = None
    """Rate from one GPU to the others of the machine while it receives at the same rate; None if it is not known."""

    @property
    def between_gpus_bytes_per_s(self) -> float:
        """The rate of links between GPUs. An unknown rate is assumed: `ASSUMED_NVLINK_BYTES_PER_S`, or for PCIe the
        rate of the slower direction of copies from and to RAM."""
        if self.gpu_link_bytes_per_s is not None:
            return self.gpu_link_bytes_per_s
        return ASSUMED_NVLINK_BYTES_PER_S if self.gpu_link == "nvlink" else self._slower_copy_bytes_per_s

    @property
    def gpus_share_links(self) -> bool:
        """Whether bytes between GPUs use the links between RAM and devices, as over PCIe. A rate between GPUs that is
        higher than the rate of these links belongs to another link."""
        return self.gpu_link != "nvlink" and self.between_gpus_bytes_per_s <= self._slower_copy_bytes_per_s

    @property
    def _slower_copy_bytes_per_s(self) -> float:
        return min(self.h2d_bytes_per_s, self.d2h_bytes_per_s)

    @property
    def ssd_capacity_bytes(self) -> int:
        return sum(ssd.capacity_bytes for ssd in self.ssd)

    @property
    def ssd_read_bytes_per_s(self) -> float:
        return self.ssd_together_read_bytes_per_s or sum(ssd.read_bytes_per_s for ssd in self.ssd)

    @property
    def ssd_write_bytes_per_s(self) -> float:
        return self.ssd_together_write_bytes_per_s or sum(ssd.write_bytes_per_s for ssd in self.ssd)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> HardwareProfile:
        """Make a profile from YAML or JSON types. `to_mapping` is the inverse.

        Numbers may be strings, such as "160e12", which YAML 1.1 does not read as a number. Bytes may be sizes, such as
        "24GB" or "7GB/s". An entry of `ssd` may describe several equal drives with `count: 3`. Raises ProfileError.
        """
        return _read(cls, values, "")

    def to_mapping(self) -> dict[str, Any]:
        """Return the profile for YAML or JSON, without fields that have their default."""
        return _written(self) | {
            "device": _written(self.device),
            "ssd": [_written(ssd) for ssd in self.ssd],
            "cpu": _written(self.cpu),
        }


Profile = TypeVar("Profile", DeviceProfile, SsdProfile, CpuProfile, HardwareProfile)


def with_changed(profile: Profile, change: Callable[[float], float], *names: str) -> Profile:
    """Return the profile with ``change`` applied to rates or sizes. Unknown values stay unknown."""
    known = {name: value for name in names if (value := getattr(profile, name)) is not None}
    fresh: dict[str, Any] = {name: change(value) for name, value in known.items()}
    return replace(profile, **fresh)


def _keys(profile: type) -> list[str]:
    return [field.name for field in fields(profile)]


def _written(profile: Any) -> dict[str, Any]:
    values = {field.name: getattr(profile, field.name) for field in fields(profile)}
    defaults = {field.name: field.default for field in fields(profile) if field.default is not MISSING}
    return {name: value for name, value in values.items() if name not in defaults or value != defaults[name]}


class ProfileError(ValueError):
    """A hardware profile is invalid. The message names the key and the value."""


def _read(kind: type[Profile], values: Any, path: str, also: tuple[str, ...] = ()) -> Profile:
    """Read the profile of this kind at ``path``, such as "ssd[0]". The whole profile has the path ""."""
    allowed = [*_keys(kind), *also]
    if not isinstance(values, Mapping):
        what = path or "the hardware profile"
        raise ProfileError(f"{what} is {_shown(values)}; write a mapping with the keys {', '.join(allowed)}")
    for key in values:
        if key not in allowed:
            close = difflib.get_close_matches(str(key), allowed, n=1)
            guess = f"did you mean {close[0]}? " if close else ""
            raise ProfileError(
                f"{_place(path, key)} = {_shown(values[key])} is not a key of a hardware profile; {guess}allowed here: "
                f"{', '.join(allowed)}"
            )
    return kind(**{field.name: _value_of(field, values, path) for field in fields(kind)})


def _value_of(field: Field[Any], values: Mapping[Any, Any], path: str) -> Any:
    value, place, (allowed, convert) = values.get(field.name), _place(path, field.name), _rule_of(field.name)
    if value is None:
        if field.default is None or (field.default is not MISSING and field.name not in values):
            return field.default
        what = "is empty" if field.name in values else "is missing"
        raise ProfileError(f"{place} {what} in the hardware profile; write {allowed}")
    return _converted(value, place, allowed, convert)


def _converted(value: Any, place: str, allowed: str, convert: Callable[[Any], Any]) -> Any:
    if (found := convert(value)) is None:
        raise ProfileError(f"{place} = {_shown(value)} is not allowed; write {allowed}")
    return found


def _rule_of(name: str) -> tuple[str, Callable[[Any], Any]]:
    """Return what is allowed for a key, and the function that converts its value and returns None for others. The
    ending of a key is its unit."""
    match name:
        case "device" | "cpu":
            kind: Any = DeviceProfile if name == "device" else CpuProfile
            return f"a mapping with the keys {', '.join(_keys(kind))}", lambda value: _read(kind, value, name)
        case "ssd":
            return (
                'a list of drives, each with "read_bytes_per_s", "write_bytes_per_s" and "capacity_bytes"',
                _read_ssds,
            )
        case "gpu_link":
            return " or ".join(GPU_LINKS), lambda value: value if value in GPU_LINKS else None
        case "name" | "path":
            return "text", lambda value: value if isinstance(value, str) else None
        case "shares_cpu" | "grows_segments" | "moves_files":
            return "true or false", lambda value: value if isinstance(value, bool) else None
        case "count":
            return "a whole number above 0", lambda value: value if type(value) is int and value > 0 else None
    if name.endswith("_bytes_per_s"):
        return 'a number of bytes per second above 0, such as 20e9 or "20GB/s"', partial(_number, has_unit=True)
    if name.endswith("_bytes"):
        return 'a number of bytes above 0, such as 24000000000, "24GB" or "24GiB"', _size_bytes
    return "a number above 0 such as 160e12", _number


def _read_ssds(values: Any) -> tuple[SsdProfile, ...] | None:
    if not isinstance(values, list | tuple):
        return None
    ssds: list[SsdProfile] = []
    for index, entry in enumerate(values):
        ssd = _read(SsdProfile, entry, f"ssd[{index}]", ("count",))
        count = entry.get("count")
        ssds += [ssd] * (1 if count is None else _converted(count, f"ssd[{index}].count", *_rule_of("count")))
    return tuple(ssds) or None


_NUMBER = re.compile(r"([+-]?(?:\d[\d_]*(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?)\s*([a-zA-Z]*)(/s)?", re.ASCII)


def _number(value: Any, *, has_unit: bool = False) -> float | None:
    """Return a number above 0, or None for other values. With ``has_unit`` it may have a unit of bytes."""
    number = 0.0
    if isinstance(value, int | float) and not isinstance(value, bool):
        number = float(value)
    elif isinstance(value, str) and (match := _NUMBER.fullmatch(value.strip())):
        digits, unit, per_second = match.groups()
        scale = UNIT_BYTES.get(unit.lower())
        if scale is not None and (has_unit or not (unit or per_second)):
            number = float(digits.replace("_", "")) * scale
    return number if 0 < number < math.inf else None


def _size_bytes(value: Any) -> int | None:
    return int(_number(value, has_unit=True) or 0) or None


def _place(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
