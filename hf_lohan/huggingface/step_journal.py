"""What Trainer needs to go on from a step: the small files of a checkpoint, committed with the step itself."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from hf_lohan.engine import Journal, OffloadEngine
from hf_lohan.files import write_failure
from hf_lohan.huggingface.termination import Termination
from hf_lohan.store import Commit

LAST_STEP = "last_step"
PRIVATE_FOLDER = Path("_lohan")
"""In a run's output folder. Pushes to the Hub leave out what begins with an underscore."""
STORE_FOLDER = PRIVATE_FOLDER / "store"
"""Where a store is if the configuration names no path."""
FOLDER = PRIVATE_FOLDER / LAST_STEP
_TRAINER_FACTS = "trainer"
_SUMS = ("_tr_loss", "_globalstep_last_logged", "current_flos")
"""What Trainer adds up between two logs, and a Hugging Face checkpoint forgets."""


class StepJournal(TrainerCallback):
    """Commits every step of one `train()` with its journal.

    Captured when the step has been logged, evaluated and saved as asked for; at the end of an epoch, when that has
    been. Going on from it then repeats nothing and leaves nothing out. The step of a checkpoint that a run goes on
    from is committed once more when training begins.
    """

    def __init__(
        self, trainer: Any, engine: OffloadEngine, write_files: Callable[[str], None], termination: Termination
    ) -> None:
        self._trainer = trainer
        self._engine = engine
        self._write_files = write_files
        self._termination = termination
        self._last_checkpoint: str | None = None
        self._has_saved = False
        self._seen_step = -1
        self._num_logged = 0
        self._begins_log = True
        self._resumed: Mapping[str, Any] | None = None
        self._loaded: Path | None = None
        engine.commits.leave_to_journal()

    def resume(self, commit: Commit) -> None:
        """This run goes on from `commit`."""
        self._resumed = commit.facts[_TRAINER_FACTS]
        self._num_logged = commit.facts["num_logged"]
        self._last_checkpoint = commit.facts["last_checkpoint"]
        self._begins_log = False

    def resume_from_checkpoint(self, folder: str) -> None:
        """This run goes on from the checkpoint in `folder`: its step is committed as one of this run."""
        self._last_checkpoint = os.path.abspath(folder)
        self._loaded = Path(folder)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._seen_step = state.global_step
        if self._resumed is not None:
            self._restore_sums(self._resumed)
            return
        # What was loaded, over what an earlier run left: from here on its steps are gone.
        begun = self._capture() if self._loaded else Journal(self._facts(resumable=False), begins_log=True)
        self._engine.commits.commit(begun, even_in_place=True)
        self._loaded = None

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._has_saved = True
        folder = self._trainer.last_whole_checkpoint  # None where a subclass saves in its own way
        folder = folder or os.path.join(args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
        self._last_checkpoint = os.path.abspath(folder)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self._engine.commits.are_kept:
            self._engine.commits.commit(self._capture(), even_in_place=True)

    def after_step(self) -> None:
        """A step is over, or an epoch after its last step. Raises SystemExit if the process was asked to end."""
        state, control = self._trainer.state, self._trainer.control
        is_first_call = state.global_step != self._seen_step
        self._seen_step = state.global_step
        ends_epoch = control.should_training_stop or control.should_epoch_stop or float(state.epoch).is_integer()
        if is_first_call and ends_epoch:
            return  # there is more to come: this is called again when the epoch has ended
        is_last, has_saved = self._termination.is_requested, self._has_saved
        self._has_saved = False
        if self._engine.commits.are_kept or is_last or has_saved:
            # In place, a commit lasts until the next update; that then knows which checkpoint to point at.
            self._engine.commits.commit(self._capture(), even_in_place=True)
        if is_last:
            self._engine.settle()
            self._engine.close()
            self._termination.exit()

    def _capture(self) -> Journal:
        state = self._trainer.state
        with tempfile.TemporaryDirectory() as folder:
            self._write_files(folder)
            self._without_history(state).save_to_json(os.path.join(folder, TRAINER_STATE_NAME))
            if self._loaded is not None:  # Trainer takes up its random numbers when training has begun
                for path in self._loaded.glob("rng_state*.pth"):
                    shutil.copy(path, folder)
            files = {path.name: path.read_bytes() for path in Path(folder).iterdir()}
        history = state.log_history
        begins_log = self._begins_log or len(history) < self._num_logged
        new = history if begins_log else history[self._num_logged :]
        self._num_logged, self._begins_log = len(history), False
        lines = "".join(json.dumps(entry, default=_as_json) + "\n" for entry in new)
        return Journal(self._facts(resumable=True), files, lines.encode(), begins_log)

    def _facts(self, *, resumable: bool) -> dict[str, Any]:
        """`resumable`: with a journal."""
        trainer = self._trainer
        facts: dict[str, Any] = {
            "global_step": trainer.state.global_step,
            "is_resumable": resumable,
            "output_dir": os.path.realpath(trainer.args.output_dir),
            "last_checkpoint": self._last_checkpoint,
        }
        if resumable:
            sums = {name: getattr(trainer, name) for name in _SUMS if hasattr(trainer, name)}
            facts["num_logged"] = self._num_logged
            facts[_TRAINER_FACTS] = {name: float(value) for name, value in sums.items()}
        return facts

    def _without_history(self, state: Any) -> Any:
        """The state to write down: its history goes to the log, which only grows; with callbacks as they are now."""
        by_name: dict[str, Any] = {}
        for callback in [*self._trainer.callback_handler.callbacks, self._trainer.control]:
            if isinstance(callback, ExportableState):
                by_name.setdefault(type(callback).__name__, []).append(callback.state())
        callbacks = {name: states if len(states) > 1 else states[0] for name, states in by_name.items()}
        return dataclasses.replace(state, log_history=[], stateful_callbacks=callbacks)

    def _restore_sums(self, sums: Mapping[str, Any]) -> None:
        trainer = self._trainer
        for name in _SUMS:
            if name in sums and hasattr(trainer, name):
                value = getattr(trainer, name)
                if name == "_tr_loss":
                    value.fill_(sums[name])
                    # The average over this call counts this call's steps only.
                    trainer._total_loss_scalar -= sums[name]
                else:
                    setattr(trainer, name, type(value)(sums[name]))


def _as_json(value: Any) -> Any:
    """Callbacks log tensors and numpy's numbers, too."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def unpack(commit: Commit, log: bytes, output_dir: str | Path) -> str:
    """Lay a committed journal out as the folder that Trainer resumes from; returns its path.

    Raises `CapacityError` or `StorageError` if it cannot be written.
    """
    folder = Path(output_dir) / FOLDER
    files = dict(commit.journal)
    state = json.loads(files[TRAINER_STATE_NAME])
    state["log_history"] = [json.loads(line) for line in log.decode().splitlines()]
    files[TRAINER_STATE_NAME] = (json.dumps(state, indent=2, sort_keys=True) + "\n").encode()
    try:
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(parents=True, mode=0o700)
        for name, content in files.items():
            if Path(name).name != name:
                raise ValueError(f"the journal of the last step names a file outside its folder: {name!r}")
            (folder / name).touch(mode=0o600)
            (folder / name).write_bytes(content)
    except OSError as error:
        raise write_failure(str(folder), sum(map(len, files.values())), error) from error
    return str(folder)
