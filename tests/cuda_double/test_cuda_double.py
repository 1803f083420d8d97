"""The double finds planted faults and reports none in correct programs. Each program runs in its own process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

NEEDED = "needs the CUDA double: bash scripts/development/cuda_double.sh"
cuda_double = pytest.importorskip("cuda_double", reason=NEEDED)
if not hasattr(cuda_double, "summarize"):  # imported the folder of this name
    pytest.skip(NEEDED, allow_module_level=True)

FINDS_RACES = {"CUDA_DOUBLE_RACES": "1", "CUDA_DOUBLE_POISON": "1"}
RUNS_LATE = {**FINDS_RACES, "CUDA_DOUBLE_ASYNC": "1", "CUDA_DOUBLE_COPY_DELAY_US": "100000"}


# A thread of autograd that asks for the interpreter while Python ends aborts the process, whatever the device is
# (18 of 240 runs of five lines of torch). So a program ends without the interpreter's end.
END = """
import atexit, os, sys
atexit._run_exitfuncs()
sys.stdout.flush()
os._exit(0)
"""


class Program:
    """Runs Python code on a device with the settings of environment variables."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def run(self, code: str, **device: str) -> tuple[str, str]:
        """Return the output and the report of violations, "" for none."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("CUDA_DOUBLE_")}
        report = self._folder / "report"
        done = subprocess.run(
            [sys.executable, "-c", f"import cuda_double, torch\ntorch.set_num_threads(1)\n{code}\n{END}"],
            env={**inherited, **device, "CUDA_DOUBLE_REPORT": str(report)},
            cwd=self._folder,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        text, is_fine = cuda_double.summarize(report)
        assert "in 1 processes" in text
        assert is_fine is ("VIOLATION" not in done.stderr)
        return done.stdout, "" if is_fine else text


@pytest.fixture
def program(tmp_path: Path) -> Program:
    return Program(tmp_path)


COPY_AND_USE = """
device, host, side = torch.zeros(1 << 16, device="cuda"), torch.ones(1 << 16).pin_memory(), torch.cuda.Stream()
device + 1  # warms up: the first call of an operation takes longer than a late copy
torch.cuda.synchronize()
with torch.cuda.stream(side):
    device.copy_(host, non_blocking=True)
{wait}
used = device + 1
torch.cuda.synchronize()
print(used.sum().item())
"""
WAIT = "torch.cuda.current_stream().wait_stream(side)"


@pytest.mark.parametrize("device", [FINDS_RACES, RUNS_LATE], ids=["at_once", "late"])
def test_the_right_order_is_no_race(program: Program, device: dict[str, str]) -> None:
    output, wrong = program.run(COPY_AND_USE.format(wait=WAIT), **device)
    assert float(output) == 2 << 16
    assert not wrong


def test_a_missing_wait_is_a_race_though_the_numbers_are_right(program: Program) -> None:
    output, wrong = program.run(COPY_AND_USE.format(wait=""), **FINDS_RACES)
    assert float(output) == 2 << 16  # the copy was done at once
    assert 'race: "aten::add.Tensor" on stream 0 reads what "copy h2d" on stream 1 wrote' in wrong


def test_a_missing_wait_gives_wrong_numbers_if_copies_are_late(program: Program) -> None:
    output, wrong = program.run(COPY_AND_USE.format(wait=""), **RUNS_LATE, CUDA_DOUBLE_SEED="3")
    assert float(output) == 1 << 16
    assert "race" in wrong


FREE_WHILE_USED = """
freed, side = torch.zeros(1 << 20, device="cuda"), torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    used = freed * 2
{keep}
del freed
other = torch.ones(1 << 20, device="cuda")
torch.cuda.synchronize()
"""


def test_freeing_memory_while_a_stream_uses_it_is_a_race(program: Program) -> None:
    _, wrong = program.run(FREE_WHILE_USED.format(keep=""), **FINDS_RACES)
    assert 'race: "poison" on stream 0 writes what "aten::mul.Tensor" on stream 1 reads' in wrong


def test_freeing_memory_recorded_for_the_stream_is_no_race(program: Program) -> None:
    _, wrong = program.run(FREE_WHILE_USED.format(keep="freed.record_stream(side)"), **FINDS_RACES)
    assert not wrong


def test_a_read_of_freed_memory_is_reported(program: Program) -> None:
    code = """
torch.zeros(1 << 18, device="cuda")  # freed at once
again = torch.empty(1 << 18, device="cuda")
print((again * 1).isnan().all().item())
"""
    output, wrong = program.run(code, **FINDS_RACES)
    assert output.strip() == "True"
    assert 'poison read: "aten::mul.Tensor"' in wrong


def test_unregistering_pinned_memory_during_a_copy_is_reported(program: Program) -> None:
    code = """
import mmap
host = torch.frombuffer(mmap.mmap(-1, 1 << 20), dtype=torch.uint8)
device = torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
runtime = torch.cuda.cudart()
runtime.cudaHostRegister(host.data_ptr(), host.numel(), 0)
device.copy_(host, non_blocking=True)
runtime.cudaHostUnregister(host.data_ptr())
torch.cuda.synchronize()
"""
    _, wrong = program.run(code, **RUNS_LATE)
    assert 'cudaHostUnregister while "copy h2d" uses the memory' in wrong


def test_callers_that_block_the_host_are_counted(program: Program) -> None:
    """Only `.item()` waits here."""
    code = """
numbers = torch.ones(1000, device="cuda")
def careless(): return numbers.sum().item()
def careful(): return numbers.sum()
with cuda_double.Callers("sync:", inside="<string>", depth=1) as callers:
    careful()
assert not callers.found, callers
with cuda_double.Callers("sync:", inside="<string>", depth=1) as callers:
    careless(), careful(), careless()
print(callers)
cuda_double.reset()
careless()
print(cuda_double.counts()["blocking: cudaStreamSynchronize"])
"""
    output, wrong = program.run(code, CUDA_DOUBLE_ASYNC="1")
    row, count = output.splitlines()
    assert row.split()[0] == "2"
    assert "sync: cudaStreamSynchronize" in row
    assert row.endswith("<string>:5 careless")
    assert count == "1"
    assert not wrong


def test_a_device_of_24_gib_and_its_limits(program: Program) -> None:
    code = """
def is_refused(num_bytes, **options):
    try: torch.empty(num_bytes, dtype=torch.uint8, **options)
    except torch.OutOfMemoryError: return True
    return False
half = torch.empty(12 << 30, dtype=torch.uint8, device="cuda")  # only touched pages are resident
print(torch.cuda.get_device_properties(0).total_memory >> 30, torch.cuda.mem_get_info()[0] >> 30)
print(is_refused(12 << 30, device="cuda"), is_refused(11 << 30, device="cuda"))
with cuda_double.device_memory(13 << 30):
    torch.cuda.empty_cache()
    print(is_refused(1 << 30, device="cuda"))
"""
    output, _ = program.run(code)
    assert output.split() == ["24", "11", "True", "False", "True"]


@pytest.mark.parametrize("late", ["0", "1"], ids=["at_once", "late"])
def test_refused_pinning(program: Program, late: str) -> None:
    """As in CUDA, the next launch reports the error unless the error is cleared."""
    code = """
import mmap
memory = torch.frombuffer(mmap.mmap(-1, 8 << 20), dtype=torch.uint8)
kept = torch.ones(1, device="cuda")  # launches without device memory
print(int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)), memory.is_pinned())
try: kept.add_(1)
except RuntimeError as error: print("out of memory" in str(error))
print(torch.ones(1, device="cuda").item())
with cuda_double.pin_limit(16 << 20):
    print(int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)), memory.is_pinned())
"""
    output, _ = program.run(code, CUDA_DOUBLE_PIN_LIMIT="1M", CUDA_DOUBLE_ASYNC=late)
    assert output.split() == ["2", "False", "True", "1.0", "0", "True"]


@pytest.mark.parametrize("allocator", ["", "expandable_segments:True"], ids=["segments", "expandable"])
def test_the_nth_allocation_fails_once(program: Program, allocator: str) -> None:
    code = """
def attempt():
    try: return bool(torch.ones(30 << 18, device="cuda").numel())
    except torch.OutOfMemoryError: return False
torch.cuda.init()
cuda_double.fail_allocation(2)
kept = torch.ones(8, device="cuda")
print(attempt(), attempt())
"""
    output, wrong = program.run(code, PYTORCH_CUDA_ALLOC_CONF=allocator)
    assert output.split() == ["False", "True"]
    assert not wrong
