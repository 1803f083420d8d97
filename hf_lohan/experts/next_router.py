"""Predicts the choice of a layer's router: it runs the router on the rows of the previous layer.

A layer changes its rows little, so its router mostly makes the same choice for the previous layer's rows as for its own
(mixtral-offloading, arXiv 2312.17238). A wrong prediction causes needless loads and changes no result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from hf_lohan.device import Lane
from hf_lohan.experts.routing import ends_by_expert
from hf_lohan.model import Block, ModelBlocks, ParamSlice
from hf_lohan.weights import SlotRing

_CORRECTION = "e_score_correction_bias"
"""Name of a buffer that some routers add to the sigmoids of their logits before they choose."""


@dataclass(frozen=True)
class Router:
    """The router of a layer with experts."""

    block: Block
    """The block with the router's parameters."""
    weight: ParamSlice
    """[experts, hidden]."""
    bias: ParamSlice | None
    correction: Callable[[], Tensor] | None
    """Returns the buffer `_CORRECTION` [experts]."""

    def scores(self, rows: Tensor, weights: Tensor) -> Tensor:
        """Return the scores [tokens, experts] of ``rows`` [tokens, hidden]. ``weights``: the block's weights."""
        weight = weights[self.weight.start : self.weight.stop].view(self.weight.shape)
        bias = weights[self.bias.start : self.bias.stop] if self.bias is not None else None
        logits = nn.functional.linear(rows.to(weight.dtype), weight, bias)
        return logits if self.correction is None else logits.float().sigmoid() + self.correction().float()


def find_routers(model: nn.Module, blocks: ModelBlocks) -> list[Router | None]:
    """Return, for each module of ``blocks.experts``, the module in the same parent that scores its experts. The entry
    is None if several modules may score them, or if the router's weights are in several blocks."""
    names = {module: name for name, module in model.named_modules()}
    place = {
        part.parameter: (block, part)
        for block in blocks.blocks
        for part in block.slices
        if part.is_whole and block.numel
    }
    return [_find_router(model, names[module], len(of), place) for module, of in blocks.experts.items()]


def _find_router(
    model: nn.Module, experts_name: str, num_experts: int, place: dict[nn.Parameter, tuple[Block, ParamSlice]]
) -> Router | None:
    parent_name, _, own_name = experts_name.rpartition(".")
    parent = model.get_submodule(parent_name)
    candidates = [
        (module, parameter)
        for module in _without(parent, parent.get_submodule(own_name))
        for parameter in module.parameters(recurse=False)
        if parameter.dim() == 2 and parameter.shape[0] == num_experts
    ]
    if len(candidates) != 1 or candidates[0][1] not in place:
        return None
    module, parameter = candidates[0]
    block, weight = place[parameter]
    own_bias = getattr(module, "bias", None)
    bias = place.get(own_bias) if isinstance(own_bias, nn.Parameter) else None
    if bias is not None and (bias[0] is not block or bias[1].shape != (num_experts,)):
        return None
    is_corrected = _CORRECTION in dict(module.named_buffers(recurse=False))
    correction = partial(getattr, module, _CORRECTION) if is_corrected else None
    return Router(block, weight, bias[1] if bias is not None else None, correction)


def _without(parent: nn.Module, experts: nn.Module) -> Iterator[nn.Module]:
    left_out = set(experts.modules())
    return (module for module in parent.modules() if module not in left_out)


class NextRouter:
    """Runs the router of the next layer if it is on the device. Only the computing thread uses it."""

    def __init__(self, ring: SlotRing, routers: Sequence[Router | None]) -> None:
        """``routers`` has an entry for each layer with experts, in forward order."""
        self._ring = ring
        self._routers = [*routers[1:], None]

    def expect(self, layer: int, rows: Tensor, top_k: int) -> Tensor | None:
        """Predict how many of ``rows`` [tokens, hidden] the next layer would send to each expert, with ``top_k``
        experts for each row. Enqueues and returns the cumulative sum over experts, [experts]. Returns None if the
        router is unknown or not on the device."""
        router = self._routers[layer]
        if router is None or router.weight.shape[1] != rows.shape[-1]:
            return None
        slot = self._ring.pin_arrived(router.block)
        if slot is None:
            return None
        try:
            assert slot.ready is not None
            self._ring.device.wait(Lane.COMPUTE, slot.ready)
            with torch.no_grad():
                scores = router.scores(rows, slot.weights)
                chosen = scores.topk(min(top_k, scores.shape[-1])).indices
                return ends_by_expert(chosen.reshape(-1).sort().values, scores.shape[-1])
        finally:
            self._ring.unpin(router.block)


def most_chosen(counts: Sequence[int]) -> list[int]:
    """Return the experts that have rows, the expert with the most rows first."""
    return [expert for expert, count in sorted(enumerate(counts), key=lambda one: -one[1]) if count]
