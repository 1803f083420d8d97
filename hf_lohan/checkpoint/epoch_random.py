"""Keeps the order of the data when a run resumes in the middle of an epoch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from hf_lohan.files.directories import temporary_folder

_FILE_STEM = "epoch_rng_state"
_STOCK_STEM = "rng_state"


class EpochRandomNumbers:
    """The random number generators' state at the start of the epoch. Samplers draw the data order from this state.

    transformers saves only the state at the checkpointed step. A sampler restarted from that state would draw a
    different order for the rest of the epoch. (accelerate's seedable sampler is not affected.)
    """

    def __init__(self, save: Callable[[str], None], load: Callable[[str], None], suffix: str = "") -> None:
        """`save` and `load` are Trainer's functions for the file `rng_state<suffix>.pth` in a folder."""
        self._save = save
        self._load = load
        self._stock_name, self._file_name = f"{_STOCK_STEM}{suffix}.pth", f"{_FILE_STEM}{suffix}.pth"
        self._content = b""
        self._resumed: Path | None = None

    def resume(self, folder: str | Path | None) -> None:
        """Resume from the folder of a journal or checkpoint. A checkpoint of the stock Trainer lacks the state."""
        self._resumed = None if folder is None else Path(folder)
        files = [] if folder is None else Path(folder).glob(f"**/{self._file_name}")
        self._content = next((path.read_bytes() for path in files), b"")

    def begin_epoch(self, *, is_rest: bool) -> None:
        """Save or restore the state before an epoch's order is drawn. ``is_rest``: whether this resumes the epoch."""
        resumed, self._resumed = self._resumed, None
        with temporary_folder() as folder:
            path = Path(folder, self._stock_name)
            if resumed is not None and is_rest and self._content:
                path.write_bytes(self._content)
                self._load(folder)
                return
            if resumed is not None and not is_rest:
                self._load(str(resumed))  # transformers repeats this before it draws the order
            self._save(folder)
            self._content = path.read_bytes() if path.is_file() else b""

    def write(self, folder: str) -> None:
        """Write the state for a resume, unless no epoch has begun."""
        if self._content:
            Path(folder, self._file_name).write_bytes(self._content)
