"""Settings of all tests: no network, two threads of torch, and GPU tests only on a machine with a GPU."""

from __future__ import annotations

import gc
import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

# Settings of the user's shell would change the tests. Settings of the tests are named `LOHAN_TEST_...`.
_FOREIGN = ("ACCELERATE_", "DATASETS_", "HF_", "KMP_", "MKL_", "OMP_", "TRANSFORMERS_")
for _name in [name for name in os.environ if name.startswith(_FOREIGN)]:
    del os.environ[_name]
# The libraries read these variables on import, so the variables are set before any test module is imported.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# Spinning OpenMP threads would take the cores from the engine's threads, above all on a busy machine.
os.environ["OMP_WAIT_POLICY"] = "passive"
_DOUBLE = importlib.util.find_spec("cuda_double")  # without a location, this is the folder tests/cuda_double
ON_CUDA_DOUBLE = _DOUBLE is not None and _DOUBLE.has_location
if ON_CUDA_DOUBLE:  # its streams compute in one thread each, where the bits of MKL depend on the alignment
    os.environ["MKL_CBWR"] = "COMPATIBLE"
# Hardware profiles of the tests stay out of the user's cache. All processes of a test run share them.
os.environ.setdefault("LOHAN_TEST_CACHE", tempfile.mkdtemp(prefix="lohan-tests-"))
os.environ["XDG_CACHE_HOME"] = os.environ["LOHAN_TEST_CACHE"]
os.environ["HF_HOME"] = os.path.join(os.environ["LOHAN_TEST_CACHE"], "huggingface")  # has no accelerate config

sys.path.insert(0, str(Path(__file__).parent / "shared"))  # modules that several folders use
sys.path.append(str(Path(__file__).parents[1] / "scripts" / "development"))  # `tiny_configs`, which these modules use
sys.path.append(str(Path(__file__).parents[1] / "scripts" / "benchmarks"))  # doubles that take time
pytest.register_assert_rewrite("engines")

GPU_TESTS = Path(__file__).parent / "gpu"
FILES_IN_RAM = Path("/dev/shm")


def pytest_configure(config: pytest.Config) -> None:
    import torch
    from hypothesis import settings

    settings.register_profile("any machine", deadline=None)  # examples are slow on a busy machine
    settings.load_profile("any machine")
    config.addinivalue_line(
        "markers",
        "covering(strength): one case (0), or cases that cover each value (1) or each pair (2), run; others are slow",
    )
    torch.set_num_threads(1 if ON_CUDA_DOUBLE else 2)  # fixes the order of sums on every machine
    if ON_CUDA_DOUBLE:
        from double_violations import FailsOnViolations

        config.pluginmanager.register(FailsOnViolations())


def pytest_collection_finish() -> None:
    freeze_objects()


@pytest.hookimpl(tryfirst=True)  # before fixtures are made
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Freeze again before the first test of each file, because tests import modules too."""
    if item.path != _last_file[0]:
        _last_file[0] = item.path
        freeze_objects()


_last_file: list[Path | None] = [None]


def freeze_objects() -> None:
    """Freeze the half million objects of imported modules, which each run of Trainer would search for garbage."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)  # before the selection by -m
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch
    from covering import mark_others_slow

    mark_others_slow(items)
    no_cuda = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if GPU_TESTS in item.path.parents:
            item.add_marker(pytest.mark.gpu)
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(no_cuda)


@pytest.fixture
def ram_folder(tmp_path: Path) -> Iterator[Path]:
    """A folder in RAM, or `tmp_path` if RAM is short, for tests that need no real drive."""
    if not os.access(FILES_IN_RAM, os.W_OK) or shutil.disk_usage(FILES_IN_RAM).free < 1 << 28:
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="lohan-tests-", dir=FILES_IN_RAM) as folder:
        yield Path(folder)
