"""From a parameter's place in the store to its hyperparameters in the optimizer that the user sees."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from hf_lohan.model import ParamSlice
from hf_lohan.optim import UpdateRule
from hf_lohan.updates.setup import GroupOf


class ParamGroups:
    """Of no optimizer at first, then of one, from which another may take over."""

    def __init__(self, rules: Mapping[ParamSlice, UpdateRule]) -> None:
        """``rules``: of all slices, what their states were laid out for."""
        self._slices = list(rules)
        self._rules = rules
        self._groups: Sequence[Mapping[str, Any]] | None = None
        self._index: dict[ParamSlice, int] = {}

    def bind(self, param_groups: Sequence[Mapping[str, Any]]) -> None:
        """Take an optimizer's, in which schedulers change the values. Raises ValueError unless they fit the store:
        every parameter that requires a gradient in a group, and every one in a group with states in the store: those
        that the group's rule needs."""
        index: dict[ParamSlice, int] = {}
        by_parameter: dict[Any, list[ParamSlice]] = {}
        for part in self._slices:
            by_parameter.setdefault(part.parameter, []).append(part)
        for number, group in enumerate(param_groups):
            for parameter in group["params"]:
                parts = by_parameter.get(parameter)
                if parts is None:
                    raise ValueError(
                        f"a parameter of shape {tuple(parameter.shape)} is not in the store; add adapters or new "
                        "embeddings to the model before it is offloaded"
                    )
                if parts[0].trainable:
                    self._rules[parts[0]].settings_of(group)
                    index.update(dict.fromkeys(parts, number))
                elif parameter.requires_grad:  # else it stays as it is, as under torch
                    raise ValueError(
                        f"{parts[0].name} was frozen when the model was offloaded and has no optimizer state; let it "
                        "require a gradient before the model is offloaded"
                    )
        for part in self._slices:
            if part.trainable and part.parameter.requires_grad and part not in index:
                raise ValueError(
                    f"{part.name} requires a gradient but is in no param group of the optimizer; add it, or set "
                    "requires_grad=False"
                )
        self._groups, self._index = param_groups, index

    def has_any(self) -> bool:
        """Whether there is an optimizer."""
        return self._groups is not None

    def group_of(self, part: ParamSlice) -> Hashable:
        """A parameter's hyperparameters as they are at the call. Raises ValueError if it is in no group, RuntimeError
        if there is no optimizer."""
        return self._rules[part].settings_of(self._bound()[self._index_of(part)])

    def as_they_are_now(self) -> GroupOf:
        """`group_of` with the present values for good: a scheduler may change them before the last update has run."""
        groups = self._bound()
        pairs = {(number, self._rules[part]) for part, number in self._index.items()}
        settings = {(number, rule): rule.settings_of(groups[number]) for number, rule in pairs}
        return lambda part: settings[self._index_of(part), self._rules[part]]

    def _bound(self) -> Sequence[Mapping[str, Any]]:
        if self._groups is None:
            raise RuntimeError("the model has no optimizer yet; make an OffloadAdamW over its parameters")
        return self._groups

    def _index_of(self, part: ParamSlice) -> int:
        index = self._index.get(part)
        if index is None:
            raise ValueError(f"{part.name} got a gradient but is in no param group of the optimizer")
        return index
