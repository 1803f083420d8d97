"""Runs a step's micro-batches together through each block before the next block. Then one backward runs for all."""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge

from hf_lohan.compat.torch_private import sequence_number, version_of
from hf_lohan.costs import SizeClass
from hf_lohan.device import Device
from hf_lohan.micro_batches.leaves import GradientSums, MicroBatchLeaves
from hf_lohan.micro_batches.lockstep import Lockstep
from hf_lohan.model import Block, ParamSlice
from hf_lohan.threads import ThreadSettings
from hf_lohan.weights import BlocksInUse, Slot, SlotRing


class CurrentPass(Protocol):
    """The engine's pass through the model. It treats a joint forward as one forward."""

    @property
    def in_use(self) -> BlocksInUse: ...

    def begin_forward(self, *, is_training: bool) -> None: ...

    def end_forward(self, *, is_training: bool) -> None: ...

    def begin_head(self) -> None: ...

    def begin_backward(self, before_end: Callable[[], None]) -> None: ...

    def send_gradient(self, part: ParamSlice, gradient: Tensor | None, *, has_more: bool = False) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class JointParts:
    """The parts of an engine that a joint forward uses."""

    model: nn.Module
    num_layers: int
    device: Device
    ring: SlotRing
    model_pass: CurrentPass
    holds_gradients: bool
    """Whether the host can add to gradients that have arrived."""
    using_forward_pass: Callable[[JointForward], contextlib.AbstractContextManager[None]]
    """Returns a context in which the model's hooks call a joint forward."""


class MicroBatchRun:
    """Runs the micro-batches of each step."""

    def __init__(self, parts: JointParts) -> None:
        self._parts = parts
        self._losses: dict[int, list[Tensor]] = {}
        self._lockstep: Lockstep | None = None
        """The lockstep of running micro-batches, or None."""
        self._separate_heads = True

    def __call__(self, micro_batches: Sequence[Callable[[], Any]]) -> list[Any]:
        """Run the forwards and the backward of one step, as `OffloadEngine.run_micro_batches` describes."""
        if self._lockstep is not None:
            raise RuntimeError("run_micro_batches was called in a micro-batch; run all micro-batches in one call")
        parts = self._parts
        settings = ThreadSettings(parts.device.torch_device.type)
        contexts = [settings.applied(parts.device.in_this_lane()) for _ in micro_batches]
        joint: JointForward

        def run(number: int) -> Any:
            self._losses[number] = []
            result = micro_batches[number]()
            joint.heads.run_backward_of(number, self._losses.pop(number))
            return result

        self._lockstep = lockstep = Lockstep([partial(run, n) for n in range(len(micro_batches))], contexts)
        try:
            joint = JointForward(parts, lockstep, separate_heads=self._separate_heads)
            buffers = [(name, buffer, version_of(buffer)) for name, buffer in parts.model.named_buffers()]
            parts.model_pass.begin_forward(is_training=True)
            with parts.using_forward_pass(joint):
                with joint.forwards():
                    results = lockstep.run()
                    _refuse_changed(buffers if len(micro_batches) > 1 else ())
                self._lockstep = None
                self._separate_heads = joint.heads.are_separate
                joint.backward()
        finally:
            self._lockstep = None
            self._losses.clear()
        return results

    def refuse_within(self, call: str) -> None:
        """Raise RuntimeError if micro-batches run their forwards. ``call`` is the name of the refused function."""
        if self._lockstep is not None:
            raise RuntimeError(f"{call} was called in a micro-batch; call it once, after run_micro_batches")

    @property
    def is_running(self) -> bool:
        """Whether micro-batches run their forwards."""
        return self._lockstep is not None

    def defer_backward(self, loss: Tensor) -> bool:
        """Keep a loss for the joint backward. Returns False outside `__call__`."""
        if self._lockstep is None:
            return False
        self._losses[self._lockstep.running].append(loss)
        return True


def _refuse_changed(buffers: Sequence[tuple[str, Tensor, int]]) -> None:
    """Raise ValueError if one of the ``buffers`` has another version, because the last micro-batch runs first."""
    for name, buffer, version in buffers:
        if version_of(buffer) != version:
            raise ValueError(
                f"the forward changes the buffer {name}, which micro-batches that run together change in another order "
                "than in turn; run them in turn (vertical_micro_batches: false), or call eval() on the buffer's module"
            )


@dataclass
class _Progress:
    """Progress of a micro-batch, compared field by field. A micro-batch that skips a layer waits for the others."""

    num_forwards: int = 0
    num_layers: int = 0
    """Number of layers that the micro-batch has run or skipped in this forward."""
    num_stops: int = 0
    """Number of stops since the last layer."""

    def position(self) -> tuple[int, ...]:
        return self.num_forwards, self.num_layers, self.num_stops


class JointForward:
    """The `ForwardPass` of several micro-batches. `Lockstep` decides which micro-batch runs.

    A block stays in its slot from one micro-batch to the next, until another block of its size class is needed.
    """

    def __init__(self, parts: JointParts, lockstep: Lockstep, *, separate_heads: bool) -> None:
        """``separate_heads``: whether to try to run the backward of each head just after its forward."""
        self._pass = parts.model_pass
        self._in_use = parts.model_pass.in_use
        self._ring = parts.ring
        self._num_layers = parts.num_layers
        self._adds_on_host = parts.holds_gradients
        self._num_sent: Counter[ParamSlice] = Counter()
        self._lockstep = lockstep
        self._separate_heads = separate_heads
        self._sums = GradientSums(lockstep.num_functions, parts.model_pass.send_gradient)
        self._leaves = MicroBatchLeaves(parts.model, parts.ring, self._take_leaf_gradient)
        self.heads = MicroBatchHeads(self._leaves.__contains__)
        self._progress: defaultdict[int, _Progress] = defaultdict(_Progress)
        self._saving: dict[int, contextlib.AbstractContextManager[Any]] = {}
        self._is_in_forward = True

    @contextlib.contextmanager
    def forwards(self) -> Iterator[None]:
        """Return a context for all forwards. The joint backward runs after it."""
        try:
            yield
        finally:
            self._leaves.restore()
            self._is_in_forward = False
        if self._separate_heads and not self.heads.are_separate:
            self._sums.keeps_order = True
        for size_class in SizeClass:
            self._in_use.leave_idle(size_class, self._is_idle)
        self._pass.end_forward(is_training=True)

    # Forward.

    def begin_model(self) -> None:
        if torch.is_grad_enabled():
            progress = self._progress[self._lockstep.running]
            self._progress[self._lockstep.running] = _Progress(progress.num_forwards + 1)

    def save_by(self, saving: contextlib.AbstractContextManager[Any]) -> None:
        saving.__enter__()
        self._saving[self._lockstep.running] = saving

    def end_model(self, *, is_whole: bool) -> None:
        saving = self._saving.pop(self._lockstep.running, None)
        if saving is not None:
            saving.__exit__(None, None, None)

    def enter(self, blocks: Sequence[Block]) -> None:
        self._stop_before(blocks)
        number = self._lockstep.running
        for block in blocks:
            if block.size_class is SizeClass.LAYER and self._progress[number].num_layers:
                # All forwards have passed the first layer. Free the slot of blocks before it, to load the head early.
                self._in_use.leave_idle(SizeClass.OUTER, self._is_idle)
            self._in_use.enter_for_many(block, is_idle=self._is_idle)
            self._ring.show(block)
            self._leaves.enter(number, block)

    def leave(self, blocks: Sequence[Block], on_views: Callable[[Block], None] = lambda _block: None) -> None:
        for block in blocks:
            self._leaves.leave(self._lockstep.running, block)
            # The block stays in its slot, but its parameters become absent, so that later reads get a leaf.
            if self._is_idle(block) and self._ring.hide(block):
                on_views(block)

    @property
    def number(self) -> int:
        return self._lockstep.running

    @property
    def is_saving(self) -> bool:
        return self._lockstep.running in self._saving

    @property
    def is_here(self) -> bool:
        return self._lockstep.is_here

    def enter_to_read(self, block: Block) -> None:
        self.enter((block,))

    def weight(self, part: ParamSlice) -> Tensor:
        return self._leaves.leaf(self._lockstep.running, part)

    def leaf_of_rows(self, block: Block, part: ParamSlice) -> Tensor:
        return self._leaves.leaf_of_rows(self._lockstep.running, block, part)

    def _stop_before(self, blocks: Sequence[Block]) -> None:
        """Let the other micro-batches catch up before this micro-batch enters blocks that share a slot with others."""
        progress = self._progress[self._lockstep.running]
        is_in_head = self._separate_heads and progress.num_layers == self._num_layers
        if torch.is_grad_enabled() and not is_in_head and any(block.size_class is SizeClass.OUTER for block in blocks):
            progress.num_stops += 1
            self._pass_on(progress.position())

    def after_layer(self, index: int, output: Any) -> Any:
        """Let the other micro-batches run the layer. Returns the input of the next layer.

        Micro-batches switch after a layer and not before it, because before transformers 5.23 hooks run within the
        layer's checkpoint. If they switched before a layer, the checkpoint would save the random generator's state, and
        then other micro-batches would draw from the generator. The recomputation would get different random numbers.
        """
        if not torch.is_grad_enabled():
            return output  # without a backward, the order does not matter
        number = self._lockstep.running
        progress = self._progress[number]
        progress.num_layers, progress.num_stops = index + 1, 0
        if not self._separate_heads or progress.num_layers < self._num_layers:
            self._pass_on(progress.position())
            return output
        # Heads run their backward immediately, so the first micro-batch must be first.
        self._pass_on((*progress.position(), number))
        self._leaves.begin_head(number)
        return self.heads.put_gate(number, output)

    def _pass_on(self, position: tuple[int, ...]) -> None:
        number = self._lockstep.running
        self._leaves.suspend(number)
        self._lockstep.pass_on(position)
        self._leaves.resume(number)

    def _is_idle(self, block: Block) -> bool:
        return not self._leaves.is_in_use(block)

    # Backward.

    def backward(self) -> None:
        """Run the backward of all micro-batches. Raises RuntimeError if there is no loss."""
        try:
            self.heads.run_joint_backward()
        finally:
            self._sums.clear()  # the backward may have raised

    def enter_backward(self) -> None:
        if self._is_in_forward:
            self._pass.begin_head()
        else:
            self._pass.begin_backward(before_end=self._sums.flush)

    def take_gradient(self, part: ParamSlice, parameter: nn.Parameter) -> None:
        raise RuntimeError(
            f"an autograd function uses the parameter {part.name} directly, so the micro-batches' contributions to its "
            "gradient cannot be separated; set vertical_micro_batches: false"
        )

    def take_expert_gradient(self, number: int, part: ParamSlice, gradient: Tensor | None) -> None:
        """Send an expert's gradient to the host, which adds gradients as they arrive, because sums for all experts of a
        layer may not fit the device. Gradients that may arrive out of the micro-batches' order wait on the device."""
        self.enter_backward()
        if self._sums.keeps_order or not self._adds_on_host:
            self._ring.moved_gradients.mark_moved()
            self._sums.add_gradient(number, part, gradient)
            return
        self._num_sent[part] += 1
        self._pass.send_gradient(part, gradient, has_more=self._num_sent[part] < self._lockstep.num_functions)

    def fetch_in_backward(self, block: Block) -> Slot:
        if self._is_in_forward:
            return self._in_use.enter_for_many(block, is_idle=self._is_idle)
        return self._in_use.fetch_in_backward(block, self._on_block_done)

    def _take_leaf_gradient(self, micro_batch: int, part: ParamSlice, leaf: nn.Parameter, *, has_more: bool) -> None:
        self.enter_backward()
        self._ring.moved_gradients.mark_moved()
        (self._sums.keep if has_more else self._sums.add)(micro_batch, part, leaf)

    def _on_block_done(self, block: Block) -> None:
        # A block outside the layers may be used before and after them, so more gradients may arrive.
        if block.size_class is SizeClass.LAYER:
            self._sums.complete(block)


@dataclass
class _Gate:
    """The boundary between the graph of the layers and the graph of the head."""

    hidden: Tensor
    node: Node


class MicroBatchHeads:
    """Runs the backward of each head just after its forward, down to the last layer's output, so that the logits of
    only one micro-batch exist at a time.

    This is not possible if a loss depends on the layers in another way, as a router's loss does, or if a micro-batch
    has several losses. In that case its whole backward runs together with the other micro-batches' backwards.
    """

    def __init__(self, is_leaf: Callable[[Tensor], bool]) -> None:
        """``is_leaf`` returns whether a tensor is a leaf of a micro-batch."""
        self._is_leaf = is_leaf
        self._gates: dict[int, list[_Gate]] = defaultdict(list)
        self._roots: list[tuple[Any, Tensor | None]] = []  # torch's types do not allow tensors and edges in a list
        self.are_separate = True
        """Whether all heads so far had a separate backward."""

    def put_gate(self, micro_batch: int, output: Any) -> Any:
        """Return the head's input for the last layer's output."""
        hidden = output[0] if type(output) in (tuple, list) else output
        if not isinstance(hidden, Tensor) or not hidden.requires_grad:
            return output
        gate = hidden.view_as(hidden)  # the backward of a view saves nothing, so it may run twice
        assert gate.grad_fn is not None
        self._gates[micro_batch].append(_Gate(gate, gate.grad_fn))
        return gate if hidden is output else type(output)((gate, *output[1:]))

    def run_backward_of(self, micro_batch: int, losses: Sequence[Tensor]) -> None:
        """Run the backward of a micro-batch's head after its forwards. ``losses``: its losses."""
        gates = self._gates.pop(micro_batch, [])
        leaves = _leaves_behind(gates[0], losses[0], self._is_leaf) if len(gates) == len(losses) == 1 else None
        if leaves is None:
            self.are_separate = False
            self._roots += [(loss, None) for loss in losses]
            return
        gate = gates[0].hidden
        torch.autograd.backward(losses, inputs=[gate, *leaves])
        if gate.grad is not None:
            # The edge is kept, because the gate would keep the last layer's output in memory.
            self._roots.append((get_gradient_edge(gate), gate.grad))
            gate.grad = None

    def run_joint_backward(self) -> None:
        """Run the rest of the backward for all micro-batches. Raises RuntimeError if there is no loss."""
        roots, self._roots = self._roots, []
        if not roots:
            raise RuntimeError("no micro-batch passed its loss to backward; call accelerator.backward(loss) in each")
        torch.autograd.backward([root for root, _ in roots], [gradient for _, gradient in roots])


def _leaves_behind(gate: _Gate, loss: Tensor, is_leaf: Callable[[Tensor], bool]) -> list[Tensor] | None:
    """Return the leaves between the gate and the loss. None if the loss also depends on the layers in another way."""
    number = sequence_number(gate.node)
    leaves: list[Tensor] = []
    waiting = [loss.grad_fn]
    seen: set[Node | None] = {gate.node, None}
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is None:
            if sequence_number(node) < number:
                return None
            waiting += [before for before, _ in node.next_functions]
        elif is_leaf(leaf):
            leaves.append(leaf)
        else:
            return None
    return leaves
