"""Stores records in files and in RAM, with versions, checksums and commits.

A `StoreLayout` has the offset of each record, striped over the SSD paths. A `Store` adds preallocated files, a manifest
and a lock, and reads and writes tensors by (block, kind). A write is a draft until the next commit. Each read is
verified against the checksum of the write. The unit of checksums is called a granule. A record has two versions in
files, called homes: one is committed, and one is for the next commit. This package does not depend on models, steps or
devices. Callers provide the memory.
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
from hf_lohan.store.store_folders import DATA_NAMES, bytes_of_new_store, committed_log, kept_commits, last_commit
from hf_lohan.store.versions import Checksums
