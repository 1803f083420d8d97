"""Move a model that stands in memory into the store, block by block."""

from __future__ import annotations

from torch import nn

from hf_lohan.engine.parameter_access import ParameterAccess
from hf_lohan.model import Block


def drain_model(blocks: list[Block], parameters: ParameterAccess) -> None:
    """Write every parameter to the store and let go of its memory at once.

    Afterwards the parameters hold empty tensors; the engine replaces them by placeholders.
    """
    for block in blocks:
        for part in block.slices:
            parameters.write_parameter(part.name, part.parameter)
            _let_go(part.parameter)


def _let_go(parameter: nn.Parameter) -> None:
    parameter.grad = None
    parameter.data = parameter.data.new_empty(0)
