"""The state that a run resumes from: a checkpoint, or the last committed step of its store."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_lohan.checkpoint.generations import common_commits, is_resumable, stores_of
from hf_lohan.checkpoint.optimizer_states import FOLDER_NAME
from hf_lohan.files import StorageError, write_failure
from hf_lohan.files.directories import make_folders
from hf_lohan.planning.run_plan import RUN_ID
from hf_lohan.ranks import Links
from hf_lohan.ranks.transport.agreements import newest_common_commit
from hf_lohan.report.run_data import (
    FOLDER,
    PATHS_OF_RANKS,
    PRIVATE_FOLDER,
    SETTINGS_NAME,
    STORE_FOLDER,
    no_run_in,
    output_folder,
)
from hf_lohan.store import Commit, committed_log, kept_commits
from hf_lohan.store.rank_folders import rank_folder, shared_directory, stores_under

LAST_STEP = "last_step"
CHECKPOINT_FACTS_NAME = "run.json"
"""Name of the file with the facts of the run, in the folder `lohan` of a checkpoint."""
LAST_COMMIT = "last_commit"
"""Name of the id of the last commit before a checkpoint, in these facts."""
_TRAINER_STATE_NAME = "trainer_state.json"


@dataclass(frozen=True)
class ResumePoint:
    """The state from which one `train()` resumes."""

    folder: str | bool | None = None
    """The folder from which transformers resumes. True is the last checkpoint. None is a new run."""
    commit: Commit | None = None
    """The committed step whose journal is in `folder`. None for a checkpoint or a new run."""

    @classmethod
    def choose(
        cls,
        asked: str | bool | None,
        wait_for_store_paths: Callable[[], Sequence[str]],
        output_dir: str,
        last_checkpoint: Callable[[str], str | None],
        check: Callable[[Commit, bytes, str], None],
        links: Links | None = None,
    ) -> ResumePoint:
        """Choose the state for ``asked``, the argument `resume_from_checkpoint`. "last_step" is the last committed
        step. True is the last step, or the last checkpoint if it is newer (see `_continues_from`). transformers
        handles other values.

        `wait_for_store_paths` waits for a running commit and returns the paths of the store. `last_checkpoint` returns
        the last checkpoint in a folder. `check` raises StorageError if a step's journal is damaged. All ranks call this
        together, and resume from the newest step that all have. Raises ValueError if there is nothing to resume from.
        """
        if asked is not True and asked != LAST_STEP:
            if asked not in (None, False):
                _check_checkpoint(str(asked), output_dir, last_checkpoint)
            return cls(asked)
        links = links or Links.alone()
        store_paths = wait_for_store_paths()
        last = _last_of_all(kept_commits(store_paths), links, may_have_none=asked is True)
        log = b""
        if last is not None and is_resumable(last):
            log = committed_log(store_paths, last)
            check(last, log, store_paths[0])
        if asked is True and not _continues_from(last, store_paths, output_dir, last_checkpoint):
            return cls(True)
        commit = _resumable(last, store_paths, output_dir)
        folder = os.path.join(output_dir, PRIVATE_FOLDER, LAST_STEP)
        return cls(_unpack(commit, log, Path(rank_folder(folder, links.ranks.rank, links.ranks.num_ranks))), commit)


def newest_checkpoint(named: str | None, run_id: str | None, output_dir: str) -> str | None:
    """Return the newest checkpoint of the run ``run_id``. ``named`` is the checkpoint that the last commit names. A
    checkpoint is complete before a commit names it, so a run that was killed in between has a newer checkpoint.
    Checkpoints of other runs in ``output_dir`` are ignored."""
    newest, last = named, -1 if named is None else _step_in_name(named)
    for folder in Path(output_dir).glob("checkpoint-*") if run_id is not None else ():
        if _step_in_name(folder.name) > last and (folder / _TRAINER_STATE_NAME).is_file():
            facts = facts_of_checkpoint(folder)
            if facts.get(RUN_ID) == run_id:
                newest, last = str(folder.absolute()), _step_in_name(folder.name)
    return newest


def facts_of_checkpoint(folder: str | Path) -> dict[str, Any]:
    """Return the facts of the run that saved a checkpoint, or {} if another program or an early version saved it."""
    path = Path(folder, FOLDER_NAME, CHECKPOINT_FACTS_NAME)
    facts = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    assert isinstance(facts, dict)
    return facts


def id_of(commit: Commit | None) -> str | None:
    """Return an id that is the same on all ranks, and that no other commit has."""
    return None if commit is None else f"{commit.group_id or commit.store_id}-{commit.number}"


def _step_in_name(checkpoint: str) -> int:
    """Return the step of a folder `checkpoint-N`, or -1 for another name."""
    match = re.search(r"checkpoint-(\d+)$", checkpoint)
    return -1 if match is None else int(match[1])


def point_of_attempt(launch_id: str, store_paths: Sequence[str], output_dir: str, links: Links) -> str | None:
    """Return the value of `resume_from_checkpoint` after a failed attempt of the same launch: the last committed step,
    or the newest checkpoint of the run. None if the attempt did not begin to train, or if there is neither. All ranks
    call this together."""
    last = _last_of_all(kept_commits(store_paths), links, may_have_none=True)
    facts = last.facts if last is not None else {}
    if last is not None and is_resumable(last):
        point: str | None = LAST_STEP
    else:
        point = newest_checkpoint(facts.get("last_checkpoint"), facts.get(RUN_ID), output_dir)
    # A machine that joined the launch later has another launch id, but it may use the store of a former machine.
    told = json.dumps([point, facts.get("launch_id") == launch_id])
    points = [json.loads(of_rank) for of_rank in links.all_gather("the state of the failed attempt", told.encode())]
    found: set[str | None] = {of_rank for of_rank, _ in points}
    if not any(is_own for _, is_own in points) or None in found or (LAST_STEP in found and len(found) > 1):
        return None
    # Some machines may not see the newest checkpoint yet, so all ranks take the newest one that all machines see.
    return min((of_rank for of_rank in found if of_rank is not None), key=_step_in_name)


def _check_checkpoint(folder: str, output_dir: str, last_checkpoint: Callable[[str], str | None]) -> None:
    """Raise ValueError if ``folder`` is not a checkpoint of Trainer."""
    if os.path.isfile(os.path.join(folder, _TRAINER_STATE_NAME)):
        return
    fault = f"has no {_TRAINER_STATE_NAME}" if os.path.isdir(folder) else "does not exist"
    last = last_checkpoint(output_dir) if os.path.isdir(output_dir) else None
    raise ValueError(
        f"resume_from_checkpoint={folder!r} {fault}; give the folder of a checkpoint"
        + (f", such as {last}," if last else "")
        + f' or "{LAST_STEP}", the last committed step'
    )


def store_paths_of(run: str | Path) -> list[list[str]]:
    """Return the ssd paths of a run: one list that all ranks share, or one list for each rank. ``run`` is the output
    folder, a folder in it, or the folder of a store. Raises ValueError if there is no offloaded run.

    If the output folder was moved, a store inside it is still found.
    """
    if stores_under(str(run)):
        return [[str(run)]]
    folder = output_folder(run, SETTINGS_NAME)
    if folder is None:
        raise no_run_in(run, SETTINGS_NAME)
    file = folder / FOLDER / SETTINGS_NAME
    try:
        of_ssd = [ssd.get(PATHS_OF_RANKS) or [ssd["path"]] for ssd in json.loads(file.read_text())["ssd"]]
        lists = [[shared_directory(str(path)) for path in of_rank] for of_rank in zip(*of_ssd, strict=True)]
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise ValueError(f"{file} is damaged ({error}); give the folder of the store itself") from error
    paths = lists[:1] if all(of_rank == lists[0] for of_rank in lists) else lists
    was_inside = [Path(path).parts[-len(STORE_FOLDER.parts) :] for path in paths[0]] == [STORE_FOLDER.parts]
    is_inside = len(paths) == 1 and was_inside and (folder / STORE_FOLDER).is_dir()
    return [[str(folder / STORE_FOLDER)]] if is_inside else paths


def last_step(output_dir: str | Path) -> int | None:
    """Return the global step from which `train(resume_from_checkpoint="last_step")` would resume, or None.

    This changes nothing, and may be called during a run. With several ranks, the result is the newest step that all
    ranks have, and this machine must have access to all stores. Raises `StorageError` or `ForeignStoreError` if a store
    is damaged, RanksDisagreeError if the ranks have no common step, and ValueError if a store is missing.
    """
    if not (Path(output_dir) / FOLDER / SETTINGS_NAME).is_file():
        return None
    found = stores_of(store_paths_of(output_dir)).found
    if found is None or not all(store.commits for store in found.stores.values()):
        return None
    folders = found.folders()
    commit = common_commits([*map(kept_commits, folders)])[0]
    if not is_resumable(commit):
        return None
    step = commit.facts.get("global_step")
    if type(step) is not int:
        raise StorageError(
            f"global_step is {step!r} in the commit in", path=folders[0][0], advice="resume from a checkpoint"
        )
    return step


def _last_of_all(kept: Sequence[Commit], links: Links, *, may_have_none: bool) -> Commit | None:
    """Return the last of this rank's ``kept`` commits that all ranks have, or None if nothing is committed. If the
    ranks have no common commit, return None with ``may_have_none``, and raise RanksDisagreeError otherwise."""
    by_key = {commit.key: commit for commit in kept}
    packed = links.all_gather("the steps that each rank has committed", json.dumps([*by_key]).encode())
    held_by_rank = [[(str(group), int(number)) for group, number in json.loads(held)] for held in packed]
    if not any(held_by_rank) or (may_have_none and not set(held_by_rank[0]).intersection(*held_by_rank[1:])):
        return None
    return by_key[newest_common_commit(held_by_rank)]


def _resumable(commit: Commit | None, paths: Sequence[str], output_dir: str) -> Commit:
    """Return the commit. Raises ValueError if the run in ``output_dir`` cannot resume from it."""
    where = " and ".join(paths)
    if commit is None or (not commit.is_torn and not commit.facts.get("is_resumable")):
        raise ValueError(
            f"no step has been committed in {where}; train without resume_from_checkpoint, or from a checkpoint"
        )
    if not is_resumable(commit):
        checkpoint = commit.facts.get("last_checkpoint") or "a checkpoint"
        raise ValueError(
            f"the last step in {where} is lost, because a later write, such as one in gathered_parameters, replaced "
            "records of which the store keeps only one version (all with durability: checkpoint, otherwise frozen "
            f"weights); resume from {checkpoint}, or train without resume_from_checkpoint"
        )
    if not _is_of_run(commit, paths, output_dir):
        raise ValueError(
            f"the store in {where} has steps of the run in {commit.facts['output_dir']}, and this run's output_dir is "
            f"{os.path.realpath(output_dir)}; use the same output_dir, or give this run another ssd path"
        )
    return commit


def _continues_from(
    commit: Commit | None, paths: Sequence[str], output_dir: str, last_checkpoint: Callable[[str], str | None]
) -> bool:
    """Return whether the run in ``output_dir`` continues from ``commit`` and not from its last checkpoint.

    A run that is killed between a checkpoint and the commit of its step continues from the commit before, because a
    checkpoint lacks the sums since the last log and what follows the last step of an epoch, such as an evaluation. A
    checkpoint that does not follow this commit is preferred if it is newer: the run may have used another store."""
    if commit is None or not is_resumable(commit) or not _is_of_run(commit, paths, output_dir):
        return False
    checkpoint = last_checkpoint(output_dir) if os.path.isdir(output_dir) else None
    if checkpoint is None or int(commit.facts["global_step"]) >= _step_in_name(checkpoint):
        return True
    return facts_of_checkpoint(checkpoint).get(LAST_COMMIT) == id_of(commit)


def _is_of_run(commit: Commit, paths: Sequence[str], output_dir: str) -> bool:
    """Return whether the run in ``output_dir`` made the commit. That folder may have been moved with the store."""
    store = os.path.realpath(os.path.join(output_dir, STORE_FOLDER))
    is_inside = [os.path.realpath(shared_directory(path)) for path in paths] == [store]
    return commit.facts["output_dir"] == os.path.realpath(output_dir) or is_inside


def _unpack(commit: Commit, log: bytes, folder: Path) -> str:
    """Write a committed journal to ``folder``, so that Trainer can resume from it. Return the path. Raises
    `CapacityError` or `StorageError` if the journal cannot be written."""
    files = dict(commit.journal)
    state = json.loads(files[_TRAINER_STATE_NAME])
    state["log_history"] = [json.loads(line) for line in log.decode().splitlines()]
    files[_TRAINER_STATE_NAME] = (json.dumps(state, indent=2, sort_keys=True) + "\n").encode()
    try:
        if folder.exists():
            shutil.rmtree(folder)
        make_folders(folder, mode=0o700)
        for name, content in files.items():
            (folder / name).touch(mode=0o600)
            (folder / name).write_bytes(content)
    except OSError as error:
        raise write_failure(str(folder), sum(map(len, files.values())), error) from error
    return str(folder)
