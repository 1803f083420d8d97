"""What updates are built from, and from a parameter to its hyperparameters."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import nn

from hf_lohan.config import Schedule
from hf_lohan.device import BufferPool, Device, HostStack
from hf_lohan.model import Block, ParamSlice
from hf_lohan.optim import UpdateRule
from hf_lohan.ranks import StepAgreement
from hf_lohan.store import RecordFiles, Store
from hf_lohan.threads import Command
from hf_lohan.updates.gradient_reduction import GradientMeans, OwnGradients
from hf_lohan.updates.missed_steps import GroupOf, MissedSteps, StepCounts


@dataclass(frozen=True)
class UpdateSetup:
    """The parts that gradients and updates pass through."""

    device: Device
    blocks: Sequence[Block]
    """In forward order."""
    slices: Sequence[ParamSlice]
    """In the model's order, in which torch adds norms up."""
    group_of: GroupOf
    """Gives the present hyperparameters."""
    step_counts: StepCounts
    """Of all `slices`. Steps count them on the worker's thread."""
    schedule: Schedule
    holds_gradients: bool
    """Until the norm is known, unless it is guessed."""
    store: Store
    """If it has two homes it keeps its last commit until the next: what was written since can be undone."""
    states: BufferPool
    """Where chunks are updated."""
    gradients: BufferPool
    """Where gradients arrive, and are held. Updates after backward may borrow those that are free."""
    num_arrival_buffers: int
    """So many of them are never borrowed."""
    recall: BufferPool
    """Buffers for spilled gradients that come back. The worker must never wait for a buffer of the pool in which
    gradients arrive: it is who empties that one."""
    has_groups: Callable[[], bool] = lambda: True
    """Whether there are hyperparameters: before an optimizer is made nothing is guessed."""
    spilled_blocks: frozenset[str] = frozenset()
    """Their held gradients wait on the SSD, in `spill`, unless there is room in `shared_ram`."""
    num_held_chunks: int = 0
    """Of the other blocks. Never more are held in `gradients`."""
    shared_ram: HostStack | None = None
    """At its bottom lie swapped activations. What they leave, gradients may take as long as it lasts; None with several
    ranks, which read each other's gradients in buffers."""
    spill: RecordFiles | None = None
    keeps_gradient_dtypes: bool = False
    """One backward a step is to be expected. What it brings in 2 bytes an element is kept so, in half a buffer. Sums of
    it, where they come after all, are float32 and wait in what `open_spill_of_sums` opens."""
    open_spill_of_sums: Callable[[], RecordFiles] | None = None
    means: Callable[[Callable[[Command], None], Callable[[BaseException], None]], GradientMeans] = OwnGradients
    """Makes what makes gradients those of all ranks, given how to run something on the worker's thread, and whom to
    tell what went wrong elsewhere."""
    copies_new_weights: Device | None = None
    """To whoever needs their block: `device`, if None. Where that is host memory, the host copies them at once."""
    missed: MissedSteps = field(default_factory=lambda: MissedSteps((), ()))
    """Steps with gradients of zeros that chunks of the store take later; where nothing is said, none does."""
    agreement: StepAgreement | None = None
    """Of the ranks that train together; None where there is one."""


class HasGroups(Protocol):
    """An optimizer, whose groups are whatever it has at the time."""

    @property
    def param_groups(self) -> Sequence[Mapping[str, Any]]: ...


class ParamGroups:
    """Of no optimizer at first, then of one, from which another may take over. The groups may change between steps."""

    def __init__(self, rules: Mapping[ParamSlice, UpdateRule]) -> None:
        """``rules``: of all slices, what their states were laid out for."""
        self._rules = rules
        self._parts: dict[nn.Parameter, list[ParamSlice]] = {}
        for part in rules:
            self._parts.setdefault(part.parameter, []).append(part)
        self._frozen = {parameter: parts for parameter, parts in self._parts.items() if not parts[0].trainable}
        """They have no states."""
        self._optimizer: HasGroups | None = None
        self._taken: tuple[tuple[Mapping[str, Any], ...], dict[ParamSlice, int]] = (), {}
        """The groups, and which slice is in which: updates in backward look at them while the loop changes its list."""
        self._members: list[list[int]] = []
        self._pairs: set[tuple[int, UpdateRule]] = set()
        """Each group with the rules that some of its parameters have."""
        self._in_no_group: dict[nn.Parameter, list[ParamSlice]] = {}
        self._at_backward: tuple[dict[ParamSlice, int], dict[tuple[int, UpdateRule], Hashable]] | None = None

    def bind(self, optimizer: HasGroups) -> None:
        """Take an optimizer's, in which schedulers change the values. Raises ValueError unless they fit the store:
        every parameter that requires a gradient in a group, and every one in a group with states in the store: those
        that the group's rule needs."""
        index, in_no_group = self._placed_in(optimizer.param_groups)
        self._refuse_thawed()
        _refuse_without_group(in_no_group)
        self._optimizer = optimizer
        self._take(index, in_no_group)

    def follow(self, *, may_be_without_group: bool = False) -> None:
        """Take what has changed since: parameters may have been frozen, thawed, or given to another group. Raises as
        `bind`, unless parameters ``may_be_without_group``, as long as no step is to be taken."""
        self._refuse_thawed()
        if self._optimizer is not None and self._members != _members(self._bound()):
            self._take(*self._placed_in(self._bound()))
        if not may_be_without_group:
            _refuse_without_group(self._in_no_group)

    def _take(self, index: dict[ParamSlice, int], in_no_group: dict[nn.Parameter, list[ParamSlice]]) -> None:
        groups = tuple(self._bound())
        self._taken, self._in_no_group = (groups, index), in_no_group
        self._pairs = {(number, self._rules[part]) for part, number in index.items()}
        self._members = _members(groups)

    def _placed_in(
        self, param_groups: Sequence[Mapping[str, Any]]
    ) -> tuple[dict[ParamSlice, int], dict[nn.Parameter, list[ParamSlice]]]:
        """The number of the group that has each slice with states, and the parameters that are in none."""
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

    def note(self) -> None:
        """A backward begins: note the values that its updates get."""
        self._at_backward = (self._taken[1], self._settings()) if self._optimizer is not None else None

    def at_step(self, *, has_updates: bool) -> GroupOf:
        """`follow`, and `group_of` with the present values for good: a scheduler may change them before the last
        update has run. Raises ValueError if the step ``has_updates`` from backward that had other values."""
        self._bound()
        self.follow()
        index, settings = self._taken[1], self._settings()
        if has_updates and self._at_backward is not None and self._at_backward != (index, settings):
            raise ValueError(
                "a param group was changed between backward and step() of a step whose updates run in backward, so "
                "they had the values before; change it before backward(), or set max_grad_norm > 0 to keep gradients "
                "until step()"
            )
        return lambda part: settings[_index_in(index, part), self._rules[part]]

    def has_any(self) -> bool:
        """Whether there is an optimizer."""
        return self._optimizer is not None

    def group_of(self, part: ParamSlice) -> Hashable:
        """A parameter's hyperparameters as they are at the call. Raises ValueError if it is in no group, RuntimeError
        if there is no optimizer."""
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
                    f"{parts[0].name} was frozen when the model was offloaded and has no optimizer state; let all that "
                    "is to be trained at some time require a gradient when the model is offloaded, and freeze it "
                    "afterwards by requires_grad_(False): that can be undone between any two steps"
                )


def _refuse_without_group(parameters: Mapping[nn.Parameter, Sequence[ParamSlice]]) -> None:
    for parameter, parts in parameters.items():
        if parameter.requires_grad:
            raise ValueError(
                f"{parts[0].name} requires a gradient but is in no param group of the optimizer; add it with "
                "optimizer.add_param_group, or freeze it by requires_grad_(False)"
            )


def _members(param_groups: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """Which parameters are in which group."""
    return [[id(group), *map(id, group["params"])] for group in param_groups]


def _index_in(index: Mapping[ParamSlice, int], part: ParamSlice) -> int:
    number = index.get(part)
    if number is None:
        raise ValueError(f"{part.name} got a gradient but is in no param group of the optimizer")
    return number
