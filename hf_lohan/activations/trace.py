"""What the layers' forwards were seen to do: the real shapes of a real batch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from hf_lohan.compat.torch_private import tree_leaves
from hf_lohan.planner import INPUT


@dataclass
class LayerTrace:
    """One layer's forward of one micro-batch, the last one."""

    input_shape: tuple[int, ...] = ()
    """Of its first argument: [batch, sequence, hidden] in every causal LM."""
    input_bytes: int = 0
    num_runs: int = 1
    """Forwards of the layer since tracing began: the micro-batches of a step."""
    operations: dict[str, int] = field(default_factory=dict)
    """Bytes of the outputs of the anchor operations, in the order in which they ran."""
    recomputed: set[str] = field(default_factory=set)
    """Those of them that its recomputation ran: keeping the others saves nothing."""

    @property
    def candidates(self) -> dict[str, int]:
        """Bytes of the outputs that are worth putting away."""
        return {name: num_bytes for name, num_bytes in self.operations.items() if name in self.recomputed}

    def sizes(self) -> dict[str, int]:
        """Bytes of all that could be put away, by name, in the order in which backward needs them."""
        return {INPUT: self.input_bytes} | self.candidates

    def note(self, name: str, output: Any) -> None:
        """An anchor operation ran."""
        self.operations[name] = bytes_of(output)


def bytes_of(value: Any) -> int:
    """Of all tensors in it."""
    return sum(leaf.numel() * leaf.element_size() for leaf in tree_leaves(value) if isinstance(leaf, Tensor))
