"""The file that says what is committed: replacing it is the commit."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash
from safetensors import SafetensorError
from safetensors.numpy import load, save

from hf_lohan.files import StorageError, replace_durably
from hf_lohan.files.durable_file import read_whole
from hf_lohan.store.granules import Checksums

COMMIT_NAME = "commit.safetensors"
_JOURNAL = "journal/"
_ADVICE = "check the drive; the store must be made anew, from a checkpoint"


@dataclass(frozen=True, eq=False)
class Commit:
    """What one commit wrote down: the version of every granule, and what its writer wants to find again."""

    store_id: str
    number: int
    """Commits of this store are counted from 1."""
    home: npt.NDArray[np.uint8]
    checksum: Checksums
    facts: Mapping[str, Any] = field(default_factory=dict)
    """In JSON's types."""
    journal: Mapping[str, bytes] = field(default_factory=dict)
    """Small files, by name."""
    log_start_byte: int = 0
    log_stop_byte: int = 0
    """The part of the store's log file that belongs to this commit."""
    log_crc32: int = 0
    """Of that part: unlike a hash, it can be carried on."""
    is_torn: bool = False
    """Whether records are being changed in place, so that they are of no step."""


def write_commit(commit: Commit, directory: str) -> None:
    """Put it in place of the last one, whole or not at all. See `replace_durably`."""
    arrays: dict[str, npt.NDArray[Any]] = {"home": commit.home, "checksum": commit.checksum}
    arrays |= {_JOURNAL + name: np.frombuffer(content, np.uint8) for name, content in commit.journal.items()}
    head = {
        "store_id": commit.store_id,
        "number": commit.number,
        "facts": commit.facts,
        "log_start_byte": commit.log_start_byte,
        "log_stop_byte": commit.log_stop_byte,
        "log_crc32": commit.log_crc32,
        "is_torn": commit.is_torn,
    }
    text = json.dumps(head)
    metadata = {"commit": text, "xxh3": _digest(text, arrays)}
    replace_durably(os.path.join(directory, COMMIT_NAME), save(arrays, metadata))


def read_commit(directory: str) -> Commit | None:
    """The commit in a store's first directory, None if there is none yet. Raises `StorageError` if it is damaged."""
    file = os.path.join(directory, COMMIT_NAME)
    try:
        content = read_whole(file)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StorageError("cannot read", path=file, errno=error.errno, advice=_ADVICE) from error
    try:
        arrays, metadata = load(content), _metadata(content)
        text = metadata["commit"]
        if _digest(text, arrays) == metadata["xxh3"]:
            return _parse(json.loads(text), arrays)
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise StorageError("not a commit is", path=file, advice=f"{_ADVICE} ({error})") from error
    raise StorageError("the checksum is wrong of", path=file, advice=_ADVICE)


def _parse(head: dict[str, Any], arrays: Mapping[str, npt.NDArray[Any]]) -> Commit:
    journal = {
        name.removeprefix(_JOURNAL): array.tobytes() for name, array in arrays.items() if name.startswith(_JOURNAL)
    }
    return Commit(
        head["store_id"],
        head["number"],
        arrays["home"],
        arrays["checksum"],
        head["facts"],
        journal,
        head["log_start_byte"],
        head["log_stop_byte"],
        head["log_crc32"],
        head["is_torn"],
    )


def _metadata(content: bytes) -> dict[str, str]:
    """What the header of a safetensors file says beside its tensors."""
    header_bytes = int.from_bytes(content[:8], "little")
    metadata = json.loads(content[8 : 8 + header_bytes])["__metadata__"]
    assert isinstance(metadata, dict), "safetensors has checked the header before"
    return metadata


def _digest(text: str, arrays: Mapping[str, npt.NDArray[Any]]) -> str:
    digest = xxhash.xxh3_64(text.encode())
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} {array.dtype} {array.shape}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()
