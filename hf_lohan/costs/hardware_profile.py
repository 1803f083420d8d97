"""The capabilities of a machine in numbers, measured on this machine or written by hand for another.

A profile is checked when it is read. Every error names the key, the value and the allowed values.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, Field, dataclass, fields, replace
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
_SSD_LIST = 'a list of drives, each with "read_bytes_per_s", "write_bytes_per_s" and "capacity_bytes"'


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


def _read(kind: type[Profile], values: object, path: str, also: tuple[str, ...] = ()) -> Profile:
    """Read the profile of this kind at `path`. The end of a key is its unit."""
    section = Section(values, path, [*_keys(kind), *also])
    return kind(**{field.name: _value_of(section, field) for field in fields(kind)})


def _value_of(section: Section, field: Field[Any]) -> Any:
    match field.name:
        case "device" | "cpu":
            kind: Any = DeviceProfile if field.name == "device" else CpuProfile
            allowed = f"a mapping with the keys {', '.join(_keys(kind))}"
            return _read(kind, section.require(field.name, allowed), field.name)
        case "ssd":
            return _read_ssds(section.require("ssd", _SSD_LIST))
        case "gpu_link":
            return section.choice("gpu_link", GPU_LINKS)
        case "shares_cpu" | "grows_segments" | "moves_files" | "name" | "path":
            return section.plain(field.name, field.default)
    if field.default is None and not section.has(field.name):
        return None
    if field.name.endswith("_bytes_per_s"):
        return section.quantity(field.name, _RATES)
    return section.size_bytes(field.name) if field.name.endswith("_bytes") else section.quantity(field.name, _NUMBERS)


def _read_ssds(values: object) -> tuple[SsdProfile, ...]:
    if not isinstance(values, list | tuple) or not values:
        raise ProfileError(f"ssd = {values!r} is not allowed; write {_SSD_LIST}")
    ssds: list[SsdProfile] = []
    for index, entry in enumerate(values):
        ssd = _read(SsdProfile, entry, f"ssd[{index}]", ("count",))
        ssds += [ssd] * Section(entry, f"ssd[{index}]", entry).count("count")
    return tuple(ssds)


class ProfileError(ValueError):
    """A hardware profile is invalid. The message names the key and the value."""


_NUMBER = re.compile(r"([+-]?(?:\d[\d_]*(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?)\s*([a-zA-Z]*)(/s)?", re.ASCII)
_NUMBERS = "a number above 0 such as 160e12"
_SIZES = 'a number of bytes above 0, such as 24000000000, "24GB" or "24GiB"'
_RATES = 'a number of bytes per second above 0, such as 20e9 or "20GB/s"'


class Section:
    """One mapping of the profile. `path` is its path in the profile, such as "ssd[0]". The profile itself has the path
    ""."""

    def __init__(self, values: object, path: str, allowed: Collection[str]) -> None:
        """Raise ProfileError if `values` is not a mapping, or has a key that is not allowed."""
        if not isinstance(values, Mapping):
            raise ProfileError(
                f"{path or 'the hardware profile'} is {_shown(values)}; write a mapping with the keys "
                f"{', '.join(allowed)}"
            )
        self._values: Mapping[Any, Any] = values
        self._path = path
        for key in values:
            if key not in allowed:
                close = difflib.get_close_matches(str(key), allowed, n=1)
                guess = f"did you mean {close[0]}? " if close else ""
                raise ProfileError(
                    f"{self.place(str(key))} = {_shown(values[key])} is not a key of a hardware profile; "
                    f"{guess}allowed here: {', '.join(allowed)}"
                )

    def place(self, key: str) -> str:
        """Return the whole path of a key, for messages."""
        return f"{self._path}.{key}" if self._path else key

    def has(self, key: str) -> bool:
        return self._values.get(key) is not None

    def require(self, key: str, allowed: str) -> Any:
        """Return the value as written. Raises ProfileError if it is missing. `allowed`: description of the allowed
        values."""
        value = self._values.get(key)
        if value is None:
            what = "is missing" if key not in self._values else "is empty"
            raise ProfileError(f"{self.place(key)} {what} in the hardware profile; write {allowed}")
        return value

    def size_bytes(self, key: str) -> int:
        size = self.quantity(key, _SIZES)
        if size < 1:
            raise self._wrong(key, _SIZES)
        return int(size)

    def count(self, key: str) -> int:
        """Return a whole number above 0; 1 if the key is missing."""
        value = self._values.get(key)
        if value is None:
            return 1
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self._wrong(key, "a whole number above 0")
        return value

    def plain(self, key: str, default: Any) -> Any:
        """Return a value of the default's type, which is text or bool."""
        value = self._values.get(key, default)
        if not isinstance(value, type(default)):
            raise self._wrong(key, "text" if isinstance(default, str) else "true or false")
        return value

    def choice(self, key: str, allowed: Collection[str]) -> str:
        """Return one of these words; "" if the key is missing."""
        value = self._values.get(key)
        if value is None:
            return ""
        if value not in allowed:
            raise self._wrong(key, " or ".join(allowed))
        return str(value)

    def quantity(self, key: str, allowed: str) -> float:
        """Return a number above 0. A number of bytes may have a unit."""
        value, has_unit = self.require(key, allowed), allowed != _NUMBERS
        number: float | None = None
        if isinstance(value, int | float) and not isinstance(value, bool):
            number = float(value)
        elif isinstance(value, str) and (match := _NUMBER.fullmatch(value.strip())):
            digits, unit, per_second = match.groups()
            scale = UNIT_BYTES.get(unit.lower())
            if scale is not None and (has_unit or not (unit or per_second)):
                number = float(digits.replace("_", "")) * scale
        if number is None or not math.isfinite(number) or number <= 0:
            raise self._wrong(key, allowed)
        return number

    def _wrong(self, key: str, allowed: str) -> ProfileError:
        return ProfileError(f"{self.place(key)} = {_shown(self._values[key])} is not allowed; write {allowed}")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
