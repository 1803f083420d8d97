"""From a parameter's place in the store to its hyperparameters in the optimizer that the user sees."""

from __future__ import annotations

from collections.abc import Sequence

from hf_lohan.model import ParamSlice
from hf_lohan.optim import AdamWGroup, OffloadAdamW
from hf_lohan.updates.setup import GroupOf


class BoundOptimizer:
    """The optimizer whose hyperparameters updates have: none at first, then one, which another may take over from."""

    def __init__(self, slices: Sequence[ParamSlice]) -> None:
        self._slices = slices
        self._optimizer: OffloadAdamW | None = None
        self._index: dict[ParamSlice, int] = {}

    @property
    def optimizer(self) -> OffloadAdamW | None:
        return self._optimizer

    def bind(self, optimizer: OffloadAdamW) -> None:
        """Raises ValueError unless its groups fit the store: every parameter that requires a gradient in a group, and
        every one in a group with states in the store."""
        index: dict[ParamSlice, int] = {}
        by_parameter = {part.parameter: part for part in self._slices}
        for parameter, group in optimizer.param_group_indices().items():
            part = by_parameter.get(parameter)  # type: ignore[call-overload]
            if part is None:
                raise ValueError(
                    f"a parameter of shape {tuple(parameter.shape)} is not in the store; add adapters or new "
                    "embeddings to the model before it is offloaded"
                )
            if not part.trainable:
                raise ValueError(f"{part.name} was frozen when the model was offloaded and has no optimizer state")
            index[part] = group
        for part in self._slices:
            if part.trainable and part.parameter.requires_grad and part not in index:
                raise ValueError(
                    f"{part.name} requires a gradient but is in no param group of the optimizer; add it, or set "
                    "requires_grad=False"
                )
        self._optimizer, self._index = optimizer, index

    def group_of(self, part: ParamSlice) -> AdamWGroup:
        """A parameter's hyperparameters as they are at the call. Raises ValueError if it is in no group, RuntimeError
        if there is no optimizer."""
        return self._bound().group(self._index_of(part))

    def groups_as_they_are_now(self) -> GroupOf:
        """`group_of` with the present values for good: a scheduler may change them before the last update has run."""
        optimizer = self._bound()
        groups = [optimizer.group(index) for index in range(len(optimizer.param_groups))]
        return lambda part: groups[self._index_of(part)]

    def _bound(self) -> OffloadAdamW:
        if self._optimizer is None:
            raise RuntimeError("the model has no optimizer yet; make an OffloadAdamW over its parameters")
        return self._optimizer

    def _index_of(self, part: ParamSlice) -> int:
        index = self._index.get(part)
        if index is None:
            raise ValueError(f"{part.name} got a gradient but is in no param group of the optimizer")
        return index
