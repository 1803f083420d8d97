"""Bytes in files: aligned buffers, the threads that move them, what is synced when, locks. Knows no records."""

from hf_lohan.files.buffers import SECTOR_BYTES
from hf_lohan.files.data_file import DataFile, FileBackend, PosixBackend
from hf_lohan.files.durable_file import replace_durably, write_failure
from hf_lohan.files.errors import (
    CapacityError,
    CorruptionError,
    ForeignStoreError,
    Shortfall,
    StorageError,
    StoreInUseError,
    TornStoreError,
)
from hf_lohan.files.io_engine import IoEngine, Transfer
from hf_lohan.files.places import Extent, StorePath
from hf_lohan.files.request import IoRequest

__all__ = [
    "SECTOR_BYTES",
    "CapacityError",
    "CorruptionError",
    "DataFile",
    "Extent",
    "FileBackend",
    "ForeignStoreError",
    "IoEngine",
    "IoRequest",
    "PosixBackend",
    "Shortfall",
    "StorageError",
    "StoreInUseError",
    "StorePath",
    "TornStoreError",
    "Transfer",
    "replace_durably",
    "write_failure",
]
