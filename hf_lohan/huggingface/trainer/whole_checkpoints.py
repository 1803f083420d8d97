"""Writes Trainer's checkpoints and model card. A checkpoint appears only when it is complete."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_jit_checkpoint import JITCheckpointCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, SaveStrategy, rotate_checkpoints

from hf_lohan.checkpoint.whole_folder import unfinished_together
from hf_lohan.compat.patches import replaced
from hf_lohan.compat.transformers_private import uploads_without
from hf_lohan.huggingface.trainer_mixin import TrainerMixin
from hf_lohan.report.run_data import FOLDER

CARD_TAG = "hf_lohan"
CARD_HEADING = "### Offloading"


class CompleteCheckpointsMixin(TrainerMixin):
    """A checkpoint appears when it is complete, and only then old checkpoints are removed. Upstream's
    `_save_checkpoint` writes to another folder, which is then renamed. The path of the best checkpoint, a push to the
    Hub and the removal of old checkpoints need the final name, so they are repeated or delayed."""

    _unfinished_run_dir: str | None = None
    _push_is_due = False
    last_whole_checkpoint: str | None = None
    """Path of the last checkpoint that was written."""

    def _replace_jit_checkpoints(self) -> None:
        """Remove upstream's callback for `enable_jit_checkpoint`. At SIGTERM it could save in the middle of a step,
        with only a part of the updates. `_maybe_log_save_evaluate` saves after the step instead."""
        callback = self.pop_callback(JITCheckpointCallback)
        if callback is not None:
            callback.on_train_end(self.args, self.state, self.control)  # restores the handler of SIGTERM

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
                with replaced(self, _unfinished_run_dir=str(unfinished)):
                    super()._save_checkpoint(model, trial)
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

    def _save_unless_saved(self, model: Any, trial: Any) -> None:
        name = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        if os.path.basename(self.last_whole_checkpoint or "") != name:
            self._save_checkpoint(model, trial)
            self.callback_handler.on_save(self.args, self.state, self.control)

    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:
        """Same as upstream, but leave out the run's record and any store in the folder."""
        with self._uploads_as_upstream():
            return super().push_to_hub(*args, **kwargs)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Same as upstream, but add our tag and lines about the run to an offloaded run's card, unless `hub_model_card`
        is false."""
        super().create_model_card(*args, **kwargs)
        config = self._offload_config
        if config is None or not config.hub_model_card or not self.is_world_process_zero():
            return
        path = os.path.join(self.args.output_dir, "README.md")
        card = ModelCard.load(path)
        card.data.tags = list(dict.fromkeys([*(card.data.tags or []), CARD_TAG]))
        lines = [f"- {line}" for line in (self._record.card_lines() if self._record is not None else [])]
        card.text = "\n".join([card.text.rstrip("\n"), *(["", CARD_HEADING, "", *lines] if lines else []), ""])
        card.save(path)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if self._unfinished_run_dir is None:
            with self._uploads_as_upstream():
                super()._push_from_checkpoint(checkpoint_folder)
        else:
            self._push_is_due = True  # push later, because this folder is renamed while an upload would run

    def _uploads_as_upstream(self) -> contextlib.AbstractContextManager[None]:
        if self._offload_config is None:
            return contextlib.nullcontext()
        ssd = self._offload_config.ssd
        # Uploads leave out the "auto" store in any case, because of its name.
        stores = [] if ssd == "auto" else [path.path for path in ssd]
        return uploads_without([FOLDER, *stores], self.args.output_dir)

    def _name_best_checkpoint(self, run_dir: str, checkpoint: Path) -> None:
        """Set the final path of the best checkpoint. Upstream sets the path in the unfinished folder."""
        state, before = self.state, self.state.best_model_checkpoint
        if state.best_global_step and self.args.save_strategy != SaveStrategy.NO:
            best_name = f"{PREFIX_CHECKPOINT_DIR}-{state.best_global_step}"
            if best_name == checkpoint.name or os.path.exists(os.path.join(run_dir, best_name)):
                state.best_model_checkpoint = os.path.join(run_dir, best_name)
        has_changed = state.best_model_checkpoint != before
        if has_changed and self.args.should_save and (checkpoint / TRAINER_STATE_NAME).exists():
            state.save_to_json(str(checkpoint / TRAINER_STATE_NAME))
