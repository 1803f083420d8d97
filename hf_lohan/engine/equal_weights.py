"""Ranks that bring the same weights: each stores a part of its own, and together they are one model."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import xxhash
from torch import Tensor

from hf_lohan.ranks import Links, RanksDisagreeError

_DIGEST_BYTES = 8


def refuse_other_weights(weights: Iterable[tuple[str, Tensor]], links: Links) -> None:
    """Raises RanksDisagreeError, naming the first weight that is not the same on all ranks, to the bit. All ranks call
    this together."""
    if not links.ranks.others:
        return
    named = [(name, weight) for name, weight in weights if weight.device.type != "meta"]
    found = links.all_gather("the weights to be the same", b"".join(_digest(weight) for _, weight in named))
    for rank, digests in enumerate(found):
        if len(digests) != len(found[0]):
            raise RanksDisagreeError(
                f"rank 0 has {len(found[0]) // _DIGEST_BYTES} weights and rank {rank} {len(digests) // _DIGEST_BYTES}; "
                "build the same model on all ranks"
            )
        for number, (name, _) in enumerate(named):
            place = slice(number * _DIGEST_BYTES, (number + 1) * _DIGEST_BYTES)
            if digests[place] != found[0][place]:
                raise RanksDisagreeError(
                    f"{name} is another one on rank {rank} than on rank 0; set the same seed on all ranks before the "
                    "model is built (transformers.set_seed), or load it from one checkpoint"
                )


def _digest(weight: Tensor) -> bytes:
    content = weight.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return xxhash.xxh3_64_digest(content.numpy().data)
