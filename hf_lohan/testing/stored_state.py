"""Reads the whole content of a store, to compare it bit for bit."""

from __future__ import annotations

from random import Random

import torch
from torch import Tensor

from hf_lohan.device import mapped_empty
from hf_lohan.store import RecordSpec, Store

Content = dict[tuple[str, str], bytes]
"""The bytes of each record, by block and kind."""


def zeros(records: tuple[RecordSpec, ...]) -> Content:
    """Return the content of a new store of these records."""
    return {(record.block, record.kind): bytes(record.num_bytes) for record in records}


def content_of(store: Store) -> Content:
    """Read every record whole. Raises the errors of `Store.read`."""
    content = {}
    for record in store.records:
        out = aligned(record, record.numel)
        store.read(record.block, record.kind, record.first, out).wait()
        content[record.block, record.kind] = out.view(torch.uint8).numpy().tobytes()
    return content


def aligned(record: RecordSpec, numel: int, random: Random | None = None) -> Tensor:
    """Return a tensor [numel] of the record's type in aligned memory, with random bits if ``random`` is not None."""
    memory = mapped_empty(numel * record.itemsize)
    if random is not None:
        memory.copy_(torch.frombuffer(bytearray(random.randbytes(memory.numel())), dtype=torch.uint8))
    dtype: torch.dtype = getattr(torch, record.dtype)
    return memory.view(dtype)
