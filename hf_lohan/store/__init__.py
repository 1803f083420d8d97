"""The lowest tier: records in files.

An `IoEngine` moves bytes between aligned host memory and files with a few threads and O_DIRECT, within a byte
budget. A `StoreLayout` says where each record's bytes lie, striped over the SSD paths. A `Store` puts the two
together: preallocated files, a manifest, a lock, and tensors read and written by (block, kind), in versions: what is
written is a draft until it is committed, and what is read is checked against the checksum of what was written. Nothing
here knows of models, steps or devices; whoever reads or writes brings the memory.
"""

from hf_lohan.store.commit import Commit
from hf_lohan.store.granules import GRANULE_NUMEL, MAX_GRANULE_NUMEL, Checksums
from hf_lohan.store.last_commit import committed_log, last_commit
from hf_lohan.store.layout import (
    DEFAULT_STRIPE_BYTES,
    KINDS,
    PARAMS_PER_ELEMENT,
    RECORD_ALIGN_NUMEL,
    RecordSpec,
    StoreLayout,
)
from hf_lohan.store.manifest import ModelIdentity
from hf_lohan.store.record_files import RecordFiles
from hf_lohan.store.record_read import RecordRead
from hf_lohan.store.store import Store
from hf_lohan.store.verification import VerifiedRecord, verify

__all__ = [
    "DEFAULT_STRIPE_BYTES",
    "GRANULE_NUMEL",
    "KINDS",
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
    "VerifiedRecord",
    "committed_log",
    "last_commit",
    "verify",
]
