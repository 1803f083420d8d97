"""Records in files and in RAM: versions, checksums, commits.

A `StoreLayout` says where the bytes of each record lie, striped over the SSD paths. A `Store` adds preallocated files,
a manifest and a lock, and reads and writes tensors by (block, kind). Whatever is written stays a draft until it is
committed, and every read is verified against the checksum of the write. A checksum block is called a granule. The two
copies of a record, one committed and one for the next commit, are its homes. Nothing here knows models, steps or
devices; callers provide the memory.
"""

from hf_lohan.store.commits import Commit
from hf_lohan.store.layout import (
    GRANULE_NUMEL,
    MAX_GRANULE_NUMEL,
    PARAMS_PER_ELEMENT,
    RECORD_ALIGN_NUMEL,
    RecordSpec,
    StoreLayout,
    granules_of,
)
from hf_lohan.store.manifest import ModelIdentity
from hf_lohan.store.record_files import RecordFiles, checksums
from hf_lohan.store.record_read import RecordRead
from hf_lohan.store.store import Store
from hf_lohan.store.store_folders import DATA_NAMES, committed_log, kept_commits, last_commit
from hf_lohan.store.versions import Checksums

__all__ = [
    "DATA_NAMES",
    "GRANULE_NUMEL",
    "MAX_GRANULE_NUMEL",
    "PARAMS_PER_ELEMENT",
    "RECORD_ALIGN_NUMEL",
    "Checksums",
    "Commit",
    "ModelIdentity",
    "RecordFiles",
    "RecordRead",
    "RecordSpec",
    "Store",
    "StoreLayout",
    "checksums",
    "committed_log",
    "granules_of",
    "kept_commits",
    "last_commit",
]
