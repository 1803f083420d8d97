"""Number of threads of torch's kernels, in the main thread and in worker threads."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator

import pytest
import torch

from hf_lohan.threads import (
    KernelThreads,
    TaskThreads,
    ThreadSettings,
    set_compute_threads,
    start_thread,
    usable_cpus,
    use_all_cores,
)


@pytest.fixture(autouse=True)
def restore_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def threads_of_a_new_thread() -> int:
    numbers = list[int]()
    thread = threading.Thread(target=lambda: numbers.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    return numbers[0]


def test_usable_cpus_are_those_of_the_affinity_mask() -> None:
    assert usable_cpus() == len(os.sched_getaffinity(0))


def test_a_changed_number_of_threads_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    with caplog.at_level(logging.INFO):
        set_compute_threads(2)
    assert torch.get_num_threads() == 2
    assert "2 threads instead of 1 (OMP_NUM_THREADS=1)" in caplog.text


def test_an_unchanged_number_of_threads_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    torch.set_num_threads(2)
    with caplog.at_level(logging.INFO):
        set_compute_threads(2)
    assert not caplog.records


def test_kernel_threads_do_not_change_the_setting_of_other_threads() -> None:
    torch.set_num_threads(3)
    threads = KernelThreads(2)
    meeting = threading.Barrier(2)

    def threads_of(part: str) -> tuple[str, int]:
        meeting.wait(60)  # both threads meet here
        return part, torch.get_num_threads()

    assert threads.map(threads_of, "abcd") == [("a", 1), ("b", 1), ("c", 1), ("d", 1)] and torch.get_num_threads() == 3
    assert threads_of_a_new_thread() == 3


def test_the_first_error_is_raised_once_all_parts_are_done() -> None:
    done = list[int]()

    def work(part: int) -> None:
        if part in (1, 2):
            raise ValueError(f"part {part}")
        done.append(part)

    with pytest.raises(ValueError, match="part 1"):
        KernelThreads(2).map(work, range(6))
    assert sorted(done) == [0, 3, 4, 5]


@pytest.mark.parametrize("beside_kernels", [True, False])
def test_a_thread_beside_kernels_uses_one_core_until_it_asks_for_all(beside_kernels: bool) -> None:
    torch.set_num_threads(3)
    seen = list[int]()

    def run() -> None:
        for _ in range(2):
            seen.append(torch.get_num_threads())
            use_all_cores()
            use_all_cores()

    start_thread(run, "beside", beside_kernels=beside_kernels).join()
    assert seen == [1 if beside_kernels else 3, 3]


def test_a_thread_beside_kernels_does_not_change_the_setting_of_other_threads() -> None:
    torch.set_num_threads(3)
    start_thread(lambda: None, "beside", beside_kernels=True).join()
    assert threads_of_a_new_thread() == torch.get_num_threads() == 3


def test_a_thread_beside_kernels_may_start_others() -> None:
    torch.set_num_threads(3)
    seen = list[int]()

    def run() -> None:
        KernelThreads(2).close()
        start_thread(lambda: None, "beside a thread", beside_kernels=True).join()
        seen.append(torch.get_num_threads())

    start_thread(run, "beside", beside_kernels=True).join()
    assert seen == [1] and threads_of_a_new_thread() == torch.get_num_threads() == 3


def test_no_switch_of_threads_changes_a_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """After each switch, a running thread and a new thread compute a sum that depends on the number of threads."""
    torch.set_num_threads(3)
    values = torch.logspace(-3, 3, 300_000).sin_()
    expected, settings = values.sum(), ThreadSettings("cpu")
    sums, numbers = list[torch.Tensor](), list[int]()
    running, set_num_threads = TaskThreads(1, "computes"), torch.set_num_threads
    has_computed = threading.Event()
    running.submit(lambda: sums.append(values.sum()))
    running.submit(has_computed.set)
    assert has_computed.wait(60)  # a thread takes its number of threads at its first kernel

    def compute() -> None:
        numbers.append(torch.get_num_threads())  # a new thread has the number of the switch
        with settings.applied():
            sums.append(values.sum())

    def switch(num_threads: int) -> None:
        set_num_threads(num_threads)
        if num_threads != 3:
            done = threading.Event()
            running.submit(lambda: sums.append(values.sum()))
            running.submit(done.set)
            thread = threading.Thread(target=compute)
            thread.start()
            thread.join()
            assert done.wait(60)

    monkeypatch.setattr(torch, "set_num_threads", switch)
    KernelThreads(1).close()
    start_thread(use_all_cores, "beside", beside_kernels=True).join()
    running.close()
    assert numbers == [1, 1] and len(sums) == 5
    assert all(torch.equal(value, expected) for value in sums)


def test_all_cores_is_the_current_setting_of_torch() -> None:
    torch.set_num_threads(2)
    has_changed, seen = threading.Event(), list[int]()

    def run() -> None:
        assert has_changed.wait(60)
        use_all_cores()
        seen.append(torch.get_num_threads())

    thread = start_thread(run, "beside", beside_kernels=True)
    torch.set_num_threads(3)
    has_changed.set()
    thread.join()
    assert seen == [3]
