"""One optimizer step, with its hyperparameters, its gradient norm, its clipping, and the decision whether it counts."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Hashable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from hf_lohan.costs import MOST_WRONG_GUESSES
from hf_lohan.model import Block, ParamSlice
from hf_lohan.optim import AdamWGroup, UpdateRule
from hf_lohan.updates.gradients import NonFiniteGradientError
from hf_lohan.updates.handover import WeightChange, WeightSlots
from hf_lohan.updates.missed_steps import GroupOf
from hf_lohan.updates.pipeline import GradientPipeline
from hf_lohan.updates.worker import Applied

logger = logging.getLogger(__name__)

WINDOW_STEPS = 16
"""Number of last steps that count for the clip rate."""

ClipWay = Literal["defer", "speculate"]


class ClipHistory:
    """How the next step clips, and the results of the last steps. Used by the computing thread."""

    def __init__(self, way: ClipWay, *, always: bool = False) -> None:
        """`always`: guess even if the norm clips often. Without it, the first step waits for its norm, and so does each
        step while more than `MOST_WRONG_GUESSES` of the last steps clipped."""
        self.way: ClipWay = "speculate" if always else way
        """How the plan clips. `speculates` says whether the next step guesses."""
        self._always = always
        self._may_guess = True
        self._clipped: deque[bool] = deque(maxlen=WINDOW_STEPS)
        self.num_speculated = 0
        self.num_redone = 0

    @property
    def clip_rate(self) -> float:
        """Fraction of the last steps that clipped."""
        return sum(self._clipped) / len(self._clipped) if self._clipped else 0.0

    @property
    def speculates(self) -> bool:
        """Whether the next step guesses, if it can be undone."""
        return self.way == "speculate" and self._may_guess and (self._always or self._rarely_clips)

    @property
    def _rarely_clips(self) -> bool:
        return bool(self._clipped) and self.clip_rate <= MOST_WRONG_GUESSES

    def clip_by(self, way: ClipWay) -> None:
        """Clip in this way from the next step on."""
        self.way = way

    def never_speculate(self) -> None:
        """Never guess again, because the loop undoes every guess between backward and step."""
        self._may_guess = False

    def note_step(self, applied: str | None, *, clipped: bool) -> None:
        """Count a step. `applied`: see `StepResult`."""
        self._clipped.append(clipped)
        self.num_speculated += applied in ("accepted", "redone")
        if applied == "redone":
            self.num_redone += 1
            if not clipped:
                self.never_speculate()  # the loop changed hyperparameters between backward and step


_SECOND_CLIP_RATIO = 1.01
"""A second clip has no effect if its `max_norm` is larger than the first by at least this factor, for any rounding of
the first."""
_CLIP_EPS = 1e-6
"""The number that torch.nn.utils.clip_grad_norm_ adds to the norm."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """The outcome of a step."""

    changed: set[Block]
    """Blocks whose records have changed."""
    applied: Applied | None
    """How the step was applied; None if it was skipped."""
    clipped: bool
    not_finite: str | None = None
    """The parameter whose gradient caused the skip."""


class StepTransaction:
    """The step in progress, from its first gradient to the end of `finish_step`. It counts completely or not at all.
    Used by the computing thread. An interrupt may end any method. `recover` then abandons the step."""

    def __init__(
        self,
        pipeline: GradientPipeline,
        clip_history: ClipHistory,
        blocks: Sequence[Block],
        slots: WeightSlots,
    ) -> None:
        self._pipeline = pipeline
        self._clip_history = clip_history
        self._blocks = blocks
        self._slots = slots
        self._clip_coefficient = 1.0
        self._max_norm: float | None = None
        """The `max_norm` to which the step's gradients were clipped."""
        self.max_norm_before: float | None = None
        """The `max_norm` of the previous step."""
        self._has_taken_gradients = False
        """Whether the last step took the gradients, and zero_grad() was not called afterwards. Torch would still have
        these gradients."""
        self._since_none: set[ParamSlice] = set()
        """Parameters that had a gradient since gradients were last dropped as `zero_grad(set_to_none=True)` does."""
        self._zeroed: frozenset[ParamSlice] = frozenset()
        """Parameters whose gradient torch would have set to zeros."""
        self._is_ending = False
        self._leaves_updates = False
        self.last: StepResult | None = None
        """The outcome of the last step."""
        pipeline.set_speculation(clip_history.speculates)

    @property
    def is_half_applied(self) -> bool:
        """Whether the store may have updates of a step that does not count."""
        return self._is_ending or self._leaves_updates or self._pipeline.has_begun_updates

    def clip_by(self, way: ClipWay) -> None:
        """Clip in this way from the next step on, or from this step if none of its gradients has arrived."""
        self._clip_history.clip_by(way)
        if not self._pipeline.has_gradients:
            self._pipeline.set_speculation(self._clip_history.speculates)

    def refuse_between_updates(self) -> None:
        """Raise RuntimeError if some of the step's updates have run, because then no forward may follow."""
        if self._pipeline.has_begun_updates:
            raise RuntimeError(
                "the model was called between backward and step() of a step whose updates run in backward, so some of "
                "its weights are already updated; set max_grad_norm > 0 to keep gradients until step()"
            )

    def refuse_new_weight(self, part: ParamSlice) -> None:
        """Raise RuntimeError if an unfinished step has updated the weight."""
        if self._pipeline.has_begun_to_update(part):
            raise RuntimeError(
                f"{part.name} is needed again in a step whose updates run in backward, and has already been updated; "
                "read it after step(), or set max_grad_norm > 0 to keep gradients until step()"
            )

    def begin_backward(self) -> None:
        """Prepare for the gradients of a backward. Raises RuntimeError if torch would add them to this step's clipped
        gradients, or to the last step's gradients, which are gone."""
        if self._max_norm is not None:
            raise RuntimeError(
                f"backward() was called after clip_grad_norm_ to {self._max_norm:g} in the same step, so the "
                "gradients of both would be clipped together; clip once per step, after its last backward (with "
                "accumulated gradients, under `if accelerator.sync_gradients:`)"
            )
        if self._has_taken_gradients:
            raise RuntimeError(
                "backward() was called after step() without zero_grad(): torch would add these gradients to the last "
                "step's gradients, which are gone; call optimizer.zero_grad() after each step()"
            )

    def undo_guesses(self) -> None:
        """Undo guesses, because the step needs its old weights again. Later steps probably need theirs too, so no step
        guesses any more."""
        if undone := self._pipeline.undo_guesses():
            self._clip_history.never_speculate()
            self._slots.forget(undone)

    def clip_gradients(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale the step's gradients so that their norm is at most `max_norm`. Returns the norm before scaling.

        An infinite `max_norm` only measures. After a clip the norm is the measured norm times the clip's coefficient,
        because gradients are not measured twice. Raises ValueError for norms other than the 2-norm, for updates that
        have already run in backward, and for a second clip that may scale again. Raises RuntimeError if the last step
        took the gradients.
        """
        if float(norm_type) != 2.0:
            raise ValueError(f"norm_type={norm_type} is not supported under offload; use the 2-norm")
        if self._has_taken_gradients:
            raise RuntimeError(
                "clip_grad_norm_ was called after step(), which has already used the gradients; call it between "
                "backward() and step()"
            )
        clips = max_norm != float("inf")
        if clips and self._max_norm is not None and not max_norm >= self._max_norm * _SECOND_CLIP_RATIO:
            raise ValueError(
                f"the gradients of this step were clipped to {self._max_norm:g} before, and clipping them to "
                f"{max_norm:g} would scale them twice; call clip_grad_norm_ once per step, with the smallest max_norm"
            )
        self._pipeline.wait_for_norms(max_norm if clips else None)
        norm = self._pipeline.total_norm()
        if self._max_norm is not None:
            return norm * self._clip_coefficient
        if not clips:
            return norm
        if not self._pipeline.holds_gradients:
            raise ValueError(
                f"clip_grad_norm_ was called with max_norm={max_norm}, but the engine was prepared for "
                "max_grad_norm=0 and has already applied the updates in backward; set max_grad_norm before training "
                "starts"
            )
        self._max_norm = max_norm
        self._clip_coefficient = float(torch.clamp(max_norm / (norm + _CLIP_EPS), max=1.0))
        return norm

    def finish_step(self, group_of: GroupOf) -> StepResult:
        """Apply the held gradients with this step's hyperparameters, and make the step count. If a gradient is not
        finite, undo the step's updates and forget its gradients instead. (Updates that cannot be undone had finite
        gradients.) Raises RuntimeError if no gradient arrived after the last step, because torch would apply the old
        gradients again. Also raises RuntimeError if no trained weight got a gradient in the step's backwards. torch
        refuses these backwards unless a tensor outside the model requires a gradient."""
        if self._has_taken_gradients:
            raise RuntimeError(
                "step() was called a second time with the same gradients, which the first call has used; call step() "
                "once for each backward(), or zero_grad() before step() if nothing is to be applied"
            )
        has_gradients = self._pipeline.has_gradients
        self._is_ending = True
        self._pipeline.wait_for_norms()  # no gradient may still arrive when the step's norms are forgotten
        self._refuse_zeros(self._pipeline.with_gradient())
        if self._pipeline.trains_nothing:
            self._abandon()
            raise RuntimeError(
                "no trained weight got a gradient in this step, so the loss depends on no trained weight (torch calls "
                "this 'element 0 of tensors does not require grad'); unmerge or enable the adapters, and compute the "
                "loss from outputs of the model that are not detached"
            )
        with self._slots.changing():
            if math.isfinite(self._pipeline.total_norm()) or self._pipeline.is_past_undoing:
                changed, applied = self._pipeline.finish_step(self._clip_coefficient, group_of)
                result = StepResult(changed, applied, self._clip_coefficient != 1.0)
            else:
                not_finite = self._pipeline.first_not_finite() or "all parameters together"
                changed, _ = self._pipeline.abandon_step()
                result = StepResult(changed, None, clipped=False, not_finite=not_finite)
            self._begin_next()
            self._has_taken_gradients = has_gradients
            self._slots.end_step(result.changed)
        self._clip_history.note_step(result.applied, clipped=result.clipped)
        self._pipeline.set_speculation(self._clip_history.speculates)
        self.last = result
        self._is_ending = self._leaves_updates = False
        return result

    def _refuse_zeros(self, with_gradient: Set[ParamSlice]) -> None:
        """Record the step's gradients. Raises ValueError if torch has a gradient of zeros for another parameter."""
        self._since_none |= with_gradient
        missing = sorted(part.name for part in self._zeroed - with_gradient)
        if missing:
            raise ValueError(
                f"{missing[0]} ({len(missing)} of {len(self._zeroed)} parameters) has no gradient in this step, and "
                "after zero_grad(set_to_none=False) torch would still update it with a gradient of zeros, which "
                "offload does not keep; call zero_grad(), which sets gradients to None"
            )

    def recover(self) -> None:
        """Abandon the rest of the step if an exception ended a method."""
        if self._is_ending:
            # The pipeline takes a step completely or not at all. It may have taken this step.
            self._pipeline.wait_for_updates()
            self._abandon()
            self._is_ending = True
            if self._slots.is_half_changed:
                self._slots.end_step(self._blocks)  # other ranks count this step
            else:
                self._slots.forget(self._blocks)
            self._is_ending = False

    def abandon_gradients(self, *, to_none: bool = True) -> None:
        """Forget the step's gradients, and undo its updates if the store can. ``to_none``: whether torch would set them
        to None and not to zeros."""
        self._since_none = set() if to_none else self._since_none | self._pipeline.announced()
        self._zeroed = frozenset(self._since_none)
        touched, remains = self._abandon()
        if remains:
            logger.warning("gradients were dropped, but backward had already updated %d blocks with them", len(touched))

    def abandon_broken(self) -> None:
        """Abandon the step after an exception in its backward."""
        touched, remains = self._abandon()
        logger.warning(
            "the last backward did not finish, so the gradients of its step are dropped%s",
            f", but the step had already updated {len(touched)} blocks" if remains else "",
        )

    def _abandon(self) -> tuple[set[Block], bool]:
        """Abandon the step. Returns the blocks that it changed, and whether updates remain in them."""
        self._is_ending = True
        touched, remains = self._pipeline.abandon_step()
        self._begin_next()
        self._leaves_updates = self._leaves_updates or remains
        if touched:
            self._slots.end_step(touched, WeightChange.DROP)
        self._is_ending = False
        return touched, remains

    def _begin_next(self) -> None:
        self.max_norm_before, self._max_norm, self._clip_coefficient = self._max_norm, None, 1.0
        self._has_taken_gradients = False


class SkippedSteps:
    """Counts steps whose gradients were not finite. Too many of them in a row end the run."""

    def __init__(self, max_in_a_row: int) -> None:
        self._max_in_a_row = max_in_a_row
        self._in_a_row = 0
        self.total = 0

    def note_step(self, result: StepResult) -> None:
        """Count a step. Raises NonFiniteGradientError if too many were skipped in a row."""
        if result.not_finite is None:
            self._in_a_row = 0
            return
        self.total += 1
        self._in_a_row += 1
        name, in_a_row = result.not_finite, self._in_a_row
        logger.warning("skipped a step: the gradient of %s is not finite (%d in a row)", name, in_a_row)
        if in_a_row >= self._max_in_a_row:
            raise NonFiniteGradientError(
                f"the gradient of {name} is not finite, and {in_a_row} steps in a row were skipped "
                f"(max_skipped_steps={self._max_in_a_row}); lower the learning rate or check the data. The store "
                "holds the last good step"
            )


class HasGroups(Protocol):
    """Interface of an optimizer. Its groups may change at any time."""

    @property
    def param_groups(self) -> Sequence[Mapping[str, Any]]: ...


class ParamGroups:
    """The hyperparameters of each parameter, from an optimizer's param groups. An optimizer is bound later, and may be
    replaced. The groups may change between steps."""

    def __init__(self, rules: Mapping[ParamSlice, UpdateRule]) -> None:
        """``rules``: the update rule of each slice, which determined its states in the store."""
        self._rules = rules
        self._parts: dict[nn.Parameter, list[ParamSlice]] = {}
        for part in rules:
            self._parts.setdefault(part.parameter, []).append(part)
        self._frozen = {parameter: parts for parameter, parts in self._parts.items() if not parts[0].trainable}
        """Slices of parameters without states."""
        self._optimizer: HasGroups | None = None
        self._taken: tuple[tuple[Mapping[str, Any], ...], dict[ParamSlice, int]] = (), {}
        """The groups, and the index of each slice's group. Updates in backward read these while the loop may change its
        own list."""
        self._members: list[list[int]] = []
        self._pairs: set[tuple[int, UpdateRule]] = set()
        """Pairs of a group's index and the update rule of the group's parameters."""
        self._in_no_group: dict[nn.Parameter, list[ParamSlice]] = {}
        self._at_backward: tuple[dict[ParamSlice, int], dict[tuple[int, UpdateRule], Hashable]] | None = None
        self._at_step: dict[str, Any] = {}
        """The `values` of the last step."""

    def bind_optimizer(self, optimizer: HasGroups) -> None:
        """Use the groups of an optimizer. Schedulers may change their values. Raises ValueError if they do not fit the
        store. Every parameter that requires a gradient must be in a group, and every parameter in a group must have the
        states that the group's rule needs."""
        index, in_no_group = self._placed_in(optimizer.param_groups)
        self._refuse_thawed()
        _refuse_without_group(in_no_group)
        self._optimizer = optimizer
        self._set_groups(index, in_no_group)

    def follow_optimizer(self, *, may_be_without_group: bool = False) -> None:
        """Read the groups again, because parameters may have been frozen, thawed, or moved to another group. Raises as
        `bind_optimizer` does. ``may_be_without_group``: parameters may be in no group, because no step follows."""
        self._refuse_thawed()
        if self._optimizer is not None and self._members != _members(self._bound()):
            self._set_groups(*self._placed_in(self._bound()))
        if not may_be_without_group:
            _refuse_without_group(self._in_no_group)

    def _set_groups(self, index: dict[ParamSlice, int], in_no_group: dict[nn.Parameter, list[ParamSlice]]) -> None:
        groups = tuple(self._bound())
        self._taken, self._in_no_group = (groups, index), in_no_group
        self._pairs = {(number, self._rules[part]) for part, number in index.items()}
        self._members = _members(groups)

    def _placed_in(
        self, param_groups: Sequence[Mapping[str, Any]]
    ) -> tuple[dict[ParamSlice, int], dict[nn.Parameter, list[ParamSlice]]]:
        """Return the index of each slice's group, for slices with states, and the parameters in no group."""
        index: dict[ParamSlice, int] = {}
        in_no_group = {parameter: parts for parameter, parts in self._parts.items() if parts[0].trainable}
        for number, group in enumerate(param_groups):
            for parameter in group["params"]:
                parts = self._parts.get(parameter)
                if parts is None:
                    raise ValueError(
                        f"a parameter of shape {tuple(parameter.shape)} is not in the store; add adapters or new "
                        "embeddings to the model before it is offloaded"
                    )
                if parts[0].trainable:
                    self._rules[parts[0]].settings_of(group)
                    index.update(dict.fromkeys(parts, number))
                    in_no_group.pop(parameter, None)
        return index, in_no_group

    def note_settings(self) -> None:
        """Record the values for the updates of a backward that begins."""
        self._at_backward = (self._taken[1], self._settings()) if self._optimizer is not None else None

    def at_step(self, *, has_updates: bool) -> GroupOf:
        """Call `follow_optimizer`, and return a `group_of` with copies of the current values, because a scheduler may
        change them before the last update has run. Raises ValueError if the step ``has_updates`` from backward with
        other values."""
        self._bound()
        self.follow_optimizer()
        index, settings = self._taken[1], self._settings()
        if has_updates and self._at_backward is not None and self._at_backward != (index, settings):
            raise ValueError(
                "a param group was changed between backward and step() of a step whose updates run in backward, so "
                "the updates used the old values; change it before backward(), or set max_grad_norm > 0 to keep "
                "gradients until step()"
            )
        self._at_step = self.values()
        return lambda part: settings[_index_in(index, part), self._rules[part]]

    def values(self) -> dict[str, Any]:
        """Return the current hyperparameters of all groups, as JSON values by name."""
        pairs = sorted(self._settings().items(), key=lambda pair: (pair[0][0], str(pair[0][1])))
        return {
            f"{name} of param group {number}": value
            for (number, _), settings in pairs
            for name, value in _by_name(settings).items()
        }

    def values_to_compare(self) -> dict[str, Any]:
        """Return the `values`, and the values of the previous step, because a loop may change values after the ranks
        have compared them."""
        return {**self.values(), **{f"{name} in the step before": value for name, value in self._at_step.items()}}

    def places(self) -> dict[str, str]:
        """Return the group of each parameter with states, by name."""
        return {part.name: f"in param group {number}" for part, number in self._taken[1].items()}

    def has_any(self) -> bool:
        """Return whether an optimizer is bound."""
        return self._optimizer is not None

    def group_of(self, part: ParamSlice) -> Hashable:
        """Return a parameter's current hyperparameters. Raises ValueError if it is in no group, and RuntimeError
        without an optimizer."""
        self._bound()
        groups, index = self._taken
        return self._rules[part].settings_of(groups[_index_in(index, part)])

    def _settings(self) -> dict[tuple[int, UpdateRule], Hashable]:
        return {(number, rule): rule.settings_of(self._taken[0][number]) for number, rule in self._pairs}

    def _bound(self) -> Sequence[Mapping[str, Any]]:
        if self._optimizer is None:
            raise RuntimeError("the model has no optimizer yet; make an OffloadAdamW over its parameters")
        return self._optimizer.param_groups

    def _refuse_thawed(self) -> None:
        for parameter, parts in self._frozen.items():
            if parameter.requires_grad:
                raise ValueError(
                    f"{parts[0].name} was frozen when the model was offloaded and has no optimizer state; set "
                    "requires_grad=True on every parameter that is ever trained before the model is offloaded, and "
                    "freeze it afterwards with requires_grad_(False), which can be undone between any two steps"
                )


def _by_name(settings: Hashable) -> dict[str, Any]:
    if isinstance(settings, AdamWGroup):
        return asdict(settings)
    assert isinstance(settings, tuple), "as other rules have them"
    return dict(settings)


def _refuse_without_group(parameters: Mapping[nn.Parameter, Sequence[ParamSlice]]) -> None:
    for parameter, parts in parameters.items():
        if parameter.requires_grad:
            raise ValueError(
                f"{parts[0].name} requires a gradient but is in no param group of the optimizer; add it with "
                "optimizer.add_param_group, or freeze it with requires_grad_(False)"
            )


def _members(param_groups: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    return [[id(group), *map(id, group["params"])] for group in param_groups]


def _index_in(index: Mapping[ParamSlice, int], part: ParamSlice) -> int:
    number = index.get(part)
    if number is None:
        raise ValueError(f"{part.name} got a gradient but is in no param group of the optimizer; add it to a group")
    return number
