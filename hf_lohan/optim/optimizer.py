"""The `torch.optim.Optimizer` for Trainer, schedulers and accelerate. An engine runs its steps."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn, Protocol

import torch

from hf_lohan.optim.adamw import SEED_KEY
from hf_lohan.optim.rules import ADAMW, RULE_KEY, refuse_settings


class StepTarget(Protocol):
    """The part of an engine's interface that an optimizer uses."""

    def bind_optimizer(self, optimizer: OffloadOptimizer) -> None: ...

    def rounding_seed(self) -> int | None: ...

    def check_groups(self) -> None: ...

    def step(self) -> None: ...

    def drop_gradients(self, *, to_none: bool = True) -> None: ...

    @property
    def step_was_skipped(self) -> bool: ...


def _refuse(*args: Any, **kwargs: Any) -> NoReturn:
    raise ValueError(
        "the states of an offloaded optimizer are in the store and not in optimizer.state, so code that reads, changes "
        "or resets them there has no effect; read one with hf_lohan.engine_of(model).parameters.read_flat(name, kind), "
        "and to reset them save the model and start a new run from it"
    )


_REFUSED = (
    *("__contains__", "__delitem__", "__ior__", "__iter__", "__len__", "__setitem__", "clear", "copy", "get", "items"),
    *("keys", "pop", "popitem", "setdefault", "update", "values"),
)
_Refusing: Any = type("_Refusing", (dict,), {**dict.fromkeys(_REFUSED, _refuse), "__reduce__": lambda _: (dict, ())})
"""An empty dict that raises ValueError for each use, but is pickled and copied as an empty dict."""


class _StatesInStore(_Refusing):  # type: ignore[misc]
    """The `state` of an optimizer."""

    def __missing__(self, parameter: Any) -> Any:
        return _NoStates()


class _NoStates(_Refusing):  # type: ignore[misc]
    def __missing__(self, kind: str) -> NoReturn:
        raise ValueError(
            f"the state {kind!r} of a parameter is in the store and not in optimizer.state; read it with "
            f"hf_lohan.engine_of(model).parameters.read_flat(name, {kind!r})"
        )


class OffloadOptimizer(torch.optim.Optimizer):
    """An optimizer whose states are in the store, and whose updates run when gradients arrive.

    After `step()` all reads return the new weights. Updates that needed the gradient norm may still run after `step()`,
    and a read of a block waits for its update. `state` refuses each use, but is empty for `state_dict` and `pickle`.
    `param_groups` always contains the same objects, even after `load_state_dict`, because schedulers and users keep
    references to them.
    """

    _is_made = False

    def __init__(self, params: Iterable[Any], defaults: Mapping[str, Any], *, engine: StepTarget) -> None:
        """``defaults`` has the hyperparameters for groups that do not set them, and the rule's name as `RULE_KEY`."""
        seed = engine.rounding_seed()
        super().__init__(params, {**({} if seed is None else {SEED_KEY: seed}), **defaults})
        self.state = _StatesInStore()
        self._engine_ref = weakref.ref(engine)  # the engine lives as long as its model
        engine.bind_optimizer(self)
        self._is_made = True

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "state" and self._is_made:
            _refuse()
        super().__setattr__(name, value)

    def state_dict(self) -> dict[str, Any]:
        """Return the hyperparameters, without states."""
        own = vars(self)
        before, own["state"] = own["state"], {}
        try:
            return super().state_dict()
        finally:
            own["state"] = before

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as torch does, between steps. Raises ValueError for parameters without states in the store, or
        for hyperparameters that need other states, and then leaves the groups unchanged."""
        super().add_param_group(param_group)
        if self._is_made:
            self._check_added()

    def _check_added(self) -> None:
        try:
            self._engine.check_groups()
        except ValueError:
            self.param_groups.pop()
            raise

    @property
    def _engine(self) -> StepTarget:
        engine = self._engine_ref()
        if engine is None:
            raise RuntimeError(
                "the model of this optimizer's parameters was deleted; keep a reference to the model while you train"
            )
        return engine

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Finish the step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._engine.step()
        return loss

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step changed nothing because a gradient was not finite."""
        return self._engine.step_was_skipped

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients that have not been applied yet. With ``set_to_none=False`` a later step refuses a parameter
        that torch would then update with a gradient of zeros."""
        for group in self.param_groups:
            for param in group["params"]:
                param.grad = None
        self._engine.drop_gradients(to_none=set_to_none)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load only the hyperparameters. Moments and masters are in the store. Raises ValueError for a ``state_dict``
        that has moments."""
        if moments := state_dict.get("state"):
            raise ValueError(
                f"the optimizer state has the states of {len(moments)} parameters, which would be lost, because this "
                "optimizer keeps its states in the store; resume from a checkpoint of an offloaded run, or leave the "
                "states out (`{**state_dict, 'state': {}}`) to load only the hyperparameters"
            )
        groups = state_dict["param_groups"]
        if len(groups) != len(self.param_groups):
            raise ValueError(
                f"the optimizer state has {len(groups)} param groups, this optimizer has {len(self.param_groups)}; "
                "resume with the same weight-decay settings"
            )
        for group, loaded in zip(self.param_groups, groups, strict=True):
            ours, theirs = group[RULE_KEY], loaded.get(RULE_KEY, ADAMW.name)
            if ours != theirs:
                raise ValueError(
                    f"the optimizer state is for {theirs}, this optimizer is {ours}; resume with {theirs}, or start "
                    "a new run from the checkpoint's weights"
                )
            refuse_settings(theirs, loaded)
        for group, loaded in zip(self.param_groups, groups, strict=True):
            group.update({key: value for key, value in loaded.items() if key != "params"})


class OffloadAdamW(OffloadOptimizer):
    """AdamW."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        engine: StepTarget,
    ) -> None:
        settings = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {RULE_KEY: ADAMW.name, **settings}, engine=engine)


class JointOptimizer(OffloadOptimizer):
    """Several optimizers of one model, each with some of its parameters. The step runs after all parts have stepped."""

    def __init__(
        self,
        groups_of_parts: Sequence[Sequence[dict[str, Any]]],
        defaults_of_parts: Sequence[Mapping[str, Any]] = (),
        *,
        engine: StepTarget,
    ) -> None:
        """``defaults_of_parts`` has each optimizer's hyperparameters for groups that are added later."""
        super().__init__([group for groups in groups_of_parts for group in groups], {}, engine=engine)
        defaults = defaults_of_parts or [{}] * len(groups_of_parts)
        self.parts = [
            OptimizerPart(groups, self, of_part) for groups, of_part in zip(groups_of_parts, defaults, strict=True)
        ]
        """The optimizers that the training loop steps, in the order of their groups."""
        self._stepped: dict[OptimizerPart, list[dict[str, Any]]] = {}
        """Optimizers that have stepped and wait for others, with their groups' hyperparameters at their step."""
        self._zeroed: dict[OptimizerPart, bool] = {}
        """Optimizers that have dropped their gradients and wait for others, with their `set_to_none`."""

    def step_part(self, part: OptimizerPart) -> None:
        """Run the step if the other optimizers have stepped. Raises RuntimeError if one of them steps twice."""
        if part in self._stepped or (self._zeroed and not self._stepped):
            self._fall_out_of_step()
        self._stepped[part] = [_hyperparameters(group) for group in part.param_groups]
        if len(self._stepped) == len(self.parts):
            stepped = dict(self._stepped)
            self._stepped.clear()
            self.follow_parts()
            present = [(group, dict(group)) for group in self.param_groups]
            try:
                for of_part, settings in stepped.items():  # schedulers may have changed the groups after the step
                    for group, own in zip(of_part.param_groups, settings, strict=True):
                        group.update(own)
                self.step()
            finally:
                for group, own in present:
                    group.update(own)

    def follow_parts(self) -> None:
        """Use the current groups of the parts, because a training loop may have changed their lists."""
        self.param_groups[:] = [group for part in self.parts for group in part.param_groups]

    def waits(self, part: OptimizerPart) -> bool:
        """Return whether this optimizer has stepped and another has not."""
        return part in self._stepped

    def zero_part(self, part: OptimizerPart, set_to_none: bool) -> None:
        """Drop gradients after `zero_grad` of all optimizers. Raises RuntimeError if only some have stepped."""
        self._zeroed[part] = set_to_none
        if len(self._zeroed) == len(self.parts):
            to_none = all(self._zeroed.values())
            self._zeroed.clear()
            self.zero_grad(to_none)
            if self._stepped:
                self._fall_out_of_step()

    def _fall_out_of_step(self) -> NoReturn:
        self._stepped.clear()
        self._zeroed.clear()
        raise RuntimeError(
            "the optimizers of an offloaded model take their steps together; call step() and zero_grad() of each "
            "once for each step"
        )


def _hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the hyperparameters, because a scheduler writes to a learning rate that is a tensor."""
    return {
        key: value.clone() if isinstance(value, torch.Tensor) else value
        for key, value in group.items()
        if key != "params"
    }


class OptimizerPart(OffloadOptimizer):
    """One of the optimizers that step together."""

    def __init__(self, groups: Sequence[dict[str, Any]], joint: JointOptimizer, defaults: Mapping[str, Any]) -> None:
        torch.optim.Optimizer.__init__(self, groups, dict(defaults))
        self.state = _StatesInStore()
        self._joint = joint
        self._is_made = True

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as `OffloadOptimizer.add_param_group` does."""
        if self._is_made:
            self._joint.follow_parts()
        torch.optim.Optimizer.add_param_group(self, param_group)
        if self._is_made:
            try:
                self._joint.add_param_group(self.param_groups[-1])
            except ValueError:
                self.param_groups.pop()
                raise

    @property
    def _engine(self) -> StepTarget:
        return self._joint._engine

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Finish the step if all other optimizers have stepped. Raises ValueError for a closure."""
        if closure is not None:
            raise ValueError("one of several optimizers cannot run a closure; run it before their steps")
        self._joint.step_part(self)

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step changed nothing. False until all optimizers have stepped, so that a scheduler may step
        before that, as in torch."""
        return not self._joint.waits(self) and super().step_was_skipped

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients that have not been applied yet, after `zero_grad` of all optimizers."""
        self._joint.zero_part(self, set_to_none)
