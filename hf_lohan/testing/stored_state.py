"""All that a store holds, for comparing it to the bit."""

from __future__ import annotations

from random import Random

import torch
from torch import Tensor

from hf_lohan.device import mapped_empty
from hf_lohan.store import RecordSpec, Store

Content = dict[tuple[str, str], bytes]
"""Bytes of each record, by block and kind."""


def zeros(records: tuple[RecordSpec, ...]) -> Content:
    """What a new store of these records holds."""
    return {(record.block, record.kind): bytes(record.num_bytes) for record in records}


def content_of(store: Store) -> Content:
    """Read every record, as a whole. Raises as `Store.read`."""
    content = {}
    for record in store.records:
        out = aligned(record, record.numel)
        store.read(record.block, record.kind, record.first, out).wait()
        content[record.block, record.kind] = out.view(torch.uint8).numpy().tobytes()
    return content


def aligned(record: RecordSpec, numel: int, random: Random | None = None) -> Tensor:
    """A tensor [numel] of the record's type in aligned memory, of random bits if there is a ``random``."""
    memory = mapped_empty(numel * record.itemsize)
    if random is not None:
        memory.copy_(torch.frombuffer(bytearray(random.randbytes(memory.numel())), dtype=torch.uint8))
    dtype: torch.dtype = getattr(torch, record.dtype)
    return memory.view(dtype)
