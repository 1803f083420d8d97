"""Parameter objects and gradient sums of micro-batches that share one backward."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from hf_lohan.compat.torch_private import has_gradient_hook, own_parameters, put_parameter
from hf_lohan.model import Block, ParamSlice
from hf_lohan.weights import SlotRing


class OnGradient(Protocol):
    """Called in backward when the gradient of a micro-batch's leaf is complete. ``has_more``: whether the micro-batch
    has another leaf of this parameter, whose gradient may arrive later."""

    def __call__(self, micro_batch: int, part: ParamSlice, leaf: nn.Parameter, *, has_more: bool) -> None: ...


class MicroBatchLeaves:
    """Puts separate leaves for each micro-batch into the modules. Leaves share the parameters' memory.

    With shared parameters, autograd would add the gradients of micro-batches, and of each use of tied weights, in the
    weights' dtype. With separate leaves, each micro-batch has the same gradient as in a separate backward.
    """

    def __init__(self, model: nn.Module, ring: SlotRing, on_gradient: OnGradient) -> None:
        """Raises ValueError for a hook on a parameter's gradient, which is not called for leaves."""
        self._ring = ring
        self._on_gradient = on_gradient
        hooked = next((name for name, parameter in model.named_parameters() if has_gradient_hook(parameter)), None)
        if hooked is not None:
            raise ValueError(
                f"{hooked} has a hook on its gradient, which micro-batches that run together do not call; remove the "
                "hook, or run them one after the other (vertical_micro_batches: false or auto)"
            )
        self._owners: dict[nn.Parameter, list[tuple[nn.Module, str]]] = defaultdict(list)
        for module in model.modules():
            for name, parameter in own_parameters(module):
                self._owners[parameter].append((module, name))
        self._leaves: dict[tuple[int, ParamSlice], nn.Parameter] = {}
        self._in_use: dict[int, Counter[Block]] = defaultdict(Counter)
        self._known: set[nn.Parameter] = set()
        self._used_by_layers: dict[int, set[ParamSlice]] = {}

    def __contains__(self, tensor: Tensor) -> bool:
        """Return whether a tensor is a leaf of a micro-batch."""
        return tensor in self._known

    def is_in_use(self, block: Block) -> bool:
        """Return whether a micro-batch runs a module that uses the block."""
        return any(blocks[block] for blocks in self._in_use.values())

    def enter(self, micro_batch: int, block: Block) -> None:
        """Put leaves into a module that uses the block, before it runs. The block's parameters must be shown."""
        in_use = self._in_use[micro_batch]
        in_use[block] += 1
        if in_use[block] == 1:
            self._show(micro_batch, block)

    def leave(self, micro_batch: int, block: Block) -> None:
        """Remove the leaves after the module has run."""
        in_use = self._in_use[micro_batch]
        in_use[block] -= 1
        if not in_use[block]:
            self._hide(micro_batch, block)

    def leaf(self, micro_batch: int, part: ParamSlice) -> nn.Parameter:
        """Return a micro-batch's leaf of a parameter that is in use."""
        return self._leaves.get((micro_batch, part), part.parameter)

    def leaf_of_rows(self, micro_batch: int, block: Block, part: ParamSlice) -> nn.Parameter:
        """Return a micro-batch's leaf of a table if only rows of the table are loaded."""
        leaf = self._leaves.get((micro_batch, part))
        if leaf is None:
            placeholder = self._ring.stand_ins.placeholder(block, part)
            leaf = self._leaves[micro_batch, part] = self._leaf_of(micro_batch, part, placeholder)
        return leaf

    def suspend(self, micro_batch: int) -> None:
        """Remove a micro-batch's leaves, because another micro-batch runs now."""
        for block in +self._in_use[micro_batch]:
            self._hide(micro_batch, block)

    def resume(self, micro_batch: int) -> None:
        """Put the micro-batch's leaves back, because it runs again."""
        for block in +self._in_use[micro_batch]:
            self._show(micro_batch, block)

    def begin_head(self, micro_batch: int) -> None:
        """Make new leaves for a micro-batch that has run the layers, separate from the leaves in the layers."""
        self.suspend(micro_batch)
        parts = {part for number, part in self._leaves if number == micro_batch}
        for part in parts:
            del self._leaves[micro_batch, part]
        self._used_by_layers[micro_batch] = parts | self._used_by_layers.get(micro_batch, set())
        self.resume(micro_batch)

    def restore(self) -> None:
        """Put the parameters back into the modules, after the forwards."""
        for parameter, owners in self._owners.items():
            for module, name in owners:
                put_parameter(module, name, parameter)
        self._leaves.clear()
        self._known.clear()
        self._in_use.clear()

    def _show(self, micro_batch: int, block: Block) -> None:
        for part in _parts_with_gradient(block):
            leaf = self._leaves.get((micro_batch, part))
            if leaf is None:
                leaf = self._leaves[micro_batch, part] = self._leaf_of(micro_batch, part, part.parameter.data)
            leaf.data = part.parameter.data
            self._put(part, leaf)

    def _hide(self, micro_batch: int, block: Block) -> None:
        for part in _parts_with_gradient(block):
            self._leaves[micro_batch, part].data = self._ring.stand_ins.placeholder(block, part)
            self._put(part, part.parameter)

    def _put(self, part: ParamSlice, parameter: nn.Parameter) -> None:
        for module, name in self._owners[part.parameter]:
            put_parameter(module, name, parameter)

    def _leaf_of(self, micro_batch: int, part: ParamSlice, weights: Tensor) -> nn.Parameter:
        leaf = nn.Parameter(weights)
        has_more = part in self._used_by_layers.get(micro_batch, ())
        leaf.register_post_accumulate_grad_hook(
            lambda leaf: self._on_gradient(micro_batch, part, leaf, has_more=has_more)
        )
        self._known.add(leaf)
        return leaf


def _parts_with_gradient(block: Block) -> list[ParamSlice]:
    return [part for part in block.trainable_slices if part.parameter.requires_grad]


class GradientSums:
    """Adds the micro-batches' gradients in float32, in the micro-batches' order, and sends each complete sum.

    Gradients arrive in that order unless `keeps_order` is set. Then early gradients wait.
    """

    def __init__(self, num_micro_batches: int, send: Callable[[ParamSlice, Tensor | None], None]) -> None:
        """``send`` is called with None for a gradient of zeros."""
        self.keeps_order = False
        """Whether gradients may arrive out of order."""
        self._num_micro_batches = num_micro_batches
        self._send = send
        self._sums: dict[ParamSlice, Tensor] = {}
        self._num_added: Counter[ParamSlice] = Counter()
        self._of_zeros: set[ParamSlice] = set()
        """Parameters whose gradients so far are all zeros."""
        self._early: dict[ParamSlice, dict[int, Tensor | None]] = defaultdict(dict)
        self._unfinished: dict[tuple[int, ParamSlice], Tensor] = {}

    def keep(self, micro_batch: int, part: ParamSlice, leaf: nn.Parameter) -> None:
        """Keep the gradient of a leaf, because another leaf of the micro-batch may add to it."""
        self._unfinished[micro_batch, part] = self._pop_gradient(micro_batch, part, leaf)

    def add(self, micro_batch: int, part: ParamSlice, leaf: nn.Parameter) -> None:
        """Add the gradient of the micro-batch's last leaf, and the gradients that `keep` has kept."""
        self.add_gradient(micro_batch, part, self._pop_gradient(micro_batch, part, leaf))

    def _pop_gradient(self, micro_batch: int, part: ParamSlice, leaf: nn.Parameter) -> Tensor:
        gradient, leaf.grad = leaf.grad, None
        assert gradient is not None
        if gradient.is_sparse:
            gradient = gradient.coalesce()
        kept = self._unfinished.pop((micro_batch, part), None)
        return gradient if kept is None else kept.add_(gradient)

    def add_gradient(self, micro_batch: int, part: ParamSlice, gradient: Tensor | None) -> None:
        """Add a micro-batch's complete gradient of a part of a parameter. None is zeros."""
        if self.keeps_order:
            early = self._early[part]
            early[micro_batch] = gradient
            while self._num_added[part] in early:
                self._add(part, early.pop(self._num_added[part]))
        else:
            self._add(part, gradient)
        if self._num_added[part] == self._num_micro_batches:
            self._complete(part)

    def complete(self, block: Block) -> None:
        """Send the sums of a block that will get no more gradients."""
        for part in block.trainable_slices:
            self._complete(part)

    def flush(self) -> None:
        """Send all sums, at the end of the backward."""
        for (micro_batch, part), gradient in sorted(self._unfinished.items(), key=lambda item: item[0][0]):
            self.add_gradient(micro_batch, part, gradient)
        self._unfinished.clear()
        for part in {**self._sums, **self._early, **dict.fromkeys(self._of_zeros)}:
            self._complete(part)
        self._num_added.clear()

    def clear(self) -> None:
        """Drop all sums, after a backward that raised."""
        for waiting in (self._sums, self._num_added, self._of_zeros, self._early, self._unfinished):
            waiting.clear()

    def _add(self, part: ParamSlice, gradient: Tensor | None) -> None:
        total = self._sums.get(part)
        if gradient is None:
            if total is None:
                self._of_zeros.add(part)
        elif total is None:
            # A single gradient needs no sum. Its user converts it.
            self._sums[part] = gradient.to(torch.float32) if self._num_micro_batches > 1 else gradient
        else:
            total.add_(gradient)
        self._num_added[part] += 1

    def _complete(self, part: ParamSlice) -> None:
        for _, gradient in sorted(self._early.pop(part, {}).items()):
            self._add(part, gradient)
        if part in self._sums:
            self._send(part, self._sums.pop(part))
        elif part in self._of_zeros:
            self._send(part, None)
        self._of_zeros.discard(part)
