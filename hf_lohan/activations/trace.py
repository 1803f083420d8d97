"""Records the layers' forwards of the first step, with the shapes of a real batch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from hf_lohan.compat.torch_private import tree_leaves
from hf_lohan.costs import INPUT


@dataclass
class LayerTrace:
    """The last forward of one layer."""

    input_bytes: int = 0
    operations: dict[str, int] = field(default_factory=dict)
    """Bytes of the anchor operations' outputs, in the order in which they ran."""
    recomputed: set[str] = field(default_factory=set)
    """Operations that the recomputation ran. Keeping outputs of other operations saves nothing."""

    @property
    def candidates(self) -> dict[str, int]:
        """Bytes of the outputs that are worth keeping."""
        return {name: num_bytes for name, num_bytes in self.operations.items() if name in self.recomputed}

    def sizes(self) -> dict[str, int]:
        """Return the bytes of each tensor that could be swapped, by name, in the order in which backward needs them."""
        return {INPUT: self.input_bytes} | self.candidates

    def begin(self, hidden: Tensor | None) -> None:
        """Begin a forward with this first argument."""
        self.input_bytes = num_bytes_of(hidden)
        self.operations.clear()
        self.recomputed.clear()

    def add_operation(self, name: str, output: Any) -> None:
        """Record that an anchor operation ran."""
        self.operations[name] = num_bytes_of(output)


def num_bytes_of(value: Any) -> int:
    """Return the bytes of all tensors in a nested structure."""
    return sum(leaf.numel() * leaf.element_size() for leaf in tree_leaves(value) if isinstance(leaf, Tensor))
