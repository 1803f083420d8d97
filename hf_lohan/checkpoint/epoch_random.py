"""An epoch's data come in the same order, also when a run goes on in the middle of it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

_FILE_NAME = "epoch_rng_state.pth"
_STOCK_NAME = "rng_state.pth"


class EpochRandomNumbers:
    """The state of the random number generators with which the present epoch began.

    Samplers draw an epoch's order from it. Upstream saves only the state at the step, with which the rest of a resumed
    epoch has another order, unless it is accelerate's seedable sampler that draws it.
    """

    def __init__(self, save: Callable[[str], None], load: Callable[[str], None]) -> None:
        """`save` and `load` are Trainer's own, for `rng_state.pth` in a folder."""
        self._save = save
        self._load = load
        self._content = b""
        self._is_to_load = False

    def resume(self, folder: str | Path | None) -> None:
        """The next epoch is the rest of one. `folder` is a journal's or a checkpoint; one without our file (of the
        stock Trainer) changes nothing."""
        found = [] if folder is None else Path(folder).glob(f"**/{_FILE_NAME}")
        self._content = next((path.read_bytes() for path in found), b"")
        self._is_to_load = bool(self._content)

    def begin(self) -> None:
        """An epoch begins, whose order has not been drawn yet."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, _STOCK_NAME)
            if self._is_to_load:
                path.write_bytes(self._content)
                self._load(folder)
            else:
                self._save(folder)
                self._content = path.read_bytes() if path.is_file() else b""
        self._is_to_load = False

    def write(self, folder: str) -> None:
        """For a run that goes on from there. Writes nothing before the first epoch."""
        if self._content:
            Path(folder, _FILE_NAME).write_bytes(self._content)
