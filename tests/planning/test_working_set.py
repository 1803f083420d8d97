"""The plan's working set covers what a real forward and backward hold, and is not far above it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_lohan.model import ChunkedLoss, chunked_head_of
from hf_lohan.planner import ModelProfile
from hf_lohan.planner.fitting import layer_working_bytes, outer_working_bytes
from hf_lohan.planning import trace_blocks
from hf_lohan.testing.models import tiny_model

BATCH_SIZE = 2


class LiveMemory(TorchDispatchMode):
    """Bytes of all numbers that operations made and that are still in use: neither token ids nor the states of random
    generators, which stay on the host."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.peak_bytes = 0
        self._weights = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
        self._alive: dict[int, tuple[Any, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(output):
            if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
                continue
            if (key := tensor.untyped_storage()._cdata) not in self._weights:
                storage = tensor.untyped_storage()
                self._alive[key] = StorageWeakRef(storage), storage.nbytes()
        self._alive = {key: held for key, held in self._alive.items() if not held[0].expired()}
        self.peak_bytes = max(self.peak_bytes, sum(num_bytes for _, num_bytes in self._alive.values()))
        return output


def peak_of_a_step(model: Any, sequence_length: int) -> int:
    """Gradients leave as soon as they are there, as the engine takes them, and layers are recomputed."""
    options = {"use_reentrant": False}
    enable = getattr(model, "activation_checkpointing_enable", None)
    if enable is not None:
        enable(activation_checkpointing_kwargs=options)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
    ids = torch.randint(5, 200, (BATCH_SIZE, sequence_length))
    with LiveMemory(model) as live:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
    return live.peak_bytes


def planned_peak(profile: ModelProfile) -> int:
    """All layers' inputs stay, and one layer or the head works."""
    return profile.inter_block_bytes + max(layer_working_bytes(profile), outer_working_bytes(profile))


@pytest.mark.parametrize(
    ("family", "shape"),
    [
        ("llama", {"vocab_size": 8192}),  # the head holds the most
        ("llama", {"vocab_size": 256, "intermediate_size": 1024}),  # a layer does
        ("opt", {"vocab_size": 4096}),
        ("gpt2", {}),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_real_step_stays_below(family: str, shape: dict[str, Any], dtype: torch.dtype) -> None:
    sequence_length = 64
    model = tiny_model(family, **shape).to(dtype).train()
    planned = planned_peak(trace_blocks(model, batch_size=BATCH_SIZE, sequence_length=sequence_length).profile)
    measured = peak_of_a_step(model, sequence_length)
    assert 0.5 * planned <= measured <= planned


def test_the_head_holds_the_logits_three_times() -> None:
    """In float32: themselves, their logarithms and their gradient; the layers of a model without a large vocabulary
    hold more."""
    model = tiny_model("llama", vocab_size=8192)
    profile = trace_blocks(model, batch_size=BATCH_SIZE, sequence_length=64).profile
    logits_bytes = 4 * BATCH_SIZE * 64 * 8192
    assert 3 * logits_bytes <= outer_working_bytes(profile) <= 3.5 * logits_bytes
    assert outer_working_bytes(profile) > layer_working_bytes(profile)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_in_chunks_are_planned_as_they_are_held(dtype: torch.dtype) -> None:
    chunked_loss = ChunkedLoss(over_bytes=1 << 20, chunk_bytes=1 << 19)
    model = tiny_model("llama", vocab_size=40960).to(dtype).train()
    sizes = {"batch_size": BATCH_SIZE, "sequence_length": 64}
    whole = planned_peak(trace_blocks(model, **sizes).profile)
    planned = planned_peak(trace_blocks(model, **sizes, chunked_loss=chunked_loss).profile)
    head = chunked_head_of(model, chunked_loss)
    assert head is not None
    head.attach()
    measured = peak_of_a_step(model, 64)
    assert 0.5 * planned <= measured <= planned < whole / 1.5
