"""How many bytes a second are hashed on their way to and from the store."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from hf_lohan.hardware.timing import median_s
from hf_lohan.store import MAX_GRANULE_NUMEL
from hf_lohan.store.granules import checksums

_GRANULE_BYTES = 2 * MAX_GRANULE_NUMEL
_TILE_BYTES = 2 * _GRANULE_BYTES
"""Most of what is hashed was just used, or is just going to be: it is in a core's cache."""
_NUM_ROUNDS = 8


def checksum_bytes_per_s(*, num_threads: int, budget_s: float) -> float:
    """Bytes a second by all of `num_threads` together, each in its core's cache."""
    contents = [torch.arange(_TILE_BYTES // 8).view(torch.uint8) for _ in range(num_threads)]

    def hash_several(content: Tensor) -> None:
        for _ in range(_NUM_ROUNDS):
            checksums(content, _GRANULE_BYTES)

    with ThreadPoolExecutor(num_threads, "lohan-checksums") as threads:

        def hash_all() -> None:
            for done in [threads.submit(hash_several, content) for content in contents]:
                done.result()

        num_bytes = num_threads * _NUM_ROUNDS * _TILE_BYTES
        return num_bytes / median_s(hash_all, lambda: None, budget_s=budget_s)
