"""What one `train()` goes on from, as it was chosen: nothing, a checkpoint, or the last committed step of the store.

`resumption` knows what there is to choose from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from hf_lohan.checkpoint.optimizer_checkpoint import load_optimizer_states
from hf_lohan.engine import OffloadEngine
from hf_lohan.huggingface.loading import reload_weights
from hf_lohan.huggingface.model_description import load_buffers
from hf_lohan.huggingface.resumption import is_last_step_newest, resumable_commit
from hf_lohan.huggingface.step_journal import LAST_STEP, StepJournal, unpack
from hf_lohan.store import Commit, committed_log


@dataclass(frozen=True)
class ResumePoint:
    """Of one `train()`. Weights and states come back in one place, `load`, whenever training begins: with another
    batch size (`auto_find_batch_size`) it begins anew."""

    folder: str | bool | None = None
    """What upstream is to resume from; True: the last checkpoint, which it finds."""
    commit: Commit | None = None
    """The step in the store whose journal is laid out in that folder; None: the folder, if there is one,
    is a checkpoint."""

    @classmethod
    def choose(
        cls, asked: str | bool | None, settled_store: Callable[[], Sequence[str]], output_dir: str
    ) -> ResumePoint:
        """As `train` was asked: "last_step", or True for that or the last checkpoint, whichever is newer, or as
        upstream. `settled_store` is asked for its paths if need be. Raises ValueError if there is no step to go on
        from."""
        if asked is not True and asked != LAST_STEP:
            return cls(asked)
        store_paths = settled_store()
        if asked is True and not is_last_step_newest(store_paths, output_dir):
            return cls(True)
        commit = resumable_commit(store_paths, output_dir)
        return cls(unpack(commit, committed_log(store_paths), output_dir), commit)

    def tell(self, journal: StepJournal, checkpoint: str | None) -> None:
        """What the journal goes on from. `checkpoint`: the folder, as upstream found it."""
        if self.commit is not None:
            journal.resume(self.commit)
        elif checkpoint is not None:
            journal.resume_from_checkpoint(checkpoint)

    def load(self, engine: OffloadEngine, model: nn.Module, checkpoint: str | None) -> None:
        """Weights, buffers and the optimizer's states as they were; nothing for a run that begins anew. Raises
        RuntimeError if the store has gone on."""
        if self.commit is None:
            if checkpoint is not None:
                reload_weights(engine, model, checkpoint)
                load_optimizer_states(engine, checkpoint)
            return
        found = engine.go_back_to_commit()
        if found.number != self.commit.number:
            raise RuntimeError(
                f"step {found.facts.get('global_step')} was committed after this resume had begun (a batch size "
                "was tried that failed later); resume once more, with a batch size that fits"
            )
        assert checkpoint is not None, "a journal was laid out there"
        load_buffers(model, checkpoint)
