"""The optimizer that a run asked for, in any of the ways that Hugging Face has to say it, and ours in its place."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import nn
from transformers import TrainingArguments

from hf_lohan.compat.torch_private import mark_optimizer_stepped
from hf_lohan.config import OffloadConfig
from hf_lohan.engine import OffloadEngine
from hf_lohan.model import Rules, hidden_matrices
from hf_lohan.optim import (
    ADAMW,
    OPTIMIZERS,
    RULE_KEY,
    JointOptimizer,
    OffloadAdamW,
    OffloadOptimizer,
    UpdateRule,
    rule_for,
)

if TYPE_CHECKING:
    from transformers import Trainer as _TrainerBase
else:
    _TrainerBase = object  # a mixin: `super()` is whatever Trainer it is mixed into

logger = logging.getLogger(__name__)

_LIONS = ("lion_32bit", "paged_lion_32bit")
"""Upstream takes them from bitsandbytes; the rule needs no package."""
_OPTIM_ARGS = {
    "sgd": ("momentum", "dampening", "nesterov"),
    "adagrad": ("lr_decay", "eps"),
    "rmsprop": ("momentum", "alpha", "eps", "centered"),
}
"""What upstream takes from `optim_args`. (Weight decay comes from `weight_decay`, whatever stands there.)"""
OPTIM_NAMES = ("adamw_torch", "adamw_torch_fused", *_OPTIM_ARGS, "adafactor", *_LIONS)
"""Values of `TrainingArguments.optim` that can be honoured."""


@dataclass(frozen=True)
class OptimizerChoice:
    """An optimizer that is to be made over a model's parameters."""

    rule: UpdateRule
    defaults: dict[str, Any]
    """Hyperparameters of param groups that do not say theirs."""
    rest: OptimizerChoice | None = None
    """Of what is no matrix of a layer, where the rule is for those."""

    def rules(self, model: nn.Module) -> dict[nn.Parameter, UpdateRule]:
        """The `Rules` of a run with it."""
        if self.rest is None:
            return dict.fromkeys(model.parameters(), self.rule)
        return self.rest.rules(model) | dict.fromkeys(hidden_matrices(model), self.rule)

    def over(self, engine: OffloadEngine) -> tuple[type[OffloadOptimizer], dict[str, Any]]:
        """Class and keyword arguments that Trainer makes it with, over the param groups that it sees to."""
        if self.rest is not None:
            return _OffloadedMuon, {"engine": engine, "muon": self.defaults, "rest": self.rest.defaults}
        if self.rule == ADAMW:
            names = ("lr", "betas", "eps", "weight_decay")
            return OffloadAdamW, {"engine": engine, **{name: self.defaults[name] for name in names}}
        return OffloadOptimizer, {"engine": engine, "defaults": self.defaults}


class _OffloadedMuon(OffloadOptimizer):
    """Muon for the matrices of the layers, another optimizer for what else is in the param groups."""

    def __init__(
        self, groups: list[dict[str, Any]], muon: dict[str, Any], rest: dict[str, Any], *, engine: OffloadEngine
    ) -> None:
        self._matrices, self._defaults_of_kinds = hidden_matrices(engine.model), ((muon, True), (rest, False))
        super().__init__(self._split(groups), {}, engine=engine)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch; matrices and the rest get a group each."""
        if not self._is_made:
            super().add_param_group(param_group)
            return
        parameters = param_group["params"]
        given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        for group in self._split([{**param_group, "params": given}]):
            super().add_param_group(group)

    def _split(self, groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        split = []
        for defaults, is_for_matrices in self._defaults_of_kinds:
            for group in groups:
                own = [p for p in group["params"] if (p in self._matrices) is is_for_matrices]
                if own:
                    split.append({**defaults, **group, "params": own})
        return split


def refused_optim_args(optim: str, optim_args: str | None) -> bool:
    """Whether something in `TrainingArguments.optim_args` would be ignored."""
    names = {pair.partition("=")[0] for pair in (optim_args or "").replace(" ", "").split(",") if pair}
    return not names <= set(_OPTIM_ARGS.get(optim, ()))


def choose_optimizer(
    args: TrainingArguments,
    given: Any,
    by_arguments: Callable[..., tuple[Any, dict[str, Any]]],
    config: OffloadConfig,
) -> OptimizerChoice:
    """What `optimizer_cls_and_kwargs` asks for if it is ``given``, else what ``config`` does, else the arguments:
    ``by_arguments`` is Trainer's `get_optimizer_cls_and_kwargs`. Raises ValueError for what has no rule."""
    optim = getattr(args.optim, "value", args.optim)
    if config.optimizer == "muon":
        if given is not None:
            raise ValueError("optimizer='muon' stands beside optimizer_cls_and_kwargs; leave one of them out")
        given = torch.optim.Muon, {"lr": args.learning_rate, "adjust_lr_fn": "match_rms_adamw"}
        config = replace(config, optimizer="auto")
    if given is None and optim in _LIONS:
        betas = (args.adam_beta1, args.adam_beta2)
        settings = {"lr": args.learning_rate, "betas": betas, "weight_decay": 0.0}
        return OptimizerChoice(rule_for("Lion", [settings]), {RULE_KEY: "Lion", **settings})
    asked = given if given is not None else by_arguments(args)
    return make_optimizer_choice(asked, lambda: choose_optimizer(args, None, by_arguments, config))


def make_optimizer_choice(
    asked: Any, rest: Callable[[], OptimizerChoice] = lambda: make_optimizer_choice(torch.optim.AdamW)
) -> OptimizerChoice:
    """A choice made already, an optimizer's class, or a class and its keyword arguments; with Muon ``rest`` chooses for
    what it does not take. Raises ValueError for one that there is no rule for, and for settings that no rule has."""
    if isinstance(asked, OptimizerChoice):
        return asked
    optimizer_class, settings = asked if isinstance(asked, tuple) else (asked, {})
    name = _name_of(optimizer_class)
    # It fills in its defaults, and refuses values that it does not take.
    instance = optimizer_class([nn.Parameter(torch.zeros(1, 1))], **settings)
    _refuse_instance(instance)
    group = instance.param_groups[0]
    defaults = {key: value for key, value in group.items() if key != "params"}
    rule = _rule_of(name, [defaults])
    return OptimizerChoice(rule, {RULE_KEY: name, **defaults}, rest() if name == "Muon" else None)


def is_taken_over(optimizer: Any) -> bool:
    """Whether it is one of ours, perhaps prepared by an `Accelerator`."""
    return isinstance(getattr(optimizer, "optimizer", optimizer), OffloadOptimizer)


def check_given(optimizer: torch.optim.Optimizer) -> None:
    """Raises ValueError unless it can be taken over: one that there is a rule for, and that has not stepped."""
    if is_taken_over(optimizer):
        return
    name = _name_of(type(optimizer))
    _refuse_instance(optimizer)
    _rule_of(name, optimizer.param_groups)
    if any(float(state.get("step", 1)) for state in optimizer.state.values()):
        raise ValueError(
            f"only a fresh {name} can be taken over, this one has stepped; make a new one, or resume from a checkpoint "
            "that was saved under offload"
        )


def rules_of(optimizers: Sequence[torch.optim.Optimizer]) -> Rules:
    """The `Rules` of a run with these optimizers over the model's own parameters."""
    found: dict[nn.Parameter, UpdateRule] = {}
    for optimizer in optimizers:
        by_name: dict[str, list[dict[str, Any]]] = {}
        for group in optimizer.param_groups:
            by_name.setdefault(group.get(RULE_KEY) or _name_of(type(optimizer)), []).append(group)
        for name, groups in by_name.items():
            rule = _rule_of(name, groups)
            found.update({parameter: rule for group in groups for parameter in group["params"]})
    used = set(found.values())
    rest = used.pop() if len(used) == 1 else ADAMW  # frozen parameters have no states

    def rules(model: nn.Module) -> dict[nn.Parameter, UpdateRule]:
        return {
            parameter: found.get(parameter, ADAMW if parameter.requires_grad else rest)
            for parameter in model.parameters()
        }

    return rules


def take_over(optimizer: torch.optim.Optimizer, engine: OffloadEngine) -> OffloadOptimizer:
    """One of ours over the same group dicts: the caller's scheduler goes on writing its learning rates into them.
    Raises ValueError as `check_given`, and if the groups do not fit the store."""
    if isinstance(optimizer, OffloadOptimizer):
        return optimizer
    check_given(optimizer)
    for group in optimizer.param_groups:
        group[RULE_KEY] = _name_of(type(optimizer))
    defaults = _defaults_of(optimizer)
    if type(optimizer) is torch.optim.AdamW:
        names = ("lr", "betas", "eps", "weight_decay")
        adamw = {name: defaults[name] for name in names}
        taken: OffloadOptimizer = OffloadAdamW(optimizer.param_groups, engine=engine, **adamw)
    else:
        taken = OffloadOptimizer(optimizer.param_groups, defaults, engine=engine)
    _let_go(optimizer, taken)
    _warn_of_frozen(taken, engine)
    return taken


def take_over_together(
    optimizers: Sequence[torch.optim.Optimizer], engine: OffloadEngine
) -> tuple[OffloadOptimizer, list[OffloadOptimizer]]:
    """As `take_over`, of one or several over parameters of one model: what the engine has, and ours for each."""
    if len(optimizers) == 1:
        taken = take_over(optimizers[0], engine)
        return taken, [taken]
    for optimizer in optimizers:
        check_given(optimizer)
        for group in optimizer.param_groups:
            group[RULE_KEY] = _name_of(type(optimizer))
    groups, defaults = [optimizer.param_groups for optimizer in optimizers], [*map(_defaults_of, optimizers)]
    joint = JointOptimizer(groups, defaults, engine=engine)
    for optimizer, part in zip(optimizers, joint.parts, strict=True):
        _let_go(optimizer, part)
    _warn_of_frozen(joint, engine)
    return joint, [*joint.parts]


def _defaults_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Hyperparameters of groups that are added later and do not give their own."""
    return {**optimizer.defaults, RULE_KEY: _name_of(type(optimizer))}


def _let_go(optimizer: torch.optim.Optimizer, taken: OffloadOptimizer) -> None:
    """Another one takes its steps. A group that the caller adds to it is added to that one."""
    optimizer.add_param_group = taken.add_param_group  # type: ignore[method-assign]
    optimizer.param_groups = taken.param_groups
    optimizer.state.clear()  # Adagrad makes its sums before it steps
    mark_optimizer_stepped(optimizer)  # what its scheduler asks before it steps


def _warn_of_frozen(optimizer: OffloadOptimizer, engine: OffloadEngine) -> None:
    """An optimizer of frozen weights may be meant to train them later. (With adapters their base stays frozen.)"""
    if hasattr(engine.model, "peft_config"):
        return
    in_groups = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    frozen = [part.name for part in engine.parameter_slices if part.parameter in in_groups and not part.trainable]
    if frozen:
        logger.warning(
            "the optimizer has %d frozen parameters (%s and so on), which have no states in the store and cannot be "
            "thawed in this run; if they are to be trained later, let them require gradients when the model is "
            "offloaded, and freeze them afterwards",
            len(frozen),
            frozen[0],
        )


def _name_of(optimizer_class: Any) -> str:
    if optimizer_class is transformers.Adafactor:
        return "TransformersAdafactor"
    name = getattr(optimizer_class, "__name__", str(optimizer_class))
    is_lion = name == "Lion" and optimizer_class.__module__.partition(".")[0] == "lion_pytorch"
    if name not in OPTIMIZERS or not (is_lion or getattr(torch.optim, name, None) is optimizer_class):
        raise ValueError(f"{name} cannot be offloaded; use one of torch.optim's {', '.join(OPTIMIZERS)}")
    return name


def _refuse_instance(optimizer: torch.optim.Optimizer) -> None:
    """Raises ValueError for what an optimizer was asked for and no param group says."""
    if getattr(optimizer, "decoupled_wd", False):  # of `lion_pytorch`
        lr, weight_decay = optimizer.defaults["lr"], optimizer.defaults["weight_decay"]
        raise ValueError(
            "Lion with decoupled_weight_decay=True is not supported under offload; leave it off, and set "
            f"weight_decay={weight_decay / lr:g}, which is {weight_decay:g} / {lr:g}, for the same"
        )


def _rule_of(name: str, groups: Sequence[dict[str, Any]]) -> UpdateRule:
    if name == "Lion" and any(group.get("cautious_factor", 1.0) != 1.0 for group in groups):
        raise ValueError("Lion with a cautious_factor is not supported under offload; leave it at 1")
    return rule_for(name, groups)


class StoredOptimizers(_TrainerBase):
    """Mixed into a Trainer: its optimizer is ours, of whatever kind was asked for."""

    optimizer: Any
    optimizer_cls_and_kwargs: Any
    _offload_config: OffloadConfig | None

    if TYPE_CHECKING:

        def _ensure_engine(self) -> OffloadEngine | None: ...

    def _rules(self) -> Rules:
        """Whose states the store is to have."""
        if self.optimizer is None:
            return self._optimizer_choice(self.args).rules
        return rules_of([getattr(self.optimizer, "optimizer", self.optimizer)])

    def _optimizer_choice(self, args: TrainingArguments) -> OptimizerChoice:
        config = self._offload_config
        assert config is not None
        return choose_optimizer(args, self.optimizer_cls_and_kwargs, self.get_optimizer_cls_and_kwargs, config)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        engine = self._ensure_engine()
        if engine is None:
            return super().create_optimizer(*args, **kwargs)
        asked = self.optimizer_cls_and_kwargs
        if self.optimizer is None:
            # Upstream groups the parameters by weight decay; only the class it instantiates is ours.
            self.optimizer_cls_and_kwargs = self._optimizer_choice(self.args).over(engine)
        try:
            super().create_optimizer(*args, **kwargs)
        finally:
            self.optimizer_cls_and_kwargs = asked
        if not isinstance(getattr(self.optimizer, "optimizer", self.optimizer), OffloadOptimizer):
            self.optimizer = take_over(self.optimizer, engine)
        return self.optimizer
