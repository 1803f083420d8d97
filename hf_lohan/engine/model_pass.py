"""Tracks a pass through a model: the forwards and backwards in progress, and the blocks that they use.
`OneForward` runs one forward at a time, and `micro_batches` runs several."""

from __future__ import annotations

import contextlib
import enum
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from hf_lohan.activations import ActivationTiers
from hf_lohan.compat.torch_private import call_behind_backward, has_gradient_hook, is_in_backward
from hf_lohan.device import Device, Lane, PoolAborted, Stamp
from hf_lohan.engine.commits import StepCommits
from hf_lohan.engine.events import FollowedPlan, PassName
from hf_lohan.engine.lifetime import Lifetime
from hf_lohan.model import Block, ParamSlice
from hf_lohan.threads import raised_anew
from hf_lohan.updates import (
    BackwardContext,
    GradientArrivals,
    GradientPipeline,
    ParamGroups,
    StepTransaction,
    WeightSlots,
)
from hf_lohan.weights import BlockLoader, BlocksInUse, Slot, SlotRing


class PassPhase(enum.Enum):
    """The phase of a pass. Joint forwards run backwards of their heads while other forwards still run."""

    IDLE = enum.auto()
    FORWARD = enum.auto()
    FORWARD_WITH_HEADS = enum.auto()
    """Forwards run, and some heads have finished their backward."""
    BETWEEN = enum.auto()
    """Forwards and backwards of heads have ended, and the layers' backward follows."""
    BACKWARD = enum.auto()


@dataclass(frozen=True, kw_only=True, slots=True)
class PassParts:
    """The parts of an engine that a pass uses."""

    device: Device
    ring: SlotRing
    prefetcher: BlockLoader
    arrivals: GradientArrivals
    activations: ActivationTiers
    step: StepTransaction
    pipeline: GradientPipeline
    commits: StepCommits
    groups: ParamGroups
    plan: FollowedPlan
    lifetime: Lifetime
    block_began: Callable[[PassName, Block], None]
    is_final_backward: Callable[[], bool]
    slots: WeightSlots | None
    """The slots that updates in backward may borrow (`BackwardContext`)."""
    block_of: Mapping[ParamSlice, Block]


class StepClock:
    """Seconds of compute, summed over a step, as measured by the computing thread."""

    def __init__(self) -> None:
        self.forward_s = 0.0
        self.backward_s = 0.0
        self.last_forward_s = 0.0
        """Seconds of the last step's forwards."""
        self.last_backward_s = 0.0
        self._began_s = 0.0

    def begin_pass(self) -> None:
        """Begin a forward or a backward."""
        self._began_s = time.perf_counter()

    def end_forward(self) -> None:
        self.forward_s += time.perf_counter() - self._began_s

    def end_backward(self) -> None:
        self.backward_s += time.perf_counter() - self._began_s

    def end_step(self) -> None:
        """Keep the step's times, and start from zero."""
        self.last_forward_s, self.last_backward_s = self.forward_s, self.backward_s
        self.forward_s = self.backward_s = 0.0


class ComputeSpans:
    """The timeline's compute tasks. Each is the work of one pass on one block, until the pass needs the next block."""

    def __init__(self, device: Device, began: Callable[[PassName, Block], None]) -> None:
        self._device = device
        self._began = began
        self._open: tuple[PassName, Block, Stamp] | None = None

    def is_open(self, name: PassName, block: Block) -> bool:
        return self._open is not None and self._open[:2] == (name, block)

    def begin_span(self, name: PassName, block: Block) -> None:
        """Begin a task of the pass ``name`` and ``block``, for work that is enqueued from now on."""
        self.end_span()
        self._began(name, block)
        self._open = name, block, self._device.stamp(Lane.COMPUTE)

    def end_span(self) -> None:
        """End the open task, if any. All its work must be enqueued."""
        if self._open is not None:
            (name, block, began), self._open = self._open, None
            self._device.note_span(Lane.COMPUTE, name, began, self._device.stamp(Lane.COMPUTE), block=block.name)


class UsedBlocks:
    """The blocks that the training forwards of a step use. A backward uses no other blocks."""

    def __init__(self) -> None:
        self._num_changes = -1
        self._of_forwards: list[set[Block]] = []
        self._num_backwards = 0
        self._num_since_backward = 0

    def begin_forward(self, num_changes: int) -> set[Block]:
        """Return the set to which the forward adds its blocks. `num_changes` differs in each step."""
        if num_changes != self._num_changes:
            self._num_changes = num_changes
            self._of_forwards, self._num_backwards, self._num_since_backward = [], 0, 0
        self._of_forwards.append(set())
        self._num_since_backward += 1
        return self._of_forwards[-1]

    def end_backward(self) -> None:
        self._num_backwards += 1
        self._num_since_backward = 0

    def unused(self, blocks: Iterable[Block], num_changes: int) -> set[Block]:
        """Return the blocks that the current backward does not reach. The backward may belong to any forward of the
        step, unless forwards and backwards took turns."""
        if num_changes != self._num_changes:
            return set()
        take_turns = self._num_since_backward == 1 and len(self._of_forwards) == self._num_backwards + 1
        used = self._of_forwards[-1] if take_turns else set[Block]().union(*self._of_forwards)
        return set(blocks) - used


class ModelPass:
    """The state of a pass. A training forward may have a backward or not, and an exception may end either."""

    def __init__(self, parts: PassParts) -> None:
        self._parts = parts
        self.clock = StepClock()
        self.in_use = BlocksInUse(parts.ring, parts.prefetcher)
        self.spans = ComputeSpans(parts.device, parts.block_began)
        self._saving: AbstractContextManager[Any] | None = None
        self.phase = PassPhase.IDLE
        self._loads_before_gradient: dict[Block, int] = {}
        self._is_running = False
        self._awaits_backward = False
        self._changed: str | None = None
        self._is_announced_final = True
        self._is_final = False
        self._used = UsedBlocks()

    @property
    def is_running(self) -> bool:
        """Whether a forward or a backward is in progress. Also true after an interrupt, but not after another error."""
        return self._is_running or is_in_backward()

    @property
    def is_saving(self) -> bool:
        """Whether a forward saves tensors for a backward."""
        return self._saving is not None

    def note_changed_weight(self, name: str) -> None:
        """Record that a weight was changed, so that the backward of an earlier forward is refused."""
        if self._awaits_backward:
            self._changed = name

    def recover(self) -> None:
        """Clean up if an exception ended the last forward, backward or step."""
        self._parts.lifetime.check()
        self._recover_if_broken()
        self._parts.step.recover()

    def _recover_if_broken(self) -> None:
        """Drop the step's gradients if a backward failed, because their sum is incomplete."""
        if self.phase is PassPhase.IDLE:
            return
        self.end_saving()  # after an interrupt, torch does not even run hooks with `always_call`
        self.spans.end_span()
        self.in_use.release_all()
        self._parts.arrivals.abandon_backward()
        self._parts.prefetcher.cancel_pass()
        if self.phase is not PassPhase.FORWARD:
            self._parts.step.abandon_broken()
        # This is last, so that the method runs again if an interrupt ends it.
        self.phase = PassPhase.IDLE
        self._is_running = self._awaits_backward = False
        self._changed = None
        self._loads_before_gradient.clear()

    # Forward.

    def begin_forward(self, *, is_training: bool) -> None:
        """Begin a forward of the whole model, or several forwards that share one backward."""
        self.recover()
        self._parts.device.note_reached()
        self._parts.step.refuse_between_updates()
        self._parts.step.undo_guesses()
        if is_training:
            self._parts.groups.follow_optimizer()
            self._parts.plan.begin_step()
        else:
            self._parts.plan.begin_evaluation()
        self.phase = PassPhase.FORWARD
        self._is_running, self._awaits_backward, self._changed = True, False, None
        self.clock.begin_pass()
        self._parts.prefetcher.begin_pass(is_training=is_training)
        if is_training:
            self.in_use.collect_uses(self._used.begin_forward(self._parts.ring.num_changes))
            self._parts.activations.begin_forward()

    def save_by(self, saving: AbstractContextManager[Any]) -> None:
        """Enter ``saving``, the hooks for tensors that the forward saves."""
        saving.__enter__()
        self._saving = saving

    def end_saving(self) -> bool:
        """Remove the hooks of `save_by` after a forward. Returns whether there were hooks."""
        if self._saving is None:
            return False
        self._saving.__exit__(None, None, None)
        self._saving = None
        return True

    def fail_forward(self) -> None:
        """Record that a forward has raised."""
        self._is_running = False

    def end_forward(self, *, is_training: bool) -> None:
        """End the forwards."""
        self._is_running, self._awaits_backward = False, is_training
        self.spans.end_span()
        self.phase = PassPhase.BETWEEN if self.phase is PassPhase.FORWARD_WITH_HEADS else PassPhase.IDLE
        if is_training:
            self._parts.activations.expect_backward()
            self.clock.end_forward()
        else:
            self._parts.prefetcher.end_pass()

    # Backward.

    def announce_backward(self, *, is_final: bool) -> bool:
        """Set whether later backwards may be the last of a step. Returns what was set before."""
        before, self._is_announced_final = self._is_announced_final, is_final
        return before

    def begin_head(self) -> None:
        """Begin or continue the backward of a head while other forwards run."""
        if self.phase is not PassPhase.FORWARD_WITH_HEADS:
            self._begin_gradients()
        self.phase = PassPhase.FORWARD_WITH_HEADS

    def begin_backward(self, before_end: Callable[[], None] = lambda: None) -> None:
        """Begin or continue a backward. ``before_end`` sends the last gradients."""
        if self.phase is PassPhase.BACKWARD:
            return
        if self._changed is not None:
            raise RuntimeError(
                f"{self._changed} was changed between a forward and its backward, which needs the old values; change "
                "weights after step()"
            )
        had_heads = self.phase is PassPhase.BETWEEN
        if not had_heads:
            self._begin_gradients()
        self._awaits_backward = False
        self.phase = PassPhase.BACKWARD
        if not had_heads:
            self._parts.step.undo_guesses()
        if self._is_final:
            blocks = set(self._parts.block_of.values())
            self._parts.arrivals.exclude(self._used.unused(blocks, self._parts.ring.num_changes))
        self.clock.begin_pass()
        call_behind_backward(lambda: self._end_backward(before_end))

    def recover_before_step(self) -> None:
        """Call `recover`, and drop the step's gradients if the training loop has set them to None."""
        self.recover()
        self._drop_forgotten()

    def _drop_forgotten(self) -> None:
        """Drop the step's gradients if the training loop has set them to None, as zero_grad() does. Raises RuntimeError
        if it has set only some to None, because a step has all its gradients or none."""
        away = self._parts.ring.moved_gradients
        if not away.forgotten:
            return
        trained = (part for part in self._parts.block_of if part.trainable and part.parameter.requires_grad)
        kept = next((part for part in trained if part.parameter not in away.forgotten), None)
        if kept is not None:
            raise RuntimeError(
                f".grad was set to None for some parameters and not for {kept.name}, but a step has all its gradients "
                "or none; call optimizer.zero_grad() to drop all, and requires_grad_(False) before the forward to "
                "leave a parameter out of a step"
            )
        self._parts.step.abandon_gradients()
        away.clear()

    def _begin_gradients(self) -> None:
        """Prepare for the first gradients of a backward, and for updates."""
        parts = self._parts
        self._drop_forgotten()
        parts.step.begin_backward()
        if parts.pipeline.updates_in_backward:
            parts.commits.keep_what_was_loaded()
        if not parts.pipeline.has_begun_updates:
            parts.groups.note_settings()
        self._is_final = self._is_announced_final and parts.is_final_backward()
        parts.arrivals.begin_backward(BackwardContext(is_final=self._is_final, slots=parts.slots))

    def take_gradient(self, part: ParamSlice, parameter: nn.Parameter) -> None:
        """Take a parameter's complete gradient of this backward."""
        self._note_gradient(part)
        with _cause_of_abort():
            self._parts.arrivals.take_gradient(part, parameter)
        self._parts.ring.moved_gradients.forgotten.discard(parameter)  # the arrival set `.grad` to None, not the loop

    def send_gradient(self, part: ParamSlice, gradient: Tensor | None, *, has_more: bool = False) -> None:
        """Add to a parameter's gradient of the step. None adds zeros. ``has_more``: whether the backward in progress
        will add more to it."""
        self._note_gradient(part)
        if gradient is None:
            self._parts.arrivals.note_zero_gradient(part)
            return
        with _cause_of_abort():
            self._parts.arrivals.send_gradient(part, gradient, has_more=has_more)

    def refuse_new_weight(self, block: Block, element: int) -> None:
        """Raise RuntimeError if backward needs an element of a block that was updated and loaded again. Autograd does
        not report uses that need no gradient of the weight."""
        before = self._loads_before_gradient.get(block)
        if before is not None and before != self._parts.ring.num_loads(block):
            part = next(part for part in block.slices if part.start <= element < part.stop)
            self._parts.step.refuse_new_weight(part)

    def _note_gradient(self, part: ParamSlice) -> None:
        self._parts.ring.moved_gradients.mark_moved()
        block = self._parts.block_of[part]
        self._loads_before_gradient.setdefault(block, self._parts.ring.num_loads(block))

    def _end_backward(self, before_end: Callable[[], None]) -> None:
        self.spans.end_span()
        before_end()
        self._parts.arrivals.flush()
        self._used.end_backward()
        self.in_use.release_all()
        self._parts.activations.end_backward()
        self.phase = PassPhase.IDLE
        self._loads_before_gradient.clear()
        self.clock.end_backward()
        self._parts.prefetcher.end_pass()


class ForwardPass(Protocol):
    """The interface that a model's hooks call while the model runs."""

    def begin_model(self) -> None:
        """Called when a forward of the whole model begins."""

    def save_by(self, saving: AbstractContextManager[Any]) -> None:
        """Called if the forward will have a backward. ``saving`` are hooks for tensors that it saves."""

    def end_model(self, *, is_whole: bool) -> None:
        """Called when the forward has ended or failed."""

    def enter(self, blocks: Sequence[Block]) -> None:
        """Called before a module that needs the blocks runs."""

    def leave(self, blocks: Sequence[Block], on_views: Callable[[Block], None] = lambda _block: None) -> None:
        """Called after a module that needed the blocks has run. Calls ``on_views`` with each block that still has
        views, before the block loses its slot."""

    @property
    def number(self) -> int:
        """The index of the running forward among the forwards of a joint pass."""

    @property
    def is_saving(self) -> bool:
        """Whether this thread's forward saves tensors for its backward."""

    @property
    def is_here(self) -> bool:
        """Whether this thread runs one of the forwards in progress."""

    def enter_to_read(self, block: Block) -> None:
        """Called before an operation reads weights of a block whose modules do not run. `leave` is called after it."""

    def weight(self, part: ParamSlice) -> Tensor:
        """Return the weight for the operation after `enter_to_read`."""

    def leaf_of_rows(self, block: Block, part: ParamSlice) -> Tensor:
        """Return the tensor that gets the gradient of a table if only rows of the table are loaded."""

    def after_layer(self, index: int, output: Any) -> Any:
        """Called after a layer has run. Returns the input of the next layer."""

    def enter_backward(self) -> None:
        """Called when a backward begins or continues."""

    def take_gradient(self, part: ParamSlice, parameter: nn.Parameter) -> None:
        """Take a parameter's complete gradient of this backward."""

    def take_expert_gradient(self, number: int, part: ParamSlice, gradient: Tensor | None) -> None:
        """Take one expert's part of a parameter's gradient in the backward of forward ``number``. None is zeros."""

    def fetch_in_backward(self, block: Block) -> Slot:
        """Load the block to the device for the backward."""


class OneForward:
    """A `ForwardPass` that runs one forward at a time."""

    def __init__(self, model_pass: ModelPass) -> None:
        self._pass = model_pass
        self._thread = 0
        self._is_running = False
        """Whether a forward is in progress. Also true after an interrupt ended it."""
        self._lock = threading.Lock()

    def begin_model(self) -> None:
        own = threading.get_ident()
        with self._lock:
            is_elsewhere = self._is_running and self._thread != own
            if is_elsewhere and any(thread.ident == self._thread for thread in threading.enumerate()):
                raise RuntimeError(
                    "an offloaded model was called on a second thread during its forward, but it has slots for only "
                    "one forward; call it on one thread at a time"
                )
            self._thread, self._is_running = own, True
        self._pass.begin_forward(is_training=torch.is_grad_enabled())

    def save_by(self, saving: AbstractContextManager[Any]) -> None:
        self._pass.save_by(saving)

    def end_model(self, *, is_whole: bool) -> None:
        if threading.get_ident() != self._thread:
            return  # this thread's forward was refused
        self._is_running = False
        was_training = self._pass.end_saving()
        if is_whole:
            self._pass.end_forward(is_training=was_training)
        else:
            self._pass.fail_forward()

    def enter(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            self._pass.in_use.enter(block)

    def leave(self, blocks: Sequence[Block], on_views: Callable[[Block], None] = lambda _block: None) -> None:
        for block in blocks:
            self._pass.in_use.leave(block, on_views)

    @property
    def number(self) -> int:
        return 0

    @property
    def is_saving(self) -> bool:
        return self._pass.is_saving

    @property
    def is_here(self) -> bool:
        return threading.get_ident() == self._thread

    def enter_to_read(self, block: Block) -> None:
        self._pass.in_use.enter(block, for_operation=True)

    def weight(self, part: ParamSlice) -> Tensor:
        return part.parameter

    def leaf_of_rows(self, block: Block, part: ParamSlice) -> Tensor:
        return part.parameter

    def after_layer(self, index: int, output: Any) -> Any:
        return output

    def enter_backward(self) -> None:
        self._pass.begin_backward()

    def take_gradient(self, part: ParamSlice, parameter: nn.Parameter) -> None:
        self._pass.begin_backward()
        self._pass.take_gradient(part, parameter)

    def take_expert_gradient(self, number: int, part: ParamSlice, gradient: Tensor | None) -> None:
        if has_gradient_hook(part.parameter):
            raise RuntimeError(
                f"{part.name} has a hook on its gradient, which is not called for experts that stream one by one; "
                "remove the hook, or set experts: with_layer"
            )
        self._pass.begin_backward()
        self._pass.send_gradient(part, gradient)

    def fetch_in_backward(self, block: Block) -> Slot:
        return self._pass.in_use.fetch_in_backward(block)


@contextlib.contextmanager
def _cause_of_abort() -> Iterator[None]:
    """Raise the error of a failed pipeline instead of `PoolAborted`."""
    try:
        yield
    except PoolAborted as aborted:
        raise raised_anew(aborted.__cause__ or aborted) from aborted.__cause__
