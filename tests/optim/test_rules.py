"""Each rule's updates of segments of a flat chunk equal torch's optimizer bit for bit."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Adafactor

from hf_lohan.optim import RULE_KEY, Segment, UpdateRule, master_format, rule_for, update_records_
from hf_lohan.optim.precision import NO_TIES, TIE_CODES, TIE_RUN_NUMEL
from hf_lohan.optim.rules import RULE_TILE_NUMEL

NUMELS = (1, 33, 64, 7, 300, RULE_TILE_NUMEL + 1000)
ALIGN = 32
STARTS = tuple(itertools.accumulate((-(-numel // ALIGN) * ALIGN for numel in NUMELS), initial=0))
CHUNK_NUMEL = STARTS[-1]

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda params: torch.optim.AdamW(params, fused=True, weight_decay=0.1),
    "Adam": lambda params: torch.optim.Adam(params, fused=True, weight_decay=0.1),
    "Adam-decoupled": lambda params: torch.optim.Adam(
        params, fused=True, weight_decay=0.1, decoupled_weight_decay=True
    ),
    "RAdam": lambda params: torch.optim.RAdam(params, weight_decay=0.1, decoupled_weight_decay=True),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, weight_decay=0.1),
    "SGD-momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, dampening=0.3),
    "SGD-nesterov": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr_decay=0.01, initial_accumulator_value=0.1),
    "RMSprop": lambda params: torch.optim.RMSprop(params, weight_decay=0.1),
    "RMSprop-all": lambda params: torch.optim.RMSprop(params, momentum=0.9, centered=True),
    "RAdam-tensor": lambda params: torch.optim.RAdam(
        params, lr=torch.tensor(1e-3), weight_decay=0.1, decoupled_weight_decay=True
    ),
    "Adagrad-tensor": lambda params: torch.optim.Adagrad(params, lr=torch.tensor(1e-2), lr_decay=0.01),
}


class Flat:
    """Parameters of `NUMELS` elements in one chunk, and their twins under torch, in two groups."""

    def __init__(self, make: Callable[[Any], torch.optim.Optimizer], dtype: torch.dtype = torch.float32) -> None:
        self.random = torch.Generator().manual_seed(0)
        weights = torch.randn(CHUNK_NUMEL, generator=self.random).to(dtype).float()
        self.parameters = [nn.Parameter(self.part(weights, i).clone()) for i in range(len(NUMELS))]
        groups = [{"params": self.parameters[:3]}, {"params": self.parameters[3:], "lr": 0.03}]
        self.stock = make(groups)
        name = type(self.stock).__name__
        self.settings = [{**group, RULE_KEY: name} for group in self.stock.param_groups]
        self.form = master_format(dtype, rule=rule_for(name, self.settings))
        dtypes = {kind: self.form.state_dtype(kind) for kind in self.form.state_kinds}
        self.records = {kind: torch.zeros(CHUNK_NUMEL, dtype=own) for kind, own in dtypes.items()}
        self.records["param"] = weights.to(dtype)
        self.records[TIE_CODES] = torch.full((-(-CHUNK_NUMEL // TIE_RUN_NUMEL),), NO_TIES, dtype=torch.int16)
        self.num_updates = [0] * len(NUMELS)

    def part(self, flat: Tensor, index: int) -> Tensor:
        return flat[STARTS[index] : STARTS[index] + NUMELS[index]]

    def step(self, skipped: int | None = None) -> None:
        gradient = torch.randn(CHUNK_NUMEL, generator=self.random)
        segments = []
        for index, parameter in enumerate(self.parameters):
            parameter.grad = None if index == skipped else self.part(gradient, index).clone()
            if index != skipped:
                self.num_updates[index] += 1
                group = self.form.rule.settings_of(self.settings[index >= 3])
                stop = STARTS[index] + NUMELS[index]
                segments.append(Segment(STARTS[index], stop, group, self.num_updates[index]))
        private = [torch.empty(4 * CHUNK_NUMEL, dtype=torch.uint8) for _ in range(self.form.num_private_buffers)]
        update_records_(self.records, gradient, segments, self.form, position=0, private=private)
        self.stock.step()

    def assert_equal(self) -> None:
        for index, parameter in enumerate(self.parameters):
            expected = parameter.detach().to(self.form.working_dtype)
            assert torch.equal(self.part(self.records["param"], index), expected), f"parameter {index}"
            for kind in self.form.rule.state_kinds:
                found = self.part(self.records[kind], index)
                assert torch.equal(found, self.stock.state[parameter][kind]), f"{kind} of parameter {index}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_steps_equal_those_of_torch(make: Callable[[Any], torch.optim.Optimizer], dtype: torch.dtype) -> None:
    """The masters of bfloat16 weights equal torch's float32 weights."""
    flat = Flat(make, dtype)
    for step in range(12):
        flat.step(skipped=step % 4 if step < 8 else None)  # gives the parameters different step counts
    flat.assert_equal()


def test_lion_equals_its_package() -> None:
    lion = pytest.importorskip("lion_pytorch")
    for lr, betas in ((0.01, (0.9, 0.99)), (0.01, [0.95, 0.98]), (torch.tensor(0.01), (0.9, 0.99))):  # YAML has lists
        flat = Flat(lambda params, lr=lr, betas=betas: lion.Lion(params, lr=lr, betas=betas, weight_decay=0.1))
        for step in range(12):
            flat.step(skipped=step % 4 if step < 8 else None)
        flat.assert_equal()


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_cuts_change_no_bit(make: Callable[[Any], torch.optim.Optimizer]) -> None:
    """Chunks, threads and tiles may cut anywhere."""
    flats = [Flat(make), Flat(make)]
    gradient = torch.randn(CHUNK_NUMEL)
    for flat, cuts in zip(flats, ([0, CHUNK_NUMEL], [0, 32, 4096, 4128, CHUNK_NUMEL]), strict=True):
        group = flat.form.rule.settings_of(flat.settings[0])
        for step in (1, 2):
            segments = [Segment(start, stop, group, step) for start, stop in itertools.pairwise(cuts)]
            update_records_(flat.records, gradient.clone(), segments, flat.form, position=0, private=[])
    for kind, record in flats[0].records.items():
        assert torch.equal(record, flats[1].records[kind]), kind


ADAFACTORS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "torch": lambda params: torch.optim.Adafactor(params, lr=0.05, weight_decay=0.1),
    "torch-tensor": lambda params: torch.optim.Adafactor(params, lr=torch.tensor(0.05), weight_decay=0.1),
    "transformers": lambda params: Adafactor(params, lr=0.05, relative_step=False, scale_parameter=False),
    "transformers-tensor": lambda params: Adafactor(
        params, lr=torch.tensor(0.05), relative_step=False, scale_parameter=False, weight_decay=0.1
    ),
    "transformers-own-rate": lambda params: Adafactor(params, beta1=0.9, weight_decay=0.1, warmup_init=True),
}


@pytest.mark.parametrize("make", ADAFACTORS.values(), ids=ADAFACTORS.keys())
@pytest.mark.parametrize("shape", [(48, 33), (3, 16, 32), (77,)], ids=str)
def test_adafactor_on_whole_parameters(make: Callable[[Any], torch.optim.Optimizer], shape: tuple[int, ...]) -> None:
    random = torch.Generator().manual_seed(0)
    parameter = nn.Parameter(torch.randn(shape, generator=random))
    stock, numel = make([parameter]), parameter.numel()
    name = "Adafactor" if isinstance(stock, torch.optim.Adafactor) else "TransformersAdafactor"
    group = {**stock.param_groups[0], RULE_KEY: name}
    form = master_format(torch.float32, rule=rule_for(name, [group]))
    records = {kind: torch.zeros(numel) for kind in form.state_kinds}
    records["param"] = parameter.detach().flatten().clone()
    for step in range(1, 9):
        parameter.grad = torch.randn(shape, generator=random) * step
        segments = [Segment(0, numel, form.rule.settings_of(group), step, shape)]
        gradient = parameter.grad.flatten().clone()
        update_records_(records, gradient, segments, form, position=0, private=[])
        stock.step()
        assert torch.equal(records["param"], parameter.flatten()), f"step {step}"


def test_a_parameter_smaller_than_its_rows_and_columns_is_refused() -> None:
    rule = UpdateRule("Adafactor", ("variance",))
    rule.refuse_shape("fine", (2, 2))
    rule.refuse_shape("fine", (7,))
    with pytest.raises(ValueError, match=r"Adafactor has more state for score\.weight \(of shape \[1, 64\]\)"):
        rule.refuse_shape("score.weight", (1, 64))


def test_a_rule_survives_a_round_trip_as_text() -> None:
    for rule in (UpdateRule("SGD", ()), UpdateRule("RMSprop", ("square_avg", "momentum_buffer"))):
        assert UpdateRule.parse(str(rule)) == rule
    with pytest.raises(ValueError, match=r"does not know the optimizer 'Sophia\(hessian\)'"):
        UpdateRule.parse("Sophia(hessian)")


def test_hyperparameters_that_need_a_missing_record_are_refused() -> None:
    plain = rule_for("SGD", [{"momentum": 0}])
    assert plain.state_kinds == ()
    with pytest.raises(ValueError, match="needs momentum_buffer"):
        plain.settings_of({RULE_KEY: "SGD", "lr": 0.1, "momentum": 0.9})
    with pytest.raises(ValueError, match=r"param group of AdamW were offloaded for SGD\(\)"):
        plain.settings_of({"lr": 0.1, "betas": (0.9, 0.99)})
    with pytest.raises(ValueError, match="SGD with maximize=True is not supported"):
        rule_for("SGD", [{"momentum": 0, "maximize": True}])
    with pytest.raises(ValueError, match="LBFGS is not supported under offload; use one of AdamW, Adam"):
        rule_for("LBFGS", [{}])


def test_only_adamw_has_encoded_moments() -> None:
    with pytest.raises(ValueError, match=r"optimizer_state_dtype: int8 is only for AdamW.*Lion\(exp_avg\)"):
        master_format(torch.float32, "int8", UpdateRule("Lion", ("exp_avg",)))
    with pytest.raises(
        ValueError, match=r"stochastic_rounding: true is only for AdamW, and this run has SGD\(\); leave"
    ):
        master_format(torch.bfloat16, "int8_stochastic", UpdateRule("SGD", ()))
