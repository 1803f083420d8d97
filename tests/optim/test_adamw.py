"""Updates of segments of a flat chunk equal torch's AdamW to the bit."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from hf_lohan.optim import AdamWGroup, Segment
from hf_lohan.optim.adamw import adamw_

NUMELS = (1, 33, 64, 7, 300, 129)
PADDING = 5
GROUPS = (
    AdamWGroup(lr=1e-2, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1),
    AdamWGroup(lr=3e-3, beta1=0.8, beta2=0.95, eps=1e-6, weight_decay=0.0),
)
GROUP_OF = (0, 1, 0, 0, 1, 1)
STARTS = tuple(itertools.accumulate((numel + PADDING for numel in NUMELS), initial=0))
CHUNK_NUMEL = STARTS[-1]


class Flat:
    """Parameters of `NUMELS` elements in one chunk with padding, and their twins under torch's AdamW."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.random = generator
        self.master = torch.randn(CHUNK_NUMEL, generator=generator)
        self.exp_avg, self.exp_avg_sq = torch.zeros(CHUNK_NUMEL), torch.zeros(CHUNK_NUMEL)
        self.parameters = [torch.nn.Parameter(self.part(self.master, i).clone()) for i in range(len(NUMELS))]
        self.num_updates = [0] * len(NUMELS)
        groups = [
            {
                "params": [p for p, own in zip(self.parameters, GROUP_OF, strict=True) if own == index],
                "lr": group.lr,
                "betas": (group.beta1, group.beta2),
                "eps": group.eps,
                "weight_decay": group.weight_decay,
            }
            for index, group in enumerate(GROUPS)
        ]
        self.stock = torch.optim.AdamW(groups, fused=True)

    def part(self, flat: Tensor, index: int) -> Tensor:
        return flat[STARTS[index] : STARTS[index] + NUMELS[index]]

    def step(self, skipped: set[int]) -> None:
        gradient = torch.randn(CHUNK_NUMEL, generator=self.random)
        segments = []
        for index, parameter in enumerate(self.parameters):
            parameter.grad = None if index in skipped else self.part(gradient, index).clone()
            if index not in skipped:
                self.num_updates[index] += 1
                stop = STARTS[index] + NUMELS[index]
                group = GROUPS[GROUP_OF[index]]
                segments.append(Segment(STARTS[index], stop, group, self.num_updates[index]))
        adamw_(self.master, gradient, self.exp_avg, self.exp_avg_sq, segments)
        self.stock.step()

    def assert_equal(self) -> None:
        for index, parameter in enumerate(self.parameters):
            assert torch.equal(self.part(self.master, index), parameter), f"parameter {index}"
            state = self.stock.state[parameter]
            for name, flat in (("exp_avg", self.exp_avg), ("exp_avg_sq", self.exp_avg_sq)):
                assert torch.equal(self.part(flat, index), state[name]), f"{name} of parameter {index}"
            assert state["step"] == self.num_updates[index]


@pytest.mark.parametrize("seed", range(3))
def test_many_steps_in_two_groups_equal_torch(seed: int) -> None:
    flat = Flat(seed)
    for _ in range(60):
        flat.step(skipped=set())
    flat.assert_equal()


def test_a_skipped_parameter_keeps_its_own_step_count() -> None:
    flat = Flat(0)
    for step in range(40):
        flat.step(skipped={step % 3, 4} if step % 2 else {5})
    flat.assert_equal()
    assert len(set(flat.num_updates)) > 2


def test_elements_outside_of_segments_do_not_change() -> None:
    flat = Flat(1)
    before = flat.master.clone()
    flat.step(skipped={1, 3})
    untouched = torch.ones(CHUNK_NUMEL, dtype=torch.bool)
    for index in (0, 2, 4, 5):
        flat.part(untouched, index).fill_(False)
    assert torch.equal(flat.master[untouched], before[untouched])
    assert not flat.exp_avg[untouched].any() and not flat.exp_avg_sq[untouched].any()
    assert bool((flat.master[~untouched] != before[~untouched]).all())


def test_one_segment_of_neighbours_equals_one_for_each() -> None:
    """The kernel is elementwise, so neighbours with equal hyperparameters may be merged."""
    flats = [Flat(2), Flat(2)]
    gradient = torch.randn(CHUNK_NUMEL)
    merged = [Segment(0, CHUNK_NUMEL, GROUPS[0], 1)]
    cut = [Segment(a, b, GROUPS[0], 1) for a, b in itertools.pairwise([0, 3, 100, 101, CHUNK_NUMEL])]
    for flat, segments in zip(flats, (merged, cut), strict=True):
        adamw_(flat.master, gradient, flat.exp_avg, flat.exp_avg_sq, segments)
    assert torch.equal(flats[0].master, flats[1].master)
    assert torch.equal(flats[0].exp_avg_sq, flats[1].exp_avg_sq)


def test_no_graph_is_built() -> None:
    flat = Flat(3)
    master = flat.master.requires_grad_()
    adamw_(master, torch.ones(CHUNK_NUMEL), flat.exp_avg, flat.exp_avg_sq, [Segment(0, 8, GROUPS[0], 1)])
    assert master.grad_fn is None and flat.exp_avg.grad_fn is None
