"""`lohan export` and `lohan verify` on the store of a real run."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from datasets import Dataset
from short_runs import short_arguments
from typer.testing import CliRunner

import hf_lohan
from hf_lohan.cli import app
from hf_lohan.testing.models import tiny_batch, tiny_model

STORE = Path("_lohan") / "store"


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output folder of a run of two steps."""
    folder = tmp_path_factory.mktemp("run")
    rows = tiny_batch(seed=3)["input_ids"].tolist()
    trainer = hf_lohan.Trainer(
        tiny_model("llama"),
        short_arguments(folder, max_steps=2),
        train_dataset=Dataset.from_dict({"input_ids": rows, "labels": rows}),
        offload={"cpu_memory": "4MiB", "gpu_memory": "2MiB"},
    )
    trainer.train()
    trainer.offload_engine.close()
    return folder


@pytest.fixture
def run(finished_run: Path, tmp_path: Path) -> Path:
    """A copy of the finished run, which tests may damage."""
    return Path(shutil.copytree(finished_run, tmp_path / "run"))


def lohan(*args: object) -> tuple[int, str]:
    """Return the exit status and stdout, or the last line of stderr if the command failed."""
    result = CliRunner().invoke(app, [str(arg) for arg in args])
    return result.exit_code, result.stderr.splitlines()[-1] if result.exit_code == 2 else result.stdout


def flip(file: Path, offset: int) -> None:
    with file.open("r+b") as stream:
        stream.seek(offset)
        byte = stream.read(1)[0]
        stream.seek(offset)
        stream.write(bytes([byte ^ 8]))


def test_a_good_store_is_verified(run: Path) -> None:
    for what in (run, run / STORE):
        code, output = lohan("verify", what)
        assert code == 0 and "every checksum is right" in output, output


@pytest.mark.parametrize("inside", [".", "lohan", "_lohan", "_lohan/store"])
def test_commands_accept_any_folder_of_a_run(
    inside: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run / inside)
    for folder in (run / inside, Path()):
        assert lohan("verify", folder)[0] == 0
        code, output = lohan("report", folder, "--output", tmp_path / "page.html")
        assert code == 0, output
    assert lohan("export", ".", tmp_path / "out") == (0, f"wrote {tmp_path / 'out'} (step 2)\n")


@pytest.mark.parametrize("command", ["export", "report", "verify"])
def test_the_error_of_a_parent_folder_names_the_run(command: str, run: Path, tmp_path: Path) -> None:
    deeper = tmp_path / "runs" / "of" / "today"
    deeper.parent.mkdir(parents=True)
    run.rename(deeper)
    code, output = lohan(command, tmp_path, *([tmp_path / "out"] if command == "export" else []))
    assert code == 2 and output.endswith(f"give '{deeper}', which is one"), output


def test_scratch_files_of_a_killed_run_are_ignored(run: Path, tmp_path: Path) -> None:
    for name in ("activations.bin", "gradients.bin"):
        (run / STORE / name).write_bytes(b"\xff" * 8192)
    code, output = lohan("verify", run)
    assert code == 0 and "every checksum is right" in output, output
    assert lohan("export", run, tmp_path / "exported")[0] == 0


def test_each_flipped_bit_is_found(run: Path) -> None:
    """The three commits (loading and two steps) are in the first home, the second, and the first again."""
    files = [run / STORE / name for name in ("records-0.bin", "records-1.bin")]
    for file in files:
        for offset in range(5000, file.stat().st_size, file.stat().st_size // 3):
            flip(file, offset)
    code, output = lohan("verify", run)
    assert code == 1
    complaints = [line for line in output.splitlines() if "is damaged" in line]
    assert len(complaints) >= 3, output
    for complaint in complaints:
        assert str(run / STORE) in complaint and " at byte " in complaint and "model." in complaint


def test_export_refuses_damaged_weights(run: Path, tmp_path: Path) -> None:
    for name in ("records-0.bin", "records-1.bin"):
        flip(run / STORE / name, 100)
    code, output = lohan("export", run, tmp_path / "out")
    assert code == 2 and "error: " in output and "is damaged" in output
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", ["export", "verify"])
def test_a_folder_without_a_run_is_refused_in_one_line(command: str, tmp_path: Path) -> None:
    code, output = lohan(command, tmp_path, *([tmp_path / "out"] if command == "export" else []))
    assert code == 2 and "is not the output folder of an offloaded run" in output


def test_a_folder_in_use_is_not_overwritten(run: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    code, output = lohan("export", run, tmp_path / "out")
    assert code == 2 and "is not an empty folder" in output


@pytest.mark.parametrize("name", ["tokenizer_config.json", "generation_config.json", "added_tokens.json"])
def test_export_copies_only_files_that_the_commit_names(name: str, run: Path, tmp_path: Path) -> None:
    (model,) = (run / STORE).glob("model-*")
    named = (model / name).exists()
    if not named:
        (model / name).write_text('{"tokenizer_class": "NoSuchTokenizer", "max_new_tokens": "many"}')
    assert lohan("export", run, tmp_path / "out") == (0, f"wrote {tmp_path / 'out'} (step 2)\n")
    assert named or not (tmp_path / "out" / name).exists()
