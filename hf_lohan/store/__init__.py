"""The lowest tier: records in files.

An `IoEngine` moves bytes between aligned host memory and files with a few threads and O_DIRECT, within a byte
budget. A `StoreLayout` says where each record's bytes lie, striped over the SSD paths. A `Store` puts the two
together: preallocated files, a manifest, a lock, and tensors read and written by (block, kind), in versions: what is
written is a draft until it is committed, and what is read is checked against the checksum of what was written. Nothing
here knows of models, steps or devices; whoever reads or writes brings the memory.
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
