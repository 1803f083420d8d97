"""RAM that swapped activations and held gradients share over time: the ones leave it while the others come.

In backward activations leave from the last layer on, and gradients come. Under the next forward gradients are applied,
from the first block on, and activations come. So both are at their most at different times, and what fits in backward
fits in the next forward, which goes through the same states the other way round.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from hf_lohan.planner.model_profile import BlockProfile

Values: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockGradient:
    """Of one block, as it is held."""

    block: str
    num_bytes: int
    num_chunks: int


def put_away_through(
    layers: Sequence[BlockProfile],
    kinds: Sequence[tuple[int, Sequence[int]]],
    swapped: npt.NDArray[np.int64],
    num_inputs: int,
    spilled_bytes: Values,
) -> dict[str, Values]:
    """What activations take of RAM when a forward is behind each layer, for each candidate. ``kinds``: the bytes of an
    operation of each kind, and the layers that have one; ``swapped`` [candidates, kinds]: how many of them are swapped,
    from the first layer on, as are the first ``num_inputs`` inputs; what is swapped first goes on to the SSD,
    ``spilled_bytes`` in all."""
    output_bytes = np.array([num_bytes for num_bytes, _ in kinds], dtype=np.float64)
    put_away, input_bytes = {}, 0
    for index, layer in enumerate(layers):
        input_bytes += layer.input_bytes if index < num_inputs else 0
        num_so_far = np.array([bisect_right(of_kind, index) for _, of_kind in kinds], dtype=np.int64)
        so_far = np.minimum(swapped, num_so_far) @ output_bytes + input_bytes
        put_away[layer.name] = np.maximum(0.0, so_far - spilled_bytes)
    return put_away


def held_beside(
    gradients: Sequence[BlockGradient],
    put_away: Mapping[str, Values],
    *,
    num_held_chunks: int,
    ram_bytes: float,
) -> Values:
    """Bytes of gradients that lie beside activations in ``ram_bytes`` when backward is over.

    ``gradients``: in forward order; ``put_away``: by layer, in forward order, what activations take when the forward is
    behind it. The first gradients that come, those of the last blocks, have ``num_held_chunks`` buffers.
    """
    behind_all = np.zeros(1)
    stretches: list[tuple[Values, list[BlockGradient]]] = []  # of blocks behind which activations take as much
    for gradient in gradients:
        behind = put_away.get(gradient.block, behind_all)
        if not stretches or behind is not behind_all:
            stretches.append((behind, []))
        behind_all = behind
        stretches[-1][1].append(gradient)
    held, num_buffers = np.zeros(1), num_held_chunks
    for behind, blocks in reversed(stretches):
        rest_bytes = 0.0
        for gradient in reversed(blocks):
            if gradient.num_chunks:
                num_in_buffers = min(num_buffers, gradient.num_chunks)
                num_buffers -= num_in_buffers
                rest_bytes += gradient.num_bytes * (gradient.num_chunks - num_in_buffers) / gradient.num_chunks
        held = held + np.clip(ram_bytes - behind - held, 0.0, rest_bytes)
    return held
