"""Gives a checkpoint its name when it is complete and durable, so that a crash leaves only complete checkpoints.

`transformers.Trainer` writes directly to `checkpoint-N`, where an incomplete checkpoint would count as the newest.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hf_lohan.files import CapacityError, StorageError
from hf_lohan.files.directories import is_disk_full, make_folders, no_room
from hf_lohan.files.errors import DiskFullError
from hf_lohan.ranks import Links

logger = logging.getLogger(__name__)

UNFINISHED_NAME = "_unfinished_checkpoint"
"""Folder of an incomplete checkpoint. Pushes to the Hub leave out names with a leading underscore."""
_REPLACED_NAME = "replaced"
_SEEN_WITHIN_S = 30.0
_LOOK_S = 0.1


def check_new_folder(out: str | Path) -> None:
    """Raise ValueError if ``out`` exists and is not an empty folder."""
    if os.path.lexists(out) and not (os.path.isdir(out) and not os.listdir(out)):
        raise ValueError(f"{str(out)!r} exists and is not an empty folder; give a new folder")


@contextmanager
def unfinished_checkpoint(
    run_dir: str, name: str, unfinished_name: str = UNFINISHED_NAME, on_file: Callable[[], object] = lambda: None
) -> Iterator[Path]:
    """Yield a folder to use in place of `run_dir`. At the end of the context, `<folder>/<name>` is made durable and
    moved to `<run_dir>/<name>`, where it replaces an older folder. The yielded folder also has the files of `run_dir`,
    because some trainers copy one of these files into each checkpoint.

    If anything fails, the folder is removed and `run_dir` does not change. A full disk raises `StorageError`. `on_file`
    is called before each file is made durable, because this may take long.
    """
    target = Path(run_dir, name)
    unfinished = Path(run_dir, unfinished_name)
    remove_unfinished(run_dir, unfinished_name)
    try:
        make_folders(unfinished)
        _link_files(Path(run_dir), unfinished)
        yield unfinished
        if (unfinished / name).is_dir():
            _publish(unfinished / name, target, on_file)
        else:
            logger.warning("%s was written directly, so a crash during the save would have left it incomplete", target)
    except BaseException as error:
        left_bytes = no_room(run_dir, 0).available_bytes
        written_bytes = sum(path.lstat().st_size for path in (unfinished / name).rglob("*") if path.is_file())
        with suppress(OSError):
            remove_unfinished(run_dir, unfinished_name)
        is_clear = isinstance(error, StorageError | CapacityError) and not isinstance(error, DiskFullError)
        if is_clear or not isinstance(error, Exception) or not is_disk_full(error, left_bytes):
            raise
        raise StorageError(
            "cannot save the checkpoint",
            path=str(target),
            errno=errno.ENOSPC,
            advice=f"{written_bytes:,} bytes of it were written and {left_bytes:,} bytes were free; free space, or "
            "keep fewer checkpoints with save_total_limit. Earlier checkpoints are untouched",
        ) from error
    shutil.rmtree(unfinished, ignore_errors=True)


def _link_files(run_dir: Path, unfinished: Path) -> None:
    for file in run_dir.iterdir():
        if file.is_file() and not file.is_symlink():
            with suppress(OSError):  # some file systems have no hard links
                os.link(file, unfinished / file.name)


@contextmanager
def unfinished_together(links: Links, run_dir: str, name: str) -> Iterator[Path]:
    """Yield the folder of `unfinished_checkpoint` on all ranks of a run. Each rank writes a part. Rank 0 creates the
    folder, and moves it when all parts are written. Raises ValueError if a rank does not see the folder."""
    if links.ranks.rank == 0:
        with unfinished_checkpoint(run_dir, name, on_file=links.watch.beat) as unfinished:
            try:
                links.barrier("rank 0 to make the folder of a checkpoint")
                yield unfinished
                links.barrier("all ranks to save their parts")
            except BaseException as error:
                links.fail(error)  # must precede the removal of the folder, after which other ranks fail
                raise
    else:
        unfinished = Path(run_dir, UNFINISHED_NAME)
        links.barrier("rank 0 to make the folder of a checkpoint")
        _wait_until_seen(unfinished, links)
        try:
            yield unfinished
        except (FileNotFoundError, FileExistsError):  # rank 0 may have removed the folder because of a failure
            links.watch.find_cause("all ranks to save their parts")
            raise
        links.barrier("all ranks to save their parts")
    links.barrier("rank 0 to give the checkpoint its name")


def _wait_until_seen(folder: Path, links: Links) -> None:
    """Wait until this rank sees a new folder. Network file systems show it to other machines after a delay."""
    rank = links.ranks.rank
    until_s = time.monotonic() + _SEEN_WITHIN_S
    while not folder.is_dir():
        links.raise_if_failed("waited for the folder of a checkpoint")
        if time.monotonic() > until_s:
            raise ValueError(
                f"rank {rank} does not see {folder}, which rank 0 created; put output_dir on a file system that all "
                "machines of the run share, or save no checkpoints"
            )
        time.sleep(_LOOK_S)


def remove_unfinished(run_dir: str, unfinished_name: str = UNFINISHED_NAME) -> None:
    """Remove the folder that a killed save left in `run_dir`, and restore a checkpoint that the save was replacing."""
    unfinished = Path(run_dir, unfinished_name)
    if not os.path.lexists(unfinished):
        return
    replaced = unfinished / _REPLACED_NAME
    for checkpoint in replaced.iterdir() if replaced.is_dir() else ():
        if not os.path.lexists(Path(run_dir, checkpoint.name)):
            checkpoint.rename(Path(run_dir, checkpoint.name))
            _sync(run_dir)
    shutil.rmtree(unfinished)


def _publish(checkpoint: Path, target: Path, on_file: Callable[[], object]) -> None:
    for folder, _, file_names in os.walk(checkpoint, topdown=False):
        for file_name in file_names:
            on_file()
            if not os.path.islink(os.path.join(folder, file_name)):
                _sync(os.path.join(folder, file_name))
        _sync(folder)
    if os.path.lexists(target):
        replaced = checkpoint.parent / _REPLACED_NAME
        make_folders(replaced)
        target.rename(replaced / target.name)
    checkpoint.rename(target)
    _sync(target.parent)
    _sync(target.parent.absolute().parent)  # the run's folder may be new as well


def _sync(path: str | Path) -> None:
    """Make a file or a folder durable. Ignore file systems that cannot sync folders, such as some on networks."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(fd)
