"""Starts scripts (`lohan launch`) and the command `lohan` in several processes, with accelerate's launcher."""

from __future__ import annotations

import os
import subprocess
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path

from accelerate.utils import patch_environment
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from hf_lohan.compat.accelerate_private import (
    default_config_file,
    launch_command,
    launch_command_parser,
    load_config_from_file,
)
from hf_lohan.config import ALL_AUTO, OFFLOAD_VARIABLE, OffloadConfig, offload_of_environment
from hf_lohan.device import num_gpus
from hf_lohan.threads import usable_cpus
from hf_lohan.wording import times


def launch_script(arguments: Sequence[str]) -> int:
    """Run an unmodified script offloaded: `[--offload X] [--trace] [options of accelerate launch] script.py [args]`.
    Returns the script's exit status. Raises ValueError for unsupported options, before anything is started. argparse
    exits with status 2 for unknown options."""
    options = _parser().parse_args(arguments)
    try:
        launch_offloaded(options, _offload_options(options))
    except subprocess.CalledProcessError as error:  # the script has printed its own error
        return _shell_status(error.returncode)
    except ChildFailedError as error:
        return _shell_status(error.get_first_failure()[1].exitcode)
    except SignalException as error:  # this process got a signal, passed it on to the ranks, and waited for them
        return _shell_status(-error.sigval.value)
    return 0


def launch_lohan(num_processes: int, arguments: Sequence[str]) -> int | None:
    """Run the command `lohan` in several processes, and return the exit status. If ``num_processes`` is 1, or if a
    launcher has already started this number, return None. Raises ValueError if a launcher started another number."""
    if num_processes < 1:
        raise ValueError(f"num_processes={num_processes} must be at least 1")
    num_here = int(os.environ.get("WORLD_SIZE", "1"))
    if num_processes in (1, num_here):
        return None
    if num_here > 1:
        raise ValueError(
            f"num_processes={num_processes} is set, but a launcher has started {num_here} processes of this program; "
            "leave num_processes out"
        )
    return launch_script(["--num_processes", str(num_processes), "-m", "hf_lohan.cli", *arguments])


def _shell_status(code: int) -> int:
    return code if code > 0 else 128 - code


def _parser() -> ArgumentParser:
    parser: ArgumentParser = launch_command_parser()
    parser.prog = "lohan launch"
    parser.usage = "lohan launch [--offload X] [--trace] [options of accelerate launch] script.py [its arguments]"
    parser.description = (
        "Run an unmodified script that uses transformers.Trainer or accelerate.Accelerator through accelerate, "
        "offloaded."
    )
    parser.add_argument(
        "--offload",
        metavar="X",
        help=f"lohan (everything automatic, the default) or the path of a YAML file. {OFFLOAD_VARIABLE} in the "
        "environment is another default.",
    )
    parser.add_argument("--trace", action="store_true", help="Write lohan/trace.json into the run's output folder.")
    return parser


def _offload_options(options: Namespace) -> list[str]:
    """Return the options for `hf_lohan.run`. Raises ValueError if the script or the configuration does not exist."""
    if not options.module and not Path(options.training_script).is_file():
        raise ValueError(f"there is no script {options.training_script!r}; give the path of a Python file")
    options.offload = options.offload or offload_of_environment(may_fit=False) or ALL_AUTO
    OffloadConfig.load(options.offload)
    is_default = options.offload == "lohan"
    offload = "lohan" if is_default else os.path.abspath(os.path.expanduser(options.offload))
    trace = ["--trace"] if options.trace else []
    return ["--offload", offload, *trace]


def launch_offloaded(options: Namespace, our_options: Sequence[str]) -> None:
    """Run the script in ``options`` (of accelerate's launcher) through `hf_lohan.run` with ``our_options``. Raises the
    launcher's errors, and ValueError for unsupported options, before anything is started."""
    if options.no_python:
        raise ValueError(
            "--no_python starts a program that is not Python, but only Python can be offloaded; leave it out"
        )
    target = ["-m", options.training_script] if options.module else [options.training_script]
    options.training_script_args = [*our_options, *target, *options.training_script_args]
    options.training_script, options.module = "hf_lohan.run", True
    with patch_environment(**_complete_options(options)):
        launch_command(options)


def _complete_options(options: Namespace) -> dict[str, str]:
    """Replace defaults of accelerate that do not suit offloading (threads, processes, GPUs, ports). Returns environment
    variables for the launcher."""
    if options.config_file is not None and not Path(options.config_file).is_file():
        raise ValueError(
            f"there is no accelerate config {options.config_file!r}; give an existing file, or leave --config_file out"
        )
    defaults = None
    if options.config_file is not None or (Path(default_config_file).is_file() and not options.cpu):
        defaults = load_config_from_file(options.config_file)
    else:
        for name, value in _WITHOUT_CONFIG.items():
            if getattr(options, name) is None:
                setattr(options, name, value)
    if (precision := options.mixed_precision or getattr(defaults, "mixed_precision", None)) == "fp8":
        from hf_lohan.huggingface.guards import check_precision  # imports transformers

        check_precision(precision)  # must precede accelerate's error about a missing package
    num_processes = options.num_processes or getattr(defaults, "num_processes", 1)
    num_machines = options.num_machines or getattr(defaults, "num_machines", 1) or 1
    num_local = max(1, num_processes // num_machines)
    if options.num_cpu_threads_per_process is None and "OMP_NUM_THREADS" not in os.environ:
        options.num_cpu_threads_per_process = max(1, usable_cpus() // num_local)
    if num_processes == 1 or any(getattr(options, name, None) for name in _OTHER_LAUNCHERS):
        return {}
    on_cpu = options.cpu or getattr(defaults, "use_cpu", False) or num_gpus() == 0
    if not on_cpu and num_local > num_gpus():
        raise ValueError(
            f"num_processes asks for {num_local} processes on this machine, which has {times(num_gpus(), 'GPU')}; "
            "start one process for each GPU, or give --cpu to train on the CPU"
        )
    vars(options).update(cpu=False, multi_gpu=True)  # makes torchrun start the processes, even on CPUs
    if num_machines == 1 and options.main_process_port is None and not getattr(defaults, "main_process_port", None):
        options.main_process_port = 0  # any free port, because two runs on one machine must not share a port
    variables = {_SHUTDOWN_TIMEOUT: os.environ.get(_SHUTDOWN_TIMEOUT, "600")}
    if on_cpu:
        variables[_USE_CPU] = "true"
    return variables


def join_other_ranks() -> None:
    """If a launcher started several processes without GPUs, join them into one run. Without the environment variable,
    accelerate would treat each process as a separate run, and all processes would write the same files."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and num_gpus() == 0:
        os.environ.setdefault(_USE_CPU, "true")


_USE_CPU = "ACCELERATE_USE_CPU"
_SHUTDOWN_TIMEOUT = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
"""Environment variable with the seconds from SIGTERM to SIGKILL. The default is 30, but a commit may take longer."""
_OTHER_LAUNCHERS = ("tpu", "use_deepspeed", "use_fsdp", "use_megatron_lm", "mpirun_hostfile")
"""Options of accelerate that choose another launcher."""
_WITHOUT_CONFIG = {"num_processes": 1, "num_machines": 1, "mixed_precision": "no", "dynamo_backend": "no"}
