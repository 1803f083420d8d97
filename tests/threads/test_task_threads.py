"""Threads for tasks without futures."""

from __future__ import annotations

import gc
import threading

from hf_lohan.threads import TaskThreads


def test_close_runs_all_submitted_tasks() -> None:
    done = list[int]()
    threads = TaskThreads(3, "tasks")
    for number in range(200):
        threads.submit(lambda number=number: done.append(number))  # type: ignore[misc]
    threads.close()
    threads.close()
    assert sorted(done) == list(range(200)) and not named("tasks")


def test_tasks_run_concurrently_on_threads_that_have_called_begin() -> None:
    begun, meeting, names = list[str](), threading.Barrier(2), list[str]()

    def task() -> None:
        name = threading.current_thread().name
        assert name in begun
        names.append(name)
        meeting.wait(60)

    threads = TaskThreads(2, "pair", begin=lambda: begun.append(threading.current_thread().name))
    for _ in range(2):
        threads.submit(task)
    threads.close()
    assert sorted(names) == ["pair_0", "pair_1"]


def test_the_threads_end_with_the_object() -> None:
    threads = TaskThreads(2, "forgotten")
    running = named("forgotten")
    assert len(running) == 2
    del threads
    gc.collect()
    for thread in running:
        thread.join(60)
    assert not named("forgotten")


def test_a_finished_task_is_freed() -> None:
    threads, is_freed = TaskThreads(1, "tidy"), threading.Event()

    class Task:
        def __call__(self) -> None:
            pass

        def __del__(self) -> None:
            is_freed.set()

    threads.submit(Task())
    assert is_freed.wait(60)
    threads.close()


def named(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(name)]
