"""Hooks on a model: each block comes before its forward and its backward, each gradient goes when it is complete."""

from __future__ import annotations

import contextlib
import enum
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from hf_lohan.activations import ActivationTiers
from hf_lohan.compat.torch_private import call_behind_backward
from hf_lohan.device import Device, PoolAborted
from hf_lohan.engine.pass_times import ComputeSpans, StepClock
from hf_lohan.micro_batches import GradientSums, JointForward, Lockstep, MicroBatchHeads, MicroBatchLeaves
from hf_lohan.model import Block, ModelBlocks, ParamSlice
from hf_lohan.planner import SizeClass
from hf_lohan.planning import StepShape
from hf_lohan.threads import raised_anew
from hf_lohan.updates import GradientArrivals
from hf_lohan.weights import BlocksInUse, Prefetcher, Slot, SlotRing, saved_weight_hooks

Result = TypeVar("Result")


class Phase(enum.Enum):
    """Where a model's pass is. A joint one has backwards of its heads while its forwards still go on."""

    IDLE = enum.auto()
    FORWARD = enum.auto()
    FORWARD_WITH_HEADS = enum.auto()
    """Forwards go on, and the first heads have had their backward."""
    BETWEEN = enum.auto()
    """Forwards are over, heads have had their backward, and that of the layers is to come."""
    BACKWARD = enum.auto()


class ModelHooks:
    """Knows whether the model is in a forward or a backward, and what has to happen where.

    `before_forward` is called before each forward of the whole model, `before_backward` when a backward
    needs its first block, `backward_broke` when one is found not to have finished.
    """

    def __init__(
        self,
        model: nn.Module,
        model_blocks: ModelBlocks,
        device: Device,
        ring: SlotRing,
        prefetcher: Prefetcher,
        arrivals: GradientArrivals,
        clock: StepClock,
        activations: ActivationTiers,
        *,
        before_forward: Callable[[], None],
        see_batch: Callable[[StepShape | None], None],
        before_backward: Callable[[], None],
        backward_broke: Callable[[], None],
    ) -> None:
        self._ring = ring
        self._prefetcher = prefetcher
        self._arrivals = arrivals
        self._clock = clock
        self._activations = activations
        self._before_forward = before_forward
        self._see_batch = see_batch
        self._begin_backward = before_backward
        self._backward_broke = backward_broke
        self._model = model
        self._joint: JointForward | None = None
        """While several micro-batches' forwards are under way."""
        self._sums: GradientSums | None = None
        """In the backward of a joint forward."""
        self._in_use = BlocksInUse(ring, prefetcher, self._done_in_backward)
        self._spans = ComputeSpans(device)
        self._saved_weights: contextlib.AbstractContextManager[Any] | None = None
        self._phase = Phase.IDLE
        self._num_layers = len(model_blocks.layers)
        self._shared = set(model_blocks.shared)
        self._handles: list[Any] = []
        self._attach(model, model_blocks, device)

    @property
    def is_idle(self) -> bool:
        """Whether neither a forward nor a backward is under way, or was broken off."""
        return self._phase is Phase.IDLE

    def recover_if_broken(self) -> None:
        """If an exception ended the last forward or backward, start clean. After a backward, the step's gradients are
        gone: half of a sum would be a wrong number."""
        if self.is_idle:
            return
        was_in_backward = self._phase is not Phase.FORWARD
        if self._saved_weights is not None:  # an interrupt does not even run hooks that are always called
            self._saved_weights.__exit__(None, None, None)
            self._saved_weights = None
        self._spans.end()
        self._in_use.release_all()
        if self._sums is not None:
            self._sums.clear()
        self._arrivals.abandon()
        self._prefetcher.cancel_pass()
        if was_in_backward:
            self._backward_broke()
        # Only now: an interrupt may end this, and then it is done again.
        self._phase = Phase.IDLE

    def remove(self) -> None:
        """Take them off the model."""
        for handle in self._handles:
            handle.remove()

    def _attach(self, model: nn.Module, model_blocks: ModelBlocks, device: Device) -> None:
        for block in model_blocks.blocks:
            self._ring.hide(block)
            for part in block.trainable_slices:
                on_gradient = partial(_told(self._on_gradient), part)
                self._handles.append(part.parameter.register_post_accumulate_grad_hook(on_gradient))
        for buffer_owner in model.modules():
            for name, buffer in list(buffer_owner.named_buffers(recurse=False, remove_duplicate=False)):
                setattr(buffer_owner, name, buffer.to(device.torch_device))
        self._handles.append(model.register_forward_pre_hook(self._on_model_forward, with_kwargs=True))
        self._handles.append(model.register_forward_hook(self._on_model_output, always_call=True))
        layers = {layer: index for index, layer in enumerate(model_blocks.layers)}
        for module, blocks in model_blocks.needs.items():
            self._handles.append(module.register_forward_pre_hook(lambda _m, _a, b=blocks: self._before(b)))
            after = partial(self._after_layer, layers[module]) if module in layers else self._after_outer
            self._handles.append(
                module.register_forward_hook(lambda _m, _a, out, b=blocks, after=after: after(b, out))
            )

    # Forward.

    @contextlib.contextmanager
    def joint_forward(self, lockstep: Lockstep, *, heads_apart: bool) -> Iterator[MicroBatchHeads]:
        """Within, ``lockstep`` runs the forwards of several micro-batches of one step, which have one backward.
        ``heads_apart``: whether to try and take heads back one by one."""
        self._before_forward()
        self._phase = Phase.FORWARD
        self._clock.begin()
        self._prefetcher.begin_pass(is_training=True)
        self._activations.begin_forward()
        sums = GradientSums(lockstep.num_functions, self._arrivals.send)
        leaves = MicroBatchLeaves(self._model, self._ring, partial(self._on_leaf_gradient, sums))
        heads = MicroBatchHeads(leaves.__contains__)
        self._joint = joint = JointForward(
            lockstep, self._in_use, leaves, num_layers=self._num_layers, heads=heads if heads_apart else None
        )
        try:
            yield heads
        finally:
            joint.restore()
            self._joint = None
        if heads_apart and not heads.are_apart:
            sums.keep_order()
        self._spans.end()
        joint.leave_all()
        self._phase = Phase.BETWEEN if self._phase is Phase.FORWARD_WITH_HEADS else Phase.IDLE
        self._activations.expect_backward()
        self._clock.end_forward()

    def _on_model_forward(self, _module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._joint is not None:
            self._see_batch(_step_shape(args, kwargs))
            self._joint.begin_model(saved_weight_hooks(self._ring, _told(self._fetch_in_backward), self._activations))
            return
        self._before_forward()
        is_training = torch.is_grad_enabled()
        self._phase = Phase.FORWARD
        self._clock.begin()
        self._prefetcher.begin_pass(is_training=is_training)
        if is_training:
            self._see_batch(_step_shape(args, kwargs))
            self._activations.begin_forward()
            self._saved_weights = saved_weight_hooks(self._ring, _told(self._fetch_in_backward), self._activations)
            self._saved_weights.__enter__()

    def _on_model_output(self, _module: nn.Module, _args: Any, output: Any) -> None:
        if self._joint is not None:
            self._joint.end_model()
            return
        is_training = self._saved_weights is not None
        if self._saved_weights is not None:
            self._saved_weights.__exit__(None, None, None)
            self._saved_weights = None
        if output is None:
            return  # called because the forward raised: the next one recovers
        self._phase = Phase.IDLE
        if is_training:
            self._activations.expect_backward()
            self._clock.end_forward()
        else:
            self._prefetcher.end_pass()

    def _before(self, blocks: tuple[Block, ...]) -> None:
        if self._phase is Phase.BACKWARD:
            # Recomputation, where layer hooks fire again (before transformers 5.23): the blocks are here already.
            self._before_backward(blocks)
            return
        if torch.is_grad_enabled() and self._phase not in (Phase.FORWARD, Phase.FORWARD_WITH_HEADS):
            raise RuntimeError(
                "a layer was called outside its model's forward with gradients on; call the model itself, so that "
                "what autograd saves of streamed weights can be tracked"
            )
        self._spans.end()
        if self._joint is not None:
            self._joint.stop_before(blocks)
        use = self._in_use if self._joint is None else self._joint
        for block in blocks:
            use.enter(block)
        if blocks:
            self._spans.begin("forward", blocks[0])

    def _after_outer(self, blocks: tuple[Block, ...], _output: Any) -> None:
        if self._phase is not Phase.BACKWARD:
            self._spans.end()
            use = self._in_use if self._joint is None else self._joint
            for block in blocks:
                use.leave(block)

    def _after_layer(self, index: int, blocks: tuple[Block, ...], output: Any) -> Any:
        if self._phase is Phase.BACKWARD:
            return output
        self._after_outer(blocks, output)
        hidden = output[0] if isinstance(output, tuple | list) else output
        if isinstance(hidden, Tensor) and hidden.requires_grad:
            hidden.register_hook(partial(_told(self._before_backward), blocks))
        return output if self._joint is None else self._joint.stop_behind_layer(index, output)

    # Backward.

    def _before_backward(self, blocks: tuple[Block, ...], _gradient: Tensor | None = None) -> None:
        for block in blocks:
            self._fetch_in_backward(block)

    def _fetch_in_backward(self, block: Block) -> Slot:
        self._enter_backward()
        use = self._in_use if self._joint is None else self._joint
        if block in self._shared or self._spans.is_open("backward", block):
            return use.fetch_in_backward(block)
        self._spans.end()
        slot = use.fetch_in_backward(block)
        self._spans.begin("backward", block)
        return slot

    def _enter_backward(self) -> None:
        if self._joint is not None:
            self._phase = Phase.FORWARD_WITH_HEADS
        elif self._phase is not Phase.BACKWARD:
            had_heads = self._phase is Phase.BETWEEN
            self._phase = Phase.BACKWARD
            if not had_heads:
                self._begin_backward()
            self._clock.begin()
            call_behind_backward(self._end_backward)

    def _on_gradient(self, part: ParamSlice, parameter: nn.Parameter) -> None:
        self._enter_backward()
        self._ring.gradients_away.note()
        with _cause_of_abort():
            self._arrivals.take(part, parameter)

    def _on_leaf_gradient(
        self, sums: GradientSums, micro_batch: int, part: ParamSlice, leaf: nn.Parameter, *, has_more: bool
    ) -> None:
        self._enter_backward()
        self._ring.gradients_away.note()
        self._sums = sums
        with _cause_of_abort():
            (sums.keep if has_more else sums.add)(micro_batch, part, leaf)

    def _done_in_backward(self, block: Block) -> None:
        # A block outside the layers may have been used before and behind them: the last word on it is not said.
        if self._sums is not None and block.size_class is SizeClass.LAYER:
            with _cause_of_abort():
                self._sums.complete(block)

    def _end_backward(self) -> None:
        self._spans.end()
        if self._sums is not None:
            with _cause_of_abort():
                self._sums.flush()
        self._arrivals.flush()
        self._in_use.release_all()
        self._phase = Phase.IDLE
        self._clock.end_backward()
        self._prefetcher.end_pass()


def _told(method: Callable[..., Result]) -> Callable[..., Result]:
    """For autograd, whose graphs and parameters must not keep the model: the garbage collector cannot see into them."""
    told = weakref.WeakMethod(method)

    def call(*args: Any) -> Result:
        method = told()
        if method is None:
            raise RuntimeError("the model is gone whose backward this is; keep it until its backward has run")
        return method(*args)

    return call


def _step_shape(args: tuple[Any, ...], kwargs: dict[str, Any]) -> StepShape | None:
    """Of a causal LM's forward: [batch, sequence] of token ids, or of what stands for them."""
    for given in (kwargs.get("input_ids"), kwargs.get("inputs_embeds"), *args[:1]):
        if isinstance(given, Tensor) and given.dim() > 1:
            return StepShape(*given.shape[:2])
    return None


@contextlib.contextmanager
def _cause_of_abort() -> Iterator[None]:
    """If the pipeline broke: say why, not how it was noticed."""
    try:
        yield
    except PoolAborted as aborted:
        raise raised_anew(aborted.__cause__ or aborted) from aborted.__cause__
