"""Weights and moments after late steps with zero gradients equal those of torch bit for bit."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from stored_moments import bytes_of, encoded, typical_moments
from torch import Tensor, nn

from hf_lohan.optim import AdamWGroup, MasterFormat, MomentDtype, Segment, UpdateRule, master_format, replay_
from hf_lohan.optim.moments import SCALE_BLOCK_NUMEL
from hf_lohan.optim.precision import NO_TIES, TIE_CODES, TIE_RUN_NUMEL
from hf_lohan.optim.update import MAX_TILE_NUMEL, MIN_WORKSPACE_BYTES, update_records_

NUM_EXPERTS, NUM_ROWS, NUM_COLUMNS, NUM_STEPS = 8, 32, 24, 200
NUM_WEIGHTS = NUM_ROWS * NUM_COLUMNS
NUMEL = NUM_WEIGHTS + NUM_ROWS
Schedule = Callable[[int], float]


def linear(step: int) -> float:
    return 1e-3 * (1 - step / (NUM_STEPS + 1))


def cosine(step: int) -> float:
    return 5e-4 * (1 + math.cos(math.pi * step / NUM_STEPS))


class LazyExpert:
    """The weights and biases of one expert in one record, and the last step applied to them."""

    def __init__(self, weights: Tensor, biases: Tensor) -> None:
        self.records = {"param": torch.cat([weights.flatten(), biases])}
        self.records |= {kind: torch.zeros(NUMEL) for kind in ("exp_avg", "exp_avg_sq")}
        self.applied = 0

    def catch_up(self, history: list[list[Segment]], gradient: Tensor | None = None) -> None:
        """Apply all steps of the history. The gradient, if any, belongs to the last step."""
        has_gradient = gradient is not None
        missed = history[self.applied : -1] if has_gradient else history[self.applied :]
        segments = history[-1] if has_gradient else ()
        form = master_format(torch.float32)
        replay_(self.records, missed, form, position=0, private=[], gradient=gradient, segments=segments)
        self.applied = len(history)

    def assert_equal(self, kind: str, weights: Tensor, biases: Tensor) -> None:
        expected = torch.cat([weights.flatten(), biases])
        assert torch.equal(self.records[kind].view(torch.int32), expected.view(torch.int32)), kind


@pytest.mark.covering(1)
@pytest.mark.parametrize(("hit_rate", "schedule"), [(0.5, linear), (0.1, cosine), (0.01, linear)])
@pytest.mark.parametrize("max_norm", [0.0, 1.0])
@pytest.mark.parametrize("weight_decay", [0.0, 0.01, 0.1])
def test_late_experts_equal_those_of_the_fused_parameter(
    weight_decay: float, max_norm: float, hit_rate: float, schedule: Schedule
) -> None:
    random = torch.Generator().manual_seed(1)
    weights = nn.Parameter(0.02 * torch.randn(NUM_EXPERTS, NUM_ROWS, NUM_COLUMNS, generator=random))
    biases = nn.Parameter(0.02 * torch.randn(NUM_EXPERTS, NUM_ROWS, generator=random))
    experts = [LazyExpert(*of_expert) for of_expert in zip(weights.detach(), biases.detach(), strict=True)]
    groups = [{"params": [weights], "weight_decay": weight_decay}, {"params": [biases], "weight_decay": 0.0}]
    stock = torch.optim.AdamW(groups, fused=True)
    history: list[list[Segment]] = []
    longest = 0
    for step in range(1, NUM_STEPS + 1):
        for group in stock.param_groups:
            group["lr"] = schedule(step)
        hit = (torch.rand(NUM_EXPERTS, generator=random) < hit_rate).nonzero().flatten().tolist()
        weights.grad, biases.grad = torch.zeros_like(weights), torch.zeros_like(biases)
        for number in hit:
            longest = max(longest, step - 1 - experts[number].applied)
            experts[number].catch_up(history)
            experts[number].assert_equal("param", weights[number], biases[number])
            size = 10 ** (-3 * torch.rand(1, generator=random).item())
            weights.grad[number] = size * torch.randn(NUM_ROWS, NUM_COLUMNS, generator=random)
            biases.grad[number] = size * torch.randn(NUM_ROWS, generator=random)
        if max_norm:
            nn.utils.clip_grad_norm_([weights, biases], max_norm)
        stock.step()
        decaying, other = (AdamWGroup.from_group(group) for group in stock.param_groups)
        history.append([Segment(0, NUM_WEIGHTS, decaying, step), Segment(NUM_WEIGHTS, NUMEL, other, step)])
        for number in hit:
            gradient = torch.cat([weights.grad[number].flatten(), biases.grad[number]])
            experts[number].catch_up(history, gradient)
    assert longest > {0.5: 3, 0.1: 20, 0.01: 50}[hit_rate]
    for number, expert in enumerate(experts):
        expert.catch_up(history)
        expert.assert_equal("param", weights[number], biases[number])
        for kind in ("exp_avg", "exp_avg_sq"):
            expert.assert_equal(kind, stock.state[weights][kind][number], stock.state[biases][kind][number])


def test_subnormal_moments_equal_those_of_torch() -> None:
    num_steps = 900
    weights = nn.Parameter(torch.randn(64))
    stock = torch.optim.AdamW([weights], lr=1e-3, weight_decay=0.1, fused=True)
    weights.grad = 1e-3 * torch.randn(64)
    stock.step()
    state = stock.state[weights]
    records = {"param": weights.detach().clone(), **{kind: state[kind].clone() for kind in ("exp_avg", "exp_avg_sq")}}
    weights.grad = torch.zeros(64)
    group = AdamWGroup.from_group(stock.param_groups[0])
    for _ in range(num_steps):
        stock.step()
    missed = [[Segment(0, 64, group, step)] for step in range(2, num_steps + 2)]
    replay_(records, missed, master_format(torch.float32), position=0, private=[])
    smallest_normal = torch.finfo(torch.float32).smallest_normal
    is_subnormal = (state["exp_avg"] != 0) & (state["exp_avg"].abs() < smallest_normal)
    assert bool(is_subnormal.all())
    expected = {"param": weights.detach(), "exp_avg": state["exp_avg"], "exp_avg_sq": state["exp_avg_sq"]}
    assert bytes_of(records) == bytes_of(expected)


def test_the_last_elements_of_an_expert_are_updated_as_vectors() -> None:
    """torch's kernel may round the last elements of a tensor as scalars. An expert's last elements are in the middle of
    stock's fused tensor, so the padding after them is updated with them."""
    num_experts, numel, padded, num_steps = 64, 13, 32, 30
    random = torch.Generator().manual_seed(3)
    fused = nn.Parameter(torch.randn(num_experts + 1, numel, generator=random))
    stock = torch.optim.AdamW([fused], lr=1e-2, weight_decay=0.1, fused=True)
    gradient = torch.randn(num_experts + 1, numel, generator=random)
    before = fused.detach().clone()
    for step in range(num_steps):
        fused.grad = torch.zeros_like(fused) if step else gradient.clone()
        stock.step()
    form, group = master_format(torch.float32), AdamWGroup.from_group(stock.param_groups[0])
    state = stock.state[fused]
    expected = {"param": fused.detach(), **{kind: state[kind] for kind in ("exp_avg", "exp_avg_sq")}}
    expected = {kind: record[:num_experts].contiguous() for kind, record in expected.items()}

    records = {kind: torch.zeros(num_experts, padded) for kind in expected}
    records["param"][:, :numel] = before[:num_experts]
    of_experts = torch.zeros(num_experts, padded)
    of_experts[:, :numel] = gradient[:num_experts]
    starts = range(0, num_experts * padded, padded)
    steps = [[Segment(at, at + padded, group, step) for at in starts] for step in range(1, num_steps + 1)]
    flat = {kind: record.view(-1) for kind, record in records.items()}
    update_records_(flat, of_experts.view(-1), steps[0], form, position=0, private=[])
    replay_(flat, steps[1:], form, position=0, private=[])
    assert bytes_of({kind: record[:, :numel].contiguous() for kind, record in records.items()}) == bytes_of(expected)


FORMS = [
    master_format(torch.float32),
    master_format(torch.bfloat16),
    master_format(torch.bfloat16, "bfloat16"),
    master_format(torch.float32, "int8"),
    master_format(torch.bfloat16, "int8"),
    master_format(torch.bfloat16, rule=UpdateRule("SGD", ("momentum_buffer",))),
    master_format(torch.float32, rule=UpdateRule("Lion", ("exp_avg",))),
]
CHUNK_NUMEL = 2 * MAX_TILE_NUMEL + 4096
assert CHUNK_NUMEL % (3 * SCALE_BLOCK_NUMEL) == 0


def random_records(form: MasterFormat) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(0)
    records = {"param": torch.randn(CHUNK_NUMEL, generator=random).to(form.working_dtype)}
    if form.has_residual:
        records["master_residual"] = torch.randint(
            NO_TIES + 1, 1 << 15, (CHUNK_NUMEL,), generator=random, dtype=torch.int16
        )
        records[TIE_CODES] = torch.full((-(-CHUNK_NUMEL // TIE_RUN_NUMEL),), NO_TIES, dtype=torch.int16)
    if form.moment_codec is not None:
        tiles = [encoded(form.moment_dtype, *typical_moments(seed, CHUNK_NUMEL // 3)) for seed in range(3)]
        return records | {kind: torch.cat([tile[kind] for tile in tiles]) for kind in tiles[0]}
    moments = zip(form.moment_kinds, typical_moments(0, CHUNK_NUMEL), strict=False)
    return records | {kind: moment.clone() for kind, moment in moments}


def settings_of(form: MasterFormat, lr: float, weight_decay: float) -> object:
    group = {"lr": lr, "weight_decay": weight_decay, "optimizer": form.rule.name, "eps": 1e-8}
    return form.rule.settings_of(
        group | {"betas": (0.9, 0.99), "momentum": 0.9, "dampening": 0.0, "nesterov": False, "foreach": None}
    )


@pytest.mark.parametrize("has_gradient", [False, True])
@pytest.mark.parametrize("form", FORMS, ids=lambda form: f"{form.working_dtype} {form.moment_dtype} {form.rule.name}")
def test_late_steps_equal_single_steps(form: MasterFormat, has_gradient: bool) -> None:
    """This holds for each form of records and across tiles. Gaps do not change."""
    edges = [0, MAX_TILE_NUMEL - 96, MAX_TILE_NUMEL + 32, CHUNK_NUMEL - 64]
    steps = [
        [
            Segment(edges[0], edges[1], settings_of(form, 1e-2 / step, 0.1), step),
            Segment(edges[2], edges[3], settings_of(form, 1e-3 * step, 0.0), step),
        ]
        for step in range(7, 12)
    ]
    generator = torch.Generator().manual_seed(1)
    gradient = torch.randn(CHUNK_NUMEL, generator=generator)
    private = [torch.empty(4 * CHUNK_NUMEL, dtype=torch.uint8) for _ in range(form.num_private_buffers)]
    expected = random_records(form)
    for number, segments in enumerate(steps):
        is_last = number == len(steps) - 1
        of_step = gradient.clone() if is_last and has_gradient else torch.zeros(CHUNK_NUMEL)
        scale = 0.3 if is_last else 1.0
        update_records_(expected, of_step, segments, form, position=64, private=private, scale=scale)
    found = random_records(form)
    before = bytes_of(found)
    if has_gradient:
        replay_(
            found,
            steps[:-1],
            form,
            position=64,
            private=private,
            gradient=gradient.clone(),
            segments=steps[-1],
            scale=0.3,
        )
    else:
        replay_(found, steps, form, position=64, private=private)
    assert bytes_of(found) == bytes_of(expected)
    assert bytes_of(found)["param"] != before["param"]
    assert torch.equal(found["param"][edges[1] : edges[2]], random_records(form)["param"][edges[1] : edges[2]])


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_a_workspace_smaller_than_a_tile_changes_no_bit(dtype: MomentDtype) -> None:
    form = master_format(torch.float32, dtype)
    missed = [[Segment(0, CHUNK_NUMEL, settings_of(form, 1e-2, 0.1), step)] for step in (1, 2)]
    found = [random_records(form), random_records(form)]
    for records, num_bytes in zip(found, (3 * MIN_WORKSPACE_BYTES, 1 << 22), strict=True):
        replay_(records, missed, form, position=0, private=[torch.empty(num_bytes, dtype=torch.uint8)])
    assert bytes_of(found[0]) == bytes_of(found[1])


def test_a_rule_that_needs_whole_parameters_is_refused() -> None:
    form = master_format(torch.float32, rule=UpdateRule("Muon", ("momentum_buffer",)))
    with pytest.raises(AssertionError, match="updates whole parameters"):
        replay_({"param": torch.zeros(32)}, [], form, position=0, private=[])
