"""From a parameter's place in the store to its hyperparameters in the optimizer that the user sees."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from hf_lohan.model import ParamSlice
from hf_lohan.optim import AdamWGroup, OffloadAdamW

GroupOf = Callable[[ParamSlice], AdamWGroup]


class ParamGroups:
    """The param groups of one optimizer. Raises ValueError unless they fit the store: every parameter that requires a
    gradient in a group, and every one in a group with states in the store."""

    def __init__(self, optimizer: OffloadAdamW, slices: Iterable[ParamSlice]) -> None:
        self._optimizer = optimizer
        self._index: dict[ParamSlice, int] = {}
        by_parameter = {part.parameter: part for part in slices}
        for parameter, index in optimizer.param_group_indices().items():
            part = by_parameter.get(parameter)  # type: ignore[call-overload]
            if part is None:
                raise ValueError(
                    f"a parameter of shape {tuple(parameter.shape)} is not in the store; add adapters or new "
                    "embeddings to the model before it is offloaded"
                )
            if not part.trainable:
                raise ValueError(f"{part.name} was frozen when the model was offloaded and has no optimizer state")
            self._index[part] = index
        for part in by_parameter.values():
            if part.trainable and part.parameter.requires_grad and part not in self._index:
                raise ValueError(
                    f"{part.name} requires a gradient but is in no param group of the optimizer; add it, or set "
                    "requires_grad=False"
                )

    def group_of(self, part: ParamSlice) -> AdamWGroup:
        """A parameter's hyperparameters as they are at the call. Raises ValueError if it is in no group."""
        return self._optimizer.group(self._index_of(part))

    def as_they_are_now(self) -> GroupOf:
        """`group_of` with the present values for good: a scheduler may change them before the last update has run."""
        groups = [self._optimizer.group(index) for index in range(len(self._optimizer.param_groups))]
        return lambda part: groups[self._index_of(part)]

    def _index_of(self, part: ParamSlice) -> int:
        index = self._index.get(part)
        if index is None:
            raise ValueError(f"{part.name} got a gradient but is in no param group of the optimizer")
        return index
