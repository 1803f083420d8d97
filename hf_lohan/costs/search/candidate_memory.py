"""Computes the memory that candidates of the search need, on the device at its peak and in RAM during a step.

Swapped activations and held gradients share RAM. In backward, activations leave from the last layer on while gradients
arrive. During the next forward, gradients are applied from the first block on while activations arrive. Each is at its
peak when the other is at its minimum. The next forward passes through the same states as backward in reverse, so memory
that is enough in backward is also enough in the next forward.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from hf_lohan.costs.fitting import layer_needs, outer_working_bytes, tied_gradient_bytes
from hf_lohan.costs.model_profile import BlockProfile, ModelProfile
from hf_lohan.costs.offload_plan import FETCH_AHEAD, LAYERS_LEAVING, BlockGradient
from hf_lohan.costs.search.activation_choices import Candidates, Counts, OperationKind
from hf_lohan.costs.step.step_costs import Values


class FullestMoment:
    """The peak of one model's device memory. It is in the backward of a layer or of the head, when memory holds

    * the activations that earlier layers keep;
    * the layer's own work, with all tensors that autograd saves (this already counts outputs that the layer keeps,
      except one as wide as the layer's input, which autograd need not save);
    * the swapped activations of the previous layer that are fetched (of a layer in chunks, its input and one chunk);
    * the gradient of a head that is tied to the embeddings, which waits for the embeddings' gradient.

    The peak may also be in the forward of a layer. Memory then holds the layer's outputs, and the outputs of the two
    previous layers, which are being copied out.
    """

    def __init__(self, model: ModelProfile, kinds: Sequence[OperationKind], num_together: int = 1) -> None:
        """``num_together``: micro-batches that the model counts as one. One of them computes while another's swapped
        activations are copied."""
        self._num_together = num_together
        self._layers = model.layers
        self._kinds = kinds
        self._outer_bytes = outer_working_bytes(model)
        self._gradient_bytes = tied_gradient_bytes(model)
        self._needs = np.array([layer_needs(layer, model) for layer in model.layers], dtype=np.float64)
        self._inputs = np.array([layer.input_bytes for layer in model.layers], dtype=np.float64)
        self._chunk_shares = np.array([1 / layer.num_chunks for layer in model.layers])
        """The share of a layer's outputs that a chunk has."""
        self._num_in_layer = np.zeros((len(kinds), len(model.layers)), dtype=np.int64)
        for index, kind in enumerate(kinds):
            for layer, _ in kind.places:
                self._num_in_layer[index, layer] += 1

    def beside_kept(self, candidates: Candidates, *, keeps_all: bool = False) -> Values:
        """Return the bytes [num_candidates] of the working set, which is the memory at the peak without kept
        activations. ``keeps_all``: nothing is recomputed, so all tensors that autograd saves stay."""
        num_layers, kept = len(self._layers), candidates.kept
        if not num_layers:
            return np.full(len(candidates.swapped), float(self._outer_bytes))
        is_kept = np.arange(num_layers) >= num_layers - kept.num_inputs
        own = self._bytes_by_layer(kept.num_of_kind[None, :], from_last=True)[0]
        if keeps_all:
            own = np.array([layer.saved_bytes for layer in self._layers], dtype=np.float64)
        kept_bytes = own + is_kept * self._inputs
        swapped = self._bytes_by_layer(candidates.swapped, from_last=False) * self._chunk_shares
        swapped = swapped + ~is_kept * self._inputs
        fullest = self.peak(kept_bytes, own, swapped, keeps_all=keeps_all)
        beside: Values = np.maximum(0.0, fullest - kept_bytes.sum())
        return beside

    def peak(
        self,
        kept: Values,
        own: Values,
        swapped: Values,
        *,
        fetch_ahead: int = FETCH_AHEAD,
        layers_leaving: int = LAYERS_LEAVING,
        keeps_all: bool = False,
    ) -> Values:
        """Return the bytes [num_candidates] of the peak without the slots. ``kept`` [num_layers]: bytes that each layer
        keeps. ``own`` [num_layers]: the part of them in its outputs. ``swapped`` [num_candidates, num_layers]: bytes
        that leave. ``fetch_ahead`` layers return early, and ``layers_leaving`` leave while the next layer computes."""
        before = np.cumsum(kept) - kept
        swapped = swapped / self._num_together
        of_one = own * self._chunk_shares / self._num_together
        of_inputs = self._inputs * self._chunk_shares / self._num_together
        counted_twice = of_one if keeps_all else np.maximum(0.0, of_one - of_inputs)
        rest = np.maximum(0.0, self._needs - counted_twice)  # `own` plus this is all that the layer needs
        backward = before + self._inputs + own + rest + self._gradient_bytes
        forward = before + 2 * self._inputs + own + swapped
        head = kept.sum() + self._outer_bytes + swapped[:, max(0, len(own) - fetch_ahead) :].sum(axis=1, keepdims=True)
        for number in range(1, max(fetch_ahead, layers_leaving) + 1):
            earlier = np.zeros_like(swapped)
            earlier[:, number:] = swapped[:, :-number]
            backward = backward + (earlier if number <= fetch_ahead else 0)
            forward = forward + (earlier if number <= layers_leaving else 0)
        backward = np.broadcast_to(backward, swapped.shape)
        fullest: Values = np.concatenate([backward, forward, head], axis=1).max(axis=1)
        return fullest

    def _bytes_by_layer(self, counts: Counts, *, from_last: bool) -> Values:
        """Return bytes [num_candidates, num_layers] of ``counts`` outputs of each kind, taken from the first layers or
        the last."""
        found = np.zeros((len(counts), len(self._layers)))
        for index, kind in enumerate(self._kinds):
            in_layer = self._num_in_layer[index]
            others = np.cumsum(in_layer) - in_layer
            if from_last:
                others = in_layer.sum() - others - in_layer
            found += kind.output_bytes * np.clip(counts[:, index, None] - others, 0, in_layer)
        return found


def put_away_through(
    layers: Sequence[BlockProfile],
    kinds: Sequence[tuple[int, Sequence[int]]],
    swapped: npt.NDArray[np.int64],
    num_inputs: int,
    spilled_bytes: Values,
) -> dict[str, Values]:
    """Return the RAM that activations take after a forward has run each layer, for each candidate. ``kinds``: for each
    kind, the bytes of an operation and the layers with this operation. ``swapped`` [candidates, kinds]: number of
    swapped operations, counted from the first layer. The first ``num_inputs`` layer inputs are swapped too. The
    activations that are swapped first move on to the SSD, ``spilled_bytes`` in all."""
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
    """Return the bytes of gradients that fit with activations in ``ram_bytes`` at the end of backward. ``gradients``:
    in forward order. ``put_away``: the bytes that activations take after the forward has run a layer, by layer in
    forward order. The gradients of the last blocks arrive first, and have ``num_held_chunks`` buffers."""
    behind_all = np.zeros(1)
    stretches: list[tuple[Values, list[BlockGradient]]] = []  # blocks after which activations take equal RAM
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
