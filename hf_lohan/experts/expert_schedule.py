"""The order in which experts are loaded. Routing says which experts are needed. Before the routing, hints predict them.

A pass is a sequence of *visits*. It visits each layer with experts in forward order, and in training then in backward
order too. The experts of a visit are known in one of three ways. The first that applies is used:

* *Routing*. The forward's experts are known as soon as the router has run. The backward uses the forward's routing, so
  all its experts are known when it begins.
* *All experts*. If the experts get at least `ALL_ROWS` rows on average, all are expected before the router has run.
* *Hints*. They are the experts that earlier passes used most, or the experts that the layer's router chooses for the
  rows of the previous layer, whichever was right more often.

After a pass without gradients, as in generation, another pass is expected. Its first experts are loaded while the last
layers and the head compute. Experts are loaded in the order of visits. The slot whose block is needed last is
overwritten first. The time of an operation here depends only on the blocks of one layer.
"""

from __future__ import annotations

import enum
import heapq
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from hf_lohan.model import Block
from hf_lohan.weights.schedule import NEVER, PassSchedule, PassState

ALL_ROWS = 8
"""From this many rows per expert on average, all experts are expected. The probability of no row is 1/3000."""

ExpertNumbers: TypeAlias = "dict[int, None] | range"
"""Ordered indices of experts with a fast lookup."""


_NOT_EXPECTED = NEVER // 2
_DECAY = 0.9**0.25
"""Factor by which the weight of a use decreases in each later pass. It is 0.9 over four passes."""
_TRUSTED_FROM = 0.5
_RANK_STEPS = 16
"""Number by which `rank` increases if the count doubles."""


class Call(enum.Enum):
    """The kind of a call of a layer's experts."""

    FORWARD = enum.auto()
    AGAIN = enum.auto()
    """A recomputation of the forward, just before its backward."""
    BACKWARD = enum.auto()


class Frequencies:
    """How often passes of one kind used each expert of one layer. Recent passes count most. Counts are logarithms, so
    that the counts of unused experts need no update."""

    def __init__(self) -> None:
        self._log_counts: dict[int, float] = {}
        self._log_weight = 0.0
        self._last: set[int] = set()
        self._most_used: dict[int, None] | None = None

    def note_uses(self, experts: Iterable[int], *, begins_pass: bool) -> None:
        """Count uses of these experts. The same pass may use more experts later."""
        if begins_pass:
            self._log_weight -= math.log2(_DECAY)
            self._last = set()
        for expert in experts:
            if expert not in self._last:
                self._last.add(expert)
                before = self._log_counts.get(expert, -math.inf)
                self._log_counts[expert] = self._log_weight + math.log2(1 + 2 ** (before - self._log_weight))
        self._most_used = None

    @property
    def most_used(self) -> dict[int, None]:
        """The most used experts in falling order of use. There are as many as the last pass used."""
        if self._most_used is None:
            counts = self._log_counts
            most = heapq.nlargest(len(self._last), counts, key=lambda expert: (counts[expert], -expert))
            self._most_used = dict.fromkeys(most)
        return self._most_used

    def rank(self, expert: int) -> int:
        """Return a number that is higher for experts with more uses, comparable between layers. -1 means no use."""
        count = self._log_counts.get(expert)
        return -1 if count is None else round(_RANK_STEPS * count)


class Trust:
    """Knows which prediction of a layer's experts was right more often: past use, or the layer's router that runs in
    advance. Recent passes count most."""

    def __init__(self) -> None:
        self._right_by_habit = 0.0
        self._right_by_router = 0.0
        self._weight = 0.0

    def note_pass(self, used: Collection[int], *, by_habit: Collection[int], by_router: Collection[int]) -> None:
        """Compare the experts ``used`` by a pass with the predictions of past use and of the router."""
        self._weight = _DECAY * self._weight + 1
        self._right_by_habit += (_overlap(used, by_habit) - self._right_by_habit) / self._weight
        self._right_by_router += (_overlap(used, by_router) - self._right_by_router) / self._weight

    @property
    def is_in_router(self) -> bool:
        """Whether to load the experts that the router predicts. True if most of the router's predictions were right,
        and more of them than of the predictions from past use. True until known."""
        return not self._weight or self._right_by_router > max(self._right_by_habit, _TRUSTED_FROM)


def _overlap(used: Collection[int], expected: Collection[int]) -> float:
    return len(set(used) & set(expected)) / max(len(used), len(expected), 1)


class DueExpert(NamedTuple):
    """The expert to load next."""

    position: int
    """The position of the use (`ExpertSchedule.next_use`)."""
    block: Block
    is_sure: bool
    """Whether the expert is certainly needed and not a hint."""


@dataclass
class _Habits:
    """The experts that passes of one kind have used so far."""

    frequencies: list[Frequencies]
    trust: list[Trust]
    use_all: bool = False


@dataclass
class _Scan:
    """Which experts of one visit have been considered for loading."""

    experts: list[int]
    num_left: int = 0
    """Number of experts at the beginning that belong to the running call. They are loaded before all others."""
    index: int = 0


@dataclass(eq=False, kw_only=True)
class _Pass(PassState):
    habits: _Habits
    use_all: bool
    num_together: int = 1
    visit: int = 0
    """The current visit. Before the first call, this is the first visit."""
    call: Call | None = None
    num_calls: int = 0
    """Number of calls of this kind in this visit so far."""
    left: dict[int, None] = field(default_factory=dict)
    """Experts that the running call has not used yet."""
    hints: dict[int, dict[int, None]] = field(default_factory=dict)
    """The experts that each layer's router predicted."""
    routed: dict[int, dict[int, int]] = field(default_factory=dict)
    """Number of backward calls that will use each expert, by layer with known routing."""
    scans: dict[int, _Scan] = field(default_factory=dict)
    again: list[int] = field(default_factory=list)
    """A heap of visits to consider again."""
    ahead: int = 0
    """The first visit that has not been considered."""


class ExpertSchedule(PassSchedule[_Pass]):
    """The experts that a pass needs next, and the order of their loads."""

    carries_on = True

    def __init__(self, layers: Sequence[Sequence[Block]]) -> None:
        """``layers`` are in forward order. Each has its blocks by expert number."""
        super().__init__()
        self._layers = [tuple(experts) for experts in layers]
        self._at = {
            block: (layer, expert) for layer, experts in enumerate(self._layers) for expert, block in enumerate(experts)
        }
        self._habits = {
            kind: _Habits([Frequencies() for _ in self._layers], [Trust() for _ in self._layers])
            for kind in (True, False)
        }
        self._num_together = 1

    # Passes.

    def begin_pass(self, *, is_training: bool) -> None:
        super().begin_pass(is_training=is_training)
        assert self._pass is not None
        self._pass.num_together = self._num_together if is_training else 1

    def expect_together(self, num_micro_batches: int) -> None:
        """Expect this many micro-batches together in each layer, in training passes that begin from now on."""
        self._num_together = num_micro_batches

    def _expect_pass(self, *, is_training: bool) -> _Pass:
        habits = self._habits[is_training]
        return _Pass(is_training=is_training, habits=habits, use_all=habits.use_all)

    def _learn_from(self, ended: _Pass) -> None:
        if ended.routed:
            ended.habits.use_all = ended.use_all

    def _resume_pass(self, resumed: _Pass) -> None:
        self.look_anew()

    # Calls, reported by the computing thread.

    def route(self, layer: int, experts: Sequence[int] | None, *, num_rows: int, call: Call) -> None:
        """Begin a call of the layer. ``experts`` are the experts that it needs, in the order of loading; None is all of
        them. ``num_rows`` is the sum over all experts. Earlier predictions for this visit are dropped."""
        if self._pass is None:  # the layer was called outside its model
            self.begin_pass(is_training=call is not Call.FORWARD)
        now = self._pass
        assert now is not None
        if call is not Call.FORWARD:
            now.expect_backward()
        num_experts = len(self._layers[layer])
        self._follow_rows(now, use_all=num_rows >= ALL_ROWS * max(1, num_experts))
        visit = layer if call is Call.FORWARD else self._backward_visit(layer)
        if (visit, call) != (now.visit, now.call):
            now.num_calls = 0
        now.visit, now.call = visit, call
        now.num_calls += 1
        used = range(num_experts) if experts is None else experts
        now.left = dict.fromkeys(used)
        if call is Call.FORWARD:
            counts = now.routed.setdefault(layer, {})
            for expert in used:
                counts[expert] = counts.get(expert, 0) + 1
            if experts is not None:
                self._learn(now, layer, experts)
        now.scans.pop(visit, None)
        if now.ahead > visit:
            heapq.heappush(now.again, visit)

    def _learn(self, now: _Pass, layer: int, used: Sequence[int]) -> None:
        habits, is_first = now.habits, now.num_calls == 1
        if is_first and layer in now.hints:
            of_layer = habits.frequencies[layer].most_used
            habits.trust[layer].note_pass(used, by_habit=of_layer, by_router=now.hints[layer])
        habits.frequencies[layer].note_uses(used, begins_pass=is_first)

    def _follow_rows(self, now: _Pass, *, use_all: bool) -> None:
        """Expect experts of later layers by the number of rows, which is known from the first call of a pass."""
        if use_all != now.use_all:
            now.use_all = use_all
            self.look_anew()
            self.version += 1

    def hint(self, layer: int, experts: Sequence[int]) -> None:
        """Add experts that the layer's next forward will probably use, the most probable first."""
        now = self._pass
        if now is None or now.use_all or layer < now.visit or layer in now.routed:
            return
        now.hints[layer] = dict.fromkeys([*experts, *now.hints.get(layer, ())])
        now.scans.pop(layer, None)
        if now.ahead > layer:
            heapq.heappush(now.again, layer)

    def use(self, block: Block) -> None:
        """Record that the running call computes with the block, and does not need it again."""
        now = self._pass
        layer, expert = self._at[block]
        if now is None or layer != self._layer_at(now, now.visit):
            return
        now.left.pop(expert, None)
        counts = now.routed.get(layer, {})
        if now.call is Call.BACKWARD and expert in counts:
            counts[expert] -= 1
            if not counts[expert]:
                del counts[expert]

    def use_for_operation(self, block: Block) -> None:
        """Record that a single operation reads weights of the block. This changes no prediction."""

    def note_displaced(self, block: Block) -> None:
        """Record that the block was overwritten. It is loaded again if a visit of this pass needs it."""
        visit, now = self.next_use(block) // 2, self._pass
        if now is None or visit >= 2 * len(self._layers):
            return
        scan, expert = now.scans.get(visit), self._at[block][1]
        if scan is not None and visit == now.visit and expert in now.left:
            scan.experts.insert(scan.index, expert)
            scan.num_left = max(scan.num_left, scan.index) + 1
        elif scan is not None:
            scan.experts.append(expert)
        if visit < now.ahead:
            heapq.heappush(now.again, visit)

    def look_anew(self) -> None:
        """Consider all visits again, because slots were emptied."""
        now = self._pass
        if now is not None:
            now.ahead = now.visit
            now.again.clear()
            now.scans.clear()

    # Queries of the loader.

    @property
    def position(self) -> int:
        """The position of the running call, or of the next call."""
        return 2 * self._pass.visit if self._pass is not None else 0

    @property
    def left(self) -> list[Block]:
        """Experts that the running call has not used yet."""
        if self._pass is None:
            return []
        blocks = self._layers[self._layer_at(self._pass, self._pass.visit)]
        return [blocks[expert] for expert in self._pass.left]

    def is_left(self, block: Block) -> bool:
        """Return whether the running call still needs the block."""
        layer, expert = self._at[block]
        now = self._pass
        return now is not None and layer == self._layer_at(now, now.visit) and expert in now.left

    def experts_of(self, layer: int) -> tuple[Block, ...]:
        """Return the layer's experts in the order of their numbers."""
        return self._layers[layer]

    def next_use(self, block: Block) -> int:
        """Return the next position that needs the block. A position is twice the number of a visit, plus one if only a
        later call of the current visit needs the block. Visits of the next pass are numbered after those of this pass.
        Blocks that no visit is expected to need have later positions, and rarely used blocks the last. `NEVER` without
        a pass."""
        now = self._pass
        if now is None:
            return NEVER
        layer, expert = self._at[block]
        backward = self._backward_visit(layer)
        for visit in (layer, backward) if now.is_training else (layer,):
            if now.visit <= visit and self._is_needed(now, visit, expert):
                is_later = visit == now.visit and now.call is not None and expert not in now.left
                return 2 * visit + is_later
        if expert in self._by_habit(now, layer):
            return 2 * (self._num_visits(now) + layer)
        return _NOT_EXPECTED - now.habits.frequencies[layer].rank(expert)

    def next_load(self, is_here: Callable[[Block], bool]) -> DueExpert | None:
        """Return the first missing block of the next visits, or None. After a training pass nothing is loaded before
        the next pass is expected, because its weights do not exist yet."""
        now = self._pass
        if now is None:
            return None
        now.ahead = max(now.ahead, now.visit)
        while True:
            while now.again and now.again[0] < now.visit:
                heapq.heappop(now.again)
            visit = min([now.ahead, *now.again[:1]])
            if visit >= 2 * len(self._layers):
                return None
            block = self._first_missing(now, visit, is_here)
            if block is not None:
                return DueExpert(self.next_use(block), block, now.use_all or self._is_routed(now, visit))
            if visit < now.ahead:
                heapq.heappop(now.again)
            else:
                now.ahead += 1

    def _first_missing(self, now: _Pass, visit: int, is_here: Callable[[Block], bool]) -> Block | None:
        blocks = self._layers[self._layer_at(now, visit)]
        scan = now.scans.get(visit)
        if scan is None:
            scan = now.scans[visit] = self._scan(now, visit)
        while scan.index < len(scan.experts):
            expert = scan.experts[scan.index]
            is_needed = expert in now.left if scan.index < scan.num_left else self._is_needed(now, visit, expert)
            if is_needed and not is_here(blocks[expert]):
                return blocks[expert]
            scan.index += 1
        return None

    # Visits.

    def _scan(self, now: _Pass, visit: int) -> _Scan:
        """Return the experts of a visit in the order of loading. A backward loads them in the reverse order of the
        forward, because the last experts may still be in slots."""
        layer = self._layer_at(now, visit)
        left = now.left if visit == now.visit and now.call is not None else {}
        if visit < len(self._layers):
            rest: Iterable[int] = self._expected(now, layer)
        elif now.is_training:
            rest = sorted(now.routed[layer] if layer in now.routed else self._expected(now, layer), reverse=True)
        else:
            rest = self._by_habit(now, layer)
        return _Scan([*left, *(expert for expert in rest if expert not in left)], num_left=len(left))

    def _is_needed(self, now: _Pass, visit: int, expert: int) -> bool:
        """Return whether a visit that has not ended needs the expert."""
        layer = self._layer_at(now, visit)
        is_under_way = visit == now.visit and now.call is not None
        if is_under_way and expert in now.left:
            return True
        if visit < len(self._layers):
            # The needs of later micro-batches are not known, so the expected experts count.
            return (not is_under_way or now.num_calls < now.num_together) and expert in self._expected(now, layer)
        if not now.is_training:
            return expert in self._by_habit(now, layer)
        if layer in now.routed:
            return expert in now.routed[layer]
        return now.visit < len(self._layers) and expert in self._expected(now, layer)

    def _expected(self, now: _Pass, layer: int) -> ExpertNumbers:
        """Return the experts that a forward is expected to use before it is routed."""
        hints = now.hints.get(layer) if now.habits.trust[layer].is_in_router else None
        return self._by_habit(now, layer) if hints is None or now.use_all else hints

    def _by_habit(self, now: _Pass, layer: int) -> ExpertNumbers:
        return range(len(self._layers[layer])) if now.use_all else now.habits.frequencies[layer].most_used

    def _is_routed(self, now: _Pass, visit: int) -> bool:
        is_of_pass = now.is_training or visit < len(self._layers)
        return is_of_pass and self._layer_at(now, visit) in now.routed

    def _layer_at(self, now: _Pass, visit: int) -> int:
        if visit < len(self._layers):
            return visit
        return self._backward_visit(visit) if now.is_training else visit - len(self._layers)

    def _backward_visit(self, layer: int) -> int:
        """Return the backward visit of a layer, or the layer of a backward visit."""
        return 2 * len(self._layers) - 1 - layer

    def _num_visits(self, now: _Pass) -> int:
        return len(self._layers) * (2 if now.is_training else 1)
