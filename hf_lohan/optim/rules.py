"""Update rules. A rule defines an optimizer's states for each parameter, and its step on a float32 chunk.

Each rule calls torch's function for one tensor after the other (`foreach=False, fused=False`), as `torch.optim` does on
a CPU, or the fused kernel (Adam and AdamW), so that results are bitwise equal to torch's.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.optim.adagrad import adagrad
from torch.optim.radam import radam
from torch.optim.rmsprop import rmsprop
from torch.optim.sgd import sgd

from hf_lohan.compat.torch_private import adafactor, adjusted_muon_lr, newton_schulz
from hf_lohan.optim.adamw import AdamWGroup, Segment, adamw_

RULE_TILE_NUMEL = 64 * 1024
"""Number of elements of a tile. Temporaries of this size stay in a core's cache."""
_MUST_BE_OFF = ("amsgrad", "maximize", "differentiable", "capturable")
"""Settings of torch's optimizers that no rule supports."""

RuleSettings = tuple[tuple[str, Any], ...]
"""Names and values of arguments of torch's functions."""
States = Mapping[str, Tensor]
"""States of the updated elements, by kind."""
Aside = Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]
"""Calls a function with a tensor on the device on which matrix products are fast."""


def here(function: Callable[[Tensor], Tensor], value: Tensor) -> Tensor:
    """Call the function on the CPU, as an `Aside`."""
    return function(value)


@dataclass(frozen=True, slots=True)
class UpdateRule:
    """Describes how a run updates some of its parameters. Equal rules have equal records."""

    name: str
    """Name of the class in `torch.optim`."""
    state_kinds: tuple[str, ...]
    """States of each element, by torch's names (`Optimizer.state`). They are float32 records of zeros at first."""

    @property
    def needs_whole(self) -> bool:
        """Whether each segment must be one whole parameter."""
        return _FAMILIES[self.name].needs_whole

    @property
    def multiplies_matrices(self) -> bool:
        """Whether the rule needs memory on the device for matrix products."""
        return self.name == "Muon"

    @property
    def may_be_late(self) -> bool:
        """Whether a step with a gradient of zeros may run later. It needs only the hyperparameters in `AdamWGroup`."""
        return self.name in ("AdamW", "Adam")

    def refuse_shape(self, name: str, shape: tuple[int, ...]) -> None:
        """Raise ValueError for a parameter whose states do not fit the rule's records."""
        if not _FAMILIES[self.name].takes(shape):
            raise ValueError(
                f"{self.name} has more state for {name} (of shape {list(shape)}) than the parameter has elements, "
                "which is not supported under offload; freeze the parameter, or use another optimizer"
            )

    def __str__(self) -> str:
        """ "SGD(momentum_buffer)"."""
        return f"{self.name}({', '.join(self.state_kinds)})"

    @classmethod
    def parse(cls, text: str) -> UpdateRule:
        """Return the rule that `str` has converted to ``text``. Raises ValueError for an unknown rule."""
        match = re.fullmatch(r"(\w+)\(([\w, ]*)\)", text)
        if match is None or match[1] not in _FAMILIES:
            raise ValueError(f"this version of hf_lohan does not know the optimizer {text!r}; upgrade hf_lohan")
        return cls(match[1], tuple(kind for kind in match[2].split(", ") if kind))

    def settings_of(self, group: Mapping[str, Any]) -> Hashable:
        """Return the current hyperparameters of a param group. Raises ValueError for a group of another optimizer, and
        for hyperparameters that need a state without a record."""
        name = group.get(RULE_KEY, ADAMW.name)
        if name != self.name:
            raise ValueError(
                f"the parameters of a param group of {name} were offloaded for {self}; pass {name} when the model is "
                "offloaded"
            )
        missing = sorted(set(_FAMILIES[self.name].kinds(group)) - set(self.state_kinds))
        if missing:
            raise ValueError(
                f"a param group of {self.name} needs {', '.join(missing)}, which a model that was offloaded for {self} "
                "does not have; set that hyperparameter before the model is offloaded"
            )
        refuse_settings(self.name, group)
        return _FAMILIES[self.name].settings_of(group)

    @torch.no_grad()
    def update_(
        self, master: Tensor, gradient: Tensor, states: States, segments: Sequence[Segment], aside: Aside = here
    ) -> None:
        """Update a float32 chunk [numel] and its states [numel], by kind, in place, but not elements outside the
        segments. Segments begin at multiples of 32 elements, and cuts at such multiples change no bit. If the rule
        needs whole parameters, each segment is a whole parameter, and ``aside`` runs matrix products."""
        if self.needs_whole:
            _FAMILIES[self.name].update_(master, gradient, states, segments, aside)
        else:
            _FAMILIES[self.name].update_(master, gradient, states, segments)


RULE_KEY = "optimizer"
"""Key of a param group for the name of its rule. Without this key the rule is AdamW."""
ADAMW = UpdateRule("AdamW", ("exp_avg", "exp_avg_sq"))
MUON = UpdateRule("Muon", ("momentum_buffer",))


def rule_for(name: str, groups: Iterable[Mapping[str, Any]]) -> UpdateRule:
    """Return the rule of an optimizer's param groups, with all states that any group needs. Raises ValueError for an
    optimizer without a rule, and for settings that no rule supports."""
    if name not in _FAMILIES:
        raise ValueError(f"{name} is not supported under offload; use one of {', '.join(_FAMILIES)}")
    kinds: dict[str, None] = {}
    for group in groups:
        refuse_settings(name, group)
        kinds |= dict.fromkeys(_FAMILIES[name].kinds(group))
    return UpdateRule(name, tuple(kinds))


def refuse_settings(name: str, group: Mapping[str, Any]) -> None:
    """Raise ValueError for a param group with settings that no rule supports."""
    for key in _MUST_BE_OFF:
        if group.get(key):
            raise ValueError(f"{name} with {key}=True is not supported under offload; leave it off")


@dataclass(frozen=True, slots=True)
class _Family:
    """The rules of one optimizer."""

    settings_of: Callable[[Mapping[str, Any]], Hashable]
    kinds: Callable[[Mapping[str, Any]], tuple[str, ...]]
    """Returns the states that a param group needs."""
    update_: Callable[..., None]
    needs_whole: bool = False
    takes: Callable[[tuple[int, ...]], bool] = lambda _shape: True
    """Returns whether a parameter of this shape is supported."""


def _always(*kinds: str) -> Callable[[Mapping[str, Any]], tuple[str, ...]]:
    return lambda _group: kinds


# Adam and AdamW.


def _adamw_(master: Tensor, gradient: Tensor, states: States, segments: Sequence[Segment]) -> None:
    adamw_(master, gradient, states["exp_avg"], states["exp_avg_sq"], segments)


# Other rules run tile by tile. A step function gets a tile's master, gradient and states, and the number of the step.

_Step = Callable[[Tensor, Tensor, States, int, dict[str, Any]], None]


def _in_tiles(step_: _Step) -> Callable[[Tensor, Tensor, States, Sequence[Segment]], None]:
    def update_(master: Tensor, gradient: Tensor, states: States, segments: Sequence[Segment]) -> None:
        for segment in segments:
            for start in range(segment.start, segment.stop, RULE_TILE_NUMEL):
                part = slice(start, min(start + RULE_TILE_NUMEL, segment.stop))
                part_states = {kind: state[part] for kind, state in states.items()}
                step_(master[part], gradient[part], part_states, segment.step, _as_keywords(segment.group))

    return update_


@dataclass(frozen=True, slots=True)
class _Scalar:
    """A learning rate that is a tensor, with which torch computes in the tensor's dtype."""

    value: float
    dtype: torch.dtype


@lru_cache(maxsize=64)
def _as_keywords(settings: Any) -> dict[str, Any]:
    return {
        name: torch.tensor(value.value, dtype=value.dtype) if isinstance(value, _Scalar) else value
        for name, value in settings
    }


def _settings(*names: str) -> Callable[[Mapping[str, Any]], RuleSettings]:
    """Return a function that reads the learning rate and these settings from a param group."""
    return lambda group: tuple((name, _hashable(group[name])) for name in ("lr", *names))


def _hashable(value: Any) -> Any:
    """Convert a list to a tuple, because betas from a JSON file are lists, and a tensor to a number with its dtype,
    because a scheduler writes to it."""
    if isinstance(value, Tensor):
        return _Scalar(float(value), value.dtype)
    return tuple(value) if isinstance(value, list) else value


def _before(step: int) -> Tensor:
    """Return the step counter for torch's functions, which add one to it."""
    return torch.tensor(float(step - 1))


def _sgd_kinds(group: Mapping[str, Any]) -> tuple[str, ...]:
    return ("momentum_buffer",) if group["momentum"] else ()


def _sgd_(master: Tensor, gradient: Tensor, states: States, step: int, settings: dict[str, Any]) -> None:
    # A parameter's first gradient becomes its momentum without dampening, as in torch, where no buffer exists before.
    has_none = step == 1 or not settings["momentum"]
    buffers: list[Tensor | None] = [None if has_none else states["momentum_buffer"]]
    sgd([master], [gradient], buffers, foreach=False, fused=False, maximize=False, **settings)
    if has_none and buffers[0] is not None:
        states["momentum_buffer"].copy_(buffers[0])


def _adagrad_(master: Tensor, gradient: Tensor, states: States, step: int, settings: dict[str, Any]) -> None:
    settings = dict(settings)
    initial = settings.pop("initial_accumulator_value")
    if step == 1:
        states["sum"].fill_(initial)
    sums, steps = [states["sum"]], [_before(step)]
    adagrad([master], [gradient], sums, steps, foreach=False, fused=False, maximize=False, **settings)


def _rmsprop_kinds(group: Mapping[str, Any]) -> tuple[str, ...]:
    averages = ("square_avg", "grad_avg") if group["centered"] else ("square_avg",)
    return (*averages, "momentum_buffer") if group["momentum"] else averages


def _rmsprop_(master: Tensor, gradient: Tensor, states: States, step: int, settings: dict[str, Any]) -> None:
    rmsprop(
        [master],
        [gradient],
        [states["square_avg"]],
        [states["grad_avg"]] if settings["centered"] else [],
        [states["momentum_buffer"]] if settings["momentum"] else [],
        [_before(step)],
        foreach=False,
        **settings,
    )


def _radam_settings(group: Mapping[str, Any]) -> RuleSettings:
    beta1, beta2 = group["betas"]
    names = ("eps", "weight_decay", "decoupled_weight_decay")
    return (*_settings(*names)(group), ("beta1", beta1), ("beta2", beta2))


def _radam_(master: Tensor, gradient: Tensor, states: States, step: int, settings: dict[str, Any]) -> None:
    moments = [states["exp_avg"]], [states["exp_avg_sq"]]
    radam([master], [gradient], *moments, [_before(step)], foreach=False, **settings)


def _lion_(master: Tensor, gradient: Tensor, states: States, step: int, settings: dict[str, Any]) -> None:
    """Run a step of Lion (Chen et al. 2023), with the operations of `lion_pytorch` in their order."""
    (beta1, beta2), lr, exp_avg = settings["betas"], settings["lr"], states["exp_avg"]
    master.mul_(1 - lr * settings["weight_decay"])
    master.add_(exp_avg.mul(beta1).add_(gradient, alpha=1 - beta1).sign_(), alpha=-lr)
    exp_avg.mul_(beta2).add_(gradient, alpha=1 - beta2)


# Muon runs matrix by matrix.


def _muon_settings(group: Mapping[str, Any]) -> RuleSettings:
    names = ("weight_decay", "momentum", "nesterov", "eps", "ns_steps", "adjust_lr_fn")
    return (*_settings(*names)(group), ("ns_coefficients", tuple(group["ns_coefficients"])))


def _muon_(master: Tensor, gradient: Tensor, states: States, segments: Sequence[Segment], aside: Aside) -> None:
    """Run a step of `torch.optim.Muon`. The Newton-Schulz iteration first rounds to bfloat16, which happens here before
    the matrix is copied. ``aside`` runs the rest."""
    for segment in segments:
        assert segment.shape is not None, "Newton-Schulz needs whole matrices"
        group, shape = _as_keywords(segment.group), torch.Size(segment.shape)
        matrix, matrix_gradient, momentum = (
            flat[segment.start : segment.stop].view(shape) for flat in (master, gradient, states["momentum_buffer"])
        )
        momentum.lerp_(matrix_gradient, 1 - group["momentum"])
        update = matrix_gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
        settings = {name: group[name] for name in ("ns_coefficients", "ns_steps", "eps")}
        update = aside(partial(newton_schulz, **settings), update.bfloat16())
        matrix.mul_(1 - group["lr"] * group["weight_decay"])
        matrix.add_(update, alpha=-adjusted_muon_lr(group["lr"], group["adjust_lr_fn"], shape))


# Adafactor runs parameter by parameter. A parameter with two or more dimensions has row averages and column averages.
# They are at the beginning of a record that has an element for each element of the parameter.


def _torch_adafactor_settings(group: Mapping[str, Any]) -> RuleSettings:
    eps1, eps2 = group["eps"]
    return (*_settings("d", "beta2_decay", "weight_decay")(group), ("eps1", eps1), ("eps2", eps2))


def _transformers_adafactor_settings(group: Mapping[str, Any]) -> RuleSettings:
    names = ("clip_threshold", "decay_rate", "beta1", "weight_decay", "scale_parameter", "relative_step", "warmup_init")
    return (*_settings(*names)(group), ("eps", tuple(group["eps"])))


def _transformers_adafactor_kinds(group: Mapping[str, Any]) -> tuple[str, ...]:
    return ("variance",) if group["beta1"] is None else ("variance", "exp_avg")


def _whole(step_: _Step) -> Callable[[Tensor, Tensor, States, Sequence[Segment], Aside], None]:
    def update_(master: Tensor, gradient: Tensor, states: States, segments: Sequence[Segment], aside: Aside) -> None:
        for segment in segments:
            assert segment.shape is not None, "rows and columns belong to whole parameters"
            part = slice(segment.start, segment.stop)
            kept = {kind: state[part] for kind, state in states.items() if kind not in ("param", "master_residual")}
            weight, weight_gradient = master[part].view(segment.shape), gradient[part].view(segment.shape)
            step_(weight, weight_gradient, kept, segment.step, _as_keywords(segment.group))

    return update_


def factors_fit(shape: tuple[int, ...]) -> bool:
    """Return whether the record has room for the averages of rows and columns."""
    return len(shape) < 2 or math.prod(shape[:-1]) + math.prod(shape[:-2]) * shape[-1] <= math.prod(shape)


def _factors(variance: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return views of the averages of rows [..., m, 1] and columns [..., 1, n], for a parameter [..., m, n]."""
    num_rows, num_columns = math.prod(shape[:-1]), math.prod(shape[:-2]) * shape[-1]
    rows = variance[:num_rows].view(*shape[:-1], 1)
    return rows, variance[num_rows : num_rows + num_columns].view(*shape[:-2], 1, shape[-1])


def torch_adafactor_(
    weight: Tensor, gradient: Tensor, states: Mapping[str, Tensor], step: int, settings: Mapping[str, Any]
) -> None:
    """Run a step of `torch.optim.Adafactor`. ``weight`` and ``gradient`` are float32 with the parameter's shape. States
    are flat."""
    variance, shape = states["variance"], tuple(weight.shape)
    rows, columns = _factors(variance, shape) if len(shape) > 1 else (None, None)
    adafactor(
        [weight],
        [gradient],
        [rows],
        [columns],
        [variance.view(shape) if rows is None else None],
        [torch.tensor(float(step - 1))],
        foreach=False,
        maximize=False,
        **settings,
    )


def transformers_adafactor_(
    weight: Tensor, gradient: Tensor, states: Mapping[str, Tensor], step: int, settings: Mapping[str, Any]
) -> None:
    """Run a step of `transformers.Adafactor`, with the same operations in the same order."""
    shape, beta1 = tuple(weight.shape), settings["beta1"]
    lr = _learning_rate(weight, step, settings)
    beta2t = 1.0 - math.pow(step, settings["decay_rate"])
    update = (gradient**2) + settings["eps"][0]
    if len(shape) > 1:
        rows, columns = _factors(states["variance"], shape)
        row, column = rows.squeeze(-1), columns.squeeze(-2)
        row.mul_(beta2t).add_(update.mean(dim=-1), alpha=1.0 - beta2t)
        column.mul_(beta2t).add_(update.mean(dim=-2), alpha=1.0 - beta2t)
        row_factor = (row / row.mean(dim=-1, keepdim=True)).rsqrt_().unsqueeze(-1)
        update = torch.mul(row_factor, column.unsqueeze(-2).rsqrt()).mul_(gradient)
    else:
        variance = states["variance"].view(shape)
        variance.mul_(beta2t).add_(update, alpha=1.0 - beta2t)
        update = variance.rsqrt().mul_(gradient)
    update.div_((_rms(update) / settings["clip_threshold"]).clamp_(min=1.0))
    update.mul_(lr)
    if beta1 is not None:
        exp_avg = states["exp_avg"].view(shape)
        update = exp_avg.mul_(beta1).add_(update, alpha=1 - beta1)
    if settings["weight_decay"] != 0:
        weight.add_(weight, alpha=-settings["weight_decay"] * lr)
    weight.add_(-update)


def _learning_rate(weight: Tensor, step: int, settings: Mapping[str, Any]) -> Any:
    relative: Any = settings["lr"]
    if settings["relative_step"]:
        smallest = 1e-6 * step if settings["warmup_init"] else 1e-2
        relative = min(smallest, 1.0 / math.sqrt(step))
    if not settings["scale_parameter"]:
        return 1.0 * relative
    return max(settings["eps"][1], _rms(weight)) * relative


def _rms(tensor: Tensor) -> Tensor:
    rms: Tensor = tensor.norm(2) / (tensor.numel() ** 0.5)
    return rms


_FAMILIES: dict[str, _Family] = {
    "AdamW": _Family(AdamWGroup.from_group, _always("exp_avg", "exp_avg_sq"), _adamw_),
    "Adam": _Family(AdamWGroup.from_adam_group, _always("exp_avg", "exp_avg_sq"), _adamw_),
    "RAdam": _Family(_radam_settings, _always("exp_avg", "exp_avg_sq"), _in_tiles(_radam_)),
    "SGD": _Family(_settings("momentum", "dampening", "weight_decay", "nesterov"), _sgd_kinds, _in_tiles(_sgd_)),
    "Adagrad": _Family(
        _settings("lr_decay", "weight_decay", "initial_accumulator_value", "eps"), _always("sum"), _in_tiles(_adagrad_)
    ),
    "RMSprop": _Family(
        _settings("momentum", "alpha", "eps", "centered", "weight_decay"), _rmsprop_kinds, _in_tiles(_rmsprop_)
    ),
    "Lion": _Family(_settings("betas", "weight_decay"), _always("exp_avg"), _in_tiles(_lion_)),
    "Muon": _Family(_muon_settings, _always("momentum_buffer"), _muon_, needs_whole=True),
    "Adafactor": _Family(
        _torch_adafactor_settings, _always("variance"), _whole(torch_adafactor_), needs_whole=True, takes=factors_fit
    ),
    "TransformersAdafactor": _Family(
        _transformers_adafactor_settings,
        _transformers_adafactor_kinds,
        _whole(transformers_adafactor_),
        needs_whole=True,
        takes=factors_fit,
    ),
}
OPTIMIZERS = tuple(_FAMILIES)
"""Names of all optimizers with a rule."""
