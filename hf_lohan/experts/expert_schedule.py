"""Which expert is needed next, as far as that can be known: for sure from the routing, before that by a hint.

A pass is a row of *visits*: each layer with experts once in forward order, then, in training, once backwards. What a
visit needs is known in three ways, best first.

* *It was routed.* The forward's experts are told as soon as their router has spoken. The backward has the forward's
  routing, all of it before it begins.
* *All of them.* Where an expert gets `ALL_ROWS` rows on average, none is left out, and nobody waits for the router.
* *Hints*: the experts that the passes before used most, or what the layer's router said of the rows of the layer
  before, whichever was right more often. Behind a pass without gradients another one is expected, as where a model
  generates: its first experts come while the last layers and the head compute.

Loads follow in the order of visits. A slot is given up whose block is needed in the last of them. Nothing here looks at
more blocks than those of one layer at a time, whatever the model has.
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
"""Rows for each expert, on average, from which on all are expected: with even routing one of 3,000 gets none."""

ExpertNumbers: TypeAlias = "dict[int, None] | range"
"""Numbers of experts, in an order, that are quickly looked up."""


_NOT_EXPECTED = NEVER // 2
_DECAY = 0.9**0.25
"""What a use counts for one pass later: nine tenths behind four passes, as caches of experts do well with."""
_TRUSTED_FROM = 0.5
_RANK_STEPS = 16
"""Ranks tell counts apart that differ by one part in so many of a doubling."""


class Call(enum.Enum):
    """What a layer's experts are needed for."""

    FORWARD = enum.auto()
    AGAIN = enum.auto()
    """The forward is made again for the backward that comes next."""
    BACKWARD = enum.auto()


class Frequencies:
    """How often passes of one kind used each expert of one layer, the last passes counting most. Kept as logarithms, so
    what was not used again stays as it is while later uses count for more."""

    def __init__(self) -> None:
        self._log_counts: dict[int, float] = {}
        self._log_weight = 0.0
        self._last: set[int] = set()
        self._most_used: dict[int, None] | None = None

    def note_uses(self, experts: Iterable[int], *, begins_pass: bool) -> None:
        """A pass used these; more may follow of the same."""
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
        """As many as the last pass used, the most used first."""
        if self._most_used is None:
            counts = self._log_counts
            most = heapq.nlargest(len(self._last), counts, key=lambda expert: (counts[expert], -expert))
            self._most_used = dict.fromkeys(most)
        return self._most_used

    def rank(self, expert: int) -> int:
        """The higher, the more often it was used, comparable over layers; below all others if never."""
        count = self._log_counts.get(expert)
        return -1 if count is None else round(_RANK_STEPS * count)


class Trust:
    """Whom to believe of one layer: its habits, or its router asked beforehand. The share of experts each was right
    about, the last passes counting most."""

    def __init__(self) -> None:
        self._right_by_habit = 0.0
        self._right_by_router = 0.0
        self._weight = 0.0

    def note_pass(self, used: Collection[int], *, by_habit: Collection[int], by_router: Collection[int]) -> None:
        """A pass used these, and those were expected."""
        self._weight = _DECAY * self._weight + 1
        self._right_by_habit += (_overlap(used, by_habit) - self._right_by_habit) / self._weight
        self._right_by_router += (_overlap(used, by_router) - self._right_by_router) / self._weight

    @property
    def is_in_router(self) -> bool:
        """Habits mostly name what is here; what routers name besides is worth loading if they are right about most.
        Until that is known they are believed."""
        return not self._weight or self._right_by_router > max(self._right_by_habit, _TRUSTED_FROM)


def _overlap(used: Collection[int], expected: Collection[int]) -> float:
    return len(set(used) & set(expected)) / max(len(used), len(expected), 1)


class DueExpert(NamedTuple):
    """What to load next."""

    place: int
    """See `ExpertSchedule.next_use`."""
    block: Block
    is_sure: bool
    """Whether it is needed, and no hint."""


@dataclass
class _Habits:
    """What passes of one kind have done so far."""

    frequencies: list[Frequencies]
    trust: list[Trust]
    use_all: bool = False


@dataclass
class _Scan:
    """How far the experts of one visit have been looked at for something to load."""

    experts: list[int]
    num_left: int = 0
    """The first so many are of a call under way, which has to have them before anything else is loaded."""
    index: int = 0


@dataclass(eq=False, kw_only=True)
class _Pass(PassState):
    habits: _Habits
    use_all: bool
    num_together: int = 1
    visit: int = 0
    """The one under way, or, before the first call, the one to come."""
    call: Call | None = None
    num_calls: int = 0
    """Of this kind in this visit, so far."""
    left: dict[int, None] = field(default_factory=dict)
    """What the call under way has not used yet."""
    hints: dict[int, dict[int, None]] = field(default_factory=dict)
    """By layer, where somebody knows better than the passes before."""
    routed: dict[int, dict[int, int]] = field(default_factory=dict)
    """By layer whose routing is known: how many calls of the backward will use each expert."""
    scans: dict[int, _Scan] = field(default_factory=dict)
    again: list[int] = field(default_factory=list)
    """A heap of visits to be looked at once more."""
    ahead: int = 0
    """Visits from here on have not been looked at."""


class ExpertSchedule(PassSchedule[_Pass]):
    """What a pass needs next of the experts, and what to load next."""

    carries_on = True

    def __init__(self, layers: Sequence[Sequence[Block]]) -> None:
        """``layers``: in forward order, the blocks of each by expert number."""
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
        """In training passes that begin from here on so many micro-batches pass each layer one after the other."""
        self._num_together = num_micro_batches

    def _expect_pass(self, *, is_training: bool) -> _Pass:
        habits = self._habits[is_training]
        return _Pass(is_training=is_training, habits=habits, use_all=habits.use_all)

    def _learn_from(self, ended: _Pass) -> None:
        if ended.routed:
            ended.habits.use_all = ended.use_all

    def _resume_pass(self, resumed: _Pass) -> None:
        self.look_anew()

    # What compute says.

    def route(self, layer: int, experts: Sequence[int] | None, *, num_rows: int, call: Call) -> None:
        """A call of the layer's experts begins, which needs these, in the order in which they are to be loaded; None:
        all. ``num_rows``: of all experts together. What was expected of the visit besides is not any more."""
        if self._pass is None:  # somebody calls the layer by itself
            self.begin_pass(is_training=call is not Call.FORWARD)
        now = self._pass
        assert now is not None
        now.is_training |= call is not Call.FORWARD
        num_experts = len(self._layers[layer])
        self._follow_rows(now, use_all=num_rows >= ALL_ROWS * num_experts)
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
        """The number of tokens, which a call is the first to know, says what is expected of the layers to come."""
        if use_all != now.use_all:
            now.use_all = use_all
            self.look_anew()
            self.version += 1

    def hint(self, layer: int, experts: Sequence[int]) -> None:
        """The layer's next forward will probably use these, the most probable first, beside what was said before."""
        now = self._pass
        if now is None or now.use_all or layer < now.visit or layer in now.routed:
            return
        now.hints[layer] = dict.fromkeys([*experts, *now.hints.get(layer, ())])
        now.scans.pop(layer, None)
        if now.ahead > layer:
            heapq.heappush(now.again, layer)

    def use(self, block: Block) -> None:
        """The call under way computes with it, and does not need it again."""
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
        """One operation reads weights of it: nothing follows from that."""

    def note_displaced(self, block: Block) -> None:
        """The block had to make room: if a visit of this pass needs it, it is loaded again."""
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
        """Whatever was here may be gone."""
        now = self._pass
        if now is not None:
            now.ahead = now.visit
            now.again.clear()
            now.scans.clear()

    # What loads ask.

    @property
    def place(self) -> int:
        """Of what the call under way, or the next one, needs: nothing is needed before it."""
        return 2 * self._pass.visit if self._pass is not None else 0

    @property
    def left(self) -> list[Block]:
        """What the call under way has not used yet."""
        if self._pass is None:
            return []
        blocks = self._layers[self._layer_at(self._pass, self._pass.visit)]
        return [blocks[expert] for expert in self._pass.left]

    def is_left(self, block: Block) -> bool:
        """Whether the call under way will use it."""
        layer, expert = self._at[block]
        now = self._pass
        return now is not None and layer == self._layer_at(now, now.visit) and expert in now.left

    def experts_of(self, layer: int) -> tuple[Block, ...]:
        """By number."""
        return self._layers[layer]

    def next_use(self, block: Block) -> int:
        """The place that needs it next: twice the number of the visit, and one more if it is not needed before a later
        call of the visit under way. The next pass's visits follow on this one's. What none is expected to need comes
        behind them all, the later the more seldom it was used; `NEVER` if there is no pass."""
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
        """The first block that a visit needs and that is not here; None if all are. Behind a training pass nothing is
        loaded before the next one is foreseen: its weights are not made yet."""
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
        """The experts of a visit as they are to be loaded: backwards from the last, which the forward used last."""
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
        """By a visit that is not over."""
        layer = self._layer_at(now, visit)
        is_under_way = visit == now.visit and now.call is not None
        if is_under_way and expert in now.left:
            return True
        if visit < len(self._layers):
            # Micro-batches that come later to this layer need what they need, which nobody knows.
            return (not is_under_way or now.num_calls < now.num_together) and expert in self._expected(now, layer)
        if not now.is_training:
            return expert in self._by_habit(now, layer)
        if layer in now.routed:
            return expert in now.routed[layer]
        return now.visit < len(self._layers) and expert in self._expected(now, layer)

    def _expected(self, now: _Pass, layer: int) -> ExpertNumbers:
        """What a forward that has not been routed yet will use."""
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
        """Of a layer; and of that, the layer."""
        return 2 * len(self._layers) - 1 - layer

    def _num_visits(self, now: _Pass) -> int:
        return len(self._layers) * (2 if now.is_training else 1)
