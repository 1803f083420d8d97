"""Trainer's checkpoints are there whole or not at all."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_jit_checkpoint import JITCheckpointCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, SaveStrategy, rotate_checkpoints

from hf_lohan.checkpoint.whole_folder import unfinished_together
from hf_lohan.compat.transformers_private import uploads_without
from hf_lohan.config import OffloadConfig
from hf_lohan.ranks import Links
from hf_lohan.report.run_data import FOLDER

if TYPE_CHECKING:
    from transformers import Trainer as _TrainerBase
else:
    _TrainerBase = object  # a mixin: `super()` is whatever Trainer it is mixed into


class WholeCheckpoints(_TrainerBase):
    """Mixed into a Trainer: its checkpoints are there whole or not at all, and old ones go only after the new is there.

    Upstream's `_save_checkpoint` does all the writing; only the folder that it asks for is another. The three things
    in it that want the final name (the best checkpoint's path, a push to the Hub, the removal of old checkpoints) are
    done once more or afterwards.
    """

    _offload_config: OffloadConfig | None
    """None: everything is as upstream has it."""
    _unfinished_run_dir: str | None = None
    _push_is_due = False
    last_whole_checkpoint: str | None = None
    """The last one that was written."""

    if TYPE_CHECKING:

        @property
        def _links(self) -> Links: ...

    def _replace_jit_checkpoints(self) -> None:
        """`enable_jit_checkpoint` asks for a checkpoint when SIGTERM comes: `_maybe_log_save_evaluate` sees to it.
        Upstream's callback saves in the middle of a step as well, when a part of its updates is done."""
        callback = self.pop_callback(JITCheckpointCallback)
        if callback is not None:
            callback.on_train_end(self.args, self.state, self.control)  # gives SIGTERM back

    def _get_output_dir(self, trial: Any) -> str:
        return self._unfinished_run_dir or super()._get_output_dir(trial)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if self._offload_config is None:
            super()._save_checkpoint(model, trial)
            return
        run_dir = self._get_output_dir(trial)
        name = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        previous_best = self.state.best_model_checkpoint
        self._push_is_due = False
        try:
            with unfinished_together(self._links, run_dir, name) as unfinished:
                self._unfinished_run_dir = str(unfinished)
                try:
                    super()._save_checkpoint(model, trial)
                finally:
                    self._unfinished_run_dir = None
                self._name_best_checkpoint(run_dir, unfinished / name)
        except BaseException:
            self.state.best_model_checkpoint = previous_best
            raise
        self.last_whole_checkpoint = os.path.join(run_dir, name)
        if self._push_is_due:
            self._push_from_checkpoint(os.path.join(run_dir, name))
        if self.args.should_save:
            rotate_checkpoints(
                output_dir=run_dir,
                save_total_limit=self.args.save_total_limit,
                best_model_checkpoint=self.state.best_model_checkpoint,
                use_mtime=True,
            )

    def _save_once(self, model: Any, trial: Any) -> None:
        """A checkpoint of this step, if it has none yet."""
        name = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        if os.path.basename(self.last_whole_checkpoint or "") != name:
            self._save_checkpoint(model, trial)
            self.callback_handler.on_save(self.args, self.state, self.control)

    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:
        """As upstream, and the same files: neither what is recorded of the run nor a store in its folder."""
        with self._uploads_of_stock():
            return super().push_to_hub(*args, **kwargs)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if self._unfinished_run_dir is None:
            with self._uploads_of_stock():
                super()._push_from_checkpoint(checkpoint_folder)
        else:
            self._push_is_due = True  # uploads run on in the background: not from a folder that is about to move

    def _uploads_of_stock(self) -> contextlib.AbstractContextManager[None]:
        if self._offload_config is None:
            return contextlib.nullcontext()
        ssd = self._offload_config.ssd
        stores = [] if ssd == "auto" else [path.path for path in ssd]  # that of "auto" has a name that is left out
        return uploads_without([FOLDER, *stores], self.args.output_dir)

    def _name_best_checkpoint(self, run_dir: str, checkpoint: Path) -> None:
        """Upstream looked for the best checkpoint beside the unfinished one; say where it is, or is about to be."""
        state, seen = self.state, self.state.best_model_checkpoint
        if state.best_global_step and self.args.save_strategy != SaveStrategy.NO:
            best_name = f"{PREFIX_CHECKPOINT_DIR}-{state.best_global_step}"
            if best_name == checkpoint.name or os.path.exists(os.path.join(run_dir, best_name)):
                state.best_model_checkpoint = os.path.join(run_dir, best_name)
        is_other = state.best_model_checkpoint != seen
        if is_other and self.args.should_save and (checkpoint / TRAINER_STATE_NAME).exists():
            state.save_to_json(str(checkpoint / TRAINER_STATE_NAME))
