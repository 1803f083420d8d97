"""For all tests: no network, few threads, and GPU tests only where there is a GPU."""

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

# What the user's shell has set is for the user's runs. `LOHAN_TEST_...` is ours.
_OTHERS = ("ACCELERATE_", "DATASETS_", "HF_", "KMP_", "MKL_", "OMP_", "TRANSFORMERS_")
for _name in [name for name in os.environ if name.startswith(_OTHERS)]:
    del os.environ[_name]
# Read by the libraries when they are first imported, so set before any test module is.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# OpenMP threads that wait by spinning take the cores from the engine's own threads, all the more on a busy machine.
os.environ["OMP_WAIT_POLICY"] = "passive"
_DOUBLE = importlib.util.find_spec("cuda_double")  # see tests/cuda_double, a folder that pytest in tests/ would find
ON_CUDA_DOUBLE = _DOUBLE is not None and _DOUBLE.has_location
if ON_CUDA_DOUBLE:  # its streams compute in one thread each, in which MKL gives other alignments other bits
    os.environ["MKL_CBWR"] = "COMPATIBLE"
# What runs measure of this busy machine is no profile to keep; the processes of one test run share it.
os.environ.setdefault("LOHAN_TEST_CACHE", tempfile.mkdtemp(prefix="lohan-tests-"))
os.environ["XDG_CACHE_HOME"] = os.environ["LOHAN_TEST_CACHE"]
os.environ["HF_HOME"] = os.path.join(os.environ["LOHAN_TEST_CACHE"], "huggingface")  # nobody's accelerate config either

sys.path.insert(0, str(Path(__file__).parent / "shared"))  # what tests of several rooms use
pytest.register_assert_rewrite("engines")

GPU_TESTS = Path(__file__).parent / "gpu"
FILES_IN_RAM = Path("/dev/shm")


def pytest_configure(config: pytest.Config) -> None:
    import torch
    from hypothesis import settings

    settings.register_profile("any machine", deadline=None)  # a busy machine is no fault of an example
    settings.load_profile("any machine")
    config.addinivalue_line(
        "markers",
        "covering(strength): of many cases, those run that have each value (1) or each pair (2) of parameters;"
        " the others are slow",
    )
    torch.set_num_threads(1 if ON_CUDA_DOUBLE else 2)  # the same sums in the same order on every machine
    if ON_CUDA_DOUBLE:
        from double_violations import FailsOnViolations

        config.pluginmanager.register(FailsOnViolations())


def pytest_collection_finish() -> None:
    """Trainer collects garbage in every run: the half million objects of imported modules are none."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)  # before -m selects
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
    """For tests whose drive is a double, which a real one below only slows down. Without room in RAM, `tmp_path`."""
    if not os.access(FILES_IN_RAM, os.W_OK) or shutil.disk_usage(FILES_IN_RAM).free < 1 << 28:
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="lohan-tests-", dir=FILES_IN_RAM) as folder:
        yield Path(folder)
