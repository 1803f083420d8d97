"""What routers say of the rows before theirs: found in every family, believed where it is right, and never a number."""

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
    """By module of experts, the rows that a forward gives it, and where they go."""
    calls: dict[nn.Module, tuple[Tensor, Tensor]] = {}
    for module in experts:
        module.register_forward_pre_hook(lambda module, args: calls.update({module: (args[0], args[1])}))
    with torch.no_grad():
        model(input_ids=torch.arange(3, 19).view(2, 8))
    return calls


@pytest.mark.parametrize("family", FAMILIES)
def test_of_its_own_rows_a_router_says_what_it_chooses(family: str) -> None:
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


def test_where_two_could_be_the_router_there_is_none() -> None:
    model = expert_model("mixtral")
    blocks = stored_form(model, None, "float32", streams_experts=True).model_blocks
    first = model.get_submodule(next(name for name, m in model.named_modules() if m in blocks.experts))
    parent = next(module for module in model.modules() if first in module.children())
    parent.other = nn.Linear(model.config.hidden_size, first.num_experts)
    routers = find_routers(model, blocks)
    assert routers[0] is None and None not in routers[1:]


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("recompute", [False, True])
def test_believed_or_not_numbers_are_stocks(
    make_twins: TwinsFactory, family: str, recompute: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    hinted: list[int] = []
    monkeypatch.setattr(Trust, "is_in_router", property(lambda trust: hinted.append(0) or True))
    twins = make_twins(family, recompute=recompute, experts="streamed", hold_gradients=False)
    twins.train(3)
    twins.assert_equal()
    assert hinted


def test_the_router_is_believed_where_it_is_right_about_most_and_habits_are_not() -> None:
    trust = Trust()
    assert trust.is_in_router
    trust.note_pass([1, 2], by_habit=[3, 4], by_router=[1, 2])
    assert trust.is_in_router
    for _ in range(20):
        trust.note_pass([1, 2], by_habit=[1, 2], by_router=[1, 3])
    assert not trust.is_in_router
    for _ in range(20):
        trust.note_pass([1, 2, 3], by_habit=[], by_router=[3, 4, 5])
    assert not trust.is_in_router  # right about a third
