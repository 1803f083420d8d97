"""A directory that is only read is locked too, also where this process cannot write."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from hf_lohan.files import StorageError, StoreInUseError
from hf_lohan.files.lock import LOCK_NAME, DirectoryLock


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.EPERM])
@pytest.mark.parametrize("has_file", [True, False])
def test_a_lock_for_reading(code: int, has_file: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if has_file:
        (tmp_path / LOCK_NAME).write_text("4711\n")
    open_file = os.open

    def refusing(path: str, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & (os.O_RDWR | os.O_CREAT):
            raise OSError(code, os.strerror(code), path)
        return open_file(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", refusing)
    with pytest.raises(StorageError, match=f"cannot open the lock .*{os.strerror(code)}"):
        DirectoryLock(str(tmp_path))
    first = DirectoryLock(str(tmp_path), is_read_only=True)
    with pytest.raises(StoreInUseError, match="in use by process " + ("4711" if has_file else "unknown")):
        DirectoryLock(str(tmp_path), is_read_only=True)
    first.close()
    DirectoryLock(str(tmp_path), is_read_only=True).close()
