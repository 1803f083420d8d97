"""Ranks whose batches pass different layers, as with images on one rank only or with layers that are skipped at random,
equal one torch process that accumulates the same batches.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from covering import slow_but
from equal_tensors import assert_same_tensors, same_bits
from torch import Tensor
from training_ranks import Trained, rank_engine, stock_steps, take_steps, weights_of
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

from hf_lohan.device import BufferPool, CpuDevice
from hf_lohan.engine import OffloadEngine
from hf_lohan.huggingface.offloaded_model import enable_checkpointing
from hf_lohan.ranks import Links, RankFailedError
from hf_lohan.testing.models import tiny_batch, tiny_model
from hf_lohan.testing.thread_ranks import Fault, rank_outcomes, run_ranks
from hf_lohan.updates import GradientReduction
from hf_lohan.weights import SharedWeights

IMAGE_TOKEN = 250
NUM_PATCHES = 4
_skipped = threading.local()
Batch = dict[str, Any]
Branches = Sequence[Sequence[Any]]
"""By step and batch, what the batch does. The batches of a step are in the order of ranks, and of each rank's
backwards."""


def tiny_llava() -> Any:
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    vision = CLIPVisionConfig(**sizes, num_hidden_layers=3, image_size=8, patch_size=4)
    text = LlamaConfig(
        **{**sizes, "hidden_size": 64, "intermediate_size": 128},
        num_key_value_heads=2,
        num_hidden_layers=3,
        vocab_size=256,
        tie_word_embeddings=False,
        use_cache=False,
    )
    torch.manual_seed(0)
    return LlavaForConditionalGeneration(
        LlavaConfig(vision_config=vision, text_config=text, image_token_id=IMAGE_TOKEN)
    )


def image_batch(has_image: bool, seed: int) -> Batch:
    batch: Batch = dict(tiny_batch(seed=seed))
    batch["input_ids"] %= IMAGE_TOKEN
    batch["labels"] = batch["input_ids"].clone()
    if has_image:
        batch["input_ids"][:, 2 : 2 + NUM_PATCHES] = IMAGE_TOKEN
        batch["labels"][:, 2 : 2 + NUM_PATCHES] = -100
        generator = torch.Generator().manual_seed(seed)
        batch["pixel_values"] = torch.rand(2, 3, 8, 8, generator=generator)
    return batch


def tiny_opt() -> Any:
    """A model of six layers, which skips those in the thread's `_skipped.layers`."""
    model = tiny_model("opt", num_layers=6)
    decoder = model.model.decoder
    decoder.layerdrop = 0.5
    return model


@pytest.fixture(autouse=True)
def choose_skipped_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have OPT's layer drop draw what the test's thread chose."""
    rand = torch.rand

    def draw(*size: Any, **kwargs: Any) -> Tensor:
        layers: list[bool] = getattr(_skipped, "layers", [])
        if size == ([],) and layers:
            return torch.tensor(0.0 if layers.pop(0) else 1.0)
        return rand(*size, **kwargs)

    monkeypatch.setattr(torch, "rand", draw)


def skipping_batch(skipped: Sequence[int], seed: int) -> Batch:
    _skipped.layers = [layer in skipped for layer in range(6)]
    return dict(tiny_batch(seed=seed))


@dataclass(frozen=True)
class Case:
    """A model, and what its batches do."""

    make_model: Callable[[], Any]
    make_batch: Callable[[Any, int], Batch]
    branches: Branches

    def loss(self, model: Any, step: int, batch: int) -> Tensor:
        loss: Tensor = model(**self.make_batch(self.branches[step][batch], 100 * step + batch)).loss
        return loss


ONE_HAS_IMAGES = Case(tiny_llava, image_batch, [[True, False]] * 3)
ALTERNATING = Case(tiny_llava, image_batch, [[True, False], [False, True], [False, False], [True, True], [False, True]])
NO_IMAGES = Case(tiny_llava, image_batch, [[False, False]] * 3)
SKIPPING = Case(tiny_opt, skipping_batch, [[(), (2, 3)], [(0,), ()], [(1, 4), (5,)], [(), ()], [(0, 1, 2), (3, 4, 5)]])
CASES = {"one": ONE_HAS_IMAGES, "alternating": ALTERNATING, "none": NO_IMAGES, "skipping": SKIPPING}
ACCUMULATED = {
    "images": Case(
        tiny_llava, image_batch, [[True, False, False, True], [False, False, True, False], [True, True, False, False]]
    ),
    "skipping": Case(
        tiny_opt, skipping_batch, [[(), (2,), (3, 4), ()], [(0, 1), (), (), (2, 3, 4)], [(5,), (5,), (), (0,)]]
    ),
}


def train_stock(case: Case, num_ranks: int, max_norm: float) -> Trained:
    """Train one process in memory. It sums the gradients of each rank, and then these sums."""
    model = case.make_model().train()
    num_micro = len(case.branches[0]) // num_ranks
    return stock_steps(
        model,
        lambda step, rank, micro: case.loss(model, step, rank * num_micro + micro),
        len(case.branches),
        num_ranks,
        num_micro=num_micro,
        ranks_per_sum=1,
        max_norm=max_norm,
    )[0]


def train_rank(
    links: Links,
    folder: Path,
    case: Case,
    max_norm: float = 0.0,
    *,
    in_step: Callable[[int, int], object] = lambda _step, _rank: None,
    checkpoints: bool = False,
    evaluating: Sequence[int] = (),
    **settings: Any,
) -> Trained:
    """Train one rank. `evaluating`: the ranks that evaluate between steps, each with other batches than it trained."""
    rank, num_micro = links.ranks.rank, len(case.branches[0]) // links.ranks.num_ranks
    holds = max_norm > 0 or num_micro > 1
    with rank_engine(links, folder, case.make_model, hold_gradients=holds, **settings) as engine:
        if checkpoints:
            enable_checkpointing(engine.model)

        def loss_of(step: int, micro: int) -> Tensor:
            loss = case.loss(engine.model, step, rank * num_micro + micro)
            in_step(step, rank)
            return loss

        def evaluate(engine: OffloadEngine, step: int) -> None:
            with torch.no_grad():
                for batch in range(1 + rank) if rank in evaluating else ():
                    case.loss(engine.model, step, (rank + batch) % 2)

        found = take_steps(
            engine, loss_of, len(case.branches), num_micro=num_micro, max_norm=max_norm, after_step=evaluate
        )
        found.weights = weights_of(engine)
        return found


def check_ranks(
    case: Case, folder: Path, max_norm: float = 0.0, *, num_local: int | None = None, **options: Any
) -> None:
    """Check that two ranks have the weights and norms of one process."""
    stock = train_stock(case, 2, max_norm)
    trained = run_ranks(2, lambda links: train_rank(links, folder, case, max_norm, **options), num_local=num_local)
    for ours in trained:
        assert_same_tensors(ours.weights, stock.weights)
        assert len(ours.norms) == len(stock.norms) and all(map(same_bits, ours.norms, stock.norms))


@pytest.fixture
def only_for_others(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The blocks that a rank read for other ranks alone."""
    found: list[str] = []
    end_load = SharedWeights._end_load

    def note(source: SharedWeights, load: Any) -> None:
        if load.ordered is None:
            found.append(load.block.name)
        end_load(source, load)

    monkeypatch.setattr(SharedWeights, "_end_load", note)
    return found


@pytest.mark.covering(0)
@pytest.mark.parametrize("max_norm", [0.0, 0.5])
@pytest.mark.parametrize("name", CASES)
def test_two_ranks_train_as_one_process(name: str, max_norm: float, tmp_path: Path, only_for_others: list[str]) -> None:
    check_ranks(CASES[name], tmp_path, max_norm)
    assert bool(only_for_others) == (name != "none"), "ranks with equal batches need the same blocks"


ROOM = {"cpu_memory": "16MiB", "gpu_memory": "4MiB"}
WAYS: dict[str, dict[str, Any]] = {
    "two nodes": {"max_norm": 0.5, "num_local": 1},
    **{
        f"{place}, checkpoints {checkpoints}": {**ROOM, "activations": place, "checkpoints": checkpoints}
        for place in ("keep", "swap")
        for checkpoints in (False, True)
    },
    **{f"evaluation by {ranks}": {"max_norm": 0.5, "evaluating": ranks} for ranks in ((0, 1), (1,))},
    **{f"accumulated, clipped to {max_norm}": {"max_norm": max_norm} for max_norm in (0.0, 0.5)},
    **{
        f"accumulated, {clip} at {max_norm}": {"max_norm": max_norm, "_clip": clip}
        for clip in ("speculate", "defer")
        for max_norm in (0.5, 100.0)
    },
}
EVERY = [
    (way, name)
    for way in WAYS
    for name in (("images", "skipping") if way.startswith("accumulated") else ("alternating", "skipping"))
]
QUICK = [
    ("two nodes", "alternating"),
    ("keep, checkpoints False", "alternating"),
    ("accumulated, clipped to 0.0", "images"),
    ("accumulated, speculate at 0.5", "images"),
]


@pytest.mark.parametrize("case", slow_but(QUICK, EVERY), ids=str)
def test_two_ranks_train_as_one_process_in_each_way(case: tuple[str, str], tmp_path: Path) -> None:
    way, name = case
    check_ranks((ACCUMULATED if way.startswith("accumulated") else CASES)[name], tmp_path, **WAYS[way])


class PlannedError(Exception):
    """Raised on purpose."""


@pytest.mark.covering(0)
@pytest.mark.parametrize("failing", [0, 1])
def test_the_words_of_a_rank_that_raises_in_its_forward_reach_the_other(failing: int, tmp_path: Path) -> None:
    def fail(step: int, rank: int) -> None:
        if (step, rank) == (1, failing):
            raise PlannedError("the image is torn")

    outcomes = rank_outcomes(
        2, lambda links: train_rank(links, tmp_path, ONE_HAS_IMAGES, 0.5, in_step=fail), timeout_s=20.0
    )
    assert isinstance(outcomes[failing].error, PlannedError)
    other = outcomes[1 - failing]
    assert isinstance(other.error, RankFailedError)
    assert "the image is torn" in str(other.error)


@pytest.mark.covering(0)
@pytest.mark.parametrize("fault", [None, Fault(1, "die", 60, "loads")])
def test_a_rank_that_is_lost_in_such_a_step_is_named(fault: Fault | None, tmp_path: Path) -> None:
    """A rank that hangs still serves loads, so that the other rank waits for its gradients."""
    is_over = threading.Event()

    def run(links: Links) -> None:
        def hang(step: int, rank: int) -> None:
            if (step, rank) == (1, 1) and fault is None:
                is_over.wait(60)

        try:
            train_rank(links, tmp_path, ONE_HAS_IMAGES, 0.5, in_step=hang)
        finally:
            is_over.set()

    outcomes = rank_outcomes(2, run, timeout_s=1.0, faults=[fault] if fault else [])
    assert isinstance(outcomes[0].error, RankFailedError)
    assert "rank 1" in str(outcomes[0].error)


def test_a_gradient_that_only_others_have_takes_a_buffer_of_the_pool(caplog: pytest.LogCaptureFixture) -> None:
    """It does not wait for one, because this rank's buffers may wait for this gradient."""
    caplog.set_level(logging.INFO, logger="hf_lohan")
    pool = BufferPool(CpuDevice(), name="gradients", num_buffers=1, buffer_bytes=4096)
    reduction = GradientReduction(Links.alone(), CpuDevice(), pool, cast(Any, None), [], None)
    chunk = cast(Any, "layer[0]")
    first = reduction._new_buffer(chunk)
    assert first.pool is pool and not caplog.records
    assert reduction._new_buffer(chunk).pool is not pool
    assert "this rank updates layer[0]" in caplog.text and "4 KiB of RAM that cpu_memory does not count" in caplog.text
    first.release()
    assert reduction._new_buffer(chunk) is first
