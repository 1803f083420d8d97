"""Commits each step with its journal. A journal has the small files that Trainer needs to resume."""

from __future__ import annotations

import dataclasses
import io
import json
import logging
import math
import os
import random
import shutil
import signal
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import numpy as np
import safetensors.torch
import torch
from transformers import TrainerCallback, TrainerState
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState
from transformers.trainer_pt_utils import safe_globals
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, has_length

from hf_lohan.checkpoint.epoch_random import EpochRandomNumbers
from hf_lohan.checkpoint.optimizer_states import FOLDER_NAME
from hf_lohan.checkpoint.resume_point import CHECKPOINT_FACTS_NAME, LAST_COMMIT, ResumePoint, facts_of_checkpoint, id_of
from hf_lohan.compat.transformers_private import LOG_SUMS, log_sums, restore_log_sums
from hf_lohan.engine import Journal, OffloadEngine
from hf_lohan.files import StorageError
from hf_lohan.files.directories import temporary_folder
from hf_lohan.huggingface.ranks import launch_id
from hf_lohan.ranks import Links, StepAgreement
from hf_lohan.store import Commit
from hf_lohan.updates import MISSED_STEPS_NAME

logger = logging.getLogger(__name__)

_TRAINER_FACTS = "trainer"
_POSITION = "position"
_END = b"end"


class Termination:
    """A context in which the first SIGTERM ends the run after the step in progress, and a second SIGTERM ends the
    process. An error after the first SIGTERM is logged and not raised: a signal to the process group also ends the data
    loader's workers, so the step in progress may fail. Does nothing if another handler is installed, or outside the
    main thread, because Python handles signals only there."""

    def __init__(self, links: Links | None = None) -> None:
        self.is_requested = False
        """Whether this rank received SIGTERM."""
        self._links = links or Links.alone()
        self._agreement = StepAgreement(Links.alone())
        self._previous: Any = None

    def set_agreement(self, agreement: StepAgreement) -> None:
        """Set the agreement with which all ranks end after the same step."""
        self._agreement = agreement
        if self.is_requested:
            agreement.request_end()

    def ends_here(self) -> bool:
        """Return whether the run ends after the step that just ended, because a rank received SIGTERM."""
        return self._agreement.ends_run

    def any_rank_requested(self) -> bool:
        """Return whether any rank received SIGTERM. All ranks call this together, after the last step of training."""
        requests = self._links.all_gather("whether to end the run", _END if self.is_requested else b"")
        return _END in requests

    def __enter__(self) -> Termination:
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            self._previous = signal.signal(signal.SIGTERM, self._on_signal)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _trace: object) -> bool:
        if self._previous is not None:
            signal.signal(signal.SIGTERM, self._previous)
            self._previous = None
        hides_error = self.is_requested and isinstance(error, Exception)
        if hides_error:
            logger.warning("the step in progress was dropped, because it failed after SIGTERM", exc_info=error)
        return hides_error

    def exit(self) -> NoReturn:
        """End the process with the exit status of SIGTERM."""
        raise SystemExit(128 + signal.SIGTERM)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self.is_requested = True
        self._agreement.request_end()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        logger.warning(
            "got SIGTERM, so the run ends after the step in progress is committed; a second SIGTERM ends it at once"
        )


class StepJournal(TrainerCallback):
    """Commits every step of one `train()` with its journal. The journal is captured after logging, evaluating and
    saving, also at the end of an epoch. So a resumed run neither repeats nor omits these. A run that resumes from a
    checkpoint commits the step of the checkpoint when training begins."""

    def __init__(
        self,
        trainer: Any,
        engine: OffloadEngine,
        write_files: Callable[[str], None],
        termination: Termination,
        epoch: EpochRandomNumbers,
    ) -> None:
        self._trainer = trainer
        self._engine = engine
        self._write_files = write_files
        self._termination = termination
        self.epoch = epoch
        self._epoch = self._num_batches = 0
        self._position: Mapping[str, int] | None = None
        """The next step's place in the data. None if a checkpoint of another program does not have it."""
        self._last_checkpoint: str | None = None
        self._has_saved = False
        self._seen_step = -1
        self._num_logged = 0
        self._begins_log = True
        self._resumed: Mapping[str, Any] | None = None
        self._loaded: Path | None = None
        engine.commits.leave_to_journal()
        termination.set_agreement(engine.agreement)

    def resume(self, point: ResumePoint, checkpoint: str | None) -> None:
        """Resume from `point`. If it has no commit, this run commits the step of upstream's folder `checkpoint`."""
        self.epoch.resume(checkpoint)
        self._position = _facts_of(point, checkpoint).get(_POSITION)
        if point.commit is not None:
            facts = point.commit.facts
            self._resumed = facts[_TRAINER_FACTS]
            self._num_logged = facts["num_logged"]
            self._last_checkpoint = facts["last_checkpoint"]
            self._begins_log = False
        elif checkpoint is not None:
            self._engine.commits.resume_facts(facts_of_checkpoint(checkpoint))
            self._last_checkpoint = os.path.abspath(checkpoint)
            self._loaded = Path(checkpoint)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._seen_step = state.global_step
        if self._resumed is not None:
            restore_log_sums(self._trainer, self._resumed)
            return
        self._warn_of_overwritten_step(state.global_step)
        # This commit replaces the steps of an earlier run, because training overwrites them.
        first = self._capture() if self._loaded else Journal(self._facts(resumable=False), begins_log=True)
        self._engine.commits.request(first, even_in_place=True)
        self._loaded = None

    def begin_epoch(self, number: int, num_batches: int, *, is_rest: bool) -> None:
        """Begin an epoch, or the rest of an epoch. ``num_batches``: number of batches of the whole epoch."""
        self.epoch.begin_epoch(is_rest=is_rest)
        self._epoch, self._num_batches = number, num_batches

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        num_steps = round((state.epoch - self._epoch) * self._num_batches) // args.gradient_accumulation_steps
        # Without a length, the last step of training counts as the end of the epoch, although rows may be left.
        is_over = state.epoch >= self._epoch + 1 and has_length(kwargs["train_dataloader"])
        is_over |= control.should_epoch_stop and not control.should_training_stop
        self._set_position(self._epoch + is_over, 0 if is_over else num_steps)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # Otherwise training may go on within this epoch, or the epoch has ended within a step.
        if self._trainer.accelerator.sync_gradients and not control.should_training_stop:
            self._set_position(self._epoch + 1, 0)

    def _set_position(self, epoch: int, num_steps: int) -> None:
        rows = self._trainer.get_total_train_batch_size(self._trainer.args)
        self._position = {"epoch": epoch, "num_steps": num_steps, "rows_per_step": rows}

    def _warn_of_overwritten_step(self, step: int) -> None:
        """Warn if this run, which begins at ``step``, overwrites a later step of an earlier run."""
        last = self._engine.tiers.store.committed
        if last is None or not last.facts.get("is_resumable") or last.is_torn or not self._engine.commits.are_kept:
            return
        if int(last.facts["global_step"]) > step and self._trainer.args.should_log:
            logger.warning(
                "step %d, the last committed step of the run in %s, is overwritten, because this run begins at step "
                '%d; to resume from such a step, call trainer.train(resume_from_checkpoint="last_step"), and to '
                "keep both runs, give each its own output_dir (checkpoints are not removed)",
                last.facts["global_step"],
                last.facts["output_dir"],
                step,
            )

    def add_to_checkpoint(self, folder: str) -> None:
        """Write the facts of the run, and the random state from the beginning of the epoch, to a checkpoint."""
        self.epoch.write(os.path.join(folder, FOLDER_NAME))
        facts = {_POSITION: self._position, LAST_COMMIT: id_of(self._engine.tiers.store.committed)}
        Path(folder, FOLDER_NAME, CHECKPOINT_FACTS_NAME).write_text(
            json.dumps({**self._engine.commits.run_facts(), **facts}), encoding="utf-8"
        )

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._has_saved = True
        folder = self._trainer.last_whole_checkpoint  # None if a subclass overrides saving
        folder = folder or os.path.join(args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
        self._last_checkpoint = os.path.abspath(folder)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self._engine.commits.are_kept:
            self._engine.commits.request(self._capture(), even_in_place=True)

    def after_step(self) -> None:
        """Commit the step. Called after each step, and again at the end of an epoch. Raises SystemExit after
        SIGTERM."""
        state, control = self._trainer.state, self._trainer.control
        if not (self._trainer.accelerator.sync_gradients or control.should_training_stop):
            return  # an epoch without a known length has ended within a step, whose first gradients no commit has
        is_first_call = state.global_step != self._seen_step
        self._seen_step = state.global_step
        ends_epoch = control.should_training_stop or control.should_epoch_stop or float(state.epoch).is_integer()
        if is_first_call and ends_epoch:
            return  # this method is called again when the epoch has ended
        is_last, has_saved = self._termination.ends_here(), self._has_saved
        self._has_saved = False
        ends_training = control.should_training_stop or state.global_step >= state.max_steps
        is_wanted = self._engine.commits.is_due or (self._engine.commits.are_kept and ends_training)
        if is_wanted or is_last or has_saved:
            # If the store has one version of each record, a commit is valid until the next update. Later it only names
            # the checkpoint to resume from.
            self._engine.commits.request(self._capture(), even_in_place=True)
        if is_last:
            self._engine.wait_for_updates()
            # Wait, because torchrun ends all ranks as soon as one rank has ended.
            self._engine.links.barrier("the last step to be committed")
            self._engine.close()
            self._termination.exit()

    def _capture(self) -> Journal:
        state = self._trainer.state
        with temporary_folder() as folder:
            self._write_files(folder)
            self.epoch.write(folder)
            self._without_history(state).save_to_json(os.path.join(folder, TRAINER_STATE_NAME))
            if self._loaded is not None:  # Trainer loads the random states after training has begun
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
        """Return the facts of a commit. `resumable`: whether the commit has a journal."""
        trainer = self._trainer
        journal_facts = {"num_logged": self._num_logged, _TRAINER_FACTS: log_sums(trainer)} if resumable else {}
        return {
            _POSITION: self._position,
            "global_step": trainer.state.global_step,
            "is_resumable": resumable,
            "output_dir": os.path.realpath(trainer.args.output_dir),
            "last_checkpoint": self._last_checkpoint,
            "launch_id": launch_id(),
            **journal_facts,
        }

    def _without_history(self, state: Any) -> Any:
        """Return the state to save. It has the current states of callbacks, but not the history, because the history is
        in a log file."""
        callbacks = [*self._trainer.callback_handler.callbacks, self._trainer.control]
        return dataclasses.replace(state, log_history=[], stateful_callbacks=_states_of(callbacks))


def _states_of(callbacks: Iterable[Any]) -> dict[str, Any]:
    """Return a dict from class to the state of its callback, or to a list if there are several, as upstream saves."""
    by_name: dict[str, Any] = {}
    for callback in callbacks:
        if isinstance(callback, ExportableState):
            by_name.setdefault(type(callback).__name__, []).append(callback.state())
    return {name: states if len(states) > 1 else states[0] for name, states in by_name.items()}


def resume_in_data(trainer: Any, point: ResumePoint, folder: str, counted: tuple[int, int]) -> tuple[int, int]:
    """Return the epoch, and the number of its micro-batches, that were trained before ``point``, whose files are in
    ``folder``. Upstream has ``counted`` both from the number of steps, which is wrong if epochs have different numbers
    of steps: an iterable dataset has no length, and a callback may end an epoch."""
    state = Path(folder, TRAINER_STATE_NAME)
    if state.is_file():
        _warn_of_differences(trainer, TrainerState.load_from_json(str(state)))
    args, position = trainer.args, _facts_of(point, folder).get(_POSITION)
    rows_per_step = trainer.get_total_train_batch_size(args)
    if args.ignore_data_skip or position is None or position["rows_per_step"] != rows_per_step:
        return counted
    return position["epoch"], position["num_steps"] * args.gradient_accumulation_steps


def _warn_of_differences(trainer: Any, resumed: TrainerState) -> None:
    """Warn if a run that resumes from ``resumed`` would differ from one that was never stopped, because states of
    callbacks are not restored, a callback had ended training, or new workers of a data loader draw random numbers."""
    args, step = trainer.args, resumed.global_step
    if not args.should_log:
        return
    saved = {} if args.restore_callback_states_from_checkpoint else resumed.stateful_callbacks
    states = json.loads(json.dumps(_states_of(trainer.callback_handler.callbacks), default=_as_json))
    for name, state in states.items():
        if saved.get(name, state) != state:
            logger.warning(
                "%s begins anew, because its state after step %d is not restored; to restore it, set "
                "restore_callback_states_from_checkpoint=True",
                name,
                step,
            )
    control = resumed.stateful_callbacks.get("TrainerControl", {}).get("args", {})
    if control.get("should_training_stop") and step < resumed.max_steps:
        logger.warning("a callback had ended training after step %d of %d, and it goes on now", step, resumed.max_steps)
    if args.dataloader_persistent_workers and args.dataloader_num_workers:
        logger.warning(
            "dataloader_persistent_workers=True draws random numbers when the workers start, so dropout differs from "
            "that of a run that was never stopped; leave it out for the same bits"
        )


def _facts_of(point: ResumePoint, checkpoint: str | None) -> Mapping[str, Any]:
    if point.commit is not None:
        return point.commit.facts
    return {} if checkpoint is None else facts_of_checkpoint(checkpoint)


def check_journal(commit: Commit, log_lines: bytes, store: str) -> None:
    """Raise `StorageError` if a Trainer cannot resume from the journal of a commit in the folder ``store``. Checksums
    show damage. This check finds journals that another program wrote."""
    name = "its facts"
    try:
        _check_facts(commit.facts)
        for name in (TRAINER_STATE_NAME, OPTIMIZER_NAME, SCHEDULER_NAME):
            if name not in commit.journal:
                raise ValueError("it is missing")
        for name, content in commit.journal.items():
            _check_file(name, content, commit.facts["global_step"])
        name = "its log"
        if not all(isinstance(json.loads(line), dict) for line in log_lines.splitlines()):
            raise ValueError("an entry is not a dict")
    except Exception as error:  # reading unknown bytes may raise anything
        what = f"step {commit.facts.get('global_step')} has a journal that no run has written ({name}: {error!r}) in"
        raise StorageError(what, path=store, advice="resume from a checkpoint") from error


def _check_facts(facts: Mapping[str, Any]) -> None:
    kinds = {"global_step": int, "output_dir": str, "num_logged": int, "num_updates": dict, _TRAINER_FACTS: dict}
    for name, kind in kinds.items():
        if type(facts[name]) is not kind:
            raise TypeError(f"{name} is {facts[name]!r}")
    if not isinstance(facts["last_checkpoint"], str | None):
        raise TypeError(f"last_checkpoint is {facts['last_checkpoint']!r}")
    for number in (*facts["num_updates"].values(), *(facts[_TRAINER_FACTS][name] for name in LOG_SUMS)):
        if not isinstance(number, int | float):
            raise TypeError(f"{number!r} is not a number")


def _check_file(name: str, content: bytes, step: int) -> None:
    """Check a file of a journal. Raises the errors of the file's reader."""
    if Path(name).name != name:
        raise ValueError("it is outside the journal's folder")
    if name == TRAINER_STATE_NAME:
        state = TrainerState(**json.loads(content))
        if type(state.max_steps) is not int or state.global_step != step or not 0 <= float(state.epoch) < math.inf:
            raise ValueError(f"it is of step {state.global_step!r} of {state.max_steps!r}, epoch {state.epoch!r}")
    elif name.endswith(".safetensors"):
        arrays = safetensors.torch.load(content)
        if name == MISSED_STEPS_NAME:
            _ = [arrays[part] for part in ("groups", "number", "group", "behind")]
    elif name.endswith((".pt", ".pth")):
        with safe_globals():
            read = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        if name == OPTIMIZER_NAME:
            _ = read["state"], [group["lr"] for group in read["param_groups"]]
        elif name == SCHEDULER_NAME and not isinstance(read, dict):  # its keys depend on the scheduler's class
            raise TypeError("it is not the state of a scheduler")
        elif "rng_state" in name:
            random.Random().setstate(read["python"])
            np.random.RandomState().set_state(read["numpy"])
            torch.Generator().set_state(read["cpu"])


def _as_json(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else str(value)
