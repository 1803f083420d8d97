"""A checkpoint of several ranks gets its name once all parts exist, and no name if a rank fails."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from hf_lohan.checkpoint import whole_folder
from hf_lohan.checkpoint.whole_folder import UNFINISHED_NAME, remove_unfinished, unfinished_together
from hf_lohan.ranks import Links, RankFailedError
from hf_lohan.testing.thread_ranks import rank_outcomes, run_ranks

NAME = "checkpoint-3"


def write_part(links: Links, folder: Path) -> None:
    (folder / NAME).mkdir(exist_ok=True)
    time.sleep(0.01 * links.ranks.rank)  # without waiting, rank 0 would rename the folder first
    (folder / NAME / f"part-{links.ranks.rank}").write_text(str(links.ranks.rank))


@pytest.mark.parametrize("seed", range(5))
def test_a_checkpoint_appears_with_all_parts(seed: int, tmp_path: Path) -> None:
    def save(links: Links) -> list[str]:
        with unfinished_together(links, str(tmp_path), NAME) as unfinished:
            write_part(links, unfinished)
        return sorted(os.listdir(tmp_path / NAME))

    parts = [f"part-{rank}" for rank in range(3)]
    assert run_ranks(3, save, delays_seed=seed) == [parts] * 3
    assert os.listdir(tmp_path) == [NAME]


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_no_checkpoint_appears_if_a_rank_fails(failing: int, tmp_path: Path) -> None:
    def save(links: Links) -> None:
        with unfinished_together(links, str(tmp_path), NAME) as unfinished:
            write_part(links, unfinished)
            if links.ranks.rank == failing:
                raise OSError("the disk of this rank is full")

    for rank, outcome in enumerate(rank_outcomes(3, save)):
        # Also of a rank that writes to the folder while rank 0 removes it.
        cause = "the disk of this rank is full"
        if rank == failing:
            assert isinstance(outcome.error, OSError) and cause in str(outcome.error)
        else:
            assert isinstance(outcome.error, RankFailedError) and cause in str(outcome.error)
    assert not (tmp_path / NAME).exists()
    remove_unfinished(str(tmp_path))  # as the next save does, because a rank may write while rank 0 removes
    assert not (tmp_path / UNFINISHED_NAME).exists()


def test_a_folder_that_one_rank_cannot_see_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole_folder, "_SEEN_WITHIN_S", 0.2)

    def save(links: Links) -> None:
        run_dir = tmp_path / ("here" if links.ranks.rank == 0 else "elsewhere")
        with unfinished_together(links, str(run_dir), NAME) as unfinished:
            (unfinished / NAME).mkdir(exist_ok=True)

    with pytest.raises(ValueError, match=r"rank 1 does not see .* put output_dir on a file system that all"):
        run_ranks(2, save)
    assert not (tmp_path / "here" / NAME).exists()
