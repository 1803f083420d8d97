"""Converts and checks the arguments of a Trainer for offload, and names arguments that are given by position."""

from __future__ import annotations

import inspect
import json
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import transformers

from hf_lohan.config import ALL_AUTO, FITS_OR_NOT, OFFLOAD_VARIABLE, ConfigError, OffloadConfig, offload_of_environment

logger = logging.getLogger(__name__)

NOT_GIVEN: Any = object()
"""Default of `offload=`. It differs from None, which means the stock Trainer."""

BFLOAT16_MEANING = (
    "mixed_precision: bf16 means bf16=True under offload: bfloat16 weights with exact float32 masters, without autocast"
)


@dataclass(repr=False)
class LohanArguments:
    """Adds the field `offload` to a class of training arguments, so that parsers, YAML files and trackers know it:

    ```python
    @dataclass
    class SFTArguments(LohanArguments, SFTConfig):
        pass
    ```

    A Trainer without `offload=` uses this field. The constructor raises ConfigError for settings that are not allowed.
    """

    offload: dict[str, Any] | str | None = field(
        default=None,
        metadata={
            "help": f"Train with the state on SSDs: {ALL_AUTO!r} (everything automatic), {FITS_OR_NOT!r} (only if it "
            f"does not fit the device), a YAML file or a JSON table. Default: {OFFLOAD_VARIABLE} in the environment."
        },
    )

    def __post_init__(self) -> None:
        self.offload = _in_json_types(self.offload)
        after = getattr(super(), "__post_init__", None)
        if after is not None:
            after()


@dataclass(repr=False)
class TrainingArguments(LohanArguments, transformers.TrainingArguments):
    """`transformers.TrainingArguments` with `offload`."""


def _in_json_types(offload: Any) -> Any:
    if isinstance(offload, str) and offload.lstrip().startswith("{"):
        try:
            offload = json.loads(offload)
        except ValueError as error:
            raise ConfigError(f"offload={offload!r} is not JSON ({error}); write a table, or a file's path") from None
    if offload in (None, FITS_OR_NOT):
        return offload
    config = OffloadConfig.load(offload)
    if isinstance(offload, OffloadConfig):
        return config.to_dict()
    return dict(offload) if isinstance(offload, Mapping) else os.fspath(offload)


def choose_offload(offload: Any, arguments: Iterable[Any], default: Any = None) -> Any:
    """Return the setting of a Trainer, from the first source that has a setting: the argument ``offload``, the training
    arguments among ``arguments``, ``default``, the environment. Raises ConfigError if the first two differ."""
    of_args = next((args.offload for args in arguments if isinstance(args, LohanArguments)), None)
    if offload is NOT_GIVEN:
        chosen = default if of_args is None else of_args
        return offload_of_environment() if chosen is None else chosen
    if of_args is not None and not _are_same(offload, of_args):
        raise ConfigError(
            f"offload={_shown(offload)} and args.offload={_shown(of_args)} are both given and differ; leave one of "
            "them out"
        )
    return offload


def _are_same(one: Any, other: Any) -> bool:
    if one is None or FITS_OR_NOT in (one, other):
        return bool(one == other)
    return OffloadConfig.load(one) == OffloadConfig.load(other)


def _shown(offload: Any) -> str:
    return "OffloadConfig(...)" if isinstance(offload, OffloadConfig) else repr(offload)


def precision_asked(
    device_placement: bool = True, split_batches: Any = None, mixed_precision: Any = None, *rest: Any, **kwargs: Any
) -> str:
    """Return the mixed precision of an `Accelerator` with these arguments. By default the launcher sets it."""
    return str(mixed_precision or os.environ.get("ACCELERATE_MIXED_PRECISION") or "no").lower()


def is_mixed(args: transformers.TrainingArguments) -> bool:
    """Whether the stock Trainer computes under autocast, because the arguments or the launcher ask for it."""
    return bool(args.bf16 or args.fp16) or getattr(args, "mixed_precision", "no") != "no"


def take_launched_precision(args: transformers.TrainingArguments) -> bool:
    """If the launcher asks for bfloat16 and the arguments do not, set `bf16=True` and return True."""
    if args.bf16 or getattr(args, "mixed_precision", "no") != "bf16":
        return False
    logger.warning(BFLOAT16_MEANING)  # warnings are shown even if a script configures no logging
    args.bf16 = True
    return True


def names_of(init: Callable[..., Any]) -> list[str] | None:
    """Return the names of the arguments that ``init`` takes by position, or None if their number is not limited."""
    parameters = inspect.signature(init).parameters.values()
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        return None
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][1:]


def by_name(what: str, names: Sequence[str], given: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
    """Return all arguments by name. Raises TypeError for arguments that a call of ``what`` would refuse."""
    if len(given) > len(names):
        raise TypeError(f"{what} takes {len(names)} arguments by position, not {len(given)}")
    by_position = dict(zip(names, given, strict=False))
    if twice := by_position.keys() & named.keys():
        raise TypeError(f"{what} got {min(twice)!r} by position and by name")
    return {**by_position, **named}
