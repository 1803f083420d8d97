"""The lowest tier: records in files.

An `IoEngine` moves bytes between aligned host memory and files with a few threads and O_DIRECT, within a byte
budget. A `StoreLayout` says where each record's bytes lie, striped over the SSD paths. A `Store` puts the two
together: preallocated files, a manifest, a lock, and tensors read and written by (block, kind). Nothing here
knows of models, steps or devices; whoever reads or writes brings the memory.
"""

from hf_lohan.storage.buffers import SECTOR_BYTES
from hf_lohan.storage.errors import CapacityError, ForeignStoreError, Shortfall, StorageError, StoreInUseError
from hf_lohan.storage.files import DataFile, FileBackend, PosixBackend
from hf_lohan.storage.io_engine import IoEngine, Transfer
from hf_lohan.storage.layout import (
    DEFAULT_STRIPE_BYTES,
    KINDS,
    RECORD_ALIGN_NUMEL,
    Extent,
    RecordSpec,
    StoreLayout,
    StorePath,
)
from hf_lohan.storage.manifest import ModelIdentity
from hf_lohan.storage.record_files import RecordFiles
from hf_lohan.storage.request import IoRequest
from hf_lohan.storage.store import Store

__all__ = [
    "DEFAULT_STRIPE_BYTES",
    "KINDS",
    "RECORD_ALIGN_NUMEL",
    "SECTOR_BYTES",
    "CapacityError",
    "DataFile",
    "Extent",
    "FileBackend",
    "ForeignStoreError",
    "IoEngine",
    "IoRequest",
    "ModelIdentity",
    "PosixBackend",
    "RecordFiles",
    "RecordSpec",
    "Shortfall",
    "StorageError",
    "Store",
    "StoreInUseError",
    "StoreLayout",
    "StorePath",
    "Transfer",
]
