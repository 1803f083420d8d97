"""Values of a hand-written profile: checked, and every complaint names the key, the value and what is allowed."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any


class ProfileError(ValueError):
    """A hardware profile is not one; the message names the key and the value."""


_NUMBER = re.compile(r"([+-]?(?:\d[\d_]*(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?)\s*([a-zA-Z]*)(/s)?", re.ASCII)
_SCALES = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgtp", start=1):
    _SCALES[f"{_letter}b"] = 1000**_power
    _SCALES[f"{_letter}ib"] = 1024**_power
_NUMBERS = "a number above 0 such as 160e12"
_SIZES = 'a number of bytes above 0, such as 24000000000, "24GB" or "24GiB"'
_RATES = 'a number of bytes per second above 0, such as 20e9 or "20GB/s"'


class Section:
    """One mapping of the profile. `path` is its place in the whole, "ssd[0]"; "" is the profile itself."""

    def __init__(self, values: object, path: str, allowed: Sequence[str]) -> None:
        """Raises ProfileError if `values` is no mapping, or has a key that is not allowed."""
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
                    f"{self.place(str(key))} = {_shown(values[key])} is no key of a hardware profile; {guess}"
                    f"allowed here: {', '.join(allowed)}"
                )

    def place(self, key: str) -> str:
        """The whole path of a key, for messages."""
        return f"{self._path}.{key}" if self._path else key

    def has(self, key: str) -> bool:
        return self._values.get(key) is not None

    def require(self, key: str, allowed: str) -> Any:
        """The value as it was written. Raises ProfileError if there is none; `allowed` says what could stand there."""
        value = self._values.get(key)
        if value is None:
            what = "is missing" if key not in self._values else "is empty"
            raise ProfileError(f"{self.place(key)} {what} in the hardware profile; write {allowed}")
        return value

    def number(self, key: str) -> float:
        return self._quantity(key, _NUMBERS, has_unit=False)

    def rate(self, key: str) -> float:
        """Bytes per second."""
        return self._quantity(key, _RATES, has_unit=True)

    def size_bytes(self, key: str) -> int:
        size = self._quantity(key, _SIZES, has_unit=True)
        if size < 1:
            raise self._wrong(key, _SIZES)
        return int(size)

    def optional_number(self, key: str) -> float | None:
        return self.number(key) if self.has(key) else None

    def optional_rate(self, key: str) -> float | None:
        return self.rate(key) if self.has(key) else None

    def optional_size_bytes(self, key: str) -> int | None:
        return self.size_bytes(key) if self.has(key) else None

    def count(self, key: str) -> int:
        """A whole number above 0; 1 if there is none."""
        value = self._values.get(key)
        if value is None:
            return 1
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self._wrong(key, "a whole number above 0")
        return value

    def text(self, key: str) -> str:
        """ "" if there is none."""
        value = self._values.get(key, "")
        if not isinstance(value, str):
            raise self._wrong(key, "text")
        return value

    def flag(self, key: str) -> bool:
        """False if there is none."""
        value = self._values.get(key, False)
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false")
        return value

    def _quantity(self, key: str, allowed: str, *, has_unit: bool) -> float:
        value = self.require(key, allowed)
        number: float | None = None
        if isinstance(value, int | float) and not isinstance(value, bool):
            number = float(value)
        elif isinstance(value, str) and (match := _NUMBER.fullmatch(value.strip())):
            digits, unit, per_second = match.groups()
            scale = _SCALES.get(unit.lower()) if has_unit else (1 if not unit else None)
            if scale is not None and not (per_second and not has_unit):
                number = float(digits.replace("_", "")) * scale
        if number is None or not math.isfinite(number) or number <= 0:
            raise self._wrong(key, allowed)
        return number

    def _wrong(self, key: str, allowed: str) -> ProfileError:
        return ProfileError(f"{self.place(key)} = {_shown(self._values[key])} is not allowed; write {allowed}")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
