"""Checks of store directories, even while other ranks create them."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from hf_lohan.files.directories import StorePath, make_directory, validate_directories


def test_ranks_check_and_make_folders_at_the_same_time(tmp_path: Path) -> None:
    errors: list[BaseException] = []

    def begin(turn: int, rank: int, meeting: threading.Barrier) -> None:
        path = str(tmp_path / str(turn) / "ssd" / f"rank-{rank}-of-4")
        meeting.wait()
        try:
            validate_directories([StorePath(path)])
            make_directory(path)
        except BaseException as error:
            errors.append(error)

    for turn in range(50):
        meeting = threading.Barrier(4)
        ranks = [threading.Thread(target=begin, args=(turn, rank, meeting)) for rank in range(4)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
    assert not errors
    assert all(len(os.listdir(tmp_path / str(turn) / "ssd")) == 4 for turn in range(50))


def test_trial_folders_are_removed(tmp_path: Path) -> None:
    validate_directories([StorePath(str(tmp_path / "a" / "b" / "c"))])
    assert os.listdir(tmp_path) == []
