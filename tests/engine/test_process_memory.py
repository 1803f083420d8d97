"""What a process should take of RAM, and when holes in the heap are returned."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hf_lohan.engine import process_memory
from hf_lohan.engine.process_memory import ProcessMemory

MIB = 1 << 20
BESIDE_BYTES, RAM_BYTES, TENSORS_BYTES = 1000 * MIB, 100 * MIB, 400 * MIB
NEEDED_BYTES = BESIDE_BYTES + RAM_BYTES + TENSORS_BYTES
LITTLE_BYTES = NEEDED_BYTES // 40


class Machine:
    """A process whose holes disappear when glibc returns its free memory."""

    def __init__(self) -> None:
        self.needed_bytes = BESIDE_BYTES
        self.holes_bytes = 0
        self.free_bytes = 10_000 * MIB
        self.num_returned = 0

    def return_holes(self) -> None:
        self.num_returned += 1
        self.holes_bytes = 0


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()
    monkeypatch.setattr(process_memory, "anonymous_memory_bytes", lambda: machine.needed_bytes + machine.holes_bytes)
    monkeypatch.setattr(process_memory, "available_host_memory_bytes", lambda: machine.free_bytes)
    monkeypatch.setattr(process_memory, "return_freed_memory", machine.return_holes)
    return machine


@pytest.fixture
def begin(machine: Machine) -> Callable[..., ProcessMemory]:
    def begin(tensors_bytes: int = TENSORS_BYTES, shared_bytes: int = 0) -> ProcessMemory:
        """Return the memory of a process that follows a plan, and has reached the peak of its first step."""
        machine.holes_bytes = 200 * MIB  # of the load
        memory = ProcessMemory(activation_ram_bytes=0, num_local=1)
        memory.follow_plan(activation_ram_bytes=RAM_BYTES, tensors_bytes=tensors_bytes, shared_bytes=shared_bytes)
        machine.needed_bytes, machine.num_returned = NEEDED_BYTES, 0
        return memory

    return begin


def test_a_process_without_holes_takes_what_the_plan_counts(begin: Callable[..., ProcessMemory]) -> None:
    memory = begin(shared_bytes=5 * MIB)
    memory.return_holes()
    memory.note_peak(NEEDED_BYTES - MIB)
    assert memory.expected_bytes == NEEDED_BYTES + LITTLE_BYTES // 2 + 5 * MIB
    memory.note_peak(NEEDED_BYTES + MIB)  # within a block
    assert memory.expected_bytes == NEEDED_BYTES + LITTLE_BYTES // 2 + 6 * MIB


def test_holes_of_the_first_step_count_and_later_holes_are_returned(
    begin: Callable[..., ProcessMemory], machine: Machine
) -> None:
    memory = begin()
    for holes_bytes in (50 * MIB, 250 * MIB, 120 * MIB):
        machine.holes_bytes = holes_bytes
        memory.return_holes()
    assert memory.expected_bytes == NEEDED_BYTES + LITTLE_BYTES // 2 + 250 * MIB
    memory.end_step()
    for holes_bytes, num_returned in ((250 * MIB + LITTLE_BYTES, 0), (251 * MIB + LITTLE_BYTES, 1), (250 * MIB, 1)):
        machine.holes_bytes = holes_bytes
        memory.return_holes()
        assert machine.num_returned == num_returned, holes_bytes
    assert memory.expected_bytes == NEEDED_BYTES + LITTLE_BYTES // 2 + 250 * MIB, "what was said does not change"


@pytest.mark.parametrize(("free_bytes", "most_bytes"), [(10_000 * MIB, 400 * MIB), (700 * MIB, 100 * MIB), (0, 0)])
def test_holes_of_the_first_step_are_at_most_the_tensors_and_half_of_the_free_ram(
    free_bytes: int, most_bytes: int, begin: Callable[..., ProcessMemory], machine: Machine
) -> None:
    machine.free_bytes = free_bytes
    memory = begin()
    machine.holes_bytes = most_bytes
    memory.return_holes()
    assert machine.num_returned == 0
    machine.holes_bytes += 1
    memory.return_holes()
    assert machine.num_returned == 1


def test_memory_that_holes_do_not_explain_is_returned_once(
    begin: Callable[..., ProcessMemory], machine: Machine
) -> None:
    memory = begin()
    memory.return_holes()
    memory.end_step()
    machine.needed_bytes += 1000 * MIB  # the script loads something
    for _ in range(3):
        memory.return_holes()
    assert machine.num_returned == 1


def test_small_tensors_leave_no_holes_that_matter(begin: Callable[..., ProcessMemory], machine: Machine) -> None:
    memory = begin(tensors_bytes=MIB)
    machine.holes_bytes = 1000 * MIB
    memory.return_holes()
    assert machine.num_returned == 0
