"""Routers predict the experts of the next layer in every family. Predictions are used if they are right, and change no
number.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engines import TwinsFactory
from expert_models import FAMILIES, expert_model
from torch import Tensor, nn

from hf_lohan.experts import find_routers
from hf_lohan.experts.expert_schedule import Trust
from hf_lohan.model import stored_form


def routed_by(model: nn.Module, experts: Any) -> dict[nn.Module, tuple[Tensor, Tensor]]:
    """Return by module of experts the rows of a forward, and their chosen experts."""
    calls: dict[nn.Module, tuple[Tensor, Tensor]] = {}
    for module in experts:
        module.register_forward_pre_hook(lambda module, args: calls.update({module: (args[0], args[1])}))
    with torch.no_grad():
        model(input_ids=torch.arange(3, 19).view(2, 8))
    return calls


@pytest.mark.parametrize("family", FAMILIES)
def test_a_router_predicts_its_own_choice_for_its_own_rows(family: str) -> None:
    model = expert_model(family).eval()
    blocks = stored_form(model, None, "float32", streams_experts=True).model_blocks
    routers = [router for router in find_routers(model, blocks) if router is not None]
    for router in routers:
        if router.correction is not None:
            nn.init.normal_(router.correction(), std=0.1)
    calls = routed_by(model, blocks.experts)
    for module, router in zip(blocks.experts, routers, strict=True):
        slot = torch.zeros(router.block.numel)
        for part in router.block.slices:
            slot[part.start : part.stop] = part.parameter.detach().view(-1)
        rows, top_k_index = calls[module]
        assert top_k_index.shape[-1] < module.num_experts
        chosen = router.scores(rows, slot).topk(top_k_index.shape[-1]).indices
        assert torch.equal(chosen.sort().values, top_k_index.sort().values)


def test_an_ambiguous_router_is_not_used() -> None:
    model = expert_model("mixtral")
    blocks = stored_form(model, None, "float32", streams_experts=True).model_blocks
    first = model.get_submodule(next(name for name, m in model.named_modules() if m in blocks.experts))
    parent = next(module for module in model.modules() if first in module.children())
    parent.other = nn.Linear(model.config.hidden_size, first.num_experts)
    routers = find_routers(model, blocks)
    assert routers[0] is None and None not in routers[1:]


@pytest.mark.covering(1)
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("recompute", [False, True])
def test_predictions_change_no_number(
    make_twins: TwinsFactory, family: str, recompute: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    hinted: list[int] = []
    monkeypatch.setattr(Trust, "is_in_router", property(lambda trust: hinted.append(0) or True))
    twins = make_twins(family, recompute=recompute, experts="streamed", hold_gradients=False)
    twins.train(3)
    twins.assert_equal()
    assert hinted


def test_predictions_are_used_if_they_are_mostly_right_and_habits_are_not() -> None:
    trust = Trust()
    assert trust.is_in_router
    trust.note_pass([1, 2], by_habit=[3, 4], by_router=[1, 2])
    assert trust.is_in_router
    for _ in range(20):
        trust.note_pass([1, 2], by_habit=[1, 2], by_router=[1, 3])
    assert not trust.is_in_router
    for _ in range(20):
        trust.note_pass([1, 2, 3], by_habit=[], by_router=[3, 4, 5])
    assert not trust.is_in_router  # a third is right
