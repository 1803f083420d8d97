"""Whether the step in progress updates on a guess, what it guesses, and whether its updates can be undone."""

from __future__ import annotations

from hf_lohan.model import ParamSlice
from hf_lohan.optim import AdamWGroup
from hf_lohan.updates.param_groups import GroupOf
from hf_lohan.updates.state_update import Drafts


class Speculation:
    """Of one step after the other. The guess: that the norm does not clip, and that the hyperparameters stay as they
    are. Decided with the step's first update or held gradient, for all of it. Used by one thread."""

    def __init__(self, group_of: GroupOf, drafts: Drafts | None) -> None:
        self._group_of = group_of
        self._drafts = drafts
        self._groups: dict[ParamSlice, AdamWGroup] = {}
        self._is_on: bool | None = None
        self._can_undo: bool | None = None

    @property
    def is_on(self) -> bool:
        """Whether what the step has updated are guesses."""
        return self._is_on is True

    @property
    def can_undo(self) -> bool | None:
        """Whether the updates of the step's backward can be undone; None before the first."""
        return self._can_undo

    def begin_updates(self) -> bool:
        """Called before each update in backward. Returns `can_undo`."""
        if self._can_undo is None:
            drafts = self._drafts
            self._can_undo = drafts is not None and drafts.num_homes > 1 and not drafts.has_drafts
        return self._can_undo

    def decide(self, *, is_wanted: bool) -> bool:
        """Whether the step speculates: as it does already, or, if that is open, if it `is_wanted` and can be undone."""
        if self._is_on is None:
            self._is_on = self.begin_updates() and is_wanted
        return self._is_on

    def guess_group_of(self, part: ParamSlice) -> AdamWGroup:
        """The present hyperparameters, noted as those that were guessed."""
        return self._groups.setdefault(part, self._group_of(part))

    def was_right(self, clip_coefficient: float, group_of: GroupOf) -> bool:
        """Whether the step is to be applied as it was guessed."""
        return clip_coefficient == 1.0 and all(group_of(part) == group for part, group in self._groups.items())

    def undo(self) -> None:
        """Back to the last commit. Nothing may be on its way to the store."""
        assert self._drafts is not None and self._can_undo
        self._groups.clear()
        self._drafts.drop()

    def stop(self) -> None:
        """The rest of the step is no guess any more."""
        self._is_on = False

    def end_step(self) -> None:
        self._groups.clear()
        self._is_on = self._can_undo = None
