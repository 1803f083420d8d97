"""A pass through a model: whether a forward or a backward is under way, and what begins and ends with it."""

from __future__ import annotations

import contextlib
import enum
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from hf_lohan.activations import ActivationTiers
from hf_lohan.compat.torch_private import call_behind_backward, is_in_backward
from hf_lohan.device import Device, Lane, PoolAborted, Stamp
from hf_lohan.engine.events import FollowedPlan, PassName
from hf_lohan.engine.lifetime import Lifetime
from hf_lohan.model import Block, ParamSlice
from hf_lohan.threads import raised_anew
from hf_lohan.updates import GradientArrivals, ParamGroups, StepTransaction
from hf_lohan.weights import BlocksInUse, Loads, SlotRing


class Phase(enum.Enum):
    """Where a model's pass is. A joint one has backwards of its heads while its forwards still go on."""

    IDLE = enum.auto()
    FORWARD = enum.auto()
    FORWARD_WITH_HEADS = enum.auto()
    """Forwards go on, and the first heads have had their backward."""
    BETWEEN = enum.auto()
    """Forwards are over, heads have had their backward, and that of the layers is to come."""
    BACKWARD = enum.auto()


@dataclass(frozen=True, kw_only=True, slots=True)
class PassParts:
    """What takes part in a pass."""

    device: Device
    ring: SlotRing
    prefetcher: Loads
    arrivals: GradientArrivals
    activations: ActivationTiers
    step: StepTransaction
    groups: ParamGroups
    plan: FollowedPlan
    lifetime: Lifetime
    block_began: Callable[[PassName, Block], None]
    block_of: Mapping[ParamSlice, Block]


class StepClock:
    """Adds up over the backwards of a step."""

    def __init__(self) -> None:
        self.forward_s = 0.0
        self.backward_s = 0.0
        self.last_forward_s = 0.0
        """Of the step before."""
        self.last_backward_s = 0.0
        self._began_s = 0.0

    def begin(self) -> None:
        """A forward or a backward begins."""
        self._began_s = time.perf_counter()

    def end_forward(self) -> None:
        self.forward_s += time.perf_counter() - self._began_s

    def end_backward(self) -> None:
        self.backward_s += time.perf_counter() - self._began_s

    def end_step(self) -> None:
        """Begin to count anew."""
        self.last_forward_s, self.last_backward_s = self.forward_s, self.backward_s
        self.forward_s = self.backward_s = 0.0


class ComputeSpans:
    """One task at a time: compute of one pass that needs one block, until the next one is asked for."""

    def __init__(self, device: Device, began: Callable[[PassName, Block], None]) -> None:
        self._device = device
        self._began = began
        self._open: tuple[PassName, Block, Stamp] | None = None

    def is_open(self, name: PassName, block: Block) -> bool:
        return self._open is not None and self._open[:2] == (name, block)

    def begin(self, name: PassName, block: Block) -> None:
        """What is enqueued from here on is of the pass ``name`` and for ``block``."""
        self.end()
        self._began(name, block)
        self._open = name, block, self._device.stamp(Lane.COMPUTE)

    def end(self) -> None:
        """The last compute of the task, if one is open, is enqueued."""
        if self._open is not None:
            (name, block, began), self._open = self._open, None
            self._device.note_span(Lane.COMPUTE, name, began, self._device.stamp(Lane.COMPUTE), block=block.name)


class ModelPass:
    """Each training forward is followed by a backward, or by nothing; an exception may end either."""

    def __init__(self, parts: PassParts) -> None:
        self._parts = parts
        self.clock = StepClock()
        self.in_use = BlocksInUse(parts.ring, parts.prefetcher)
        self.spans = ComputeSpans(parts.device, parts.block_began)
        self._saving: contextlib.AbstractContextManager[Any] | None = None
        self._phase = Phase.IDLE
        self._loads_before_gradient: dict[Block, int] = {}
        self._is_running = False
        self._awaits_backward = False
        self._changed: str | None = None

    @property
    def phase(self) -> Phase:
        return self._phase

    @property
    def is_running(self) -> bool:
        """Whether a forward or a backward is under way. One that broke off is not, unless an interrupt ended it."""
        return self._is_running or is_in_backward()

    @property
    def is_saving(self) -> bool:
        """Whether what is computed now is noted for a backward."""
        return self._saving is not None

    def note_changed_weight(self, name: str) -> None:
        """A weight is not what it was. A backward of a forward before has nothing to go by."""
        if self._awaits_backward:
            self._changed = name

    def recover(self) -> None:
        """If an exception ended the last forward, backward or step, start clean."""
        self._parts.lifetime.check()
        self._recover_if_broken()
        self._parts.step.recover()

    def _recover_if_broken(self) -> None:
        """After a backward, the step's gradients are gone: half of a sum would be a wrong number."""
        if self._phase is Phase.IDLE:
            return
        self.end_saving()  # an interrupt does not even run hooks that are always called
        self.spans.end()
        self.in_use.release_all()
        self._parts.arrivals.abandon()
        self._parts.prefetcher.cancel_pass()
        if self._phase is not Phase.FORWARD:
            self._parts.step.abandon_broken()
        # Only now: an interrupt may end this, and then it is done again.
        self._phase = Phase.IDLE
        self._is_running = self._awaits_backward = False
        self._changed = None
        self._loads_before_gradient.clear()

    # Forward.

    def begin_forward(self, *, is_training: bool) -> None:
        """A forward of the whole model begins, or several that are to have one backward."""
        self.recover()
        self._parts.device.note_reached()
        self._parts.step.refuse_between_updates()
        self._parts.step.undo_guesses()
        if is_training:
            self._parts.groups.follow()
            self._parts.plan.begin_step()
        self._phase = Phase.FORWARD
        self._is_running, self._awaits_backward, self._changed = True, False, None
        self.clock.begin()
        self._parts.prefetcher.begin_pass(is_training=is_training)
        if is_training:
            self._parts.activations.begin_forward()

    def save_by(self, saving: contextlib.AbstractContextManager[Any]) -> None:
        """``saving``: hooks for what the forward saves."""
        saving.__enter__()
        self._saving = saving

    def end_saving(self) -> bool:
        """The forward has ended, or broken off. Returns whether something was saved."""
        if self._saving is None:
            return False
        self._saving.__exit__(None, None, None)
        self._saving = None
        return True

    def break_off(self) -> None:
        """A forward has raised."""
        self._is_running = False

    def end_forward(self, *, is_training: bool) -> None:
        """It has ended."""
        self._is_running, self._awaits_backward = False, is_training
        self.spans.end()
        self._phase = Phase.BETWEEN if self._phase is Phase.FORWARD_WITH_HEADS else Phase.IDLE
        if is_training:
            self._parts.activations.expect_backward()
            self.clock.end_forward()
        else:
            self._parts.prefetcher.end_pass()

    # Backward.

    def begin_head(self) -> None:
        """While other forwards go on, the backward of a head begins, or goes on."""
        if self._phase is not Phase.FORWARD_WITH_HEADS:
            self._begin_gradients()
        self._phase = Phase.FORWARD_WITH_HEADS

    def begin_backward(self, before_end: Callable[[], None] = lambda: None) -> None:
        """A backward begins, or goes on. ``before_end`` sends the last gradients."""
        if self._phase is Phase.BACKWARD:
            return
        if self._changed is not None:
            raise RuntimeError(
                f"{self._changed} was changed between a forward and its backward, which needs it as it was; change "
                "weights behind step()"
            )
        had_heads = self._phase is Phase.BETWEEN
        if not had_heads:
            self._begin_gradients()
        self._awaits_backward = False
        self._phase = Phase.BACKWARD
        if not had_heads:
            self._parts.step.undo_guesses()
        self.clock.begin()
        call_behind_backward(lambda: self._end_backward(before_end))

    def recover_before_step(self) -> None:
        """`recover`; and gradients that a loop has set to None are none of the step's."""
        self.recover()
        self._drop_forgotten()

    def _drop_forgotten(self) -> None:
        """Drop the step's gradients if a loop has set them to None, as zero_grad() does. Raises RuntimeError if it has
        set some of them: the others would go on alone."""
        away = self._parts.ring.gradients_away
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
        self._parts.step.abandon()
        away.clear()

    def _begin_gradients(self) -> None:
        """The first gradients of a backward are about to come, and updates with them."""
        self._drop_forgotten()
        self._parts.step.begin_backward()
        if not self._parts.step.has_begun_updates:
            self._parts.groups.note()

    def take_gradient(self, part: ParamSlice, parameter: nn.Parameter) -> None:
        """A parameter's gradient of this backward is complete."""
        self._note_gradient(part)
        with _cause_of_abort():
            self._parts.arrivals.take(part, parameter)
        self._parts.ring.gradients_away.forgotten.discard(parameter)  # it was set to None there, not by the loop

    def send_gradient(self, part: ParamSlice, gradient: Tensor | None, *, has_more: bool = False) -> None:
        """A parameter's gradient of the step is complete, unless the backward under way ``has_more`` of it; None:
        zeros."""
        self._note_gradient(part)
        if gradient is None:
            self._parts.arrivals.reach(part)
            return
        with _cause_of_abort():
            self._parts.arrivals.send(part, gradient, has_more=has_more)

    def refuse_new_weight(self, block: Block, element: int) -> None:
        """Raises RuntimeError if an element of a block that backward needs was loaded anew after it had been updated:
        autograd does not know of uses that need no gradient of the weight."""
        before = self._loads_before_gradient.get(block)
        if before is not None and before != self._parts.ring.num_loads(block):
            part = next(part for part in block.slices if part.start <= element < part.stop)
            self._parts.step.refuse_new_weight(part)

    def _note_gradient(self, part: ParamSlice) -> None:
        self._parts.ring.gradients_away.note()
        block = self._parts.block_of[part]
        self._loads_before_gradient.setdefault(block, self._parts.ring.num_loads(block))

    def _end_backward(self, before_end: Callable[[], None]) -> None:
        self.spans.end()
        before_end()
        self._parts.arrivals.flush()
        self.in_use.release_all()
        self._phase = Phase.IDLE
        self._loads_before_gradient.clear()
        self.clock.end_backward()
        self._parts.prefetcher.end_pass()


@contextlib.contextmanager
def _cause_of_abort() -> Iterator[None]:
    """If the pipeline broke: say why, not how it was noticed."""
    try:
        yield
    except PoolAborted as aborted:
        raise raised_anew(aborted.__cause__ or aborted) from aborted.__cause__
