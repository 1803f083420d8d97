"""What ranks send each other, and how: the setting `collectives`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias, get_args

from hf_lohan.config.values import ConfigError, check_choice, refuse_unknown_keys

ForwardWeights: TypeAlias = Literal["exact", "int8", "delta"]
BackwardWeights: TypeAlias = Literal["world", "node"]
Gradients: TypeAlias = Literal["exact", "int8", "int4"]

_WORDS = ("exact", "quantized")
_EXPECTED = "give 'exact', 'quantized', or a table of forward, backward and gradients"


@dataclass(frozen=True, slots=True, kw_only=True)
class Collectives:
    """How weights and gradients go from rank to rank. Within a machine they always go exactly."""

    forward: ForwardWeights = "exact"
    """Weights between machines: "exact" sends them as they are, "int8" rounds them, "delta" sends what a step changed,
    to the bit."""

    backward: BackwardWeights = "world"
    """Where backward has its weights from: all machines again, or a copy that the forward left on this one. With
    "delta" there is such a copy anyway, and it is used."""

    gradients: Gradients = "exact"
    """Gradients between machines: "exact" sends float32 sums, the others round them."""

    def __post_init__(self) -> None:
        for name, allowed in _ALLOWED.items():
            check_choice(f"collectives: {name}", getattr(self, name), allowed)

    @property
    def is_exact(self) -> bool:
        """Whether the training's numbers are those without rounding."""
        return self.forward != "int8" and self.gradients == "exact"

    @property
    def keeps_weights(self) -> bool:
        """Whether each machine keeps the weights that came to it: for backward, or to send only what changed."""
        return self.backward == "node" or self.forward == "delta"

    def to_setting(self) -> str | dict[str, str]:
        """In JSON's types, the word where there is one for it."""
        for word in _WORDS:
            if self == of_word(word):
                return word
        return asdict(self)


_ALLOWED: dict[str, tuple[str, ...]] = {
    "forward": get_args(ForwardWeights),
    "backward": get_args(BackwardWeights),
    "gradients": get_args(Gradients),
}

EXACT = Collectives()


def of_word(word: str) -> Collectives:
    """What "exact" and "quantized" stand for; the latter is ZeRO++."""
    return Collectives(forward="int8", backward="node", gradients="int4") if word == "quantized" else EXACT


def check_collectives(name: str, value: object) -> Collectives:
    """The setting in any of its spellings. Raises ConfigError."""
    match value:
        case Collectives():
            return value
        case "exact" | "quantized":
            return of_word(value)
        case Mapping():
            refuse_unknown_keys(value, _ALLOWED, what=f"key of {name}")
            settings: dict[str, Any] = dict(value)
            return Collectives(**settings)
    raise ConfigError(f"{name}: {value!r} is not allowed; {_EXPECTED}")
