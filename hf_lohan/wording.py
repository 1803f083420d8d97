"""Formats bytes, seconds, rates and counts for people."""

from __future__ import annotations

from collections.abc import Sequence

BINARY_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
UNIT_BYTES = {
    "": 1,
    **{unit.lower(): 1024**power for power, unit in enumerate(BINARY_UNITS)},
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgtp", start=1)},
}
"""Bytes of a unit, by its name in lower case."""
_BOTTLENECKS = {
    "compute": "computing",
    "h2d": "the link to the device",
    "d2h": "the link from the device",
    "link": "the link to and from the device",
    "ssd": "the SSDs",
    "cpu": "the optimizer on the CPU",
    "net": "the network",
    "host": "the RAM of a node",
    "gpu_link": "the links between GPUs",
}


def format_bytes(num_bytes: float) -> str:
    """Format in binary units with at most two decimals: 1536 -> "1.5 KiB"."""
    size, power = float(abs(num_bytes)), 0
    while round(size, 2) >= 1024 and power < len(BINARY_UNITS) - 1:
        size, power = size / 1024, power + 1
    sign = "-" if num_bytes < 0 else ""
    return f"{sign}{size:.2f}".rstrip("0").rstrip(".") + f" {BINARY_UNITS[power]}"


def exact_bytes(num_bytes: int) -> str:
    """Format all digits and, from 1 KiB on, the rounded size: "2,097,152 bytes (2 MiB)"."""
    exact = f"{num_bytes:,} bytes"
    return exact if num_bytes < 1024 else f"{exact} ({format_bytes(num_bytes)})"


def drive_bytes(num_bytes: float) -> str:
    """Format in decimal units, in which drive sizes are given: "1.2 TB"."""
    return f"{_decimal(num_bytes)}B"


def rate(per_s: float, unit: str) -> str:
    """Format in decimal units, as in data sheets: 1.2e9 "B" -> "1.2 GB/s"."""
    return f"{_decimal(per_s)}{unit}/s"


def gb_per_s(bytes_per_s: float) -> str:
    """Format a rate always in GB/s, so that figures can be compared."""
    return f"{bytes_per_s / 1e9:.3g} GB/s"


def seconds(value: float) -> str:
    """Format three digits, in ms, s or min."""
    if value < 1:
        return f"{1000 * value:.3g} ms"
    return f"{value:.3g} s" if value < 600 else f"{value / 60:.0f} min"


def duration(value: float) -> str:
    """10000 -> "2.78 hours"."""
    for size, word in ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes")):
        if value >= 2 * size:
            return f"{value / size:.3g} {word}"
    return f"{value:.3g} seconds"


def count(number: float) -> str:
    """1234567 -> "1.23 million"."""
    for size, word in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if number >= size:
            return f"{number / size:.3g} {word}"
    return f"{number:.0f}"


def percent(fraction: float) -> str:
    """0.123 -> "12%"."""
    value = 100 * fraction
    return f"{value:.1f}%" if 0 < abs(value) < 1 else f"{value:.0f}%"


def times(number: int, word: str) -> str:
    """1 "step" -> "1 step", 2 -> "2 steps"."""
    return f"{number:,} {word}{'' if number == 1 else 's'}"


def bottleneck_label(name: str, *, shares_cpu: bool = False) -> str:
    """Return a readable name of the planner's bottleneck. ``shares_cpu``: whether the device is the CPU."""
    return "the CPU" if shares_cpu and name == "compute" else _BOTTLENECKS.get(name, name)


def listed(words: Sequence[str]) -> str:
    """["a", "b", "c"] -> "a, b and c"."""
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1]))) if words else ""


def states_setting(stored: str) -> str:
    """Return the setting for the form of the states in a store: "int8" -> "optimizer_state_dtype: int8"."""
    return "stochastic_rounding: true" if stored == "int8_stochastic" else f"optimizer_state_dtype: {stored}"


def _decimal(number: float) -> str:
    for size, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g} {prefix}"
    return f"{number:.3g} "
