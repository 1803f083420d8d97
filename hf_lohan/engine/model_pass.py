"""A pass through a model: which forwards and backwards are in progress, and how a forward goes through the blocks. Here
one forward runs at a time; in `micro_batches` several do."""

from __future__ import annotations

import contextlib
import enum
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from hf_lohan.activations import ActivationTiers
from hf_lohan.compat.torch_private import call_behind_backward, is_in_backward
from hf_lohan.device import Device, Lane, PoolAborted, Stamp
from hf_lohan.engine.commits import StepCommits
from hf_lohan.engine.events import FollowedPlan, PassName
from hf_lohan.engine.lifetime import Lifetime
from hf_lohan.model import Block, ParamSlice
from hf_lohan.threads import raised_anew
from hf_lohan.updates import BackwardContext, GradientArrivals, ParamGroups, StepTransaction, WeightSlots
from hf_lohan.weights import BlocksInUse, Loads, Slot, SlotRing


class PassPhase(enum.Enum):
    """How far a pass is. Joint forwards run backwards of their heads while other forwards still run."""

    IDLE = enum.auto()
    FORWARD = enum.auto()
    FORWARD_WITH_HEADS = enum.auto()
    """Forwards run, and the first heads have had their backward."""
    BETWEEN = enum.auto()
    """Forwards have ended, heads have had their backward, and the layers' backward follows."""
    BACKWARD = enum.auto()


@dataclass(frozen=True, kw_only=True, slots=True)
class PassParts:
    """The parts of an engine that a pass uses."""

    device: Device
    ring: SlotRing
    prefetcher: Loads
    arrivals: GradientArrivals
    activations: ActivationTiers
    step: StepTransaction
    groups: ParamGroups
    commits: StepCommits
    plan: FollowedPlan
    lifetime: Lifetime
    block_began: Callable[[PassName, Block], None]
    is_final_backward: Callable[[], bool]
    slots: WeightSlots | None
    """See `BackwardContext`."""
    block_of: Mapping[ParamSlice, Block]


class StepClock:
    """Seconds of compute, summed over the backwards of a step."""

    def __init__(self) -> None:
        self.forward_s = 0.0
        self.backward_s = 0.0
        self.last_forward_s = 0.0
        """Of the last step."""
        self.last_backward_s = 0.0
        self._began_s = 0.0

    def begin_pass(self) -> None:
        """A forward or a backward begins."""
        self._began_s = time.perf_counter()

    def end_forward(self) -> None:
        self.forward_s += time.perf_counter() - self._began_s

    def end_backward(self) -> None:
        self.backward_s += time.perf_counter() - self._began_s

    def end_step(self) -> None:
        """Start again from zero."""
        self.last_forward_s, self.last_backward_s = self.forward_s, self.backward_s
        self.forward_s = self.backward_s = 0.0


class ComputeSpans:
    """The timeline's compute tasks, one at a time: work of one pass on one block, until the next block is needed."""

    def __init__(self, device: Device, began: Callable[[PassName, Block], None]) -> None:
        self._device = device
        self._began = began
        self._open: tuple[PassName, Block, Stamp] | None = None

    def is_open(self, name: PassName, block: Block) -> bool:
        return self._open is not None and self._open[:2] == (name, block)

    def begin_span(self, name: PassName, block: Block) -> None:
        """Work that is enqueued from here on belongs to the pass ``name`` and to ``block``."""
        self.end_span()
        self._began(name, block)
        self._open = name, block, self._device.stamp(Lane.COMPUTE)

    def end_span(self) -> None:
        """All work of the open task, if there is one, is enqueued."""
        if self._open is not None:
            (name, block, began), self._open = self._open, None
            self._device.note_span(Lane.COMPUTE, name, began, self._device.stamp(Lane.COMPUTE), block=block.name)


class ModelPass:
    """Each training forward is followed by a backward, or by nothing. An exception may end either."""

    def __init__(self, parts: PassParts) -> None:
        self._parts = parts
        self.clock = StepClock()
        self.in_use = BlocksInUse(parts.ring, parts.prefetcher)
        self.spans = ComputeSpans(parts.device, parts.block_began)
        self._saving: AbstractContextManager[Any] | None = None
        self._phase = PassPhase.IDLE
        self._loads_before_gradient: dict[Block, int] = {}
        self._is_running = False
        self._awaits_backward = False
        self._changed: str | None = None
        self._is_announced_final = True

    @property
    def phase(self) -> PassPhase:
        return self._phase

    @property
    def is_running(self) -> bool:
        """Whether a forward or a backward is in progress. One that failed is not, unless an interrupt ended it."""
        return self._is_running or is_in_backward()

    @property
    def is_saving(self) -> bool:
        """Whether a forward saves tensors for a backward."""
        return self._saving is not None

    def note_changed_weight(self, name: str) -> None:
        """A weight was changed: the backward of an earlier forward is refused."""
        if self._awaits_backward:
            self._changed = name

    def recover(self) -> None:
        """If an exception ended the last forward, backward or step, start clean."""
        self._parts.lifetime.check()
        self._recover_if_broken()
        self._parts.step.recover()

    def _recover_if_broken(self) -> None:
        """If a backward failed, drop the step's gradients: their sum is incomplete."""
        if self._phase is PassPhase.IDLE:
            return
        self.end_saving()  # an interrupt does not even run hooks that are always called
        self.spans.end_span()
        self.in_use.release_all()
        self._parts.arrivals.abandon_backward()
        self._parts.prefetcher.cancel_pass()
        if self._phase is not PassPhase.FORWARD:
            self._parts.step.abandon_broken()
        # Last, so that this method runs again if an interrupt ends it.
        self._phase = PassPhase.IDLE
        self._is_running = self._awaits_backward = False
        self._changed = None
        self._loads_before_gradient.clear()

    # Forward.

    def begin_forward(self, *, is_training: bool) -> None:
        """A forward of the whole model begins, or several forwards that share one backward."""
        self.recover()
        self._parts.device.note_reached()
        self._parts.step.refuse_between_updates()
        self._parts.step.undo_guesses()
        if is_training:
            self._parts.groups.follow_optimizer()
            self._parts.plan.begin_step()
        self._phase = PassPhase.FORWARD
        self._is_running, self._awaits_backward, self._changed = True, False, None
        self.clock.begin_pass()
        self._parts.prefetcher.begin_pass(is_training=is_training)
        if is_training:
            self._parts.activations.begin_forward()

    def save_by(self, saving: AbstractContextManager[Any]) -> None:
        """``saving``: hooks for tensors that the forward saves."""
        saving.__enter__()
        self._saving = saving

    def end_saving(self) -> bool:
        """The forward has ended, or failed. Returns whether it saved tensors."""
        if self._saving is None:
            return False
        self._saving.__exit__(None, None, None)
        self._saving = None
        return True

    def fail_forward(self) -> None:
        """A forward has raised."""
        self._is_running = False

    def end_forward(self, *, is_training: bool) -> None:
        """The forwards have ended."""
        self._is_running, self._awaits_backward = False, is_training
        self.spans.end_span()
        self._phase = PassPhase.BETWEEN if self._phase is PassPhase.FORWARD_WITH_HEADS else PassPhase.IDLE
        if is_training:
            self._parts.activations.expect_backward()
            self.clock.end_forward()
        else:
            self._parts.prefetcher.end_pass()

    # Backward.

    def announce_backward(self, *, is_final: bool) -> None:
        """Whether the backwards from here on may be a step's last."""
        self._is_announced_final = is_final

    def begin_head(self) -> None:
        """The backward of a head begins, or goes on, while other forwards run."""
        if self._phase is not PassPhase.FORWARD_WITH_HEADS:
            self._begin_gradients()
        self._phase = PassPhase.FORWARD_WITH_HEADS

    def begin_backward(self, before_end: Callable[[], None] = lambda: None) -> None:
        """A backward begins, or goes on. ``before_end`` sends the last gradients."""
        if self._phase is PassPhase.BACKWARD:
            return
        if self._changed is not None:
            raise RuntimeError(
                f"{self._changed} was changed between a forward and its backward, which needs it as it was; change "
                "weights after step()"
            )
        had_heads = self._phase is PassPhase.BETWEEN
        if not had_heads:
            self._begin_gradients()
        self._awaits_backward = False
        self._phase = PassPhase.BACKWARD
        if not had_heads:
            self._parts.step.undo_guesses()
        self.clock.begin_pass()
        call_behind_backward(lambda: self._end_backward(before_end))

    def recover_before_step(self) -> None:
        """`recover`, and drop the step's gradients if a loop has set them to None."""
        self.recover()
        self._drop_forgotten()

    def _drop_forgotten(self) -> None:
        """Drop the step's gradients if a loop has set them to None, as zero_grad() does. Raises RuntimeError if it has
        set only some of them: a step has all its gradients or none."""
        away = self._parts.ring.moved_gradients
        if not away.forgotten:
            return
        trained = (part for part in self._parts.block_of if part.trainable and part.parameter.requires_grad)
        kept = next((part for part in trained if part.parameter not in away.forgotten), None)
        if kept is not None:
            raise RuntimeError(
                f".grad was set to None for some parameters and not for {kept.name}, and a step has all its gradients "
                "or none; call optimizer.zero_grad() to drop them, and leave a parameter out of a step by "
                "requires_grad_(False) before its forward"
            )
        self._parts.step.abandon_gradients()
        away.clear()

    def _begin_gradients(self) -> None:
        """The first gradients of a backward follow, and maybe updates."""
        parts = self._parts
        self._drop_forgotten()
        parts.step.begin_backward()
        if not parts.step.has_begun_updates:
            parts.groups.note_settings()
        is_final = self._is_announced_final and parts.is_final_backward()
        parts.arrivals.begin_backward(BackwardContext(is_final=is_final, slots=parts.slots))

    def take_gradient(self, part: ParamSlice, parameter: nn.Parameter) -> None:
        """A parameter's gradient of this backward is complete."""
        self._note_gradient(part)
        with _cause_of_abort():
            self._parts.arrivals.take_gradient(part, parameter)
        self._parts.ring.moved_gradients.forgotten.discard(parameter)  # the arrival set it to None, not the loop

    def send_gradient(self, part: ParamSlice, gradient: Tensor | None, *, has_more: bool = False) -> None:
        """Add to a parameter's gradient of the step. None: zeros. ``has_more``: the backward in progress has more of
        it."""
        self._note_gradient(part)
        if gradient is None:
            self._parts.arrivals.note_zero_gradient(part)
            return
        with _cause_of_abort():
            self._parts.arrivals.send_gradient(part, gradient, has_more=has_more)

    def refuse_new_weight(self, block: Block, element: int) -> None:
        """Raises RuntimeError if backward needs an element of a block that was updated and loaded again. Autograd does
        not report uses that need no gradient of the weight."""
        before = self._loads_before_gradient.get(block)
        if before is not None and before != self._parts.ring.num_loads(block):
            part = next(part for part in block.slices if part.start <= element < part.stop)
            self._parts.step.refuse_new_weight(part)

    def _note_gradient(self, part: ParamSlice) -> None:
        if not self._loads_before_gradient and self._parts.step.updates_in_backward:
            self._parts.commits.keep_what_was_loaded()  # at the backward's first gradient
        self._parts.ring.moved_gradients.mark_moved()
        block = self._parts.block_of[part]
        self._loads_before_gradient.setdefault(block, self._parts.ring.num_loads(block))

    def _end_backward(self, before_end: Callable[[], None]) -> None:
        self.spans.end_span()
        before_end()
        self._parts.arrivals.flush()
        self.in_use.release_all()
        self._phase = PassPhase.IDLE
        self._loads_before_gradient.clear()
        self.clock.end_backward()
        self._parts.prefetcher.end_pass()


class ForwardPass(Protocol):
    """What a model's hooks call as the model runs."""

    def begin_model(self) -> None:
        """A forward of the whole model begins."""

    def save_by(self, saving: AbstractContextManager[Any]) -> None:
        """The forward will have a backward; ``saving``: hooks for tensors that it saves."""

    def end_model(self, *, is_whole: bool) -> None:
        """The forward has ended, or failed."""

    def enter(self, blocks: Sequence[Block]) -> None:
        """A module that needs the blocks is about to run."""

    def leave(self, blocks: Sequence[Block]) -> None:
        """That module has run."""

    @property
    def number(self) -> int:
        """The index of the forward that runs, among those that share the model."""

    @property
    def is_saving(self) -> bool:
        """Whether a forward of this thread saves tensors for its backward."""

    @property
    def is_here(self) -> bool:
        """Whether this thread runs one of the forwards in progress."""

    def enter_to_read(self, block: Block) -> None:
        """An operation is about to read weights of a block whose modules do not run. `leave` follows."""

    def weight(self, part: ParamSlice) -> Tensor:
        """The weight for that operation."""

    def after_layer(self, index: int, output: Any) -> Any:
        """A layer has run. Returns the input of the next one."""

    def enter_backward(self) -> None:
        """A backward begins, or goes on."""

    def take_gradient(self, part: ParamSlice, parameter: nn.Parameter) -> None:
        """A parameter's gradient of this backward is complete."""

    def take_expert_gradient(self, number: int, part: ParamSlice, gradient: Tensor | None) -> None:
        """One expert's part of a parameter's gradient is complete, in the backward of forward ``number``. None:
        zeros."""

    def fetch_in_backward(self, block: Block) -> Slot:
        """Bring the block to the device for the backward."""


class OneForward:
    """A single forward at a time."""

    def __init__(self, model_pass: ModelPass) -> None:
        self._pass = model_pass
        self._thread = 0
        self._is_running = False
        """Also true after an interrupt that ended the forward."""
        self._lock = threading.Lock()

    def begin_model(self) -> None:
        own = threading.get_ident()
        with self._lock:
            is_elsewhere = self._is_running and self._thread != own
            if is_elsewhere and any(thread.ident == self._thread for thread in threading.enumerate()):
                raise RuntimeError(
                    "an offloaded model was called on a second thread while its forward runs on another, and its "
                    "weights pass through one set of slots; call it on one thread at a time"
                )
            self._thread, self._is_running = own, True
        self._pass.begin_forward(is_training=torch.is_grad_enabled())

    def save_by(self, saving: AbstractContextManager[Any]) -> None:
        self._pass.save_by(saving)

    def end_model(self, *, is_whole: bool) -> None:
        if threading.get_ident() != self._thread:
            return  # the forward on this thread was refused
        self._is_running = False
        was_training = self._pass.end_saving()
        if is_whole:
            self._pass.end_forward(is_training=was_training)
        else:
            self._pass.fail_forward()

    def enter(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            self._pass.in_use.enter(block)

    def leave(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            self._pass.in_use.leave(block)

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

    def after_layer(self, index: int, output: Any) -> Any:
        return output

    def enter_backward(self) -> None:
        self._pass.begin_backward()

    def take_gradient(self, part: ParamSlice, parameter: nn.Parameter) -> None:
        self._pass.begin_backward()
        self._pass.take_gradient(part, parameter)

    def take_expert_gradient(self, number: int, part: ParamSlice, gradient: Tensor | None) -> None:
        self._pass.begin_backward()
        self._pass.send_gradient(part, gradient)

    def fetch_in_backward(self, block: Block) -> Slot:
        return self._pass.in_use.fetch_in_backward(block)


@contextlib.contextmanager
def _cause_of_abort() -> Iterator[None]:
    """If the pipeline failed, raise its error instead of `PoolAborted`."""
    try:
        yield
    except PoolAborted as aborted:
        raise raised_anew(aborted.__cause__ or aborted) from aborted.__cause__
