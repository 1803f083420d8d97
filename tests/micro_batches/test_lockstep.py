"""Functions that take turns: their order, their torch settings and their failures."""

from __future__ import annotations

import contextlib
import contextvars
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

from hf_lohan.micro_batches.lockstep import Lockstep, SequenceNumbers
from hf_lohan.threads import ThreadSettings


def lockstep_of(*functions: Callable[[Lockstep], Any]) -> Lockstep:
    lockstep: Lockstep
    bound = [lambda function=function: function(lockstep) for function in functions]
    lockstep = Lockstep(bound, [contextlib.nullcontext()] * len(functions))
    return lockstep


def walk(seen: list[tuple[int, int]], number: int, layers: range, lockstep: Lockstep) -> int:
    for layer in layers:
        seen.append((layer, number))
        lockstep.pass_on((layer + 1,))
    return number


def test_all_functions_pass_a_layer_before_the_next_in_reverse_order() -> None:
    seen: list[tuple[int, int]] = []
    lockstep = lockstep_of(*(partial(walk, seen, number, range(3)) for number in range(3)))
    assert lockstep.run() == [0, 1, 2]
    assert seen == [(layer, number) for layer in range(3) for number in (2, 1, 0)]


def test_a_function_at_an_earlier_layer_catches_up() -> None:
    seen: list[tuple[int, int]] = []
    lockstep_of(partial(walk, seen, 0, range(4)), partial(walk, seen, 1, range(2, 4))).run()
    assert seen == [(2, 1), (0, 0), (1, 0), (2, 0), (3, 1), (3, 0)]


def test_backward_undoes_all_layers_in_reverse_the_first_function_first() -> None:
    """The order is autograd's own, although each thread numbers its nodes separately."""
    undone: list[tuple[int, int]] = []
    weights = [torch.ones(3, requires_grad=True) for _ in range(3)]

    def forward(number: int, lockstep: Lockstep) -> torch.Tensor:
        hidden = torch.ones(3)
        for layer, weight in enumerate(weights):
            for _ in range(1 + 40 * number):  # graphs of unequal length
                hidden = torch.sin(hidden * weight)
            hidden.register_hook(lambda _gradient, layer=layer: undone.append((layer, number)))
            lockstep.pass_on((layer + 1,))
        return hidden.sum()

    torch.autograd.backward(lockstep_of(*(partial(forward, number) for number in range(3))).run())
    assert undone == [(layer, number) for layer in (2, 1, 0) for number in range(3)]


def test_sequence_numbers_continue_after_those_of_another_thread() -> None:
    numbers = SequenceNumbers()
    source = torch.ones((), requires_grad=True)
    found: list[int] = []

    def record(num_nodes: int) -> None:
        numbers.enter()
        last = source
        for _ in range(num_nodes):
            last = last * 2
        found.append(last.grad_fn._sequence_nr())
        numbers.leave()

    for num_nodes in (3, 700, 1):
        thread = threading.Thread(target=record, args=(num_nodes,))
        thread.start()
        thread.join()
    assert found == sorted(set(found)) and found[1] >= 702


class Broken(Exception):
    """The error that a function raises."""


def test_the_first_error_ends_all_functions_and_is_raised() -> None:
    seen: list[tuple[int, int]] = []

    def fail(lockstep: Lockstep) -> None:
        lockstep.pass_on((1,))
        raise Broken("on purpose")

    before = set(threading.enumerate())
    with pytest.raises(Broken, match="on purpose") as caught:
        lockstep_of(partial(walk, seen, 0, range(5)), fail, partial(walk, seen, 2, range(5))).run()
    assert "fail" in [entry.name for entry in caught.traceback]
    assert set(threading.enumerate()) <= before  # threads of other tests may end meanwhile
    assert max(layer for layer, _ in seen) == 1


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Enable Ctrl-C, which a shell disables for background processes."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_ends_all_functions() -> None:
    def wait(lockstep: Lockstep) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        for layer in range(1_000_000):
            lockstep.pass_on((layer,))

    before = set(threading.enumerate())
    with pytest.raises(KeyboardInterrupt):
        lockstep_of(wait, wait).run()
    assert set(threading.enumerate()) <= before  # threads of other tests may end meanwhile


@pytest.mark.usefixtures("interruptible")
def test_a_second_interrupt_leaves_no_running_thread() -> None:
    """Such a thread would continue to use the model."""
    main = threading.get_ident()
    has_come, has_returned = threading.Event(), threading.Event()
    ran_on: list[bool] = []

    def note(_number: int, _frame: object) -> None:
        has_come.set()
        raise KeyboardInterrupt

    def interrupt() -> None:
        has_come.clear()
        os.kill(os.getpid(), signal.SIGINT)
        assert has_come.wait(60)

    def is_joining() -> bool:
        return any(frame.f_code.co_name == "_join" for frame, _ in traceback.walk_stack(sys._current_frames()[main]))

    def run(lockstep: Lockstep) -> None:
        interrupt()
        while not is_joining():
            time.sleep(0.001)
        interrupt()
        ran_on.append(has_returned.wait(0.5))

    signal.signal(signal.SIGINT, note)
    with pytest.raises(KeyboardInterrupt):
        lockstep_of(run).run()
    has_returned.set()
    assert ran_on == [False]


def test_one_function_runs_alone() -> None:
    assert lockstep_of(lambda lockstep: walk([], 7, range(3), lockstep)).run() == [7]


def test_thread_settings_of_torch_are_passed_on() -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")

    def look() -> tuple[Any, ...]:
        product = torch.ones(2, 2) @ torch.ones(2, 2)
        return torch.is_grad_enabled(), product.dtype, torch.ones(1).device.type, variable.get()

    variable.set("set")
    with torch.no_grad(), torch.device("meta"), torch.autocast("cpu", dtype=torch.bfloat16):
        settings = ThreadSettings("cpu")
        outside = look()
        inside = Lockstep([look, look], [settings.applied(), settings.applied()]).run()
    assert inside == [outside, outside]
    assert Lockstep([look], [ThreadSettings("cpu").applied()]).run() == [(True, torch.float32, "cpu", "set")]
