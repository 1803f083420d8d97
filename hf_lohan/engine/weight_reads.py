"""Weights for operations outside their modules, which are borrowed for one operation or gathered to be changed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from hf_lohan.absent import AbsentParameter, BorrowedWeights, WeightView, weight_refusal
from hf_lohan.compat.torch_private import has_gradient_hook
from hf_lohan.compat.torch_private import is_in_backward as is_in_backward_of_autograd
from hf_lohan.costs import SizeClass
from hf_lohan.engine.model_pass import ForwardPass, ModelPass, PassParts, PassPhase
from hf_lohan.engine.parameter_access import ParameterAccess, packed_weight_error
from hf_lohan.model import Block, ParamSlice
from hf_lohan.ranks import Links, RankFailedError, RanksDisagreeError, bytes_of
from hf_lohan.updates import WeightChange
from hf_lohan.weights import RowLoads

_WHOLE, _RAISED = b"w", b"r"
"""How a context of gathered parameters ended."""
_HASH_BYTES = 8


class WeightReads:
    """The `WeightProvider` of an engine's model.

    In a forward, the block of a parameter is loaded to a slot as for a module, and the next pass loads it ahead.
    Elsewhere the weight is copied from the store. In both cases autograd saves a handle, and the parameter gets the
    gradient.
    """

    def __init__(
        self,
        blocks: Iterable[Block],
        parts: PassParts,
        model_pass: ModelPass,
        access: ParameterAccess,
        *,
        wait_for_updates: Callable[[], None],
        forward_pass: Callable[[], ForwardPass],
        saving: Callable[[], contextlib.AbstractContextManager[Any]],
        links: Links,
        rows: RowLoads | None = None,
    ) -> None:
        """``forward_pass`` returns the pass in progress. ``saving`` returns hooks for tensors that autograd saves.
        ``rows`` loads rows of tables that are not loaded whole."""
        self._rows = rows
        self.moved_gradients = parts.ring.moved_gradients
        self._parts = parts
        self._pass = model_pass
        self._access = access
        self._wait_for_updates = wait_for_updates
        self._forward_pass = forward_pass
        self._saving = saving
        self._place: dict[nn.Parameter, tuple[Block, ParamSlice]] = {}
        """The block and slice of each parameter. A parameter in several blocks has the first block."""
        for block in blocks:
            for part in block.slices:
                self._place.setdefault(part.parameter, (block, part))
            if block.size_class is SizeClass.EXPERT and block.state_numel:
                self.moved_gradients.are_beside_autograd = True
        self._links = links
        self._gathered: set[nn.Parameter] = set()

    def note_view(self, view: Tensor, weight_view: WeightView) -> None:
        block, part = self._place[weight_view.parameter]
        if part.is_whole:
            self._parts.ring.stand_ins.add_view(view, block, part, weight_view.steps)

    def copy_parameter(self, parameter: nn.Parameter) -> nn.Parameter:
        raise RuntimeError(weight_refusal("copy.deepcopy"))

    def embed(self, table: nn.Parameter, ids: Tensor, padding_idx: int | None) -> Tensor | None:
        block, part = self._place[table]
        if self._rows is None or block.size_class is not SizeClass.ROWS:
            return None
        if has_gradient_hook(table):  # the hook expects the gradient of the whole table
            return None
        self._parts.lifetime.check()
        forward_pass = self._begin_read()
        self._pass.in_use.note_use(block)
        self._prepare_to_read(part)
        has_gradient = table.requires_grad and torch.is_grad_enabled()
        leaf = forward_pass.leaf_of_rows(block, part) if has_gradient else None
        return self._rows.embed(block, leaf, ids, padding_idx)

    def _begin_read(self) -> ForwardPass:
        """Return the pass for a read of weights outside a module that owns them."""
        forward_pass = self._forward_pass()
        if is_in_backward_of_autograd():
            forward_pass.enter_backward()
        elif self._pass.is_running and not forward_pass.is_here:
            raise RuntimeError(
                "another thread read weights while the model runs; read them between steps, on the training thread"
            )
        return forward_pass

    def _prepare_to_read(self, part: ParamSlice) -> None:
        """Undo the guesses of the step in progress, because a parameter will be read from the store."""
        if self._pass.phase is PassPhase.IDLE:
            self._pass.recover()
        self._parts.step.refuse_new_weight(part)
        self._parts.step.undo_guesses()

    @contextlib.contextmanager
    def borrow_weights(self, parameters: Sequence[nn.Parameter]) -> Iterator[BorrowedWeights]:
        self._parts.lifetime.check()
        with contextlib.ExitStack() as stack:
            borrowed = _OperationWeights(self._parts)
            forward_pass, is_in_backward = self._begin_read(), is_in_backward_of_autograd()
            is_in_forward = not is_in_backward and self._pass.phase in (PassPhase.FORWARD, PassPhase.FORWARD_WITH_HEADS)
            if torch.is_grad_enabled() and not (is_in_backward or forward_pass.is_saving):
                stack.enter_context(self._saving())
            for parameter in parameters:
                block, part = self._place[parameter]
                if not part.is_whole and parameter.requires_grad and torch.is_grad_enabled() and not is_in_backward:
                    raise RuntimeError(
                        f"{part.name} was read outside its module's forward with gradients enabled, which experts that "
                        "stream one by one do not support; read it in torch.no_grad(), or set experts: with_layer"
                    )
                if block in borrowed.blocks and part.is_whole:
                    borrowed.add_weight(parameter, forward_pass.weight(part))
                elif is_in_forward and part.is_whole and self._parts.ring.has_room_for(block):
                    forward_pass.enter_to_read(block)
                    stack.callback(forward_pass.leave, (block,))
                    borrowed.blocks.add(block)
                    borrowed.add_weight(parameter, forward_pass.weight(part))
                else:
                    borrowed.add_weight(parameter, self._copy(block, part))
            yield borrowed

    def _copy(self, block: Block, part: ParamSlice) -> Tensor:
        """Return a copy of a parameter after the last step."""
        self._pass.in_use.note_use(block)
        self._prepare_to_read(part)
        self._wait_for_updates()
        copy = self._access.read_parameter(part.name).to(self._parts.device.torch_device)
        if part.is_whole:
            self._parts.ring.stand_ins.add_copy(copy, block, part)
        return copy

    # Changes of weights by ordinary code, a few parameters at a time.

    @contextlib.contextmanager
    def gather_parameters(self, parameters: Iterable[nn.Parameter]) -> Iterator[None]:
        """Make ``parameters`` ordinary parameters on the device in this context. `gpu_memory` does not count them.

        Changed parameters are stored at the end of the context, and bfloat16 weights become their own float32 masters.
        An exception leaves the store unchanged. All ranks must make the same changes. Raises RanksDisagreeError if
        these differ, and RuntimeError in a forward or backward, and if the model runs in the context.
        """
        self._parts.lifetime.check()
        if self._pass.is_running:
            raise RuntimeError(
                "weights can be gathered between steps, not while the model runs; if an interrupt ended a pass, call "
                "model.zero_grad() first"
            )
        self._pass.recover()
        self._parts.step.undo_guesses()
        self._wait_for_updates()
        fresh = [parameter for parameter in dict.fromkeys(parameters) if parameter not in self._gathered]
        hashes: dict[nn.Parameter, int] = {}
        try:
            for parameter in fresh:
                part = self._place[parameter][1]
                self._parts.step.refuse_new_weight(part)
                weights = self._access.read_parameter(part.name)
                hashes[parameter] = _hash_of(weights)
                AbsentParameter.show(parameter, weights.to(self._parts.device.torch_device))
                self._gathered.add(parameter)
            try:
                yield
                now = {parameter: self._hash_if_valid(parameter) for parameter in hashes}
            except Exception:
                with contextlib.suppress(RankFailedError, RanksDisagreeError):
                    self._agree(_RAISED, hashes)
                raise
            self._agree(_WHOLE, now)
            for parameter in [parameter for parameter, before in hashes.items() if now[parameter] != before]:
                self._store(parameter)
        finally:
            for parameter in hashes:
                self._gathered.discard(parameter)
                block, part = self._place[parameter]
                AbsentParameter.hide(parameter, self._parts.ring.stand_ins.placeholder(block, part))

    def _agree(self, how: bytes, hashes: Mapping[nn.Parameter, int]) -> None:
        """Raise RanksDisagreeError if the context ends differently on another rank, or if the gathered parameters have
        other values there. Each rank stores only its shard of the values."""
        own = [hash_.to_bytes(_HASH_BYTES, "little") for hash_ in hashes.values()]
        answers = self._links.all_gather("the end of gathered_parameters", how + b"".join(own))
        for rank in self._links.ranks.others:
            pair = f"rank {rank} and not on rank {self._links.ranks.rank}"
            if how == _WHOLE != answers[rank][:1]:
                raise RanksDisagreeError(
                    f"an exception ended gathered_parameters on {pair}, so no change is stored; look for code that "
                    "only some ranks run"
                )
            for number, parameter in enumerate(hashes) if how == _WHOLE else ():
                start = len(_WHOLE) + number * _HASH_BYTES
                if answers[rank][start : start + _HASH_BYTES] != own[number]:
                    raise RanksDisagreeError(
                        f"{self._place[parameter][1].name} differs between rank {rank} and rank "
                        f"{self._links.ranks.rank} at the end of gathered_parameters, so no change is stored; make "
                        "the same change on all ranks (torch.distributed.broadcast copies one rank's values)"
                    )

    def _hash_if_valid(self, parameter: nn.Parameter) -> int:
        """Return the hash of a gathered parameter's values. Raises ValueError or RuntimeError if they cannot be
        stored."""
        _, part = self._place[parameter]
        if isinstance(parameter, AbsentParameter):
            raise RuntimeError(
                f"the model ran while {part.name} was gathered, so its changes are lost; run the model after the end "
                "of gathered_parameters"
            )
        weights = parameter.data
        if weights.shape != part.shape:
            raise ValueError(
                f"{part.name} now has shape {tuple(weights.shape)}, and the store has {tuple(part.shape)}; resize it "
                "before the model is offloaded"
            )
        return _hash_of(weights.cpu())

    def _store(self, parameter: nn.Parameter) -> None:
        _, part = self._place[parameter]
        if part.packed is not None:  # a read to compare the values would need all ranks
            raise packed_weight_error(part.name, part.packed)
        self._access.write_parameter(part.name, parameter.data)
        self._parts.ring.end_step([block for block, _ in self._access.parts[part.name]], WeightChange.WRITE)
        self._pass.note_changed_weight(part.name)


class _OperationWeights:
    """The `BorrowedWeights` of one operation."""

    def __init__(self, parts: PassParts) -> None:
        self._parts = parts
        self._weights: dict[nn.Parameter, Tensor] = {}
        self.blocks: set[Block] = set()
        """Blocks that are in slots for this operation."""

    def add_weight(self, parameter: nn.Parameter, weight: Tensor) -> None:
        self._weights[parameter] = weight

    def weight(self, parameter: nn.Parameter) -> Tensor:
        weight = self._weights[parameter]
        if weight.requires_grad or not (parameter.requires_grad and torch.is_grad_enabled()):
            return weight
        copied: Tensor = _Copied.apply(parameter, weight)  # type: ignore[no-untyped-call]
        return copied

    def copy_views(self, output: Any) -> Any:
        return self._parts.ring.copy_views(output, self.blocks) if self.blocks else output


class _Copied(torch.autograd.Function):
    """Returns ``copy`` in place of a parameter, and passes its gradient to the parameter."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, copy: Tensor) -> Tensor:
        return copy.view_as(copy)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def _hash_of(weights: Tensor) -> int:
    return xxhash.xxh3_64_intdigest(bytes_of(weights).numpy().data)
