"""Clipping by guess: updates run in backward as if the norm would not clip, and are undone and done over if it does.

`ClipHistory` says whether steps guess and counts what came of it, `GuessedBlocks` keeps readers from seeing a guess,
`Guess` is what one step guesses. Where the worker guesses and judges, it asks these; nothing else knows of guesses but
what an update does with its gradient afterwards (`is_guess`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from threading import Lock
from typing import Literal

from hf_lohan.model import Block, ParamSlice
from hf_lohan.planner import MOST_WRONG_GUESSES
from hf_lohan.threads import Command, WorkThread
from hf_lohan.updates.setup import GroupOf

WINDOW_STEPS = 16
"""What is older says little about the present clip rate."""

ClipWay = Literal["defer", "speculate"]


class ClipHistory:
    """How the next step clips, and what came of the last ones. Used by the computing thread."""

    def __init__(self, way: ClipWay, *, always: bool = False) -> None:
        """`always`: guess however often the norm clips. Else the first step waits for its norm, and so does each that
        comes behind steps of which more than `MOST_WRONG_GUESSES` clipped."""
        self.way: ClipWay = "speculate" if always else way
        """As planned; whether a step does guess: `speculates`."""
        self._always = always
        self._may_guess = True
        self._clipped: deque[bool] = deque(maxlen=WINDOW_STEPS)
        self.num_speculated = 0
        self.num_redone = 0

    @property
    def clip_rate(self) -> float:
        """Fraction of the last steps that clipped."""
        return sum(self._clipped) / len(self._clipped) if self._clipped else 0.0

    @property
    def speculates(self) -> bool:
        """Whether the next step guesses, if it can be undone."""
        return self.way == "speculate" and self._may_guess and (self._always or self._rarely_clips)

    @property
    def _rarely_clips(self) -> bool:
        return bool(self._clipped) and self.clip_rate <= MOST_WRONG_GUESSES

    def clip_by(self, way: ClipWay) -> None:
        """From the next step on."""
        self.way = way

    def never_speculate(self) -> None:
        """The loop does something between backward and step that has guesses taken back every time."""
        self._may_guess = False

    def note_step(self, applied: str | None, *, clipped: bool) -> None:
        """A step ended; `applied`: see `StepResult`."""
        self._clipped.append(clipped)
        self.num_speculated += applied in ("accepted", "redone")
        if applied == "redone":
            self.num_redone += 1
            if not clipped:
                self.never_speculate()  # the loop changes hyperparameters between backward and step


class GuessedBlocks:
    """The blocks that the step in progress updates on a guess, from when that is ordered of the worker's thread.
    Whoever sees a block here, on whatever thread, has the guess undone by an order that comes behind that one."""

    def __init__(self, thread: WorkThread) -> None:
        self.are_wanted = False
        """Whether the steps from the next one on are to guess, if they can."""
        self._thread = thread
        self._blocks: set[Block] = set()
        self._lock = Lock()

    def want(self, are_wanted: bool) -> None:
        self.are_wanted = are_wanted

    def __contains__(self, block: Block) -> bool:
        return block in self._blocks

    def order(self, block: Block, command: Command) -> None:
        """Have the thread run `command`, which may guess about the block."""
        with self._lock:
            self._blocks.add(block)
            self._thread.put(command)

    def undo(self, command: Command) -> set[Block]:
        """If there are any, have the thread run `command`, which undoes them all, and wait for it. Returns them. The
        step does not guess again."""
        with self._lock:
            blocks = set(self._blocks)
            if not blocks:
                return blocks
            self.are_wanted = False
            self._thread.put(command)
        self._thread.barrier()
        with self._lock:  # not before: whoever else reads these blocks has to wait as well
            self._blocks -= blocks
        return blocks

    def forget(self) -> None:
        """They are no guesses any more."""
        with self._lock:
            self._blocks = set()


class Guess:
    """What a step guesses: that the norm does not clip, and that the hyperparameters stay as they are. Decided with the
    step's first gradient that could be updated, for all of it. Used by the worker's thread."""

    def __init__(self, group_of: GroupOf) -> None:
        self._present_group_of = group_of
        self._groups: dict[ParamSlice, Hashable] = {}
        self._is_on: bool | None = None

    @property
    def is_on(self) -> bool:
        """Whether what the step has updated are guesses."""
        return self._is_on is True

    def decide(self, is_wanted: bool) -> bool:
        """Whether the step guesses: as it does already, or, if that is open, as is wanted."""
        if self._is_on is None:
            self._is_on = is_wanted
        return self._is_on

    def group_of(self, part: ParamSlice) -> Hashable:
        """The present hyperparameters, noted as those that were guessed."""
        return self._groups.setdefault(part, self._present_group_of(part))

    def was_right(self, clip_coefficient: float, group_of: GroupOf) -> bool:
        """Whether the step is to be applied as it was guessed."""
        return clip_coefficient == 1.0 and all(group_of(part) == group for part, group in self._groups.items())

    def stop(self) -> None:
        """The rest of the step is no guess any more."""
        self._is_on = False

    def end_step(self) -> None:
        self._groups.clear()
        self._is_on = None
