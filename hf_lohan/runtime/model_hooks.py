"""Hooks on a model: each block comes before its forward and its backward, each gradient goes when it is complete."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from hf_lohan.device import Device, PoolAborted
from hf_lohan.runtime.activation_tiers import ActivationTiers
from hf_lohan.runtime.block import Block, ParamSlice
from hf_lohan.runtime.blocks_in_use import BlocksInUse
from hf_lohan.runtime.compute_spans import ComputeSpans
from hf_lohan.runtime.discovery import ModelBlocks
from hf_lohan.runtime.gradient_arrival import GradientArrivals
from hf_lohan.runtime.prefetcher import Prefetcher
from hf_lohan.runtime.saved_weights import saved_weight_hooks
from hf_lohan.runtime.slot_ring import Slot, SlotRing
from hf_lohan.runtime.step_clock import StepClock


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
        before_backward: Callable[[], None],
        backward_broke: Callable[[], None],
    ) -> None:
        self._ring = ring
        self._prefetcher = prefetcher
        self._arrivals = arrivals
        self._clock = clock
        self._activations = activations
        self._before_forward = before_forward
        self._begin_backward = before_backward
        self._backward_broke = backward_broke
        self._in_use = BlocksInUse(ring, prefetcher)
        self._spans = ComputeSpans(device)
        self._saved_weights: contextlib.AbstractContextManager[Any] | None = None
        self._is_in_forward = False
        self._is_in_backward = False
        self._handles: list[Any] = []
        self._attach(model, model_blocks, device)

    @property
    def is_idle(self) -> bool:
        """Whether neither a forward nor a backward is under way, or was broken off."""
        return not (self._is_in_forward or self._is_in_backward)

    def recover_if_broken(self) -> None:
        """If an exception ended the last forward or backward, start clean. After a backward, the step's gradients are
        gone: half of a sum would be a wrong number."""
        if self.is_idle:
            return
        was_in_backward = self._is_in_backward
        if self._saved_weights is not None:  # an interrupt does not even run hooks that are always called
            self._saved_weights.__exit__(None, None, None)
            self._saved_weights = None
        self._spans.end()
        self._in_use.release_all()
        self._arrivals.abandon()
        self._prefetcher.cancel_pass()
        self._is_in_forward = self._is_in_backward = False
        if was_in_backward:
            self._backward_broke()

    def remove(self) -> None:
        """Take them off the model."""
        for handle in self._handles:
            handle.remove()

    def _attach(self, model: nn.Module, model_blocks: ModelBlocks, device: Device) -> None:
        for block in model_blocks.blocks:
            self._ring.hide(block)
            for part in block.trainable_slices:
                handle = part.parameter.register_post_accumulate_grad_hook(
                    lambda parameter, part=part: self._on_gradient(part, parameter)
                )
                self._handles.append(handle)
        for buffer_owner in model.modules():
            for name, buffer in buffer_owner._buffers.items():
                if buffer is not None:
                    buffer_owner._buffers[name] = buffer.to(device.torch_device)
        self._handles.append(model.register_forward_pre_hook(self._on_model_forward))
        self._handles.append(model.register_forward_hook(self._on_model_output, always_call=True))
        layers = set(model_blocks.layers)
        for module, blocks in model_blocks.needs.items():
            self._handles.append(module.register_forward_pre_hook(lambda _m, _a, b=blocks: self._before(b)))
            after = self._after_layer if module in layers else self._after_outer
            self._handles.append(
                module.register_forward_hook(lambda _m, _a, out, b=blocks, after=after: after(b, out))
            )

    # Forward.

    def _on_model_forward(self, _module: nn.Module, _args: Any) -> None:
        self.recover_if_broken()
        self._before_forward()
        is_training = torch.is_grad_enabled()
        self._is_in_forward = True
        self._clock.begin()
        self._prefetcher.begin_pass(is_training=is_training)
        if is_training:
            self._activations.begin_forward()
            self._saved_weights = saved_weight_hooks(self._ring, self._fetch_in_backward, self._activations)
            self._saved_weights.__enter__()

    def _on_model_output(self, _module: nn.Module, _args: Any, output: Any) -> None:
        is_training = self._saved_weights is not None
        if self._saved_weights is not None:
            self._saved_weights.__exit__(None, None, None)
            self._saved_weights = None
        if output is None:
            return  # called because the forward raised: the next one recovers
        self._is_in_forward = False
        if is_training:
            self._activations.expect_backward()
            self._clock.end_forward()
        else:
            self._prefetcher.end_pass()

    def _before(self, blocks: tuple[Block, ...]) -> None:
        if self._is_in_backward:
            # Recomputation, where layer hooks fire again (before transformers 5.23): the blocks are here already.
            self._before_backward(blocks)
            return
        if torch.is_grad_enabled() and not self._is_in_forward:
            raise RuntimeError(
                "a layer was called outside its model's forward with gradients on; call the model itself, so that "
                "what autograd saves of streamed weights can be tracked"
            )
        self._spans.end()
        for block in blocks:
            self._in_use.enter(block)
        if blocks:
            self._spans.begin("forward", blocks[0])

    def _after_outer(self, blocks: tuple[Block, ...], _output: Any) -> None:
        if not self._is_in_backward:
            self._spans.end()
            for block in blocks:
                self._in_use.leave(block)

    def _after_layer(self, blocks: tuple[Block, ...], output: Any) -> None:
        if self._is_in_backward:
            return
        self._after_outer(blocks, output)
        hidden = output[0] if isinstance(output, tuple | list) else output
        if isinstance(hidden, Tensor) and hidden.requires_grad:
            hidden.register_hook(lambda _gradient: self._before_backward(blocks))

    # Backward.

    def _before_backward(self, blocks: tuple[Block, ...]) -> None:
        for block in blocks:
            self._fetch_in_backward(block)

    def _fetch_in_backward(self, block: Block) -> Slot:
        self._enter_backward()
        if self._spans.is_open("backward", block):
            return self._in_use.fetch_in_backward(block)
        self._spans.end()
        slot = self._in_use.fetch_in_backward(block)
        self._spans.begin("backward", block)
        return slot

    def _enter_backward(self) -> None:
        if not self._is_in_backward:
            self._is_in_backward = True
            self._begin_backward()
            self._clock.begin()
            # Private, but what FSDP and DDP use: runs when the whole backward is done.
            Variable._execution_engine.queue_callback(self._end_backward)

    def _on_gradient(self, part: ParamSlice, parameter: nn.Parameter) -> None:
        self._enter_backward()
        try:
            self._arrivals.take(part, parameter)
        except PoolAborted as aborted:  # the pipeline broke: say why, not how it was noticed
            raise (aborted.__cause__ or aborted) from None

    def _end_backward(self) -> None:
        self._spans.end()
        self._arrivals.flush()
        self._in_use.release_all()
        self._is_in_backward = False
        self._clock.end_backward()
        self._prefetcher.end_pass()
