"""Streamed experts train as in memory with clipping, skipped steps, frozen weights and reads between steps."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from clip_norms import LETS_THROUGH, MAX_NORMS, assert_speculated
from engines import ConfigFactory, Twins, TwinsFactory
from expert_models import least_gpu_memory

import hf_lohan
from hf_lohan.costs import BudgetError, SizeClass
from hf_lohan.huggingface.attachment import offload_model
from hf_lohan.model import ParamSlice, stored_form
from hf_lohan.planning import lay_out
from hf_lohan.ranks import Ranks
from hf_lohan.testing.models import tiny_batch, tiny_model
from hf_lohan.updates.arrival import GradientArrivals

NORM_TOLERANCE = 1e-5
"""Relative. Stock adds squares in float32."""
STREAMED: dict[str, Any] = {"experts": "streamed", "hold_gradients": False}
FUSED = "model.layers.1.mlp.experts.gate_up_proj"


def clip(twins: Twins, max_norm: float) -> None:
    """Clip both twins by the engine's norm, which is close to stock's norm."""
    own = torch.nn.utils.get_total_norm([p.grad for p in twins.stock.parameters() if p.grad is not None])
    norm = twins.engine.clip_grad_norm(max_norm)
    assert torch.allclose(norm, own, rtol=NORM_TOLERANCE, atol=0)
    torch.nn.utils.clip_grads_with_norm_(twins.stock.parameters(), max_norm, norm)


@pytest.mark.covering(1)
@MAX_NORMS
@pytest.mark.parametrize("clip_by", ["defer", "speculate"])
def test_twins_clipped_by_one_norm_are_equal(clip_by: str, max_norms: list[float], make_twins: TwinsFactory) -> None:
    twins = make_twins("mixtral", recompute=True, experts="streamed", _clip=clip_by)
    for step, max_norm in enumerate(max_norms):
        twins.backward(10 * step)
        clip(twins, max_norm)
        twins.step()
        twins.assert_equal()
    if clip_by == "speculate":
        assert_speculated(twins, max_norms)


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "way", [STREAMED, {"experts": "streamed", "_clip": "defer"}, {"experts": "streamed", "_clip": "speculate"}]
)
@pytest.mark.parametrize("spoiled", ["loss", "gradients"])
def test_a_step_that_is_not_finite_changes_nothing(spoiled: str, way: dict[str, Any], make_twins: TwinsFactory) -> None:
    twins = make_twins("mixtral", **way)

    def good(first_seed: int) -> None:
        twins.backward(first_seed)
        if twins.engine.layout.holds_gradients:
            clip(twins, LETS_THROUGH)
        twins.step()

    good(100)
    factor = {"loss": float("inf"), "gradients": 3e38}[spoiled]
    (twins.model(**tiny_batch(seed=77)).loss * factor).backward()
    if twins.engine.layout.holds_gradients:
        assert not twins.engine.clip_grad_norm(LETS_THROUGH).isfinite()
    twins.optimizer.step()
    twins.optimizer.zero_grad()
    assert twins.optimizer.step_was_skipped
    twins.assert_equal()
    good(200)
    assert not twins.optimizer.step_was_skipped
    twins.assert_equal()


def frozen(*parts: str) -> Any:
    model = tiny_model("mixtral")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(part in name for part in parts))
    return model


@pytest.mark.covering(0)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    "parts", [("gate.weight",), ("experts",), ("experts.gate_up_proj",), ("self_attn", "norm", "embed", "gate.weight")]
)
def test_partly_frozen_models_equal_stock(parts: tuple[str, ...], recompute: bool, make_twins: TwinsFactory) -> None:
    """Freeze the router, all experts, half of each expert (which then loads with its layer), or all but experts."""
    settings = {**STREAMED, "experts": "auto" if parts == ("experts.gate_up_proj",) else "streamed"}
    twins = make_twins(model_factory=partial(frozen, *parts), recompute=recompute, **settings)
    num_slots = twins.engine.layout.plan.num_slots[SizeClass.EXPERT]
    assert num_slots == 0 if settings["experts"] == "auto" else num_slots >= 2
    twins.train(3)
    twins.assert_equal()


def test_adapters_with_frozen_experts_equal_stock(make_twins: TwinsFactory) -> None:
    peft = pytest.importorskip("peft")

    def adapted() -> Any:
        torch.manual_seed(1)
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        return peft.get_peft_model(tiny_model("mixtral"), config)

    twins = make_twins(model_factory=adapted, **STREAMED)
    twins.train(3)
    twins.assert_equal()
    assert twins.engine.expert_loader is not None and twins.engine.expert_loader.figures.num_loads > 0


def test_adapters_on_experts_are_refused(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_parameters=["mlp.experts.gate_up_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(tiny_model("mixtral"), config)
    offload = hf_lohan.OffloadConfig.load({"cpu_memory": "5MiB", "gpu_memory": "1MiB", "experts": "streamed"})
    with pytest.raises(ValueError, match=r"registry of implementations\); set experts to"):
        offload_model(model, offload, torch_device="cpu", default_ssd_path=tmp_path / "store")


def test_a_fused_weight_is_read_and_changed_between_steps(make_twins: TwinsFactory) -> None:
    twins = make_twins("mixtral", recompute=True, **STREAMED)
    for step in range(2):
        twins.train(1, first_seed=10 * step)
        weights = [model.get_parameter(FUSED) for model in twins.models]
        with torch.no_grad():
            assert torch.equal(weights[0] * 2, weights[1] * 2)
        with pytest.raises(RuntimeError, match=r"read it in torch\.no_grad"):
            weights[1].sum()
        with torch.no_grad(), hf_lohan.gathered_parameters(weights):
            for weight in weights:
                weight[1] *= 0.5
    twins.train(1, first_seed=50)
    twins.assert_equal()


@pytest.mark.parametrize("hold_gradients", [True, False])
def test_joint_micro_batches_sum_as_in_turn(make_twins: TwinsFactory, hold_gradients: bool) -> None:
    """Gradients are summed on the host, or on the device if the host holds none."""
    twins = make_twins("qwen3_moe", recompute=True, experts="streamed", hold_gradients=hold_gradients)
    for step in range(2):
        batches = [tiny_batch(seed=10 * step + number) for number in range(3)]
        for batch in batches:
            (twins.stock(**batch).loss / 3).backward()

        def run(batch: dict[str, torch.Tensor]) -> None:
            twins.engine.defer_backward(twins.model(**batch).loss / 3)

        twins.engine.run_micro_batches([lambda batch=batch: run(batch) for batch in batches])
        twins.step()
    twins.assert_equal()


# The number of loads.


@pytest.mark.parametrize("activations", ["recompute", "swap", "keep"])
def test_a_stored_output_saves_loads_of_experts(activations: str, make_twins: TwinsFactory) -> None:
    """With two slots each call loads all its experts except those that the previous call left. A stored output needs
    one call in forward and one in backward. A recomputed output needs another call.
    """
    twins = make_twins(
        "mixtral",
        recompute=activations != "keep",
        gpu_memory=least_gpu_memory(tiny_model("mixtral"), activations=activations),
        activations=activations,
        **STREAMED,
    )
    engine = twins.engine
    assert engine.expert_loader is not None
    twins.train(1)
    if activations == "swap":
        for layer in engine.planned_memory.trace.values():
            assert any(name.startswith("lohan.experts") for name in layer.operations)
    before = engine.expert_loader.figures
    num_experts = sum(len(blocks) for blocks in engine.layout.model_blocks.experts.values())
    twins.train(1, first_seed=200)
    after = engine.expert_loader.figures
    num_used, num_loads = after.num_used - before.num_used, after.num_loads - before.num_loads
    # Every expert is chosen, because a layer has 4 experts and 64 choices.
    assert num_used == num_experts * (3 if activations == "recompute" else 2)
    assert num_loads > 2 * num_experts if activations == "recompute" else num_loads <= 2 * num_experts
    twins.assert_equal()


# When experts stream, and the saved memory.


def test_auto_streams_experts_if_two_layers_and_a_gradient_exceed_half_of_the_device(
    make_twins: TwinsFactory, tmp_path: Path
) -> None:
    model = tiny_model("mixtral")
    blocks = stored_form(model, None, "float32").model_blocks.blocks
    layer = max(block.param_bytes for block in blocks if block.size_class is SizeClass.LAYER)
    enough = 2 * (2 * layer + model.get_parameter(FUSED).nbytes)
    for name, gpu_memory, streams in (("more", int(1.05 * enough), False), ("less", int(0.95 * enough), True)):
        twins = make_twins("mixtral", experts="auto", gpu_memory=gpu_memory, ssd=str(tmp_path / name))
        assert (twins.engine.layout.plan.num_slots[SizeClass.EXPERT] > 0) is streams
        twins.train(1)
        twins.assert_equal()


def test_several_ranks_stream_experts_if_layers_are_large_or_they_are_asked_to(make_config: ConfigFactory) -> None:
    model, ranks = tiny_model("mixtral"), Ranks(rank=0, num_ranks=2, local_rank=0, num_local=2)
    of_run: dict[str, Any] = {"working_dtype": None, "hold_gradients": True, "ranks": ranks}
    for settings, streams in (
        ({"experts": "auto"}, True),
        ({"experts": "auto", "gpu_memory": "64MiB"}, False),
        ({"experts": "streamed"}, True),
        ({"experts.parallel": "world"}, True),
        ({"experts.parallel": "none"}, False),
    ):
        layout = lay_out(model, make_config(cpu_memory="16MiB", **{"experts": "auto", **settings}), **of_run)
        assert (layout.plan.num_slots[SizeClass.EXPERT] > 0) is streams


class NotesLargest:
    """Notes the bytes of the largest gradient that went to the host."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_bytes = 0
        stock_send = GradientArrivals.send_gradient

        def send(arrivals: GradientArrivals, part: ParamSlice, gradient: torch.Tensor, **said: bool) -> None:
            self.num_bytes = max(self.num_bytes, gradient.nbytes)
            stock_send(arrivals, part, gradient, **said)

        monkeypatch.setattr(GradientArrivals, "send_gradient", send)


def test_a_layer_of_four_times_the_device_trains_with_streamed_experts(
    make_twins: TwinsFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole layers are refused with the memory that they need. Streamed experts fit and train as in memory."""
    model_factory = partial(tiny_model, "mixtral", num_local_experts=32, num_layers=2)
    model = model_factory()
    layer = sum(parameter.nbytes for parameter in model.model.layers[0].parameters())
    fused, gpu_memory = model.model.layers[0].mlp.experts.gate_up_proj, layer // 4
    settings: dict[str, Any] = {"hold_gradients": False, "cpu_memory": "6MiB"}
    with pytest.raises(BudgetError, match="smaller than two blocks of this model") as refused:
        make_twins(model_factory=model_factory, gpu_memory=gpu_memory, experts="with_layer", **settings)
    asked = re.search(r"at least (\d+)", str(refused.value))
    assert asked is not None and int(asked[1]) > 2 * layer
    largest = NotesLargest(monkeypatch)
    whole = make_twins(
        model_factory=model_factory,
        gpu_memory=int(asked[1]),
        ssd=str(tmp_path / "whole"),
        experts="with_layer",
        **settings,
    )
    whole.train(1)
    assert largest.num_bytes == fused.nbytes
    assert whole.engine.peak_gpu_pool_bytes > 2 * layer
    largest.num_bytes = 0
    twins = make_twins(model_factory=model_factory, gpu_memory=gpu_memory, experts="auto", recompute=True, **settings)
    twins.train(2)
    twins.assert_equal()
    assert twins.engine.peak_gpu_pool_bytes <= gpu_memory
    outside = max(p.nbytes for name, p in model.named_parameters() if ".experts." not in name)
    assert largest.num_bytes == max(outside, fused.nbytes // 32)
