"""The planned working set covers the memory of a real forward and backward, and is not far above it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Container
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from datasets import Dataset
from short_runs import short_arguments
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_lohan import Trainer
from hf_lohan.activations import ChunkedLoss, chunked_head_of
from hf_lohan.config import OffloadConfig
from hf_lohan.costs import ModelProfile
from hf_lohan.costs.fitting import layer_working_bytes, outer_working_bytes
from hf_lohan.hardware import read_hardware
from hf_lohan.planning import RunPlan, StepShape, lay_out, plan_step, run_plan, trace_blocks
from hf_lohan.planning.run_plan import hooks_taken_off
from hf_lohan.testing.models import tiny_model

BATCH_SIZE = 2
DESKTOP = Path(__file__).parents[2] / "configs" / "hardware" / "rtx4090_desktop.yaml"


class LiveMemory(TorchDispatchMode):
    """Counts the live bytes of floating-point tensors that operations made, without weights and slots, which they only
    read. Token ids and generator states are on the host.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = 0
        self._alive: dict[int, tuple[Any, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        read = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]  # bytes, too
        self.add(output, {tensor.untyped_storage()._cdata for tensor in read})
        return output

    def add(self, output: Any, read: Container[int] = ()) -> None:
        """Count what an operation made. ``read``: storages of its arguments."""
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                storage = tensor.untyped_storage()
                if storage._cdata not in read:
                    self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._alive = {key: held for key, held in self._alive.items() if not held[0].expired()}
        self.peak_bytes = max(self.peak_bytes, sum(num_bytes for _, num_bytes in self._alive.values()))


def peak_of_a_step(model: Any, sequence_length: int) -> int:
    """Return the peak of a step with recomputed layers, in which gradients are freed at once, as by the engine."""
    options = {"use_reentrant": False}
    enable = getattr(model, "activation_checkpointing_enable", None)
    if enable is not None:
        enable(activation_checkpointing_kwargs=options)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
    ids = torch.randint(5, 200, (BATCH_SIZE, sequence_length))
    with LiveMemory() as live:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
    return live.peak_bytes


def planned_peak(profile: ModelProfile) -> int:
    """Return the inputs of all layers and the working set of one layer or of the head."""
    return profile.inter_block_bytes + max(layer_working_bytes(profile), outer_working_bytes(profile))


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    ("family", "shape"),
    [
        ("llama", {"vocab_size": 8192}),  # the head has the peak
        ("llama", {"vocab_size": 256, "intermediate_size": 1024}),  # a layer has the peak
        ("opt", {"vocab_size": 4096}),
        ("gpt2", {}),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_real_step_stays_below_the_planned_peak(family: str, shape: dict[str, Any], dtype: torch.dtype) -> None:
    sequence_length = 64
    model = tiny_model(family, **shape).to(dtype).train()
    planned = planned_peak(trace_blocks(model, batch_size=BATCH_SIZE, sequence_length=sequence_length).profile)
    measured = peak_of_a_step(model, sequence_length)
    assert 0.5 * planned <= measured <= planned


def test_the_head_needs_the_logits_three_times() -> None:
    """The head needs float32 logits, their logarithms and their gradient."""
    model = tiny_model("llama", vocab_size=8192)
    profile = trace_blocks(model, batch_size=BATCH_SIZE, sequence_length=64).profile
    logits_bytes = 4 * BATCH_SIZE * 64 * 8192
    assert 3 * logits_bytes <= outer_working_bytes(profile) <= 3.5 * logits_bytes
    assert outer_working_bytes(profile) > layer_working_bytes(profile)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_in_chunks_stay_below_the_planned_peak(dtype: torch.dtype) -> None:
    chunked_loss = ChunkedLoss(over_bytes=1 << 20, chunk_bytes=1 << 19)
    model = tiny_model("llama", vocab_size=40960).to(dtype).train()
    sizes = {"batch_size": BATCH_SIZE, "sequence_length": 64}
    whole = planned_peak(trace_blocks(model, **sizes).profile)
    planned = planned_peak(trace_blocks(model, **sizes, chunked_loss=chunked_loss).profile)
    head = chunked_head_of(model, chunked_loss)
    head.attach()
    measured = peak_of_a_step(model, 64)
    assert 0.5 * planned <= measured <= planned < whole / 1.5


def test_large_logits_are_traced_in_chunks_too() -> None:
    """These logits would be too large to be real tensors."""
    with torch.device("meta"):
        model = tiny_model("llama", vocab_size=128 * 1024, hidden_size=1024)
    sizes = {"batch_size": 8, "sequence_length": 1024}
    chunked = trace_blocks(model, **sizes, chunked_loss=ChunkedLoss(over_bytes=1 << 30, chunk_bytes=1 << 28)).profile
    assert outer_working_bytes(chunked) < outer_working_bytes(trace_blocks(model, **sizes).profile) / 3


@pytest.mark.parametrize("vocab_size", [4096, 64])
def test_only_one_of_several_joint_micro_batches_is_in_a_layer(vocab_size: int, tmp_path: Path) -> None:
    """One micro-batch is in a layer or in the head. The others wait between two layers, each with one hidden state."""
    with torch.device("meta"):
        model = tiny_model("llama", num_layers=8, hidden_size=256, vocab_size=vocab_size)
    config = OffloadConfig.load({"gpu_memory": "40MiB", "cpu_memory": "200MiB", "activations": "recompute"})
    config = config.resolve(
        host_memory_bytes=1 << 30, device_memory_bytes=1 << 28, num_cpus=2, default_ssd_path=str(tmp_path)
    )
    layout = lay_out(model, config, working_dtype=torch.float32, hold_gradients=True, memory_is_host=False)
    hardware = read_hardware(DESKTOP)
    working_bytes = {}
    for number in (1, 16):
        shape = StepShape(batch_size=1, sequence_length=256, num_together=number)
        planned = plan_step(model, layout, config, shape, measure=lambda *_: hardware)
        working_bytes[number] = planned.plan.prediction.tier_bytes["gpu"]["working_set"]
    one_state_bytes = 4 * 256 * 256
    assert working_bytes[16] - working_bytes[1] == pytest.approx(16 * one_state_bytes, rel=0.3)


def test_a_model_with_a_replaced_head_is_traced_with_whole_logits() -> None:
    model = tiny_model("llama", vocab_size=8192).train()
    sizes = {"batch_size": BATCH_SIZE, "sequence_length": 48}
    expected = outer_working_bytes(trace_blocks(model, **sizes).profile)
    head = chunked_head_of(model, ChunkedLoss(over_bytes=0, chunk_bytes=1 << 16))
    head.attach()
    found: list[int] = []

    def trace_within(_module: Any, _args: Any) -> None:
        with torch.random.fork_rng(devices=()), hooks_taken_off(model):
            found.append(outer_working_bytes(trace_blocks(model, **{**sizes, "sequence_length": 47}).profile))

    model.model.register_forward_pre_hook(trace_within)
    ids = torch.zeros(1, 4, dtype=torch.long)
    model(input_ids=ids, labels=ids)
    assert found == [pytest.approx(expected, rel=0.05)]


class CountedTrainer(Trainer):
    """Counts the memory that a step takes of the device beside slots, from its plan on."""

    live: LiveMemory

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self.live = live = LiveMemory()
        plan_batches = RunPlan.plan_batches
        assert self.offload_engine is not None
        arena = self.offload_engine.device.arena
        empty = arena.empty

        def landing(*args: Any, **kwargs: Any) -> torch.Tensor:  # a thread that no mode sees may allocate it
            tensor = empty(*args, **kwargs)
            live.add(tensor)
            return tensor

        with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as counted:

            def plan_first(*args: Any, **kwargs: Any) -> Any:  # the hardware's measurement has tensors, too
                planned = plan_batches(*args, **kwargs)
                counted.enter_context(live)
                patch.setattr(arena, "empty", landing)
                return planned

            patch.setattr(RunPlan, "plan_batches", plan_first)
            # The machine's load must not change the plan.
            patch.setattr(run_plan, "cached_hardware", lambda *_args, **_options: read_hardware(DESKTOP))
            return super().training_step(*args, **kwargs)


def test_a_step_of_layers_in_chunks_is_within_device_memory(tmp_path: Path) -> None:
    """If the CPU is the device, the memory of the process does not show the device's part."""
    length, device_memory = 1024, 24 << 20
    model = tiny_model("llama", num_layers=4, intermediate_size=2048, max_position_embeddings=length)
    ids = torch.randint(5, 256, (1, length), generator=torch.Generator().manual_seed(1)).tolist()
    trainer = CountedTrainer(
        model,
        short_arguments(tmp_path / "run", max_steps=1, max_grad_norm=0.0),
        train_dataset=Dataset.from_dict({"input_ids": ids, "labels": ids}),
        data_collator=transformers.default_data_collator,
        offload={"device_memory": device_memory, "cpu_memory": "1GiB", "cpu_threads": 1, "_io_threads": 1},
    )
    trainer.train()
    engine = trainer.offload_engine
    assert engine is not None
    engine.close()
    plan = json.loads((tmp_path / "run" / "lohan" / "plan.json").read_text())
    assert plan["chunk_tokens"] is not None
    planned_bytes = sum(plan["tier_bytes"]["gpu"].values())
    taken_bytes = engine.layout.plan.gpu_pool_bytes + trainer.live.peak_bytes
    assert taken_bytes <= device_memory
    assert 0.9 * planned_bytes <= taken_bytes <= 1.02 * planned_bytes
