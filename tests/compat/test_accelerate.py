"""The private API of accelerate that we use. A failure names what an upgrade has changed."""

from __future__ import annotations

import accelerate
import torch
from accelerate.commands import launch
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn

from hf_lohan.compat import accelerate_private as private


def test_prepared_models_are_listed_and_marked_ones_are_skipped() -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    model = nn.Linear(2, 2)
    forward = model.forward
    assert not private.is_prepared(model)
    private.mark_prepared(model)
    assert accelerator.prepare_model(model) is model and model.forward == forward
    assert private.is_prepared(model), "Accelerator no longer reads _is_accelerate_prepared"
    assert private.prepared_models(accelerator) == [model], "Accelerator._models moved"


def test_accelerator_and_optimizer_can_change_their_class() -> None:
    class Ours(accelerate.Accelerator):
        answer = 42

    class OurOptimizer(AcceleratedOptimizer):
        answer = 43

    accelerator = accelerate.Accelerator(cpu=True)
    optimizer = accelerator.prepare_optimizer(torch.optim.SGD([nn.Parameter(torch.zeros(1))]))
    private.become(accelerator, Ours)
    private.become(optimizer, OurOptimizer)
    assert (accelerator.answer, optimizer.answer) == (42, 43), "accelerate's classes now have slots"


def test_launch_has_our_options() -> None:
    options = vars(private.launch_command_parser().parse_args(["script.py"]))
    expected = {
        "config_file", "cpu", "dynamo_backend", "mixed_precision", "module", "no_python", "num_cpu_threads_per_process",
        "num_machines", "num_processes", "training_script", "training_script_args",
    }  # fmt: skip
    assert options.keys() >= expected, "accelerate launch has other options"
    assert isinstance(private.default_config_file, str) and callable(private.load_config_from_file)
    assert callable(private.launch_command)
    assert launch.launch_command is private.launch_command, "TRL's programs no longer call the launcher that we replace"
