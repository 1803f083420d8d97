"""Replaces the optimizer of a run with an optimizer that updates the store."""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers
from torch import nn
from transformers import TrainingArguments
from transformers.training_args import OptimizerNames

from hf_lohan.compat.torch_private import mark_optimizer_stepped
from hf_lohan.config import OffloadConfig
from hf_lohan.engine import OffloadEngine
from hf_lohan.huggingface.trainer_mixin import TrainerMixin
from hf_lohan.model import Rules, has_adapters, hidden_matrices
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

logger = logging.getLogger(__name__)

_LIONS = ("lion_32bit", "paged_lion_32bit")
"""Values for which upstream uses bitsandbytes. The update rule here needs no package."""
_OPTIM_ARGS = {
    "sgd": ("momentum", "dampening", "nesterov"),
    "adagrad": ("lr_decay", "eps"),
    "rmsprop": ("momentum", "alpha", "eps", "centered"),
}
"""Keys of `optim_args` that upstream uses. Upstream ignores a weight decay in `optim_args`."""
_INT8_ADAMWS = ("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit")
"""Names of 8-bit AdamW in bitsandbytes. Under offload they mean moments in int8."""
_ADAMWS = ("paged_adamw_32bit", *_INT8_ADAMWS)
"""Names of AdamW in bitsandbytes."""
OPTIM_NAMES = ("adamw_torch", "adamw_torch_fused", *_ADAMWS, *_OPTIM_ARGS, "adafactor", *_LIONS)
"""Supported values of `TrainingArguments.optim`."""


@dataclass(frozen=True)
class OptimizerChoice:
    """The class and settings of an optimizer that is not created yet."""

    rule: UpdateRule
    defaults: dict[str, Any]
    """Default hyperparameters of param groups."""
    rest: OptimizerChoice | None = None
    """With Muon, the choice for parameters that are not matrices of layers."""

    def rules(self, model: nn.Module) -> dict[nn.Parameter, UpdateRule]:
        """Return the update rule of each parameter. This method is a `Rules` function."""
        if self.rest is None:
            return dict.fromkeys(model.parameters(), self.rule)
        return self.rest.rules(model) | dict.fromkeys(hidden_matrices(model), self.rule)

    def class_and_settings(self, engine: OffloadEngine) -> tuple[type[OffloadOptimizer], dict[str, Any]]:
        """Return the class and the keyword arguments with which Trainer creates the optimizer for its param groups."""
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
        """Same as in torch, but divide the group into a group of matrices and a group of other parameters."""
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


def config_named_by_optim(args: TrainingArguments, config: OffloadConfig) -> OffloadConfig:
    """Return the configuration. It gets int8 moments if `optim` names an 8-bit AdamW. Raises ValueError if a setting of
    the configuration contradicts this."""
    optim = getattr(args.optim, "value", args.optim)
    if optim not in _INT8_ADAMWS:
        return config
    meaning = f"optim={optim!r} means optimizer_state_dtype: int8"
    if config.optimizer != "auto":
        raise ValueError(
            f"{meaning}, which is for AdamW alone, and optimizer is {config.optimizer!r}; leave optimizer out, or set "
            "optim='adamw_torch'"
        )
    if config.optimizer_state_dtype not in ("auto", "int8"):
        raise ValueError(
            f"{meaning}, and optimizer_state_dtype is {config.optimizer_state_dtype!r}; leave optimizer_state_dtype "
            "out, or set optim='adamw_torch'"
        )
    if config.optimizer_state_dtype == "int8":
        return config
    logger.warning("%s, which rounds differently from bitsandbytes, so the numbers differ", meaning)
    return replace(config, optimizer_state_dtype="int8")


def int8_advice(name: str) -> str:
    """Return advice for an AdamW with 8-bit or 4-bit states, or "" for other optimizers."""
    if not re.search(r"adamw.*(8bit|4bit|fp8)", name.lower()):
        return ""
    return ", and for smaller AdamW states set optimizer_state_dtype: int8 in the offload config"


def refused_optim_args(optim: str, optim_args: str | None) -> bool:
    """Return whether a key in `TrainingArguments.optim_args` would be ignored."""
    names = {pair.partition("=")[0] for pair in (optim_args or "").replace(" ", "").split(",") if pair}
    return not names <= set(_OPTIM_ARGS.get(optim, ()))


def choose_optimizer(
    args: TrainingArguments,
    given: Any,
    by_arguments: Callable[..., tuple[Any, dict[str, Any]]],
    config: OffloadConfig,
) -> OptimizerChoice:
    """Choose an optimizer from the first that names one: ``given`` (`optimizer_cls_and_kwargs`), ``config``, ``args``.
    ``by_arguments`` is Trainer's `get_optimizer_cls_and_kwargs`. Raises ValueError for an optimizer without a rule."""
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
    if given is None and optim in _ADAMWS:
        args = copy.copy(args)
        args.optim = OptimizerNames.ADAMW_TORCH_FUSED
    chosen = given if given is not None else by_arguments(args)
    return make_optimizer_choice(chosen, lambda: choose_optimizer(args, None, by_arguments, config))


def make_optimizer_choice(
    optimizer: Any, rest: Callable[[], OptimizerChoice] = lambda: make_optimizer_choice(torch.optim.AdamW)
) -> OptimizerChoice:
    """Make a choice from an optimizer's class, or from a class and its keyword arguments. An `OptimizerChoice` is
    returned unchanged. With Muon, ``rest`` is the choice for the other parameters. Raises ValueError for optimizers and
    settings without a rule."""
    if isinstance(optimizer, OptimizerChoice):
        return optimizer
    optimizer_class, settings = optimizer if isinstance(optimizer, tuple) else (optimizer, {})
    name = _name_of(optimizer_class)
    # Creating an instance gives the defaults of the class, and raises errors for invalid values.
    instance = optimizer_class([nn.Parameter(torch.zeros(1, 1))], **settings)
    _refuse_instance(instance)
    group = instance.param_groups[0]
    defaults = {key: value for key, value in group.items() if key != "params"}
    rule = _rule_of(name, [defaults])
    return OptimizerChoice(rule, {RULE_KEY: name, **defaults}, rest() if name == "Muon" else None)


def is_taken_over(optimizer: Any) -> bool:
    """Return whether the optimizer updates the store. An `Accelerator` may have wrapped it."""
    return isinstance(getattr(optimizer, "optimizer", optimizer), OffloadOptimizer)


def check_given(optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError if the optimizer has no rule, or has already taken a step."""
    if is_taken_over(optimizer):
        return
    name = _name_of(type(optimizer))
    _refuse_instance(optimizer)
    _rule_of(name, optimizer.param_groups)
    if any(float(state.get("step", 1)) for state in optimizer.state.values()):
        raise ValueError(
            f"this {name} has already taken a step, and only a new optimizer can be offloaded; make a new optimizer, "
            "or resume from a checkpoint that was saved under offload"
        )


def rules_of(optimizers: Sequence[torch.optim.Optimizer]) -> Rules:
    """Return the `Rules` of a run with these optimizers over the model's parameters."""
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


def take_over(
    optimizers: Sequence[torch.optim.Optimizer], engine: OffloadEngine
) -> tuple[OffloadOptimizer, list[OffloadOptimizer]]:
    """Replace the optimizers of a model with ones that update the store. Each shares group dicts with its replacement,
    so the caller's scheduler sets the learning rates of both. Returns the engine's optimizer, and a replacement for
    each of ``optimizers``. Raises the errors of `check_given`, and ValueError if groups do not fit the store."""
    defaults = [*map(_defaults_by_rule, optimizers)]
    groups = [optimizer.param_groups for optimizer in optimizers]
    if len(optimizers) == 1:
        taken = OffloadOptimizer(groups[0], defaults[0], engine=engine)
        ours = [taken]
    else:
        taken = joint = JointOptimizer(groups, defaults, engine=engine)
        ours = [*joint.parts]
    for optimizer, own in zip(optimizers, ours, strict=True):
        _redirect(optimizer, own)
    _warn_of_frozen(taken, engine)
    return taken, ours


def _defaults_by_rule(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Set the rule's name in each group, and return the default hyperparameters of groups that are added later. Raises
    the errors of `check_given`."""
    check_given(optimizer)
    rule = {RULE_KEY: _name_of(type(optimizer))}
    for group in optimizer.param_groups:
        group.update(rule)
    return {**optimizer.defaults, **rule}


def _redirect(optimizer: torch.optim.Optimizer, taken: OffloadOptimizer) -> None:
    """Make ``optimizer`` save, load and add groups as its replacement ``taken``, and free the states of
    ``optimizer``."""
    optimizer.add_param_group = taken.add_param_group  # type: ignore[method-assign]
    optimizer.state_dict = taken.state_dict  # type: ignore[method-assign]
    optimizer.load_state_dict = taken.load_state_dict  # type: ignore[method-assign]
    optimizer.param_groups = taken.param_groups
    optimizer.state = taken.state  # Adagrad allocates states when it is created
    mark_optimizer_stepped(optimizer)  # keeps its scheduler from warning


def _warn_of_frozen(optimizer: OffloadOptimizer, engine: OffloadEngine) -> None:
    """Warn about frozen weights in an optimizer, because the caller may want to train them later. With adapters there
    is no warning, because the base stays frozen."""
    if has_adapters(engine.model):
        return
    in_groups = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    frozen = [part.name for part in engine.parameter_slices if part.parameter in in_groups and not part.trainable]
    if frozen:
        logger.warning(
            "the optimizer has %d frozen parameters (such as %s), which have no states in the store and stay frozen "
            "in this run; to train them later, set requires_grad=True before the model is offloaded, and freeze them "
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
        raise ValueError(
            f"{name} cannot be offloaded; use one of torch.optim's {', '.join(OPTIMIZERS)}{int8_advice(name)}"
        )
    return name


def _refuse_instance(optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError for an unsupported setting of an optimizer that its param groups do not show."""
    if getattr(optimizer, "decoupled_wd", False):  # in `lion_pytorch`
        lr, weight_decay = optimizer.defaults["lr"], optimizer.defaults["weight_decay"]
        raise ValueError(
            "Lion with decoupled_weight_decay=True is not supported under offload; for equal updates, leave it off "
            f"and set weight_decay={weight_decay / lr:g}, which is {weight_decay:g} / {lr:g}"
        )


def _rule_of(name: str, groups: Sequence[dict[str, Any]]) -> UpdateRule:
    if name == "Lion" and any(group.get("cautious_factor", 1.0) != 1.0 for group in groups):
        raise ValueError("Lion with a cautious_factor other than 1 is not supported under offload; leave it at 1")
    return rule_for(name, groups)


def _check_trains(engine: OffloadEngine) -> None:
    """Raise ValueError if all weights that an offloaded model could train were frozen."""
    has_states = any(block.state_numel for block in engine.layout.blocks)
    if has_states and not any(part.parameter.requires_grad for part in engine.parameter_slices):
        raise ValueError(
            "all weights of the model are frozen, its adapters too, so nothing would be trained; leave "
            "peft.prepare_model_for_kbit_training out: from_pretrained(..., peft_config=...) already freezes the base, "
            "and offload already recomputes its layers"
        )


class StoreOptimizerMixin(TrainerMixin):
    """Creates an optimizer that updates the store."""

    optimizer: Any
    optimizer_cls_and_kwargs: Any

    def _rules(self) -> Rules:
        """Return the update rule of each parameter. The store has the states of these rules."""
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
        _check_trains(engine)
        stock = self.optimizer_cls_and_kwargs
        if self.optimizer is None:
            # Upstream groups the parameters by weight decay, and then creates an instance of this class.
            self.optimizer_cls_and_kwargs = self._optimizer_choice(self.args).class_and_settings(engine)
        try:
            super().create_optimizer(*args, **kwargs)
        finally:
            self.optimizer_cls_and_kwargs = stock
        if not is_taken_over(self.optimizer):
            self.optimizer, _ = take_over([self.optimizer], engine)
        return self.optimizer
