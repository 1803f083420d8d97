"""The lowest tier: records in files.

An `IoEngine` moves bytes between aligned host memory and files with a few threads and O_DIRECT, within a byte
budget. A `StoreLayout` says where each record's bytes lie, striped over the SSD paths. A `Store` puts the two
together: preallocated files, a manifest, a lock, and tensors read and written by (block, kind), in versions: what is
written is a draft until it is committed, and what is read is checked against the checksum of what was written. Nothing
here knows of models, steps or devices; whoever reads or writes brings the memory.
"""

from hf_lohan.storage.buffers import SECTOR_BYTES
from hf_lohan.storage.commit import Commit
from hf_lohan.storage.durable_file import replace_durably, write_failure
from hf_lohan.storage.errors import (
    CapacityError,
    CorruptionError,
    ForeignStoreError,
    Shortfall,
    StorageError,
    StoreInUseError,
    TornStoreError,
)
from hf_lohan.storage.files import DataFile, FileBackend, PosixBackend
from hf_lohan.storage.granules import GRANULE_NUMEL, Checksums
from hf_lohan.storage.io_engine import IoEngine, Transfer
from hf_lohan.storage.last_commit import committed_log, last_commit
from hf_lohan.storage.layout import (
    DEFAULT_STRIPE_BYTES,
    KINDS,
    PARAMS_PER_ELEMENT,
    RECORD_ALIGN_NUMEL,
    Extent,
    RecordSpec,
    StoreLayout,
    StorePath,
)
from hf_lohan.storage.manifest import ModelIdentity
from hf_lohan.storage.record_files import RecordFiles
from hf_lohan.storage.record_read import RecordRead
from hf_lohan.storage.request import IoRequest
from hf_lohan.storage.store import Store
from hf_lohan.storage.verification import VerifiedRecord, verify

__all__ = [
    "DEFAULT_STRIPE_BYTES",
    "GRANULE_NUMEL",
    "KINDS",
    "PARAMS_PER_ELEMENT",
    "RECORD_ALIGN_NUMEL",
    "SECTOR_BYTES",
    "CapacityError",
    "Checksums",
    "Commit",
    "CorruptionError",
    "DataFile",
    "Extent",
    "FileBackend",
    "ForeignStoreError",
    "IoEngine",
    "IoRequest",
    "ModelIdentity",
    "PosixBackend",
    "RecordFiles",
    "RecordRead",
    "RecordSpec",
    "Shortfall",
    "StorageError",
    "Store",
    "StoreInUseError",
    "StoreLayout",
    "StorePath",
    "TornStoreError",
    "Transfer",
    "VerifiedRecord",
    "committed_log",
    "last_commit",
    "replace_durably",
    "verify",
    "write_failure",
]
