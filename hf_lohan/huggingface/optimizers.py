"""Replaces the optimizer of a run, in whichever way it was chosen, by one over the store."""

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
"""Upstream uses bitsandbytes for them; our rule needs no package."""
_OPTIM_ARGS = {
    "sgd": ("momentum", "dampening", "nesterov"),
    "adagrad": ("lr_decay", "eps"),
    "rmsprop": ("momentum", "alpha", "eps", "centered"),
}
"""Keys of `optim_args` that upstream uses. It ignores a weight decay there."""
OPTIM_NAMES = ("adamw_torch", "adamw_torch_fused", *_OPTIM_ARGS, "adafactor", *_LIONS)
"""Supported values of `TrainingArguments.optim`."""


@dataclass(frozen=True)
class OptimizerChoice:
    """An optimizer to make over a model's parameters."""

    rule: UpdateRule
    defaults: dict[str, Any]
    """Hyperparameters of param groups that do not set them."""
    rest: OptimizerChoice | None = None
    """With Muon, the choice for parameters that are not a layer's matrices."""

    def rules(self, model: nn.Module) -> dict[nn.Parameter, UpdateRule]:
        """The update rule of each parameter, as `Rules`."""
        if self.rest is None:
            return dict.fromkeys(model.parameters(), self.rule)
        return self.rest.rules(model) | dict.fromkeys(hidden_matrices(model), self.rule)

    def class_and_settings(self, engine: OffloadEngine) -> tuple[type[OffloadOptimizer], dict[str, Any]]:
        """Class and keyword arguments with which Trainer makes the optimizer over its param groups."""
        if self.rest is not None:
            return _OffloadedMuon, {"engine": engine, "muon": self.defaults, "rest": self.rest.defaults}
        if self.rule == ADAMW:
            names = ("lr", "betas", "eps", "weight_decay")
            return OffloadAdamW, {"engine": engine, **{name: self.defaults[name] for name in names}}
        return OffloadOptimizer, {"engine": engine, "defaults": self.defaults}


class _OffloadedMuon(OffloadOptimizer):
    """Muon for the matrices of the layers, and another optimizer for the other parameters."""

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
        as_list = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        for group in self._split([{**param_group, "params": as_list}]):
            super().add_param_group(group)

    def _split(self, groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        split = []
        for defaults, is_for_matrices in self._defaults_of_kinds:
            for group in groups:
                parameters = [p for p in group["params"] if (p in self._matrices) is is_for_matrices]
                if parameters:
                    split.append({**defaults, **group, "params": parameters})
        return split


def refused_optim_args(optim: str, optim_args: str | None) -> bool:
    """Whether a key in `TrainingArguments.optim_args` would be ignored."""
    names = {pair.partition("=")[0] for pair in (optim_args or "").replace(" ", "").split(",") if pair}
    return not names <= set(_OPTIM_ARGS.get(optim, ()))


def choose_optimizer(
    args: TrainingArguments,
    given: Any,
    by_arguments: Callable[..., tuple[Any, dict[str, Any]]],
    config: OffloadConfig,
) -> OptimizerChoice:
    """Choose by ``given`` (`optimizer_cls_and_kwargs`), else by ``config``, else by ``args``. ``by_arguments`` is
    Trainer's `get_optimizer_cls_and_kwargs`. Raises ValueError for an optimizer without a rule."""
    optim = getattr(args.optim, "value", args.optim)
    if config.optimizer == "muon":
        if given is not None:
            raise ValueError("optimizer='muon' and optimizer_cls_and_kwargs are both set; leave one of them out")
        given = torch.optim.Muon, {"lr": args.learning_rate, "adjust_lr_fn": "match_rms_adamw"}
        config = replace(config, optimizer="auto")
    if given is None and optim in _LIONS:
        betas = (args.adam_beta1, args.adam_beta2)
        settings = {"lr": args.learning_rate, "betas": betas, "weight_decay": 0.0}
        return OptimizerChoice(rule_for("Lion", [settings]), {RULE_KEY: "Lion", **settings})
    chosen = given if given is not None else by_arguments(args)
    return make_optimizer_choice(chosen, lambda: choose_optimizer(args, None, by_arguments, config))


def make_optimizer_choice(
    optimizer: Any, rest: Callable[[], OptimizerChoice] = lambda: make_optimizer_choice(torch.optim.AdamW)
) -> OptimizerChoice:
    """Make a choice from an optimizer's class, or a class and its keyword arguments. An `OptimizerChoice` is returned
    unchanged. With Muon ``rest`` chooses for the other parameters. Raises ValueError for optimizers and settings
    without a rule."""
    if isinstance(optimizer, OptimizerChoice):
        return optimizer
    optimizer_class, settings = optimizer if isinstance(optimizer, tuple) else (optimizer, {})
    name = _name_of(optimizer_class)
    # An instance fills in defaults, and refuses invalid values.
    instance = optimizer_class([nn.Parameter(torch.zeros(1, 1))], **settings)
    _refuse_instance(instance)
    group = instance.param_groups[0]
    defaults = {key: value for key, value in group.items() if key != "params"}
    rule = _rule_of(name, [defaults])
    return OptimizerChoice(rule, {RULE_KEY: name, **defaults}, rest() if name == "Muon" else None)


def is_taken_over(optimizer: Any) -> bool:
    """Whether the optimizer is over the store, prepared by an `Accelerator` or not."""
    return isinstance(getattr(optimizer, "optimizer", optimizer), OffloadOptimizer)


def check_given(optimizer: torch.optim.Optimizer) -> None:
    """Raises ValueError unless the optimizer can be replaced: it has a rule and has not stepped."""
    if is_taken_over(optimizer):
        return
    name = _name_of(type(optimizer))
    _refuse_instance(optimizer)
    _rule_of(name, optimizer.param_groups)
    if any(float(state.get("step", 1)) for state in optimizer.state.values()):
        raise ValueError(
            f"this {name} has stepped, and only a new one can be offloaded; make a new one, or resume from a "
            "checkpoint that was saved under offload"
        )


def rules_of(optimizers: Sequence[torch.optim.Optimizer]) -> Rules:
    """The `Rules` of a run with these optimizers over the model's parameters."""
    rule_of: dict[nn.Parameter, UpdateRule] = {}
    for optimizer in optimizers:
        by_name: dict[str, list[dict[str, Any]]] = {}
        for group in optimizer.param_groups:
            by_name.setdefault(group.get(RULE_KEY) or _name_of(type(optimizer)), []).append(group)
        for name, groups in by_name.items():
            rule = _rule_of(name, groups)
            rule_of.update({parameter: rule for group in groups for parameter in group["params"]})
    used = set(rule_of.values())
    rest = used.pop() if len(used) == 1 else ADAMW  # frozen parameters have no states

    def rules(model: nn.Module) -> dict[nn.Parameter, UpdateRule]:
        return {
            parameter: rule_of.get(parameter, ADAMW if parameter.requires_grad else rest)
            for parameter in model.parameters()
        }

    return rules


def take_over(optimizer: torch.optim.Optimizer, engine: OffloadEngine) -> OffloadOptimizer:
    """Replace an optimizer by one over the store with the same group dicts, into which the caller's scheduler writes
    learning rates. Raises ValueError as `check_given`, and if the groups do not fit the store."""
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
    _redirect(optimizer, taken)
    _warn_of_frozen(taken, engine)
    return taken


def take_over_together(
    optimizers: Sequence[torch.optim.Optimizer], engine: OffloadEngine
) -> tuple[OffloadOptimizer, list[OffloadOptimizer]]:
    """`take_over` for one or several optimizers of a model. Returns the engine's optimizer, and ours for each."""
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
        _redirect(optimizer, part)
    _warn_of_frozen(joint, engine)
    return joint, [*joint.parts]


def _defaults_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Hyperparameters of groups that are added later and do not set them."""
    return {**optimizer.defaults, RULE_KEY: _name_of(type(optimizer))}


def _redirect(optimizer: torch.optim.Optimizer, taken: OffloadOptimizer) -> None:
    """Let groups that are added to the caller's optimizer go to ours, and free its states."""
    optimizer.add_param_group = taken.add_param_group  # type: ignore[method-assign]
    optimizer.param_groups = taken.param_groups
    optimizer.state.clear()  # Adagrad makes its sums before it steps
    mark_optimizer_stepped(optimizer)  # its scheduler warns otherwise


def _warn_of_frozen(optimizer: OffloadOptimizer, engine: OffloadEngine) -> None:
    """Warn of frozen weights in an optimizer, which the caller may want to train later. With adapters the base stays
    frozen."""
    if hasattr(engine.model, "peft_config"):
        return
    in_groups = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    frozen = [part.name for part in engine.parameter_slices if part.parameter in in_groups and not part.trainable]
    if frozen:
        logger.warning(
            "the optimizer has %d frozen parameters (such as %s), which have no states in the store and stay frozen in "
            "this run; to train them later, let them require gradients when the model is offloaded, and freeze them "
            "afterwards",
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
    """Raises ValueError for a setting that is not in the param groups."""
    if getattr(optimizer, "decoupled_wd", False):  # in `lion_pytorch`
        lr, weight_decay = optimizer.defaults["lr"], optimizer.defaults["weight_decay"]
        raise ValueError(
            "Lion with decoupled_weight_decay=True is not supported under offload; for the same updates leave it off, "
            f"and set weight_decay={weight_decay / lr:g}, which is {weight_decay:g} / {lr:g}"
        )


def _rule_of(name: str, groups: Sequence[dict[str, Any]]) -> UpdateRule:
    if name == "Lion" and any(group.get("cautious_factor", 1.0) != 1.0 for group in groups):
        raise ValueError("Lion with a cautious_factor other than 1 is not supported under offload; leave it at 1")
    return rule_for(name, groups)


class StoreOptimizerMixin(_TrainerBase):
    """Mixed into a Trainer: its optimizer is over the store."""

    optimizer: Any
    optimizer_cls_and_kwargs: Any
    _offload_config: OffloadConfig | None

    if TYPE_CHECKING:

        def _ensure_engine(self) -> OffloadEngine | None: ...

    def _rules(self) -> Rules:
        """The update rules, whose states the store has."""
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
        stock = self.optimizer_cls_and_kwargs
        if self.optimizer is None:
            # Upstream groups the parameters by weight decay, and instantiates our class.
            self.optimizer_cls_and_kwargs = self._optimizer_choice(self.args).class_and_settings(engine)
        try:
            super().create_optimizer(*args, **kwargs)
        finally:
            self.optimizer_cls_and_kwargs = stock
        if not isinstance(getattr(self.optimizer, "optimizer", self.optimizer), OffloadOptimizer):
            self.optimizer = take_over(self.optimizer, engine)
        return self.optimizer
