"""Scripts that know only transformers, started through each of the launchers, and the parts that make it work."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
import transformers.trainer

import hf_lohan
import hf_lohan.integrations.launch as launching
from hf_lohan import run
from hf_lohan.config import ConfigError
from hf_lohan.device import usable_cpus
from hf_lohan.integrations import engine_of
from hf_lohan.integrations.launch import offload_by_default
from hf_lohan.testing.models import tiny_batch, tiny_model

ROOT = Path(__file__).resolve().parents[2]

SCRIPT = """
import json, os, sys
import torch
from transformers import Trainer, TrainingArguments
from hf_lohan.testing.models import tiny_batch, tiny_model

class MyTrainer(Trainer):
    pass

output_dir, report = sys.argv[1:]
batch = tiny_batch(batch_size=8)
rows = [{name: values[row] for name, values in batch.items()} for row in range(8)]
args = TrainingArguments(
    output_dir=output_dir, max_steps=3, per_device_train_batch_size=2, learning_rate=1e-2, logging_steps=1,
    save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True, seed=3,
)
trainer = MyTrainer(model=tiny_model("llama"), args=args, train_dataset=rows)
trainer.train()
facts = {
    "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
    "grad_norms": [entry["grad_norm"] for entry in trainer.state.log_history if "loss" in entry],
    "num_threads": torch.get_num_threads(),
    "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
}
with open(report, "w") as file:
    json.dump(facts, file)
"""

ACCELERATE_CONFIG = """
compute_environment: LOCAL_MACHINE
distributed_type: 'NO'
mixed_precision: 'no'
num_processes: 1
use_cpu: false
"""

ROUTES = {
    "stock": ["script.py"],
    "python": ["-m", "hf_lohan.run", "--offload", "lohan", "script.py"],
    "accelerate": [
        *["-m", "accelerate.commands.launch", "--config_file", "single.yaml"],
        *["-m", "hf_lohan.run", "--offload", "offload.yaml", "script.py"],
    ],
    "lohan": [
        *["-m", "hf_lohan.cli", "launch", "--config_file", "single.yaml", "--offload", "offload.yaml"],
        *["--mixed_precision", "no", "script.py"],
    ],
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[dict[str, Any], Path]]:
    """What the script reported, and its output directory, for every way to start it. All are started at once."""
    folder = tmp_path_factory.mktemp("routes")
    (folder / "script.py").write_text(SCRIPT)
    (folder / "single.yaml").write_text(ACCELERATE_CONFIG)
    (folder / "offload.yaml").write_text("cpu_memory: 64MiB\ngpu_memory: 16MiB\n")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("OMP_NUM_THREADS", None)
    started = {
        route: subprocess.Popen(
            [sys.executable, *command, str(folder / route), str(folder / f"{route}.json")],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for route, command in ROUTES.items()
    }
    outputs = {route: process.communicate(timeout=200)[0] for route, process in started.items()}
    for route, process in started.items():
        assert process.returncode == 0, f"{route}:\n{outputs[route]}"
    return {route: (json.loads((folder / f"{route}.json").read_text()), folder / route) for route in ROUTES}


@pytest.mark.parametrize("route", [route for route in ROUTES if route != "stock"])
def test_an_unmodified_script_is_offloaded_and_trains_the_same(runs: dict[str, Any], route: str) -> None:
    facts, output_dir = runs[route]
    stock_facts, stock_dir = runs["stock"]
    summary = json.loads((output_dir / "lohan" / "summary.json").read_text())
    assert summary["num_steps"] == 3
    assert summary["ssd_write_bytes"] > 0
    assert len(facts["losses"]) == 3
    assert facts["losses"] == pytest.approx(stock_facts["losses"], rel=1e-6)
    assert facts["grad_norms"] == pytest.approx(stock_facts["grad_norms"], rel=1e-5)
    assert not (stock_dir / "lohan").exists()


@pytest.mark.parametrize("route", ["accelerate", "lohan"])
def test_the_settings_reach_the_script(runs: dict[str, Any], route: str) -> None:
    summary = json.loads((runs[route][1] / "lohan" / "summary.json").read_text())
    assert summary["config"]["cpu_memory"] == 64 * 2**20


def test_the_optimizer_has_every_core_whatever_the_launcher_exports(runs: dict[str, Any]) -> None:
    for route in ("python", "accelerate", "lohan"):
        assert runs[route][0]["num_threads"] == usable_cpus()
    assert runs["accelerate"][0]["omp_num_threads"] == "1", "the trap this test is about is gone"
    assert runs["lohan"][0]["omp_num_threads"] == str(usable_cpus())


# The replaced Trainer.


def arguments(tmp_path: Path) -> transformers.TrainingArguments:
    return transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[], disable_tqdm=True)


def evaluates_offloaded(trainer: Any) -> bool:
    batch = tiny_batch()
    trainer.evaluate([{name: values[0] for name, values in batch.items()}])
    return engine_of(trainer.model) is not None


def test_every_class_derived_from_trainer_offloads_by_default(tmp_path: Path) -> None:
    import transformers.trainer_seq2seq  # as if a script's library had imported it before

    with offload_by_default("lohan"):
        from transformers import Seq2SeqTrainer, Trainer
        from transformers.trainer import Trainer as SameTrainer

        class Derived(Trainer):  # type: ignore[misc]
            pass

        assert Trainer is SameTrainer
        assert issubclass(Seq2SeqTrainer, Trainer)
        for number, kind in enumerate((Trainer, Derived, hf_lohan.Trainer)):
            trainer = kind(tiny_model("llama"), arguments(tmp_path / str(number)))
            assert isinstance(trainer, Trainer)
            assert evaluates_offloaded(trainer)
        seq2seq_args = transformers.Seq2SeqTrainingArguments(output_dir=str(tmp_path / "s"), use_cpu=True, report_to=[])
        assert evaluates_offloaded(Seq2SeqTrainer(tiny_model("llama"), seq2seq_args))


def test_an_explicit_offload_wins(tmp_path: Path) -> None:
    with offload_by_default("lohan"):
        stock = transformers.Trainer(tiny_model("llama"), arguments(tmp_path / "stock"), offload=None)
        assert not evaluates_offloaded(stock)
        own = transformers.Trainer(tiny_model("llama"), arguments(tmp_path / "own"), offload={"prefetch_blocks": 3})
        assert evaluates_offloaded(own)
        assert own.offload_engine.config.prefetch_blocks == 3


def test_a_script_may_use_the_mixin_itself(tmp_path: Path) -> None:
    with offload_by_default("lohan"):

        class Mixed(hf_lohan.OffloadTrainerMixin, transformers.Trainer):  # type: ignore[misc]
            pass

        assert evaluates_offloaded(Mixed(tiny_model("llama"), arguments(tmp_path)))


def test_the_replacement_is_undone() -> None:
    import transformers.trainer_seq2seq

    def state() -> list[object]:
        return [
            transformers.Trainer,
            transformers.trainer.Trainer,
            hf_lohan.Trainer,
            hf_lohan.OffloadTrainerMixin,
            transformers.trainer_seq2seq.Seq2SeqTrainer.__mro__,
        ]

    before = state()
    with pytest.raises(KeyError), offload_by_default("lohan"):
        assert state() != before
        raise KeyError
    assert state() == before
    with pytest.raises(ConfigError), offload_by_default("no such file"):
        pass
    assert state() == before


def test_the_replacement_looks_like_the_trainer_it_replaces() -> None:
    stock = transformers.Trainer
    with offload_by_default("lohan"):
        assert inspect.signature(transformers.Trainer.__init__) == inspect.signature(stock.__init__)
        assert transformers.Trainer.__name__ == "Trainer"
        assert issubclass(transformers.Trainer, stock)


# hf_lohan.run

ECHO = """
import json, sys
import transformers
is_main = sys.modules["__main__"].__dict__ is globals()
facts = [__name__, sys.argv, sys.path[0], transformers.Trainer.__mro__[1].__module__, is_main]
print("ECHO" + json.dumps(facts))
"""

_ECHO_LINE = 'print("ECHO" + json.dumps([%s]))'


def echoed(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out.partition("ECHO")[2])


def test_a_script_runs_as_if_started_directly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["run"])
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    script = tmp_path / "folder" / "echo.py"
    script.parent.mkdir()
    script.write_text(ECHO)
    (tmp_path / "link.py").symlink_to(script)
    link = str(tmp_path / "link.py")
    run.main(["--offload", "lohan", link, "--offload", "its own", "-m", "x"])
    argv = [link, "--offload", "its own", "-m", "x"]
    assert echoed(capsys) == ["__main__", argv, str(script.parent), "hf_lohan.integrations.trainer", True]


def test_a_trace_is_asked_for_whatever_the_file_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["run"])
    (tmp_path / "offload.yaml").write_text("prefetch_blocks: 3\ntrace: false\n")
    script = tmp_path / "script.py"
    told = "config.trace, config.prefetch_blocks"
    script.write_text(f"import json, transformers\nconfig = transformers.Trainer.default_offload\n{_ECHO_LINE % told}")
    for options, is_traced in ((["--trace"], True), ([], False)):
        run.main(["--offload", str(tmp_path / "offload.yaml"), *options, str(script)])
        assert echoed(capsys) == [is_traced, 3]


def test_a_module_runs_as_python_would_run_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["run"])
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "echo_package").mkdir()
    (tmp_path / "echo_package" / "__init__.py").touch()
    (tmp_path / "echo_package" / "train.py").write_text(ECHO)
    run.main(["-m", "echo_package.train", "--lr", "1"])
    argv = [str(tmp_path / "echo_package" / "train.py"), "--lr", "1"]
    assert echoed(capsys) == ["__main__", argv, str(tmp_path), "hf_lohan.integrations.trainer", True]


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["--offload", "nope", "script.py"], "'nope' is neither 'lohan'"),
        (["--offload", "bad.yaml", "script.py"], "did you mean 'cpu_memory'?"),
        (["missing.py"], "there is no script 'missing.py'"),
        (["-m", "no_such_module.train"], "there is no module 'no_such_module.train'"),
        (["-m", ".train"], "there is no module '.train'"),
    ],
)
@pytest.mark.usefixtures("bad_inputs")
def test_run_refuses_in_one_line(command: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        run.main(command)
    error = capsys.readouterr().err
    assert exit_info.value.code == 2
    assert message in error
    assert error.count("\n") == 1


@pytest.fixture
def bad_inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "script.py").touch()
    (tmp_path / "bad.yaml").write_text("cpu_memori: 1GiB\n")
    monkeypatch.chdir(tmp_path)


# lohan launch, up to the point where accelerate takes over.

Launched = Callable[..., Namespace]


@pytest.fixture
def launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Launched:
    """The options that accelerate would get for a command line, started in a folder with a script."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(launching, "default_config_file", str(tmp_path / "no_default.yaml"))
    monkeypatch.setattr(launching, "usable_cpus", lambda: 12)
    (tmp_path / "script.py").touch()
    (tmp_path / "offload.yaml").write_text("prefetch_blocks: 3\n")
    (tmp_path / "two.yaml").write_text(ACCELERATE_CONFIG.replace("num_processes: 1", "num_processes: 2"))
    received: list[Namespace] = []
    monkeypatch.setattr(launching, "launch_command", received.append)

    def launch(*command: str) -> Namespace:
        assert launching.launch(command) == 0
        return received[-1]

    return launch


def test_the_script_is_started_by_our_runner(launched: Launched, tmp_path: Path) -> None:
    options = launched("--offload", "offload.yaml", "script.py", "--offload", "its own", "--num_processes", "7")
    assert (options.module, options.training_script) == (True, "hf_lohan.run")
    ours = ["--offload", str(tmp_path / "offload.yaml"), "script.py"]
    assert options.training_script_args == [*ours, "--offload", "its own", "--num_processes", "7"]
    options = launched("-m", "package.train", "x")
    assert options.training_script_args == ["--offload", "lohan", "-m", "package.train", "x"]
    options = launched("--trace", "script.py", "--trace")
    assert options.training_script_args == ["--offload", "lohan", "--trace", "script.py", "--trace"]


def test_threads_are_shared_among_the_processes(launched: Launched, monkeypatch: pytest.MonkeyPatch) -> None:
    assert launched("script.py").num_cpu_threads_per_process == 12
    assert launched("script.py").num_processes == 1
    assert launched("--num_processes", "4", "script.py").num_cpu_threads_per_process == 3
    assert launched("--config_file", "two.yaml", "script.py").num_cpu_threads_per_process == 6
    assert launched("--num-cpu-threads-per-process", "5", "script.py").num_cpu_threads_per_process == 5
    monkeypatch.setenv("OMP_NUM_THREADS", "7")  # which accelerate then takes over
    assert launched("script.py").num_cpu_threads_per_process is None


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["missing.py"], "no script 'missing.py'"),
        (["--offload", "nope", "script.py"], "'nope' is neither"),
        (["--config_file", "missing.yaml", "script.py"], "no accelerate config 'missing.yaml'"),
        (["--no_python", "script.py"], "--no_python"),
    ],
)
def test_what_cannot_be_launched_is_refused(launched: Launched, command: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        launched(*command)


@pytest.mark.parametrize(("status", "expected"), [(3, 3), (-9, 137)])
def test_the_exit_status_is_the_scripts(
    launched: Launched, monkeypatch: pytest.MonkeyPatch, status: int, expected: int
) -> None:
    def fail(options: Namespace) -> None:
        raise subprocess.CalledProcessError(status, ["python"])

    monkeypatch.setattr(launching, "launch_command", fail)
    assert launching.launch(["script.py"]) == expected
