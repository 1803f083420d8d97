"""A closed store has the last committed step, whatever was in progress."""

from __future__ import annotations

import copy
import errno
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from clip_norms import CLIPS, LETS_THROUGH, NORMS
from clip_norms import train as train_clipping
from engines import TwinsFactory
from storage_doubles import FaultyBackend, SlowBackend

from hf_lohan.device import BufferPool, CpuDevice
from hf_lohan.engine import Journal, ParameterAccess
from hf_lohan.files import CapacityError, IoEngine, StorageError, StorePath, TornStoreError
from hf_lohan.store import Store
from hf_lohan.testing.models import tiny_batch, tiny_model

NEVER = 1 << 60
MODES: dict[str, dict[str, Any]] = {
    "defer": {"_clip": "defer"},
    "speculate": {"_clip": "speculate"},
    "in_backward": {"hold_gradients": False},
}
MODE = pytest.mark.parametrize("mode", MODES)


@contextmanager
def reopened(twins: Any, folder: Path) -> Iterator[Store]:
    """Open the store as another process would."""
    twins.engine.close()
    io = IoEngine(2, 1 << 20, 1 << 22)
    try:
        with Store.open([StorePath(str(folder / "store"))], model=twins.engine.layout.identity, engine=io) as store:
            yield store
    finally:
        io.close()


def state_of(twins: Any) -> dict[str, Any]:
    """Return the stock twin's weights, moments and step counts by parameter."""
    states = {}
    for name, parameter in twins.stock.named_parameters():
        state = twins.stock_optimizer.state.get(parameter, {})
        states[name] = {
            "param": parameter.detach().clone().flatten(),
            "step": int(state.get("step", 0)),
            **{kind: state[kind].clone().flatten() for kind in ("exp_avg", "exp_avg_sq") if state},
        }
    return states


def assert_holds(store: Store, twins: Any, state: dict[str, Any]) -> None:
    layout = twins.engine.layout
    pool = BufferPool(CpuDevice(), name="reopened", num_buffers=2, buffer_bytes=1 << 18)
    access = ParameterAccess(store, layout.blocks, pool)
    for name, kinds in state.items():
        assert store.committed.facts["num_updates"][name] == kinds["step"], name
        for kind in ("param", "exp_avg", "exp_avg_sq"):
            if kind in kinds:
                assert torch.equal(access.read_flat(name, kind), kinds[kind]), (name, kind)


def train(twins: Any, num_steps: int, *, first_seed: int = 100) -> None:
    twins.train(num_steps, first_seed=first_seed, max_norm=CLIPS if twins.engine.layout.holds_gradients else 0.0)


@pytest.mark.covering(1)
@MODE
@pytest.mark.parametrize("num_steps", [1, 2, 5])
def test_a_reopened_store_has_the_last_step(
    num_steps: int, mode: str, make_twins: TwinsFactory, tmp_path: Path
) -> None:
    """The engine is closed while the last updates and their commit run."""
    twins = make_twins("llama", backend=SlowBackend(2e-4), **MODES[mode])
    train(twins, num_steps)
    with reopened(twins, tmp_path) as store:
        assert store.committed.number == num_steps + 1  # the first commit has the loaded weights
        assert_holds(store, twins, state_of(twins))


def test_right_and_wrong_guesses_are_committed(make_twins: TwinsFactory, tmp_path: Path) -> None:
    twins = make_twins("opt", _clip="speculate", cpu_memory="2MiB")
    train_clipping(twins, NORMS["some_steps_clip"])
    with reopened(twins, tmp_path) as store:
        assert_holds(store, twins, state_of(twins))


@pytest.mark.parametrize("mode", ["speculate", "in_backward"])
def test_a_step_in_progress_is_not_committed(mode: str, make_twins: TwinsFactory, tmp_path: Path) -> None:
    twins = make_twins("llama", **MODES[mode])
    train(twins, 2)
    state = state_of(twins)
    twins.model(**tiny_batch(seed=5)).loss.backward()
    with reopened(twins, tmp_path) as store:
        assert_holds(store, twins, state)


def test_a_commit_between_backward_and_step_has_no_guess(make_twins: TwinsFactory, tmp_path: Path) -> None:
    twins = make_twins("llama", _clip="speculate")
    train(twins, 2)
    state = state_of(twins)
    twins.backward(5)
    twins.engine.commits.request()
    twins.engine.wait_for_updates()
    assert twins.engine.commits.num_commits == 4
    twins.clip(CLIPS)
    twins.engine.commits.leave_to_journal()
    twins.step()
    twins.assert_equal()
    with reopened(twins, tmp_path) as store:
        assert_holds(store, twins, state)


def test_a_commit_of_half_a_step_is_refused(make_twins: TwinsFactory) -> None:
    twins = make_twins("llama", hold_gradients=False)
    twins.train(1)
    twins.backward(5)
    with pytest.raises(RuntimeError, match=r"between two steps; finish it with step\(\)"):
        twins.engine.commits.request()
    twins.step()
    twins.engine.commits.request()
    twins.assert_equal()


@MODE
def test_a_store_with_one_version_is_whole_when_closed(mode: str, make_twins: TwinsFactory, tmp_path: Path) -> None:
    twins = make_twins("llama", durability="checkpoint", **MODES[mode])
    train(twins, 3)
    with reopened(twins, tmp_path) as store:
        assert_holds(store, twins, state_of(twins))


def test_a_store_with_one_version_is_torn_when_closed_in_a_step(make_twins: TwinsFactory, tmp_path: Path) -> None:
    twins = make_twins("llama", durability="checkpoint", hold_gradients=False, _resident_records="none")
    train(twins, 2)
    twins.model(**tiny_batch(seed=5)).loss.backward()
    with pytest.raises(TornStoreError), reopened(twins, tmp_path):
        pass


def test_a_store_with_one_version_in_ram_is_not_torn_when_closed_in_a_step(
    make_twins: TwinsFactory, tmp_path: Path
) -> None:
    """The step wrote only to RAM."""
    twins = make_twins("llama", durability="checkpoint", hold_gradients=False)
    train(twins, 2)
    twins.model(**tiny_batch(seed=5)).loss.backward()
    with reopened(twins, tmp_path) as store:
        assert store.committed is not None and not store.committed.is_torn


@MODE
def test_a_reopened_store_has_parameters_that_skipped_steps(
    mode: str, make_twins: TwinsFactory, tmp_path: Path
) -> None:
    """Whole layers and single parameters skip steps, so the home of the last version differs between granules."""
    twins = make_twins(model_factory=partial(tiny_model, "opt", layerdrop=0.6), **MODES[mode])
    single = "model.decoder.layers.1.fc1.weight"
    for step in range(8):
        for model in twins.models:
            model.get_parameter(single).requires_grad_(step % 3 == 0)
        twins.backward(step, rng_seed=step)
        if twins.engine.layout.holds_gradients:
            twins.clip(CLIPS if step % 2 else LETS_THROUGH)
        twins.step()
    state = state_of(twins)
    assert len({kinds["step"] for kinds in state.values()}) > 2
    with reopened(twins, tmp_path) as store:
        assert_holds(store, twins, state)


# Going back.


@pytest.mark.covering(1)
@MODE
@pytest.mark.parametrize("is_in_step", [False, True], ids=["between_steps", "between_backward_and_step"])
def test_going_back_restores_the_last_commit(mode: str, is_in_step: bool, make_twins: TwinsFactory) -> None:
    twins = make_twins("llama", backend=SlowBackend(2e-4), **MODES[mode])
    twins.engine.commits.leave_to_journal()
    train(twins, 2)
    twins.engine.commits.request(Journal(facts={"global_step": 2}, files={"rng": b"seed"}))
    weights, optimizer = copy.deepcopy(twins.stock.state_dict()), copy.deepcopy(twins.stock_optimizer.state_dict())
    train(twins, 2, first_seed=200)
    if is_in_step:
        twins.model(**tiny_batch(seed=5)).loss.backward()
    commit = twins.engine.go_back_to_commit()
    assert (commit.facts["global_step"], commit.journal) == (2, {"rng": b"seed"})
    twins.stock.load_state_dict(weights)
    twins.stock_optimizer.load_state_dict(optimizer)
    twins.assert_equal()
    train(twins, 2, first_seed=300)
    twins.assert_equal()


def test_going_back_before_the_first_commit_is_refused(make_twins: TwinsFactory) -> None:
    twins = make_twins("llama")
    with pytest.raises(ValueError, match="nothing is committed"):
        twins.engine.go_back_to_commit()


def test_several_steps_per_commit_are_not_speculated(make_twins: TwinsFactory, tmp_path: Path) -> None:
    """A guess can be undone only if the previous step was committed."""
    twins = make_twins("llama", _clip="speculate")
    twins.engine.commits.leave_to_journal()
    for first_seed in (100, 200):
        train(twins, 2, first_seed=first_seed)
        twins.engine.commits.request()
        state = state_of(twins)
    assert twins.engine.clip_history.num_speculated == 1  # the step after the first commit
    train(twins, 1, first_seed=300)
    twins.assert_equal()
    with reopened(twins, tmp_path) as store:
        assert_holds(store, twins, state)


# Commits that fail.


@pytest.mark.covering(1)
@MODE
@pytest.mark.parametrize("cause", ["full_disk", "failing_drive", "no_commit_file"])
def test_a_failed_commit_raises_and_leaves_the_last_one(
    cause: str, mode: str, make_twins: TwinsFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error_code = errno.EIO if cause == "failing_drive" else errno.ENOSPC
    backend = FaultyBackend("sync", NEVER, error_code, sticky=True)
    twins = make_twins("llama", backend=backend, **MODES[mode])
    train(twins, 2)
    twins.engine.wait_for_updates()
    state = state_of(twins)

    def refuse(*_: Any, **__: Any) -> None:
        raise StorageError("cannot write", path="the commit", errno=errno.ENOSPC, advice="free space")

    if cause == "no_commit_file":
        monkeypatch.setattr("hf_lohan.store.commits.write_commit", refuse)
    else:
        backend.fail_on = 1
    expected = CapacityError if cause == "full_disk" else StorageError
    with pytest.raises(expected):
        twins.model(**tiny_batch(seed=5)).loss.backward()
        twins.optimizer.step()
        twins.engine.wait_for_updates()
    for _ in range(2):
        with pytest.raises(expected):  # later steps raise again, because they could not be committed
            twins.model(**tiny_batch(seed=6)).loss.backward()
            twins.optimizer.step()
    monkeypatch.undo()
    backend.fail_on = NEVER
    with reopened(twins, tmp_path) as store:
        assert store.committed.number == 3
        assert_holds(store, twins, state)
