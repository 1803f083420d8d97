"""An epoch's data come in the same order, also when a run goes on in the middle of it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from hf_lohan.checkpoint.optimizer_states import FOLDER_NAME

_FILE_NAME = "epoch_rng_state.pth"
_STOCK_NAME = "rng_state.pth"


class EpochRandomNumbers(TrainerCallback):
    """Keeps the state of the random number generators with which the present epoch began.

    Samplers draw an epoch's order from it. Upstream saves only the state at the step, with which the rest of a resumed
    epoch has another order, unless it is accelerate's seedable sampler that draws it.
    """

    def __init__(
        self, save: Callable[[str], None], load: Callable[[str], None], resumed_from: str | Path | None
    ) -> None:
        """`save` and `load` are Trainer's own, for `rng_state.pth` in a folder. `resumed_from` is a journal's folder or
        a checkpoint; one without our file (of the stock Trainer) changes nothing."""
        self._save = save
        self._load = load
        found = [] if resumed_from is None else Path(resumed_from).glob(f"**/{_FILE_NAME}")
        self._resumed = next((path.read_bytes() for path in found), b"")
        self._content = self._resumed

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        resumed, self._resumed = self._resumed, b""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, _STOCK_NAME)
            if resumed:
                path.write_bytes(resumed)
                self._load(folder)
            else:
                self._save(folder)
                self._content = path.read_bytes() if path.is_file() else b""

    def write_to_journal(self, folder: str) -> None:
        """For a run that goes on from there. Writes nothing before the first epoch."""
        if self._content:
            Path(folder, _FILE_NAME).write_bytes(self._content)

    def write_to_checkpoint(self, folder: str) -> None:
        """As `write_to_journal`, where upstream's files are not."""
        self.write_to_journal(str(Path(folder, FOLDER_NAME)))
