"""The engine adds its advice to errors of a device without memory, and to no others."""

from __future__ import annotations

import pytest
import torch

from hf_lohan.config import OffloadConfig
from hf_lohan.engine import OutOfMemoryAdvice
from hf_lohan.engine.planned_memory import is_out_of_memory, missing_bytes

OF_TORCH = (
    "CUDA out of memory. Tried to allocate 1.50 MiB. GPU 0 has a total capacity of 23.64 GiB of which 50.00 MiB is "
    "free. Of the allocated memory 22.10 GiB is allocated by PyTorch, and 126.88 MiB is reserved by PyTorch but "
    "unallocated. If reserved but unallocated memory is large try setting PYTORCH_ALLOC_CONF."
)


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (torch.OutOfMemoryError(OF_TORCH), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (ValueError("CUDA error: out of memory"), False),
    ],
)
def test_only_out_of_memory_errors_get_the_advice(error: Exception, is_one: bool) -> None:
    assert is_out_of_memory(error) is is_one
    said = str(error)
    with pytest.raises(type(error)) as raised, OutOfMemoryAdvice(OffloadConfig(gpu_memory=20 << 30)).added_to_errors():
        raise error
    assert raised.value is error and (str(error) != said) is is_one


def test_the_advice_is_added_once_and_keeps_the_words_of_torch() -> None:
    """Accelerate looks for a smaller batch if an error has one argument with this beginning."""
    answer = OutOfMemoryAdvice(OffloadConfig(gpu_memory=20 << 30))
    error = torch.OutOfMemoryError(OF_TORCH)
    with pytest.raises(torch.OutOfMemoryError), answer.added_to_errors(), answer.added_to_errors():
        raise error
    (said,) = error.args
    assert said.startswith(OF_TORCH.partition(" If reserved")[0])
    assert "PYTORCH_ALLOC_CONF" not in said
    assert said.count("gpu_memory is 20 GiB") == 1
    assert said.endswith("The next run continues from the last committed step.")


def test_errors_of_cuda_libraries_get_the_words_of_torch() -> None:
    error = RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
    OutOfMemoryAdvice(OffloadConfig()).add_to(error)
    assert str(error).startswith("CUDA out of memory. CUDA error: CUBLAS_STATUS_ALLOC_FAILED")


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (OF_TORCH, 3 << 19),
        ("Tried to allocate 2.00 GiB.", 2 << 30),
        ("Tried to allocate 512 bytes", 0),  # too few to count
        ("out of memory", 0),
    ],
)
def test_the_missing_bytes_are_read_from_the_error(said: str, expected: int) -> None:
    assert missing_bytes(said) == expected
