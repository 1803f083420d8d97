"""Where and how often the host waits for the device in a steady step. A computing thread enqueues work far ahead of the
device. When that thread waits, the device may run out of work."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
from trainer_runs import make_trainer
from transformers import TrainerCallback

import hf_lohan
from hf_lohan.engine.ranks import RankBatches
from hf_lohan.testing.models import tiny_model

NUM_LAYERS = 4
NUM_STEPS = 4
DEPTH = 60
"""Frames recorded per call."""
BACKGROUND = ("lohan-gradients", "lohan-prefetch", "lohan-experts", "lohan-activations")
"""Background threads, which may wait."""
SHAPE_UNKNOWN_TO_THE_DOUBLE = "blocking: aten::index.Tensor"
"""Indexing with integers, which does not wait on a GPU."""

CLIP_NORM = "updates/gradients.py _norms"
ROUTING = "experts/routing.py read_numbers"
DRAIN = "activations/swapper.py drain"


@dataclass(frozen=True)
class Case:
    family: str
    expected: dict[str, int]
    """Number of waits by caller."""
    offload: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    has_adapters: bool = False


ONCE = {CLIP_NORM: 1}
EACH_LAYER_AND_PASS = {**ONCE, ROUTING: 2 * NUM_LAYERS}
TWO_MICRO_BATCHES = {"gradient_accumulation_steps": 2}
CASES = {
    "dense": Case("llama", ONCE),
    "adapters": Case("llama", ONCE, has_adapters=True),
    "accumulated": Case("llama", ONCE, settings=TWO_MICRO_BATCHES),
    "vertical": Case("llama", ONCE, {"vertical_micro_batches": True}, TWO_MICRO_BATCHES),
    # To bound memory, the host waits for the swapped activations of each layer but the last two.
    "swapped": Case("llama", {**ONCE, DRAIN: NUM_LAYERS - 2}, {"activations": "swap"}),
    "experts_with_layer": Case("qwen3_moe", ONCE, {"experts": "with_layer"}),
    "experts_streamed": Case("qwen3_moe", EACH_LAYER_AND_PASS, {"experts": "streamed"}),
    "experts_recomputed": Case("qwen3_moe", EACH_LAYER_AND_PASS, {"experts": "streamed", "activations": "recompute"}),
    "experts_vertical": Case(
        "qwen3_moe",
        {**ONCE, ROUTING: 2 * 2 * NUM_LAYERS},  # twice, for two micro-batches
        {"experts": "streamed", "vertical_micro_batches": True},
        TWO_MICRO_BATCHES,
    ),
}


def files_of(package: Any) -> frozenset[str]:
    """The package's files by the last two parts of their paths, as the double names them."""
    folder = Path(package.__file__).parent
    return frozenset("/".join(file.parts[-2:]) for file in folder.rglob("*.py"))


class LastStep(TrainerCallback):
    """Records the waits of the computing threads in the last step."""

    def __init__(self, double: Any) -> None:
        self._double = double
        self._callers = double.Callers("sync:", inside="/", depth=DEPTH)
        self.blocking_operations: list[str] = []
        """Operations that wait because the shape of their result depends on values. Known only if streams have
        threads."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == NUM_STEPS - 1:
            self._double.reset()
            self._callers.__enter__()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == NUM_STEPS:
            self._callers.__exit__()
            names = [name for name in self._double.counts() if name.startswith("blocking: aten::")]
            self.blocking_operations = [name for name in names if not name.startswith(SHAPE_UNKNOWN_TO_THE_DOUBLE)]

    def waits(self) -> Counter[str]:
        """Return the number of waits by frames, from the innermost frame outside torch. Waits of transformers happen in
        any run, so only waits of hf_lohan count."""
        torch_files, our_files = files_of(torch), files_of(hf_lohan)
        of_each: dict[str, Counter[bool]] = {}
        for (what, thread, frames), number in self._callers.found.items():
            outside = [frame for frame in frames.split(" < ") if frame.partition(":")[0] not in torch_files]
            if thread in BACKGROUND or not outside or outside[0].partition(":")[0] not in our_files:
                continue
            # The double counts a copy of pageable memory and the wait for it separately.
            of_each.setdefault(" < ".join(outside), Counter())["pageable" in what] += number
        return Counter({frames: max(of.values()) for frames, of in of_each.items()})


def run(double: Any, folder: Path, case: Case, callbacks: list[Any]) -> LastStep:
    model = tiny_model(case.family, num_layers=NUM_LAYERS)
    if case.has_adapters:
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    budgets = {"gpu_memory": "4MiB", "cpu_memory": "32MiB", "ssd": str(folder / "store"), "_clip": "defer"}
    step = LastStep(double)
    offload = {**budgets, **case.offload}
    settings = {"max_steps": NUM_STEPS, **case.settings}
    trainer = make_trainer(folder / "run", model, offload=offload, callbacks=[*callbacks, step], **settings)
    trainer.train()
    trainer.offload_engine.close()
    return step


def caller_in(frames: str, expected: dict[str, int]) -> str:
    """Return the first expected caller among the frames, or all frames if none is expected."""
    without_lines = re.sub(r":\d+ ", " ", frames)
    return next((caller for caller in expected if f" < {caller} < " in f" < {without_lines} < "), frames)


@pytest.mark.parametrize("name", CASES)
def test_the_host_waits_only_where_expected(double: Any, tmp_path: Path, name: str) -> None:
    case = CASES[name]
    step = run(double, tmp_path, case, [])
    waits: Counter[str] = Counter()
    for frames, number in step.waits().items():
        waits[caller_in(frames, case.expected)] += number
    assert waits == case.expected
    assert step.blocking_operations == []


def waits_for_buffers(double: Any, num_buffers: int) -> int:
    """Return how often the host waits at the beginning of a step of two ranks with equal buffers."""
    model = torch.nn.Module()
    for number in range(num_buffers):
        model.register_buffer(f"buffer_{number}", torch.full((3,), number, device="cuda"))
    links: Any = SimpleNamespace(ranks=SimpleNamespace(others=(1,)), all_gather=lambda _tag, told: [told, told])
    with double.Callers("sync:", inside="/", depth=DEPTH) as callers:
        RankBatches(model, links).begin_forward(None, True)
    return sum(callers.found.values())


def test_the_host_waits_once_for_the_buffers_that_ranks_compare(double: Any) -> None:
    assert 0 < waits_for_buffers(double, 1) == waits_for_buffers(double, 4)
