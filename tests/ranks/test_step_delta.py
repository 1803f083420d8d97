"""Changes of a step need few bytes and are exact for every bit pattern. Damaged messages are refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hf_lohan.ranks import StepDelta

TABLE_ROW_BYTES = 12
CHUNK = 64 * 1024


def bits(patterns: Tensor) -> Tensor:
    """Return bfloat16 values with these bit patterns."""
    return patterns.to(torch.int16).view(torch.bfloat16)


def message_of(old: Tensor, new: Tensor, delta: StepDelta | None = None) -> Tensor:
    delta = delta or StepDelta()
    out = torch.full((delta.max_bytes(old.numel()) + 9,), 0xAA, dtype=torch.uint8)
    num_bytes = delta.encode(old, new, out)
    assert num_bytes <= delta.max_bytes(old.numel()) and bool((out[num_bytes:] == 0xAA).all() or num_bytes == len(out))
    return out[:num_bytes]


def assert_exact(old: Tensor, new: Tensor, delta: StepDelta | None = None) -> Tensor:
    """Check that encoding and applying gives `new`. Return the message."""
    before = old.clone(), new.clone()
    message = message_of(old, new, delta)
    for tensor, copy in zip((old, new), before, strict=True):
        assert torch.equal(tensor.view(torch.int16), copy.view(torch.int16)), "an input was changed"
    (delta or StepDelta()).apply_(old, message)
    assert torch.equal(old.view(torch.int16), new.view(torch.int16))
    return message


def a_step(numel: int, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return weights before and after a step like one of a fine-tune: 4% change by one ulp, 0.5% by five."""
    generator = torch.Generator().manual_seed(seed)
    old = (torch.randn(numel, generator=generator) * 0.03).bfloat16()
    chance = torch.rand(numel, generator=generator)
    sign = torch.randint(0, 2, (numel,), generator=generator) * 2 - 1
    ulps = torch.where(chance < 0.04, 1, torch.where(chance < 0.045, 5, 0)) * sign
    return old, bits(old.view(torch.int16) + ulps)


def test_a_step_needs_little_more_than_a_bit_per_weight() -> None:
    old, new = a_step(8 * CHUNK)
    changed = float((old != new).float().mean())
    message = assert_exact(old, new)
    bits_per_weight = 8 * message.numel() / old.numel()
    assert bits_per_weight == pytest.approx(1 + 2 * changed + 8 * 0.005, rel=0.01)
    assert bits_per_weight < 1.15


@settings(max_examples=150)
@given(
    numel=st.integers(0, 400),
    chunk_numel=st.sampled_from([1, 7, 64, 100, 4096]),
    spread=st.sampled_from([0, 1, 2, 127, 128, 129, 1000, 1 << 15]),
    share=st.sampled_from([0.0, 0.02, 0.3, 1.0]),
    seed=st.integers(0, 999),
)
def test_any_patterns_are_exact(numel: int, chunk_numel: int, spread: int, share: float, seed: int) -> None:
    generator = np.random.default_rng(seed)
    old = generator.integers(-(1 << 15), 1 << 15, numel)
    steps = generator.integers(-spread, spread + 1, numel) * (generator.random(numel) < share)
    new = (old + steps + (1 << 15)) % (1 << 16) - (1 << 15)
    assert_exact(bits(torch.from_numpy(old)), bits(torch.from_numpy(new)), StepDelta(chunk_numel))


def test_all_bit_patterns_are_exact() -> None:
    """The 65,536 patterns have NaN with any payload, infinities, both zeros and subnormal numbers."""
    patterns = torch.arange(1 << 16)
    for step in (0, 1, -1, 2, 127, -128, 128, -129, 1 << 15):
        assert_exact(bits(patterns), bits(patterns + step))
    assert_exact(bits(patterns), bits(patterns.flip(0)))


def test_float16_is_exact() -> None:
    old = torch.randn(1000).half()
    assert_exact(old, (old * 1.001).half())


def test_unchanged_chunks_need_no_bytes() -> None:
    weights = torch.randn(3 * CHUNK + 5).bfloat16()
    assert message_of(weights, weights.clone()).numel() == 4 * TABLE_ROW_BYTES
    for ulps, difference_bytes in ((1, 0), (-1, 0), (2, 1), (-128, 1), (128, 2)):
        changed = weights.clone()
        changed.view(torch.int16)[2 * CHUNK + 1] += ulps
        message = assert_exact(weights.clone(), changed)
        assert message.numel() == 4 * TABLE_ROW_BYTES + CHUNK // 8 + 1 + 1 + difference_bytes


def test_a_chunk_is_sent_whole_if_its_changes_need_more_bytes() -> None:
    """Only this chunk is sent whole."""
    old, new = a_step(3 * CHUNK)
    new[CHUNK : 2 * CHUNK] = torch.randn(CHUNK)
    alone = [message_of(old[part], new[part]).numel() for part in (slice(CHUNK), slice(2 * CHUNK, 3 * CHUNK))]
    assert assert_exact(old, new).numel() == sum(alone) + TABLE_ROW_BYTES + 2 * CHUNK
    other = torch.randn(1000).bfloat16()
    assert assert_exact(torch.zeros(1000).bfloat16(), other).numel() == StepDelta().max_bytes(1000)


def test_the_message_may_begin_at_any_byte() -> None:
    old, new = a_step(1000)
    new[::100] = 7.0
    message = message_of(old, new)
    for shift in range(1, 4):
        buffer = torch.zeros(message.numel() + shift, dtype=torch.uint8)
        buffer[shift:] = message
        found = old.clone()
        StepDelta().apply_(found, buffer[shift:])
        assert torch.equal(found, new)


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda message: message[:-1], "its table says"),
        (lambda message: torch.cat([message, message[:1]]), "its table says"),
        (lambda message: message[:11], "its table alone has 12"),
        (lambda message: message.clone().index_fill_(0, torch.tensor(3), 0x7F), "changes among 1000 weights"),
        (lambda message: message.clone().index_fill_(0, torch.tensor(7), 0x80), "changes among 1000 weights"),
        (lambda message: message.clone().index_fill_(0, torch.arange(12, 20), 0xFF), "contradicts its table"),
    ],
)
def test_a_damaged_message_is_refused(damage: object, sentence: str) -> None:
    old, new = a_step(1000)
    before = old.clone()
    with pytest.raises(ValueError, match=f"changes to 1000 weights .*{sentence}.*: it is damaged or belongs"):
        StepDelta().apply_(old, damage(message_of(old, new)))  # type: ignore[operator]
    assert torch.equal(old, before)


def test_unsupported_tensors_are_refused() -> None:
    delta, weights, out = StepDelta(), torch.zeros(10).bfloat16(), torch.zeros(99, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"not for torch\.float32 \[10\] on cpu; send other weights as they are"):
        delta.encode(weights.float(), weights.float(), out)
    with pytest.raises(
        ValueError, match=r"weights are torch\.bfloat16 \[10\] before the step and torch\.bfloat16 \[9\] after it"
    ):
        delta.encode(weights, weights[:9], out)
    with pytest.raises(
        ValueError, match=r"31 bytes are too few for the changes of 10 weights; allocate max_bytes\(10\) = 32"
    ):
        delta.encode(weights, weights, out[:31])
    with pytest.raises(ValueError, match=r"a payload is contiguous torch\.uint8 .* not torch\.int8 \[99\]"):
        delta.apply_(weights, out.view(torch.int8))
    with pytest.raises(ValueError, match="contiguous"):
        delta.encode(weights[::2], weights[::2], out)
