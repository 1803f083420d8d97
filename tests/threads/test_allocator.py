from __future__ import annotations

import sys

import pytest
from python_runs import run_python

from hf_lohan.threads import keep_freed_memory

FAULTS_OF_A_STEP = """
import resource, sys, torch
from hf_lohan.threads import keep_freed_memory
if sys.argv[1] == "kept":
    assert keep_freed_memory()
def step():
    tensors = [torch.ones(4 << 20, dtype=torch.uint8) for _ in range(16)]
step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


MEMORY_BETWEEN = """
import sys
import torch
from hf_lohan.hardware import anonymous_memory_bytes
from hf_lohan.threads import keep_freed_memory, return_freed_memory
keep_freed_memory()
before = anonymous_memory_bytes()
large = [torch.ones(1 << 20, dtype=torch.uint8) for _ in range(128)]
kept = [large[index] for index in range(7, 128, 16)]
del large
held = anonymous_memory_bytes() - before
return_freed_memory()
print(held, anonymous_memory_bytes() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="glibc's mallopt")
def test_memory_that_a_step_frees_is_reused_without_page_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD"):
        monkeypatch.delenv(name, raising=False)

    def faults(how: str) -> int:
        return int(run_python("-c", FAULTS_OF_A_STEP, how).stdout)

    # 1,000 to 5,000 against 17,000 to 82,000, depending on the heap's address.
    assert faults("kept") < faults("stock") / 2


def test_the_users_settings_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "131072")
    assert not keep_freed_memory()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc_trim")
def test_freed_memory_between_other_memory_is_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD"):
        monkeypatch.delenv(name, raising=False)
    held, left = map(int, run_python("-c", MEMORY_BETWEEN).stdout.split())
    assert held > 100 << 20 and left < 20 << 20, (held, left)
