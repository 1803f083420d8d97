"""The optimizer with the interface that Trainer, schedulers and accelerate use."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from hf_lohan.optim import AdamWGroup, JointOptimizer, OffloadAdamW


class Target:
    """An engine that records the optimizer's calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.optimizer: OffloadAdamW | None = None
        self.learning_rates: list[float] = []
        self.step_was_skipped = False

    def bind_optimizer(self, optimizer: OffloadAdamW) -> None:
        self.optimizer = optimizer

    def step(self) -> None:
        self.calls.append("step")
        self.learning_rates.append(AdamWGroup.from_group(self.optimizer.param_groups[0]).lr)

    def drop_gradients(self, *, to_none: bool = True) -> None:
        self.calls.append("drop" if to_none else "set to zeros")

    def rounding_seed(self) -> int | None:
        return None

    def check_groups(self) -> None:
        self.calls.append("check")


@pytest.fixture
def target() -> Target:
    return Target()


def parameters(count: int = 3) -> list[nn.Parameter]:
    return [nn.Parameter(torch.full((2,), float(number))) for number in range(count)]


def two_groups(target: Target) -> tuple[OffloadAdamW, list[nn.Parameter]]:
    params = parameters()
    groups = [{"params": params[:2], "weight_decay": 0.1}, {"params": params[2:], "weight_decay": 0.0, "lr": 0.5}]
    return OffloadAdamW(groups, lr=0.25, betas=(0.8, 0.9), eps=1e-5, engine=target), params


def test_hyperparameters_are_read_at_each_step(target: Target) -> None:
    optimizer, _ = two_groups(target)
    assert target.optimizer is optimizer
    first, second = optimizer.param_groups
    assert AdamWGroup.from_group(first) == AdamWGroup(0.25, 0.8, 0.9, 1e-5, 0.1)
    assert AdamWGroup.from_group(second) == AdamWGroup(0.5, 0.8, 0.9, 1e-5, 0.0)
    first["lr"] = torch.tensor(0.125)  # some schedulers write tensors
    assert AdamWGroup.from_group(first).lr == 0.125 and isinstance(AdamWGroup.from_group(first).lr, float)


def test_loading_a_state_keeps_the_group_objects(target: Target) -> None:
    optimizer, params = two_groups(target)
    groups, first, lists = optimizer.param_groups, optimizer.param_groups[0], optimizer.param_groups[0]["params"]
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["lr"] = 0.75
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups is groups
    assert optimizer.param_groups[0] is first and first["params"] is lists
    assert first["params"][0] is params[0]
    assert AdamWGroup.from_group(optimizer.param_groups[0]).lr == 0.75


def test_a_state_of_other_groups_is_refused(target: Target) -> None:
    optimizer, _ = two_groups(target)
    one_group = OffloadAdamW(parameters(), engine=Target()).state_dict()
    with pytest.raises(ValueError, match="1 param groups, this optimizer has 2"):
        optimizer.load_state_dict(one_group)
    assert len(optimizer.param_groups) == 2


def test_the_state_is_empty_and_pickles(target: Target) -> None:
    optimizer, _ = two_groups(target)
    optimizer.step()
    saved = pickle.loads(pickle.dumps(optimizer.state_dict()))
    assert saved["state"] == {}
    assert pickle.loads(pickle.dumps(optimizer.state)) == {}
    assert [group["weight_decay"] for group in saved["param_groups"]] == [0.1, 0.0]


def test_a_read_of_a_state_names_the_store(target: Target) -> None:
    one, several = two_groups(target)[0], JointOptimizer([[{"params": parameters(), "lr": 0.1}]], engine=target)
    for optimizer in (one, several, several.parts[0]):
        parameter = optimizer.param_groups[0]["params"][0]
        for kind in ("exp_avg", "exp_avg_sq", "step"):
            with pytest.raises(ValueError, match=rf"'{kind}' of a parameter is in the store.*flat\(name, '{kind}'"):
                optimizer.state[parameter][kind]
            with pytest.raises(ValueError, match=r"the states of an offloaded optimizer are in the store"):
                optimizer.state[parameter].get(kind)
        for use in (len, list, lambda states: "lr" in states, lambda states: states.clear()):
            for states in (optimizer.state, optimizer.state[parameter]):
                with pytest.raises(ValueError, match=r"are in the store and not in optimizer.state.*has no effect"):
                    use(states)
        with pytest.raises(ValueError, match=r"are in the store and not in optimizer.state.*has no effect"):
            optimizer.state = {}
        assert optimizer.state_dict()["state"] == {}


def test_zero_grad_forgets_gradients_here_and_in_the_engine(target: Target) -> None:
    optimizer, params = two_groups(target)
    for parameter in params:
        parameter.grad = torch.ones(2)
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in params)
    optimizer.zero_grad(set_to_none=False)
    assert target.calls == ["drop", "set to zeros"]


@pytest.mark.parametrize(("ways", "call"), [((True, True), "drop"), ((True, False), "set to zeros")])
def test_parts_set_gradients_to_zeros_if_one_does(ways: tuple[bool, bool], call: str, target: Target) -> None:
    settings = {"lr": 0.5, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0}
    groups = [[{"params": [parameter], **settings}] for parameter in parameters(2)]
    for part, to_none in zip(JointOptimizer(groups, engine=target).parts, ways, strict=True):
        part.zero_grad(set_to_none=to_none)
    assert target.calls == [call]


def test_a_closure_runs_before_the_step_with_gradients_on(target: Target) -> None:
    optimizer, params = two_groups(target)

    def closure() -> torch.Tensor:
        target.calls.append(f"closure {torch.is_grad_enabled()}")
        return params[1].sum()

    with torch.no_grad():
        loss = optimizer.step(closure)
    assert float(loss) == 2.0
    assert target.calls == ["closure True", "step"]
    assert optimizer.step() is None


def test_joint_optimizers_use_the_hyperparameters_of_their_own_step(target: Target) -> None:
    first, second = parameters(2)
    lr = torch.tensor(0.5)  # schedulers write to such a tensor
    settings = {"betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0}
    groups = [[{"params": [p], "lr": own, **settings}] for p, own in ((first, lr), (second, 0.25))]
    one, other = JointOptimizer(groups, engine=target).parts
    one.step()
    lr.fill_(0.125)
    other.step()
    assert target.learning_rates == [0.5]
    assert one.param_groups[0]["lr"] is lr and float(lr) == 0.125


def test_a_joint_optimizer_does_not_report_an_earlier_step(target: Target) -> None:
    settings = {"lr": 0.5, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0}
    groups = [[{"params": [parameter], **settings}] for parameter in parameters(2)]
    one, other = JointOptimizer(groups, engine=target).parts
    target.step_was_skipped = True
    one.step()
    assert not one.step_was_skipped
    other.step()
    assert one.step_was_skipped and other.step_was_skipped


def test_dropping_gradients_after_a_part_has_stepped_is_refused(target: Target) -> None:
    settings = {"lr": 0.5, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0}
    groups = [[{"params": [parameter], **settings}] for parameter in parameters(2)]
    one, other = JointOptimizer(groups, engine=target).parts
    one.step()
    one.zero_grad()
    with pytest.raises(RuntimeError, match="take their steps together"):
        other.zero_grad()
    assert target.calls == ["drop"]
    one.step()
    other.step()
    assert target.calls == ["drop", "step"]
