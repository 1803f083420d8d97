"""What a run may go on from: the last committed step of its store, or its last checkpoint."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path

from transformers.trainer_utils import get_last_checkpoint

from hf_lohan.huggingface.step_journal import STORE_FOLDER
from hf_lohan.report import CONFIG_NAME
from hf_lohan.report import FOLDER as RUN_FOLDER
from hf_lohan.store import Commit, last_commit


def store_paths_of_run(output_dir: str | Path) -> list[str]:
    """The ssd paths that the run in `output_dir` used. Raises ValueError if no offloaded run wrote there.

    A store in the output folder itself is found also after the folder was moved.
    """
    inside = Path(output_dir) / STORE_FOLDER
    file = Path(output_dir) / RUN_FOLDER / CONFIG_NAME
    try:
        paths = [str(ssd["path"]) for ssd in json.loads(file.read_text())["ssd"]]
        was_inside = len(paths) == 1 and Path(paths[0]).parts[-len(STORE_FOLDER.parts) :] == STORE_FOLDER.parts
        return [str(inside)] if was_inside and inside.is_dir() else paths
    except FileNotFoundError:
        raise ValueError(
            f"{str(output_dir)!r} is not the output folder of an offloaded run ({RUN_FOLDER / CONFIG_NAME} is missing "
            "in it)"
        ) from None


def last_step(output_dir: str | Path) -> int | None:
    """The global step that `train(resume_from_checkpoint="last_step")` would go on from, None if there is none.

    Looks only; the run may be going on. Raises `StorageError` or `ForeignStoreError` if its store is damaged.
    """
    if not (Path(output_dir) / RUN_FOLDER / CONFIG_NAME).is_file():
        return None
    commit = last_commit(store_paths_of_run(output_dir))
    return int(commit.facts["global_step"]) if commit is not None and _is_resumable(commit) else None


def resumable_commit(paths: Sequence[str], output_dir: str) -> Commit:
    """The last commit of the store in `paths`. Raises ValueError if the run in `output_dir` cannot go on from it."""
    commit = last_commit(paths)
    where = " and ".join(paths)
    if commit is None or (not commit.is_torn and not commit.facts.get("is_resumable")):
        raise ValueError(
            f"no step has been committed in {where}; train without resume_from_checkpoint, or from a checkpoint"
        )
    if not _is_resumable(commit):
        checkpoint = commit.facts.get("last_checkpoint") or "a checkpoint"
        raise ValueError(
            f"the store in {where} has kept one version only of what has been overwritten since (all of it under "
            "durability: checkpoint, else frozen weights, which are others now); "
            f"resume from {checkpoint}, or use durability='step'"
        )
    if not _is_of_run(commit, paths, output_dir):
        raise ValueError(
            f"the store in {where} holds steps of the run in {commit.facts['output_dir']}, not of that in "
            f"{os.path.realpath(output_dir)}; set output_dir to that one, or give this run an ssd path of its own"
        )
    return commit


def is_last_step_newest(paths: Sequence[str], output_dir: str) -> bool:
    """Whether the run in `output_dir` has committed a step after its last checkpoint, or that very one."""
    commit = last_commit(paths)
    if commit is None or not _is_resumable(commit) or not _is_of_run(commit, paths, output_dir):
        return False
    checkpoint = get_last_checkpoint(output_dir) if os.path.isdir(output_dir) else None
    if checkpoint is None:
        return True
    found = re.search(r"(\d+)$", checkpoint)
    assert found is not None, "get_last_checkpoint returns checkpoint-N"
    return int(commit.facts["global_step"]) >= int(found.group(1))


def _is_of_run(commit: Commit, paths: Sequence[str], output_dir: str) -> bool:
    """Whether the run in `output_dir` made the commit; a store in that folder is its own also after it was moved."""
    folder = os.path.realpath(output_dir)
    inside = os.path.realpath(os.path.join(output_dir, STORE_FOLDER))
    return commit.facts["output_dir"] == folder or [os.path.realpath(path) for path in paths] == [inside]


def _is_resumable(commit: Commit) -> bool:
    return bool(commit.facts.get("is_resumable")) and not commit.is_torn and commit.facts.get("durability") == "step"
