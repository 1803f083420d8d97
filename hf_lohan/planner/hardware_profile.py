"""What the hardware can do, as numbers: measured on this machine, or written by hand for one that is not here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any

from hf_lohan.planner.profile_values import ProfileError, Section

__all__ = ["CpuProfile", "DeviceProfile", "HardwareProfile", "ProfileError", "SsdProfile"]


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceProfile:
    """The compute device."""

    flops_per_s: float
    """Reached at the model's own matrix shapes (LoHan's THP_G), not the data sheet's."""
    memory_bytes: int
    memory_bytes_per_s: float | None = None
    """What elementwise operations reach; None: they are taken to cost nothing beside the products."""
    shares_cpu: bool = False
    """The CPU is the device: its cores also copy, run the optimizer and serve the drives."""
    name: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class SsdProfile:
    """One drive, or one path. Drives are simplex: reading and writing share its time."""

    read_bytes_per_s: float
    write_bytes_per_s: float
    capacity_bytes: int
    endurance_bytes: int | None = None
    """What may be written to it in its life (the data sheet's TBW); None: not known."""
    path: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class CpuProfile:
    """The host."""

    memory_bytes: int
    optimizer_params_per_s: float
    """AdamW over chunks in RAM, while the device computes; alone where the device shares the CPU, since the two are
    added there."""
    checksum_bytes_per_s: float | None = None
    """Hashing of what passes to and from the SSD; None: taken to cost nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HardwareProfile:
    """A machine. `ssd` are the paths that a store is striped over; together they are as fast as their sum, unless
    `ssd_together_read_bytes_per_s` and `ssd_together_write_bytes_per_s` were measured for all at once."""

    device: DeviceProfile
    h2d_bytes_per_s: float
    d2h_bytes_per_s: float
    ssd: tuple[SsdProfile, ...]
    cpu: CpuProfile
    duplex_bytes_per_s: float | None = None
    """Host to device and back at once, both added; None: neither slows the other (PCIe)."""
    ssd_together_read_bytes_per_s: float | None = None
    ssd_together_write_bytes_per_s: float | None = None
    ssd_mixed_bytes_per_s: float | None = None
    """Of all paths, reading and writing as many bytes at once, both added; None: they share the time (simplex)."""

    @property
    def ssd_capacity_bytes(self) -> int:
        """Of all paths together."""
        return sum(ssd.capacity_bytes for ssd in self.ssd)

    @property
    def ssd_read_bytes_per_s(self) -> float:
        """Of all paths together."""
        return self.ssd_together_read_bytes_per_s or sum(ssd.read_bytes_per_s for ssd in self.ssd)

    @property
    def ssd_write_bytes_per_s(self) -> float:
        """Of all paths together."""
        return self.ssd_together_write_bytes_per_s or sum(ssd.write_bytes_per_s for ssd in self.ssd)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> HardwareProfile:
        """From YAML's or JSON's types; `to_mapping` is its inverse.

        Numbers may be strings ("160e12", which YAML 1.1 does not read as a number), and bytes sizes ("24GB", "7GB/s").
        An entry of `ssd` may stand for several equal drives: `count: 3`. Raises ProfileError.
        """
        top = Section(values, "", _keys(cls))
        return cls(
            device=_read_device(top.require("device", f"a mapping with the keys {', '.join(_keys(DeviceProfile))}")),
            h2d_bytes_per_s=top.rate("h2d_bytes_per_s"),
            d2h_bytes_per_s=top.rate("d2h_bytes_per_s"),
            ssd=_read_ssds(top.require("ssd", _SSD_LIST)),
            cpu=_read_cpu(top.require("cpu", f"a mapping with the keys {', '.join(_keys(CpuProfile))}")),
            duplex_bytes_per_s=top.optional_rate("duplex_bytes_per_s"),
            ssd_together_read_bytes_per_s=top.optional_rate("ssd_together_read_bytes_per_s"),
            ssd_together_write_bytes_per_s=top.optional_rate("ssd_together_write_bytes_per_s"),
            ssd_mixed_bytes_per_s=top.optional_rate("ssd_mixed_bytes_per_s"),
        )

    def to_mapping(self) -> dict[str, Any]:
        """For YAML or JSON; what is at its default is left out."""
        return _written(self) | {
            "device": _written(self.device),
            "ssd": [_written(ssd) for ssd in self.ssd],
            "cpu": _written(self.cpu),
        }


_SSD_LIST = 'a list of drives, each with "read_bytes_per_s", "write_bytes_per_s" and "capacity_bytes"'


def _keys(profile: type) -> list[str]:
    return [field.name for field in fields(profile)]


def _written(profile: Any) -> dict[str, Any]:
    values = {field.name: getattr(profile, field.name) for field in fields(profile)}
    defaults = {field.name: field.default for field in fields(profile) if field.default is not MISSING}
    return {name: value for name, value in values.items() if name not in defaults or value != defaults[name]}


def _read_device(values: object) -> DeviceProfile:
    section = Section(values, "device", _keys(DeviceProfile))
    return DeviceProfile(
        flops_per_s=section.number("flops_per_s"),
        memory_bytes=section.size_bytes("memory_bytes"),
        memory_bytes_per_s=section.optional_rate("memory_bytes_per_s"),
        shares_cpu=section.flag("shares_cpu"),
        name=section.text("name"),
    )


def _read_cpu(values: object) -> CpuProfile:
    section = Section(values, "cpu", _keys(CpuProfile))
    return CpuProfile(
        memory_bytes=section.size_bytes("memory_bytes"),
        optimizer_params_per_s=section.number("optimizer_params_per_s"),
        checksum_bytes_per_s=section.optional_rate("checksum_bytes_per_s"),
    )


def _read_ssds(values: object) -> tuple[SsdProfile, ...]:
    if not isinstance(values, list | tuple) or not values:
        raise ProfileError(f"ssd = {values!r} is not allowed; write {_SSD_LIST}")
    ssds: list[SsdProfile] = []
    for index, entry in enumerate(values):
        section = Section(entry, f"ssd[{index}]", [*_keys(SsdProfile), "count"])
        ssd = SsdProfile(
            read_bytes_per_s=section.rate("read_bytes_per_s"),
            write_bytes_per_s=section.rate("write_bytes_per_s"),
            capacity_bytes=section.size_bytes("capacity_bytes"),
            endurance_bytes=section.optional_size_bytes("endurance_bytes"),
            path=section.text("path"),
        )
        ssds += [ssd] * section.count("count")
    return tuple(ssds)
