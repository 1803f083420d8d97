"""What lies behind the last layer, for one micro-batch at a time: forward, loss and backward."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

from hf_lohan.compat.torch_private import sequence_number


@dataclass
class _Gate:
    """The last layer's output, as the head sees it."""

    hidden: Tensor
    node: Node


class MicroBatchHeads:
    """Takes each loss back to the last layer's output as soon as it is there, so that what heads leave for backward,
    above all the logits, is there for one micro-batch at a time.

    Not where the loss leads past that output into the layers (a router's does), or where there are several: what a
    micro-batch leaves then waits for the others.
    """

    def __init__(self, is_leaf: Callable[[Tensor], bool]) -> None:
        """``is_leaf``: whether a tensor is one of the micro-batches' leaves."""
        self._is_leaf = is_leaf
        self._gates: dict[int, list[_Gate]] = defaultdict(list)
        self._roots: list[tuple[Any, Tensor | None]] = []  # tensors and edges; torch types lists of one of them
        self.are_apart = True
        """Whether all heads so far could be taken back alone."""

    def put_gate(self, micro_batch: int, output: Any) -> Any:
        """What to give to the head instead of the last layer's output."""
        hidden = output[0] if type(output) in (tuple, list) else output
        if not isinstance(hidden, Tensor) or not hidden.requires_grad:
            return output
        gate = hidden.view_as(hidden)  # its backward needs nothing, so it may run twice
        assert gate.grad_fn is not None
        self._gates[micro_batch].append(_Gate(gate, gate.grad_fn))
        return gate if hidden is output else type(output)((gate, *output[1:]))

    def take_back(self, micro_batch: int, losses: Sequence[Tensor]) -> None:
        """A micro-batch's forwards are over, and these are its losses."""
        gates = self._gates.pop(micro_batch, [])
        leaves = _leaves_behind(gates[0], losses[0], self._is_leaf) if len(gates) == len(losses) == 1 else None
        if leaves is None:
            self.are_apart = False
            self._roots += [(loss, None) for loss in losses]
            return
        gate = gates[0].hidden
        torch.autograd.backward(losses, inputs=[gate, *leaves])
        if gate.grad is not None:
            # Not the gate itself: with it the last layer's output would stay beside its gradient.
            self._roots.append((get_gradient_edge(gate), gate.grad))
            gate.grad = None

    def backward(self) -> None:
        """Take all micro-batches back from where they are. Raises RuntimeError if none gave a loss."""
        roots, self._roots = self._roots, []
        if not roots:
            raise RuntimeError("no micro-batch gave its loss to backward; call accelerator.backward(loss) in each")
        torch.autograd.backward([root for root, _ in roots], [gradient for _, gradient in roots])


def _leaves_behind(gate: _Gate, loss: Tensor, is_leaf: Callable[[Tensor], bool]) -> list[Tensor] | None:
    """The leaves that the loss depends on otherwise than through the gate; None if the gate is not all that leads from
    it into the layers."""
    number = sequence_number(gate.node)
    leaves: list[Tensor] = []
    waiting = [loss.grad_fn]
    seen: set[Node | None] = {gate.node, None}
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is None:
            if sequence_number(node) < number:
                return None
            waiting += [before for before, _ in node.next_functions]
        elif is_leaf(leaf):
            leaves.append(leaf)
        else:
            return None
    return leaves
