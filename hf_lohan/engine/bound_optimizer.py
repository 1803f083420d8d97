"""The optimizer that the user steps: whose hyperparameters the updates have, and whose states the store holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hf_lohan.engine.parameter_access import ParameterAccess, Zeros
from hf_lohan.model import ParamSlice
from hf_lohan.optim import AdamWGroup, OffloadAdamW
from hf_lohan.updates import GroupOf, ParamGroups


class BoundOptimizer:
    """None at first, then one, which another may take over from."""

    def __init__(
        self, slices: Sequence[ParamSlice], moment_kinds: Sequence[str], settled: Callable[[], ParameterAccess]
    ) -> None:
        """`settled` waits for all updates and gives access to what they left."""
        self.optimizer: OffloadAdamW | None = None
        self._slices = slices
        self._moment_kinds = moment_kinds
        self._settled = settled
        self._groups: ParamGroups | None = None

    def bind(self, optimizer: OffloadAdamW) -> None:
        """Like any new one it starts with zero moments. Raises ValueError if its groups do not fit the store."""
        groups = ParamGroups(optimizer, self._slices)
        if self.optimizer is not None:
            self._start_anew()
        self.optimizer, self._groups = optimizer, groups

    def group_of(self, part: ParamSlice) -> AdamWGroup:
        """A parameter's hyperparameters as they are at the call. Raises RuntimeError if there is no optimizer."""
        return self._bound_groups().group_of(part)

    def groups_as_they_are_now(self) -> GroupOf:
        """See `ParamGroups.as_they_are_now`. Raises RuntimeError if there is no optimizer."""
        return self._bound_groups().as_they_are_now()

    def _bound_groups(self) -> ParamGroups:
        if self._groups is None:
            raise RuntimeError("the model has no optimizer yet; make an OffloadAdamW over its parameters")
        return self._groups

    def _start_anew(self) -> None:
        parameters = self._settled()  # updates that still run count their step, too
        for part in self._slices:
            if part.num_updates:
                part.num_updates = 0
                for kind in self._moment_kinds:
                    parameters.write_state(part.name, kind, Zeros())
