"""What the layers' forwards were seen to do: the real shapes of a real batch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from hf_lohan.planner.placement import INPUT


@dataclass(frozen=True, slots=True)
class TracedOperation:
    """One anchor operation of one layer."""

    flops: float
    output_bytes: int


@dataclass
class LayerTrace:
    """One layer's forward of one micro-batch, the last one."""

    input_shape: tuple[int, ...] = ()
    """Of its first argument: [batch, sequence, hidden] in every causal LM."""
    input_bytes: int = 0
    num_runs: int = 1
    """Forwards of the layer since tracing began: the micro-batches of a step."""
    operations: dict[str, TracedOperation] = field(default_factory=dict)
    """In the order in which they ran."""
    recomputed: set[str] = field(default_factory=set)
    """Those of them that its recomputation ran: keeping the others saves nothing."""

    @property
    def candidates(self) -> dict[str, TracedOperation]:
        """What is worth putting away."""
        return {name: traced for name, traced in self.operations.items() if name in self.recomputed}

    def sizes(self) -> dict[str, int]:
        """Bytes of all that could be put away, by name, in the order in which backward needs them."""
        return {INPUT: self.input_bytes} | {name: traced.output_bytes for name, traced in self.candidates.items()}

    def note(self, name: str, operation: Any, args: Any, kwargs: Any, output: Any) -> None:
        """An anchor operation ran."""
        self.operations[name] = TracedOperation(flops_of(operation, args, kwargs, output), bytes_of(output))


def bytes_of(value: Any) -> int:
    """Of all tensors in it."""
    return sum(leaf.numel() * leaf.element_size() for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


def flops_of(operation: Any, args: Any, kwargs: Any, output: Any) -> float:
    """By torch's formulas; those it has no formula for (a grouped product) count as their inputs' products."""
    packet = getattr(operation, "overloadpacket", operation)
    formula = flop_registry.get(packet)
    if formula is not None:
        return float(formula(*args, **kwargs, out_val=output))
    return grouped_product_flops(args)


def grouped_product_flops(args: Any) -> float:
    """Of rows [tokens, k] that each meet one of the matrices [groups, k, n], or of [groups, m, k] by [groups, k, n]."""
    left, right = args[0], args[1]
    return 2.0 * float(left.numel() * right.shape[-1])
