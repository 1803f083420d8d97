"""Bytes in files: aligned buffers, threads that read and write, durable small files, and locks."""

from hf_lohan.files.data_file import DataFile, FileBackend
from hf_lohan.files.directories import SECTOR_BYTES, StorePath
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
from hf_lohan.files.io_engine import IoEngine, IoRequest, Transfer
from hf_lohan.files.reflink import Extent
