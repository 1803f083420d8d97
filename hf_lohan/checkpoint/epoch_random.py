"""An epoch's data come in the same order, also when a run goes on in the middle of it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

_FILE_STEM = "epoch_rng_state"
_STOCK_STEM = "rng_state"


class EpochRandomNumbers:
    """The state of the random number generators with which the present epoch began.

    Samplers draw an epoch's order from it. Upstream saves only the state at the step, with which the rest of a resumed
    epoch has another order, unless it is accelerate's seedable sampler that draws it.
    """

    def __init__(self, save: Callable[[str], None], load: Callable[[str], None], suffix: str = "") -> None:
        """`save` and `load` are Trainer's, for the file `rng_state<suffix>.pth` in a folder."""
        self._save = save
        self._load = load
        self._stock_name, self._file_name = f"{_STOCK_STEM}{suffix}.pth", f"{_FILE_STEM}{suffix}.pth"
        self._content = b""
        self._resumed: Path | None = None

    def resume(self, folder: str | Path | None) -> None:
        """The next epoch is the first one after a resume. `folder` is a journal's or a checkpoint, which may be without
        our file (of the stock Trainer)."""
        self._resumed = None if folder is None else Path(folder)
        found = [] if folder is None else Path(folder).glob(f"**/{self._file_name}")
        self._content = next((path.read_bytes() for path in found), b"")

    def begin(self, *, is_rest: bool) -> None:
        """An epoch begins, whose order has not been drawn yet. ``is_rest``: of one that was broken off."""
        resumed, self._resumed = self._resumed, None
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, self._stock_name)
            if resumed is not None and is_rest and self._content:
                path.write_bytes(self._content)
                self._load(folder)
                return
            if resumed is not None and not is_rest:
                self._load(str(resumed))  # as upstream does when we return, before it draws the order
            self._save(folder)
            self._content = path.read_bytes() if path.is_file() else b""

    def write(self, folder: str) -> None:
        """For a run that goes on from there. Writes nothing before the first epoch."""
        if self._content:
            Path(folder, self._file_name).write_bytes(self._content)
