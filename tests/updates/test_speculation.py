"""Speculative clipping equals torch's clipping, whether guesses are right or wrong."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch
from async_device import AsyncDevice
from clip_norms import CLIPS, EITHER_WAY, LETS_THROUGH, MAX_NORMS, NORMS, assert_speculated, counts, train
from engines import EngineFactory, TwinsFactory
from storage_doubles import SlowBackend

from hf_lohan.optim import OffloadAdamW
from hf_lohan.testing.models import FAMILIES, tiny_batch, tiny_model
from hf_lohan.updates import ClipHistory


@pytest.mark.covering(1)
@MAX_NORMS
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_clips_as_torch(family: str, max_norms: list[float], make_twins: TwinsFactory) -> None:
    twins = make_twins(family, _clip="speculate")
    train(twins, max_norms)
    twins.assert_equal()
    assert_speculated(twins, max_norms)


@pytest.mark.covering(1)
@MAX_NORMS
@pytest.mark.parametrize("recompute", [False, True], ids=["keep", "recompute"])
@pytest.mark.parametrize("schedule", ["optimized", "naive", "serial"])
def test_every_schedule_clips_as_torch(
    schedule: str, recompute: bool, max_norms: list[float], make_twins: TwinsFactory
) -> None:
    twins = make_twins("llama", _clip="speculate", _schedule=schedule, recompute=recompute)
    train(twins, max_norms)
    twins.assert_equal()
    if schedule == "serial":
        assert counts(twins) == (0, 0)  # it updates after backward only
    else:
        assert_speculated(twins, max_norms)


@MAX_NORMS
def test_spilled_gradients_of_a_wrong_guess_are_kept(max_norms: list[float], make_twins: TwinsFactory) -> None:
    twins = make_twins("llama", _clip="speculate", cpu_memory="2MiB", gpu_memory="512KiB", backend=SlowBackend(2e-4))
    assert twins.engine.layout.plan.spilled_blocks
    train(twins, max_norms)
    twins.assert_equal()
    assert_speculated(twins, max_norms)
    for pool in twins.engine.tiers.pools[1:]:
        assert pool.high_water_bytes <= pool.num_buffers * pool.buffer_bytes


@pytest.mark.covering(1)
@pytest.mark.parametrize("sums_gradients", [True, False], ids=["float32", "kept"])
@pytest.mark.parametrize("clip", ["defer", "speculate"])
@EITHER_WAY
def test_bfloat16_masters_and_residuals_are_undone_and_redone(
    max_norm: float, clip: str, sums_gradients: bool, build_engine: EngineFactory
) -> None:
    """The reference trains bfloat16 weights with float32 masters, torch's AdamW and gradients clipped in float32."""
    stock, model = (tiny_model("llama").train() for _ in range(2))
    engine = build_engine(model, dtype=torch.bfloat16, _clip=clip, sums_gradients=sums_gradients)
    model.config.dtype = torch.bfloat16
    optimizer = OffloadAdamW(model.parameters(), lr=1e-3, engine=engine)
    masters = {name: torch.nn.Parameter(p.detach().clone()) for name, p in stock.named_parameters()}
    stock_optimizer = torch.optim.AdamW(masters.values(), lr=1e-3, fused=True)
    for step in range(3):
        for name, parameter in stock.named_parameters():
            parameter.data = masters[name].detach().bfloat16()
            parameter.grad = None
        for either in (stock, model):
            either(**tiny_batch(seed=step)).loss.backward()
        gradients = {name: p.grad.float() for name, p in stock.named_parameters() if p.grad is not None}
        norm = torch.nn.utils.get_total_norm(gradients.values(), foreach=False)
        assert torch.equal(engine.clip_grad_norm(max_norm), norm)
        for name, gradient in gradients.items():
            masters[name].grad = gradient * torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        stock_optimizer.step()
        optimizer.step()
        optimizer.zero_grad()
    assert engine.clip_history.num_redone == (3 if max_norm == CLIPS and clip == "speculate" else 0)
    access = engine.parameters
    for name, master in masters.items():
        assert torch.equal(access.read_masters(name, 0, master.numel()), master.detach().flatten()), name
        assert torch.equal(access.read_flat(name, "exp_avg"), stock_optimizer.state[master]["exp_avg"].flatten()), name


# Accumulation.


@EITHER_WAY
def test_announced_accumulation_guesses_in_the_last_backward(max_norm: float, make_twins: TwinsFactory) -> None:
    twins = make_twins("mixtral", _clip="speculate")
    for step in range(3):
        for number in range(3):
            twins.engine.announce_backward(is_final=number == 2)
            twins.backward(10 * step + number, scale=1 / 3)
        twins.clip(max_norm)
        twins.step()
    twins.assert_equal()
    assert_speculated(twins, [max_norm] * 3)


@EITHER_WAY
def test_gradients_of_earlier_backwards_alone_are_applied(max_norm: float, make_twins: TwinsFactory) -> None:
    """The last backward has no gradients for one layer and part of another, so no guess covers them."""
    twins = make_twins("llama", _clip="speculate", backend=SlowBackend(1e-3))
    names = [name for name, _ in twins.stock.named_parameters()]
    early_only = [name for name in names if "layers.1." in name or name.endswith("layers.2.mlp.up_proj.weight")]
    for step in range(3):
        for number in range(2):
            twins.engine.announce_backward(is_final=number == 1)
            for model, name in itertools.product(twins.models, early_only):
                model.get_parameter(name).requires_grad_(number == 0)
            twins.backward(10 * step + number)
        twins.clip(max_norm)
        twins.step()
    twins.assert_equal()
    assert_speculated(twins, [max_norm] * 3)


@EITHER_WAY
def test_unannounced_accumulation_ends_speculation(max_norm: float, make_twins: TwinsFactory) -> None:
    twins = make_twins("llama", _clip="speculate")
    for step in range(3):
        for number in range(2):
            twins.backward(10 * step + number, scale=0.5)
        twins.clip(max_norm)
        twins.step()
    twins.assert_equal()
    assert counts(twins) == (0, 0)
    assert not twins.engine.clip_history.speculates


# Whether to guess.


def test_nothing_is_guessed_if_nothing_can_be_undone(make_twins: TwinsFactory) -> None:
    twins = make_twins("llama", _clip="speculate", durability="checkpoint")
    train(twins, NORMS["some_steps_clip"])
    twins.assert_equal()
    assert (counts(twins), twins.engine.undone_update_s) == ((0, 0), 0.0)


@pytest.mark.covering(0)
@pytest.mark.parametrize("pattern", [[True], [False], [True, False], [False, False, True]])
@MAX_NORMS
def test_the_way_of_clipping_may_change_between_steps(
    pattern: list[bool], max_norms: list[float], make_twins: TwinsFactory
) -> None:
    """A new plan may change it."""
    twins = make_twins("llama", _clip="speculate")
    ways = list(itertools.islice(itertools.cycle(pattern), 2 * len(max_norms)))
    for step, (max_norm, guesses) in enumerate(zip(max_norms * 2, ways, strict=True)):
        twins.engine.clip_by("speculate" if guesses else "defer")
        twins.train(1, first_seed=10 * step, max_norm=max_norm)
    twins.assert_equal()
    assert counts(twins)[0] == sum(ways)


@pytest.mark.parametrize(
    ("max_norms", "guesses"),
    [
        ([CLIPS] * 3, (0, 0)),
        ([LETS_THROUGH] * 3, (2, 0)),  # the first step has no history
        ([LETS_THROUGH, CLIPS, LETS_THROUGH, CLIPS], (1, 1)),
    ],
    ids=["every", "none", "some"],
)
def test_auto_does_not_guess_after_steps_that_clipped(
    max_norms: list[float], guesses: tuple[int, int], make_twins: TwinsFactory
) -> None:
    """A wrong guess costs a second write."""
    twins = make_twins("llama", _clip="auto")
    twins.engine.clip_by("speculate")  # as a plan does
    train(twins, max_norms)
    twins.assert_equal()
    assert counts(twins) == guesses


def test_auto_guesses_again_when_few_of_the_last_steps_clipped() -> None:
    history = ClipHistory("speculate")
    guessed = []
    for step in range(20):
        guessed.append(history.speculates)
        history.note_step("deferred", clipped=step < 4)
    assert guessed == [False] * 18 + [True] * 2, "2 of 16 clipped"
    assert ClipHistory("speculate", always=True).speculates


def test_without_a_plan_no_step_guesses(make_twins: TwinsFactory) -> None:
    twins = make_twins("llama", _clip="auto")
    train(twins, NORMS["some_steps_clip"])
    assert counts(twins) == (0, 0)
    assert twins.engine.clip_history.clip_rate == 0.5


# Races.


@pytest.mark.covering(0)
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("family", ["llama", "opt"])
def test_late_copies_change_no_bit(family: str, seed: int, make_twins: TwinsFactory) -> None:
    device = AsyncDevice(seed, max_delay_s=5e-4)
    twins = make_twins(model_factory=partial(tiny_model, family), _clip="speculate", device=device)
    train(twins, NORMS["some_steps_clip"])
    twins.assert_equal()
    assert device.num_races == 0
