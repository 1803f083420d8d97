"""Weights for whoever reads them where no module runs that owns them: the true numbers, or an error at that line."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hf_lohan.compat.torch_private import is_in_backward as is_in_backward_of_autograd
from hf_lohan.compat.torch_private import storage_id, tree_map
from hf_lohan.engine.gathering import Gathering
from hf_lohan.engine.model_pass import ForwardPass, ModelPass, PassParts, Phase
from hf_lohan.engine.parameter_access import ParameterAccess
from hf_lohan.model import Block, ParamSlice
from hf_lohan.weights.absence import ViewOf, refusal


class WeightReads:
    """Brings absent parameters for one operation.

    Within a forward their block comes to its slot, as for a module, and the next pass foresees it. Elsewhere the
    weight is copied from the store. In both cases autograd saves a handle, and the gradient is the parameter's.
    """

    def __init__(
        self,
        blocks: Iterable[Block],
        parts: PassParts,
        model_pass: ModelPass,
        access: ParameterAccess,
        *,
        settle: Callable[[], None],
        forward_pass: Callable[[], ForwardPass],
        saving: Callable[[], contextlib.AbstractContextManager[Any]],
    ) -> None:
        """``settle`` waits for updates; ``forward_pass`` says how forwards go now; ``saving`` gives hooks for what
        autograd saves."""
        self.gradients_away = parts.ring.gradients_away
        self._parts = parts
        self._pass = model_pass
        self._access = access
        self._settle = settle
        self._forward_pass = forward_pass
        self._saving = saving
        self._place: dict[nn.Parameter, tuple[Block, ParamSlice]] = {}
        """Of those that lie in several blocks, the first."""
        for block in blocks:
            for part in block.slices:
                self._place.setdefault(part.parameter, (block, part))
        self._gathering = Gathering(self._place, parts, model_pass, access, settle)

    def note_view(self, view: Tensor, view_of: ViewOf) -> None:
        """See `Absence`."""
        block, part = self._place[view_of.parameter]
        if part.is_whole:
            self._parts.ring.stand_ins.note_view(view, block, part, view_of.steps)

    def copied(self, parameter: nn.Parameter) -> nn.Parameter:
        """See `Absence`."""
        raise RuntimeError(refusal("copy.deepcopy"))

    def gathered(self, parameters: Sequence[nn.Parameter]) -> contextlib.AbstractContextManager[None]:
        """See `Absence`."""
        return self._gathering.gathered(parameters)

    @contextlib.contextmanager
    def reading(self, parameters: Sequence[nn.Parameter]) -> Iterator[_Brought]:
        """See `Absence`."""
        self._parts.lifetime.check()
        with contextlib.ExitStack() as stack:
            brought = _Brought(self._parts)
            forward_pass, is_in_backward = self._forward_pass(), is_in_backward_of_autograd()
            is_in_forward = not is_in_backward and self._pass.phase in (Phase.FORWARD, Phase.FORWARD_WITH_HEADS)
            if is_in_backward:
                forward_pass.enter_backward()
            elif self._pass.is_running and not forward_pass.is_here:
                raise RuntimeError(
                    "weights were read by another thread while the model runs; read them on the thread that trains, "
                    "between steps"
                )
            if torch.is_grad_enabled() and not (is_in_backward or forward_pass.is_saving):
                stack.enter_context(self._saving())
            for parameter in parameters:
                block, part = self._place[parameter]
                if not part.is_whole and parameter.requires_grad and torch.is_grad_enabled() and not is_in_backward:
                    raise RuntimeError(
                        f"{part.name} was read with gradients on by an operation that is not its experts' own, and its "
                        "experts stream one by one; read it under torch.no_grad(), or set experts: with_layer"
                    )
                if block in brought.blocks and part.is_whole:
                    brought.put(parameter, forward_pass.weight(part))
                elif is_in_forward and part.is_whole and self._parts.ring.has_room_for(block):
                    forward_pass.enter_to_read(block)
                    stack.callback(forward_pass.leave, (block,))
                    brought.blocks.add(block)
                    brought.put(parameter, forward_pass.weight(part))
                else:
                    brought.put(parameter, self._copy(block, part))
            yield brought

    def _copy(self, block: Block, part: ParamSlice) -> Tensor:
        """Of a parameter as the last step has left it."""
        if self._pass.phase is Phase.IDLE:
            self._pass.recover()
        self._parts.step.refuse_new_weight(part)
        self._parts.step.undo_guesses()
        self._settle()
        copy = self._access.read_parameter(part.name).to(self._parts.device.torch_device)
        if part.is_whole:
            self._parts.ring.stand_ins.note_copy(copy, block, part)
        return copy


class _Brought:
    """What was brought for one operation."""

    def __init__(self, parts: PassParts) -> None:
        self._parts = parts
        self._weights: dict[nn.Parameter, Tensor] = {}
        self.blocks: set[Block] = set()
        """That are in their slots."""

    def put(self, parameter: nn.Parameter, weight: Tensor) -> None:
        self._weights[parameter] = weight

    def weight(self, parameter: nn.Parameter) -> Tensor:
        """See `Brought`."""
        weight = self._weights[parameter]
        if weight.requires_grad or not (parameter.requires_grad and torch.is_grad_enabled()):
            return weight
        copied: Tensor = _Copied.apply(parameter, weight)  # type: ignore[no-untyped-call]
        return copied

    def kept(self, output: Any) -> Any:
        """See `Brought`."""
        if not self.blocks:
            return output
        slots = {storage_id(self._parts.ring.slot_of(block).weights) for block in self.blocks}

        def own(leaf: Any) -> Any:
            if isinstance(leaf, np.ndarray):
                return leaf.copy()  # it may be one over a slot
            if not isinstance(leaf, Tensor) or isinstance(leaf, nn.Parameter) or storage_id(leaf) not in slots:
                return leaf
            return leaf.clone()

        return tree_map(own, output)


class _Copied(torch.autograd.Function):
    """A parameter's weights, in memory of their own."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, copy: Tensor) -> Tensor:
        return copy.view_as(copy)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None
