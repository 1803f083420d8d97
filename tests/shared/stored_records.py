"""I/O engines, records and paths for the storage tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from data_files import EngineFactory

from hf_lohan.device import mapped_empty
from hf_lohan.files import FileBackend, IoEngine, StorePath
from hf_lohan.store import ModelIdentity, RecordSpec


@pytest.fixture
def make_engine() -> Iterator[EngineFactory]:
    """Make I/O engines, which close with the test."""
    engines: list[IoEngine] = []

    def make(
        backend: FileBackend | None = None,
        *,
        num_threads: int = 2,
        piece_bytes: int = 16384,
        max_inflight_bytes: int = 1 << 20,
    ) -> IoEngine:
        engines.append(IoEngine(num_threads, piece_bytes, max_inflight_bytes, backend))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture
def engine(make_engine: EngineFactory) -> IoEngine:
    return make_engine()


@pytest.fixture
def model() -> ModelIdentity:
    return ModelIdentity("LlamaForCausalLM", 12345, "abc")


@pytest.fixture
def records() -> tuple[RecordSpec, ...]:
    """Two blocks, three dtypes, 88 KiB."""
    return (
        RecordSpec("layers.0", "param", "bfloat16", 8192, granule_numel=2048),
        RecordSpec("layers.0", "master_residual", "int16", 8192, granule_numel=2048),
        RecordSpec("layers.0", "exp_avg", "float32", 8192, granule_numel=2048),
        RecordSpec("layers.1", "param", "bfloat16", 4096, granule_numel=2048),
        RecordSpec("layers.1", "exp_avg", "float32", 4096, granule_numel=2048),
    )


@pytest.fixture
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[StorePath]:
    """Two directories that do not exist yet, one with twice the capacity of the other."""
    root = tmp_path_factory.mktemp("disks")
    return [StorePath(str(root / "a"), 200_000), StorePath(str(root / "b"), 100_000)]


@pytest.fixture
def random_values() -> Callable[[RecordSpec, int], torch.Tensor]:
    """Make random bytes as values ``[numel]`` of a record's dtype, in aligned memory."""
    generator = torch.Generator().manual_seed(0)

    def make(record: RecordSpec, numel: int) -> torch.Tensor:
        memory = mapped_empty(numel * record.itemsize)
        memory.random_(0, 256, generator=generator)
        return memory.view(getattr(torch, record.dtype))

    return make
