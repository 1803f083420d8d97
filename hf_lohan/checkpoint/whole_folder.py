"""Gives a checkpoint its name when it is complete and durable, so that a crash leaves only complete checkpoints.

`transformers.Trainer` writes directly to `checkpoint-N`, where an incomplete checkpoint would count as the newest.
`accelerate.Accelerator` writes file by file, so that a folder that is written again could have files of two states.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

from hf_lohan.files import CapacityError, StorageError
from hf_lohan.files.directories import is_disk_full, make_folders, no_room
from hf_lohan.files.errors import DiskFullError
from hf_lohan.ranks import Links

logger = logging.getLogger(__name__)

UNFINISHED_NAME = "_unfinished_checkpoint"
"""Folder of an incomplete checkpoint. Pushes to the Hub leave out names with a leading underscore."""
_REPLACED_NAME = "replaced"
_COMPLETE_NAME = "_complete_checkpoint"
"""Folder of complete files that have yet to replace the files of the folder around it."""
_MADE_BY_RANK_0 = "rank 0 to make the folder of a checkpoint"
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
    with _named_if_full(target, unfinished / name, lambda: remove_unfinished(run_dir, unfinished_name)):
        make_folders(unfinished)
        _link_files(Path(run_dir), unfinished)
        yield unfinished
        if (unfinished / name).is_dir():
            _publish(unfinished / name, target, on_file)
        else:
            logger.warning("%s was written directly, so a crash during the save would have left it incomplete", target)
    shutil.rmtree(unfinished, ignore_errors=True)


@contextmanager
def _named_if_full(target: Path, unfinished: Path, remove: Callable[[], object]) -> Iterator[None]:
    """If anything fails in this context, call ``remove``. Replace the error of a full disk by `StorageError`, which
    names ``target`` and the bytes in ``unfinished``."""
    try:
        yield
    except BaseException as error:
        left_bytes = no_room(str(target.parent), 0).available_bytes
        written_bytes = sum(path.lstat().st_size for path in unfinished.rglob("*") if path.is_file())
        with suppress(OSError):
            remove()
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


@contextmanager
def unfinished_files(
    folder: str | Path, new_in: str | Path, on_file: Callable[[], object] = lambda: None
) -> Iterator[Path]:
    """Yield a folder to use in place of ``folder``. At the end of the context its files are made durable, and replace
    all files of the same names in ``folder`` together. Other files of ``folder`` stay. If ``folder`` is new, it appears
    then, and until then its files are in ``new_in``.

    A process that is killed leaves the files of before or all new files, if the next reader or writer calls
    `finish_files`. If anything fails, ``folder`` does not change. A full disk raises `StorageError`.
    """
    folder = Path(folder)
    finish_files(folder)
    is_new = not folder.is_dir()
    unfinished = Path(new_in, f"{UNFINISHED_NAME}-{folder.name}") if is_new else folder / UNFINISHED_NAME
    complete = folder if is_new else folder / _COMPLETE_NAME
    if unfinished.is_dir():
        shutil.rmtree(unfinished)
    with _named_if_full(folder, unfinished, lambda: shutil.rmtree(unfinished)):
        make_folders(folder.parent)
        make_folders(unfinished)
        yield unfinished
        _sync_all(unfinished, on_file)
        unfinished.rename(complete)
        _sync(complete.parent)
        _sync(complete.parent.absolute().parent)  # the parent may be new as well
    finish_files(folder)


def finish_files(folder: str | Path) -> None:
    """If a process was killed while complete files replaced the files of ``folder``, replace the rest of them."""
    complete = Path(folder, _COMPLETE_NAME)
    if not complete.is_dir():
        return
    paths = sorted(complete.rglob("*"))  # a folder is before its files
    changed = {Path(folder)}
    for path in paths:
        target = Path(folder, path.relative_to(complete))
        if path.is_dir() and not path.is_symlink():
            make_folders(target)
            changed.add(target)
        else:
            path.replace(target)
    for each in changed:
        _sync(each)
    shutil.rmtree(complete)


def _link_files(run_dir: Path, unfinished: Path) -> None:
    for file in run_dir.iterdir():
        if file.is_file() and not file.is_symlink():
            with suppress(OSError):  # some file systems have no hard links
                os.link(file, unfinished / file.name)


def unfinished_together(links: Links, run_dir: str, name: str) -> AbstractContextManager[Path]:
    """Yield the folder of `unfinished_checkpoint` on all ranks of a run. Each rank writes a part. Rank 0 creates the
    folder, and moves it when all parts are written. Raises ValueError if a rank does not see the folder."""
    return _together(links, Path(run_dir), unfinished_checkpoint(run_dir, name, on_file=links.watch.beat))


def unfinished_files_together(links: Links, folder: Path, new_in: Path) -> AbstractContextManager[Path]:
    """Yield the folder of `unfinished_files` on all ranks of a run, as `unfinished_together` does. ``folder`` is within
    ``new_in``."""
    return _together(links, new_in, unfinished_files(folder, new_in, on_file=links.watch.beat))


def finish_files_together(links: Links, folder: str | Path) -> None:
    """Call `finish_files` on rank 0. All ranks call this. Raises ValueError if ``folder`` is that of a killed save."""
    if os.path.basename(os.path.normpath(folder)).startswith(UNFINISHED_NAME):
        raise ValueError(f"{str(folder)!r} is incomplete, because its save was killed; delete it, and load another")
    if links.ranks.rank == 0:
        finish_files(folder)
    links.barrier("rank 0 to replace the files of a checkpoint")


@contextmanager
def _together(links: Links, base: Path, on_rank_0: AbstractContextManager[Path]) -> Iterator[Path]:
    """``base``: a folder around that of ``on_rank_0``. Its path may differ between machines."""
    if links.ranks.rank == 0:
        with on_rank_0 as unfinished:
            try:
                links.all_gather(_MADE_BY_RANK_0, os.path.relpath(unfinished, base).encode())
                yield unfinished
                links.barrier("all ranks to save their parts")
            except BaseException as error:
                links.fail(error)  # must precede the removal of the folder, after which other ranks fail
                raise
    else:
        unfinished = base / links.all_gather(_MADE_BY_RANK_0)[0].decode()
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
    _sync_all(checkpoint, on_file)
    if os.path.lexists(target):
        replaced = checkpoint.parent / _REPLACED_NAME
        make_folders(replaced)
        target.rename(replaced / target.name)
    checkpoint.rename(target)
    _sync(target.parent)
    _sync(target.parent.absolute().parent)  # the run's folder may be new as well


def _sync_all(checkpoint: Path, on_file: Callable[[], object]) -> None:
    for folder, _, file_names in os.walk(checkpoint, topdown=False):
        for file_name in file_names:
            on_file()
            if not os.path.islink(os.path.join(folder, file_name)):
                _sync(os.path.join(folder, file_name))
        _sync(folder)


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
