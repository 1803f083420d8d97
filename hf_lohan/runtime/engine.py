"""Wires the runtime to a model's hooks: the one object that `integrations/` talks to."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from hf_lohan.config import OffloadConfig
from hf_lohan.device import Device, PoolAborted
from hf_lohan.optim import AdamWGroup, OffloadAdamW
from hf_lohan.runtime.block import Block, ParamSlice
from hf_lohan.runtime.blocks_in_use import BlocksInUse
from hf_lohan.runtime.clipping import ClipHistory
from hf_lohan.runtime.gradient_arrival import ArrivedChunk, GradientArrivals
from hf_lohan.runtime.gradient_home import GradientHome
from hf_lohan.runtime.gradient_norms import GradientNorms
from hf_lohan.runtime.gradient_pipeline import GradientPipeline
from hf_lohan.runtime.layout import OffloadLayout
from hf_lohan.runtime.non_finite import SkippedSteps
from hf_lohan.runtime.param_groups import ParamGroups
from hf_lohan.runtime.parameter_access import ParameterAccess, Zeros
from hf_lohan.runtime.prefetcher import ParameterLoader, Prefetcher
from hf_lohan.runtime.saved_weights import saved_weight_hooks
from hf_lohan.runtime.slot_ring import Slot, SlotRing
from hf_lohan.runtime.state_update import StateUpdater
from hf_lohan.runtime.step_clock import StepClock
from hf_lohan.runtime.step_log import Journal, StepLog
from hf_lohan.runtime.step_transaction import StepResult, StepTransaction
from hf_lohan.runtime.tiers import Tiers
from hf_lohan.storage import Commit

logger = logging.getLogger(__name__)


class OffloadEngine:
    """Trains a model whose parameters and optimizer states live in a store.

    Built over a model whose parameters are in the store already (`drain_model` or the streamed load put them there).
    Hooks bring each block to the device before its forward and its backward, and take each gradient off the device
    when it is complete. `is_final_backward` is asked in backward whether the step's last one is running.
    """

    def __init__(self, model: nn.Module, layout: OffloadLayout, tiers: Tiers, config: OffloadConfig) -> None:
        self.model = model
        self.layout = layout
        self.tiers = tiers
        self.config = config
        self.device: Device = tiers.device
        self.is_final_backward: Callable[[], bool] = lambda: True
        self.optimizer: OffloadAdamW | None = None
        self._parameters = ParameterAccess(tiers.store, layout.blocks, layout.master, tiers.states)
        dtype = layout.master.working_dtype
        self._ring = SlotRing(self.device, layout.plan, dtype)
        place = {parameter: index for index, parameter in enumerate(model.parameters())}
        norms = GradientNorms(
            sorted((p for block in layout.blocks for p in block.slices), key=lambda p: place[p.parameter])
        )
        spilled = frozenset(layout.plan.spilled_blocks)
        self._pipeline = GradientPipeline(
            StateUpdater(tiers.store, tiers.states, layout.master),
            GradientHome(tiers.recall, spilled, tiers.spill),
            layout.blocks,
            self._group_of,
            norms,
            tiers.gradients,
            schedule=config.schedule,
            hold_gradients=layout.holds_gradients,
            drafts=tiers.store,
        )
        loader = ParameterLoader(
            self.device, tiers.store, tiers.staging, dtype, self._pipeline.wait_until_current
        )
        self._prefetcher = Prefetcher(self._ring, loader, layout.blocks)
        self._in_use = BlocksInUse(self._ring, self._prefetcher)
        self._arrivals = GradientArrivals(self.device, tiers.gradients, layout.chunks(), norms, self._submit)
        self.transaction = StepTransaction(self._pipeline, norms)
        self._block_of = {part: block for block in layout.blocks for part in block.slices}
        self.step_log = StepLog(tiers.store, self._block_of)
        self.commits_each_step = True
        """Whether `step` commits by itself; whoever has a journal to go with it turns this off and calls `commit`."""
        self.clip_history = ClipHistory(config.clip)
        self.skipped_steps = SkippedSteps(config.max_skipped_steps)
        self.step_was_skipped = False
        self._clock = StepClock()
        self._pipeline.speculates = self.clip_history.speculates_next()
        self._groups: ParamGroups | None = None
        self._saved_weights: contextlib.AbstractContextManager[Any] | None = None
        self._has_begun = False
        self._is_in_forward = False
        self._is_in_backward = False
        self._hooks: list[Any] = []
        self.is_closed = False
        self._attach()
        # A thread that is inside torch when the interpreter goes away takes the process down with an abort.
        atexit.register(self.close)

    # Hooks.

    def _attach(self) -> None:
        for block in self.layout.blocks:
            self._ring.hide(block)
            for part in block.trainable_slices:
                hook = part.parameter.register_post_accumulate_grad_hook(
                    lambda parameter, part=part: self._on_gradient(part, parameter)
                )
                self._hooks.append(hook)
        for buffer_owner in self.model.modules():
            for name, buffer in buffer_owner._buffers.items():
                if buffer is not None:
                    buffer_owner._buffers[name] = buffer.to(self.device.torch_device)
        self._hooks.append(self.model.register_forward_pre_hook(self._on_model_forward))
        self._hooks.append(self.model.register_forward_hook(self._on_model_output, always_call=True))
        layers = set(self.layout.model_blocks.layers)
        for module, blocks in self.layout.model_blocks.needs.items():
            self._hooks.append(module.register_forward_pre_hook(lambda _m, _a, b=blocks: self._before(b)))
            after = self._after_layer if module in layers else self._after_outer
            self._hooks.append(
                module.register_forward_hook(lambda _m, _a, out, b=blocks, after=after: after(b, out))
            )

    def _on_model_forward(self, _module: nn.Module, _args: Any) -> None:
        self._recover_if_broken()
        if self._pipeline.has_begun_updates:
            raise RuntimeError(
                "the model was called between backward and step() of a step whose updates run in backward, so its "
                "weights are half old, half new; set max_grad_norm > 0 to keep gradients until step()"
            )
        if taken_back := self._pipeline.stop_speculating():
            self.clip_history.never_speculate()
            self._ring.forget(taken_back)
        is_training = torch.is_grad_enabled()
        if is_training and not self._has_begun:
            self._has_begun = True
            if self.commits_each_step:
                self.commit(even_in_place=True)  # what was loaded: the first step can then be undone as any other
        self._is_in_forward = True
        self._clock.begin()
        self._prefetcher.begin_pass(is_training=is_training)
        if is_training:
            self._saved_weights = saved_weight_hooks(self._ring, self._fetch_in_backward)
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
        for block in blocks:
            self._in_use.enter(block)

    def _after_outer(self, blocks: tuple[Block, ...], _output: Any) -> None:
        if not self._is_in_backward:
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
        return self._in_use.fetch_in_backward(block)

    def _enter_backward(self) -> None:
        if not self._is_in_backward:
            self._is_in_backward = True
            self._clock.begin()
            # Private, but what FSDP and DDP use: runs when the whole backward is done.
            Variable._execution_engine.queue_callback(self._end_backward)

    def _on_gradient(self, part: ParamSlice, parameter: nn.Parameter) -> None:
        self._enter_backward()
        try:
            self._arrivals.take(part, parameter)
        except PoolAborted as aborted:  # the pipeline broke: say why, not how it was noticed
            raise (aborted.__cause__ or aborted) from None

    def _submit(self, arrived: ArrivedChunk) -> None:
        self._pipeline.submit(arrived, is_final=self.is_final_backward())

    def _end_backward(self) -> None:
        self._arrivals.flush()
        self._in_use.release_all()
        self._is_in_backward = False
        self._clock.end_backward()
        self._prefetcher.end_pass()

    def _recover_if_broken(self) -> None:
        """If an exception ended the last forward or backward, start clean. After a backward, the step's gradients are
        gone: half of a sum would be a wrong number."""
        if not (self._is_in_forward or self._is_in_backward):
            return
        was_in_backward = self._is_in_backward
        if self._saved_weights is not None:  # an interrupt does not even run hooks that are always called
            self._saved_weights.__exit__(None, None, None)
            self._saved_weights = None
        self._in_use.release_all()
        self._arrivals.abandon()
        self._prefetcher.cancel_pass()
        self._is_in_forward = self._is_in_backward = False
        if was_in_backward:
            touched, remains = self.transaction.drop()
            self._ring.forget(touched)
            logger.warning(
                "the last backward did not finish; its step's gradients are dropped%s",
                f", but {len(touched)} blocks had been updated in it already" if remains else "",
            )

    # Steps.

    def bind_optimizer(self, optimizer: OffloadAdamW) -> None:
        """Take hyperparameters from `optimizer`. Raises ValueError if its groups do not fit the store."""
        groups = ParamGroups(optimizer, self._block_of)
        if self.optimizer is not None:
            self._reset_optimizer_states()
        self.optimizer, self._groups = optimizer, groups

    def _reset_optimizer_states(self) -> None:
        """Another optimizer takes over: like any new one it starts with zero moments."""
        for part in self._block_of:
            if part.num_updates:
                part.num_updates = 0
                for kind in ("exp_avg", "exp_avg_sq"):
                    self.parameters.write_state(part.name, kind, Zeros())

    def _group_of(self, part: ParamSlice) -> AdamWGroup:
        return self._bound_groups().group_of(part)

    def _bound_groups(self) -> ParamGroups:
        if self._groups is None:
            raise RuntimeError("the model has no optimizer yet; make an OffloadAdamW over its parameters")
        return self._groups

    def step(self) -> None:
        """Finish the step. Where updates had to wait for the norm they run on under the next forward, each block's
        before the block is read; `settle` waits for them all. A step whose gradients are not finite is skipped.

        Raises NonFiniteGradientError after too many skipped steps in a row.
        """
        self._recover_if_broken()
        result = self.transaction.commit(self._bound_groups().as_they_are_now())
        self._ring.forget(result.changed)
        self._prefetcher.foresee(is_training=True)
        self._choose_clipping(result)
        self.step_was_skipped = result.not_finite is not None
        if self.commits_each_step:
            self.commit()
        if result.not_finite is not None:
            self.skipped_steps.note(result.not_finite)
        else:
            self.skipped_steps.note_good_step()

    def _choose_clipping(self, result: StepResult) -> None:
        history = self.clip_history
        history.note_step(
            forward_s=self._clock.forward_s, backward_s=self._clock.backward_s, clipped=result.clipped
        )
        self._clock.end_step()
        if self._pipeline.last_update_s:
            history.note_updates(self._pipeline.last_update_s)
        if result.outcome in ("accepted", "redone"):
            history.note_speculation(redone=result.outcome == "redone")
        self._pipeline.speculates = history.speculates_next()

    @property
    def keeps_commits(self) -> bool:
        """Whether the store holds its last commit until the next one: it has two versions."""
        return self.tiers.store.num_homes > 1

    def commit(self, journal: Journal | None = None, *, even_in_place: bool = False) -> None:
        """Make the steps so far last, as soon as their updates are written; does not wait for that. `journal` is
        found again by `go_back_to_commit`. Where the next update would overwrite it, only if `even_in_place`."""
        if self.keeps_commits or even_in_place:
            self._pipeline.when_written(lambda: self.step_log.commit(journal or Journal()))

    def go_back_to_commit(self) -> Commit:
        """Forget what is not committed, a load too; returns the last commit. Raises ValueError if there is none."""
        self.drop_gradients()
        self.settle()
        commit = self.step_log.go_back()
        self.forget_weights()
        return commit

    @property
    def undone_update_s(self) -> float:
        """What updates took that ran on a wrong guess, or of steps that were dropped."""
        return self._pipeline.undone_s

    def settle(self) -> None:
        """Wait until the store holds every update of the steps so far."""
        self._pipeline.settle()

    @property
    def parameters(self) -> ParameterAccess:
        """Parameters and their states in the store, as the last step left them."""
        self.settle()
        return self._parameters

    def clip_grad_norm(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """See `StepTransaction.clip`."""
        self._recover_if_broken()
        return self.transaction.clip(max_norm, norm_type)

    def drop_gradients(self) -> None:
        """Forget gradients that have not been applied."""
        self._recover_if_broken()
        touched, remains = self.transaction.drop()
        self._ring.forget(touched)
        if remains:
            logger.warning("gradients were dropped after backward had updated %d blocks with them", len(touched))

    @property
    def parameter_slices(self) -> list[ParamSlice]:
        return list(self._block_of)

    @property
    def peak_gpu_pool_bytes(self) -> int:
        """High-water mark of the device slots."""
        return self._ring.high_water_bytes

    def forget_weights(self) -> None:
        """The store's parameters were replaced (a checkpoint was loaded)."""
        self._ring.forget(self.layout.blocks)

    @property
    def store_folders(self) -> set[str]:
        """Real paths of the folders that the store lies in."""
        return {os.path.realpath(path.path) for path in self.tiers.store.paths}

    def close(self) -> None:
        """Stop the threads, close the store and take the hooks off. The model keeps placeholders."""
        if self.is_closed:
            return
        self.is_closed = True
        atexit.unregister(self.close)
        for hook in self._hooks:
            hook.remove()
        self.model.register_forward_pre_hook(_refuse_closed)
        self._prefetcher.close()
        if self._is_whole_in_place:
            self.commit(even_in_place=True)
        self._pipeline.close()
        self.tiers.close()

    @property
    def _is_whole_in_place(self) -> bool:
        """Whether a store with one version holds the last step, and only that."""
        return (
            not self.keeps_commits
            and self.commits_each_step
            and self._pipeline.failure is None
            and not (self._is_in_forward or self._is_in_backward or self._pipeline.has_begun_updates)
        )


def _refuse_closed(_module: nn.Module, _args: Any) -> None:
    raise RuntimeError("the engine of this model is closed and its weights are in the store; load the model again")
