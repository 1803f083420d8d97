"""Computing the logits in chunks gives the same loss and gradients with far less memory, and never a wrong logit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from architectures import model_of
from torch import Tensor
from torch.nn import functional as F

from hf_lohan.activations.chunked_head import ChunkedLoss, Smoothing, chunked_head_of, whole_logits
from hf_lohan.compat.torch_private import TorchDispatchMode
from hf_lohan.planning.tracing.operations import LiveBytes
from hf_lohan.testing.models import tiny_batch, tiny_model

SMALL_CHUNKS = ChunkedLoss(over_bytes=0, chunk_bytes=5 * 256 * 4)
"""Chunks of five tokens, so that the last chunk is shorter."""


@contextmanager
def chunked(model: Any, chunked_loss: ChunkedLoss = SMALL_CHUNKS) -> Iterator[Any]:
    head = chunked_head_of(model, chunked_loss)
    detach = head.attach()
    try:
        yield head
    finally:
        detach()


class Peak(TorchDispatchMode):
    """Measures the peak memory of tensors during operations."""

    def __init__(self) -> None:
        super().__init__()
        self.live = LiveBytes()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        self.live.add_output((args, kwargs), output)
        return output


def batch(**more: Any) -> dict[str, Any]:
    inputs = tiny_batch(batch_size=3, sequence_length=11)
    inputs["labels"][0, :4] = -100
    return {**inputs, **more}


def loss_and_gradients(model: Any, inputs: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_close(model: Any, inputs: dict[str, Any]) -> None:
    expected_loss, expected = loss_and_gradients(model, inputs)
    with chunked(model):
        loss, gradients = loss_and_gradients(model, inputs)
    assert_equal_but_for_rounding(loss, gradients, expected_loss, expected)


def assert_equal_but_for_rounding(
    loss: Tensor, gradients: dict[str, Tensor], expected_loss: Tensor, expected: dict[str, Tensor]
) -> None:
    assert abs(loss - expected_loss) <= 1e-6 * abs(expected_loss)
    assert gradients.keys() == expected.keys()
    largest = max(gradient.norm() for gradient in expected.values())
    for name, gradient in gradients.items():
        # The true gradient of a key's bias is zero, so its computed value is noise.
        assert (gradient - expected[name]).norm() <= 1e-6 * max(expected[name].norm(), 1e-3 * largest), name


FAMILIES = ("llama", "opt", "mixtral", "gpt2")
SCALED = ("cohere", "granite", "gemma2", "gemma3_text")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("num_items", [None, 29])
def test_loss_and_gradients_equal_those_of_whole_logits(family: str, num_items: int | None) -> None:
    assert_close(tiny_model(family), batch(num_items_in_batch=None if num_items is None else torch.tensor(num_items)))


@pytest.mark.parametrize("architecture", SCALED)
def test_scaled_and_capped_logits_are_supported(architecture: str) -> None:
    torch.manual_seed(0)
    model = model_of(architecture, vocab_size=256).train()
    with chunked(model) as head:
        called = watch(head)
        loss_and_gradients(model, batch())
    assert called == ["loss"]
    assert_close(model, batch())


def watch(head: Any) -> list[str]:
    """Return a list that collects which results the head computes from pending logits."""
    called: list[str] = []

    def record(name: str, stock: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(*args: Any) -> Any:
            called.append(name)
            return stock(*args)

        return recorded

    head.compute_loss, head.compute_logits = record("loss", head.compute_loss), record("logits", head.compute_logits)
    return called


def test_shifted_labels_ignore_index_and_a_frozen_head_are_supported() -> None:
    model = tiny_model("llama")
    labels = batch()["labels"]
    assert_close(model, batch(shift_labels=F.pad(labels, (0, 1), value=-100)[:, 1:].contiguous()))
    labels = labels.masked_fill(labels == -100, 7)
    assert_close(model, batch(labels=labels, ignore_index=7))
    model.lm_head.weight.requires_grad_(False)
    assert_close(model, batch())


def test_bfloat16_gradients_are_summed_in_float32() -> None:
    model = tiny_model("llama")
    expected = loss_and_gradients(model, batch())[1]["lm_head.weight"]
    model = model.bfloat16()
    whole = loss_and_gradients(model, batch())[1]["lm_head.weight"]
    with chunked(model, ChunkedLoss(over_bytes=0, chunk_bytes=256 * 4)):
        found = loss_and_gradients(model, batch())[1]["lm_head.weight"]
    assert found.dtype == torch.bfloat16
    assert (found.float() - expected).norm() <= 1.1 * (whole.float() - expected).norm()


def test_memory_of_loss_and_backward_does_not_grow_with_the_vocabulary() -> None:
    vocabulary = 262_144
    model = tiny_model("llama", num_layers=1, hidden_size=8, vocab_size=vocabulary).train()
    inputs = tiny_batch(batch_size=1, sequence_length=96)

    def peak_bytes() -> int:
        model.zero_grad()
        with Peak() as peak:
            model(**inputs).loss.backward()
        return peak.live.peak_bytes

    whole_loss, whole = loss_and_gradients(model, inputs)
    whole_bytes = peak_bytes()
    with chunked(model, ChunkedLoss(over_bytes=1 << 20, chunk_bytes=4 << 20)):
        loss, gradients = loss_and_gradients(model, inputs)
        chunked_bytes = peak_bytes()
    assert chunked_bytes < whole_bytes / 5
    assert_equal_but_for_rounding(loss, gradients, whole_loss, whole)


# Reading logits.


def test_small_logits_evaluation_and_forwards_without_labels_are_untouched() -> None:
    model = tiny_model("llama")
    ids = batch()["input_ids"]
    expected = model(**batch())
    with chunked(model, ChunkedLoss(over_bytes=1 << 30, chunk_bytes=1 << 20)):
        assert torch.equal(model(**batch()).loss, expected.loss)
    with chunked(model):
        for outputs in (model(input_ids=ids), model(input_ids=ids).copy()):
            assert type(outputs["logits"]) is Tensor and torch.equal(outputs["logits"], expected.logits)
        with torch.no_grad():
            outputs = model(**batch())
        assert type(outputs.logits) is Tensor and torch.equal(outputs.loss, expected.loss)


def test_reading_logits_after_a_training_forward_is_exact_or_refused() -> None:
    model = tiny_model("llama")
    expected = model(**batch()).logits
    with chunked(model):
        outputs = model(**batch())
        logits = outputs.logits
        assert logits.shape == expected.shape and logits.dtype == expected.dtype and logits.requires_grad
        assert "PendingLogits" in repr(logits)
        with pytest.raises(RuntimeError, match=r"chunks\.loss: false"):
            logits.sum()
        with pytest.raises(RuntimeError, match=r"chunks\.loss: false"):
            F.cross_entropy(logits.view(-1, 256), batch()["labels"].view(-1))
        with torch.no_grad():
            assert torch.equal(logits.argmax(-1), expected.argmax(-1))
            assert torch.equal(logits + 0, expected)
        outputs.loss.backward()


def test_a_loss_function_may_change_the_logits() -> None:
    """The loss masks one token and adds a penalty on the size of the logits."""

    def loss_function(logits: Tensor, labels: Tensor, **_: Any) -> Tensor:
        logits = logits.float()
        logits[..., 3] = -1e9
        flat = logits[:, :-1].reshape(-1, logits.shape[-1])
        return F.cross_entropy(flat, labels[:, 1:].reshape(-1)) + 1e-4 * logits[..., 5:].logsumexp(-1).pow(2).mean()

    model = tiny_model("llama")
    model.loss_function = loss_function
    expected_loss, expected = loss_and_gradients(model, batch())
    with chunked(model):
        loss, gradients = loss_and_gradients(model, batch())
    assert torch.equal(loss, expected_loss)
    assert all(torch.equal(gradients[name], expected[name]) for name in expected)


def test_writing_to_logits_after_a_view_is_refused() -> None:
    def loss_function(logits: Tensor, labels: Tensor, **_: Any) -> Tensor:
        flat = logits.view(-1, logits.shape[-1])
        logits[..., 3] = -1e9
        return F.cross_entropy(flat, labels.view(-1))

    model = tiny_model("llama")
    model.loss_function = loss_function
    with chunked(model), pytest.raises(RuntimeError, match=r"set chunks\.loss: false"):
        model(**batch())


def test_label_smoothing_equals_that_of_the_trainer() -> None:
    from transformers.trainer_pt_utils import LabelSmoother

    model = tiny_model("llama")
    inputs = batch()
    outputs = model(input_ids=inputs["input_ids"])
    with chunked(model) as head:
        for num_items in (None, 29, torch.tensor(29)):
            smoothing = Smoothing(0.2, inputs["labels"])
            with head.smoothing(smoothing):
                model(input_ids=inputs["input_ids"])
            whole = LabelSmoother(0.2)(outputs, inputs["labels"], shift_labels=True, num_items_in_batch=num_items)
            assert torch.allclose(smoothing.loss(num_items), whole, rtol=1e-6)
    with pytest.raises(RuntimeError, match="label_smoothing_factor"):
        Smoothing(0.2, inputs["labels"]).loss(None)


def test_a_head_with_a_replaced_forward_keeps_it() -> None:
    model = tiny_model("llama")
    head = model.lm_head
    head.forward = lambda hidden: F.linear(hidden, head.weight) * 0.5
    assert chunked_head_of(model, SMALL_CHUNKS) is None
    expected, wrapped = model(**batch()).loss, head.forward
    with whole_logits(model):
        assert torch.equal(model(**batch()).loss, expected)
    assert head.forward is wrapped


def test_hooks_on_the_head_run_once_with_the_model_s_hidden_states() -> None:
    model = tiny_model("llama")
    seen: list[Any] = []
    model.lm_head.register_forward_hook(lambda _, args, output: seen.append((*args, output)))
    model(**batch())
    with chunked(model):
        loss = model(**batch()).loss
        loss.backward()
    (stock_hidden, stock), (hidden, logits) = seen
    assert torch.equal(hidden, stock_hidden) and logits.shape == stock.shape


def test_a_mean_in_bfloat16_is_rounded_once() -> None:
    model = tiny_model("llama").bfloat16()
    model.loss_function = lambda logits, labels, **_: F.cross_entropy(logits.view(-1, 256), labels.view(-1))
    inputs = batch()
    exact = F.cross_entropy(model(**inputs).logits.float().view(-1, 256), inputs["labels"].view(-1))
    with chunked(model):
        assert model(**inputs).loss == exact.bfloat16()
