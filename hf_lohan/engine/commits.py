"""Which steps are committed, and when: behind their updates, with what is needed to go on from there."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hf_lohan.config import interval_s
from hf_lohan.files import StorageError
from hf_lohan.store import Commit, Store
from hf_lohan.timeline import UPDATES_WAIT, Timeline
from hf_lohan.updates import MISSED_STEPS_NAME, MissedSteps, StepCounts

logger = logging.getLogger(__name__)

Describe = Callable[[], Mapping[str, bytes] | None]
"""What makes the files that belong beside a model's records, by name or relative path."""


@dataclass(frozen=True)
class Journal:
    """What whoever drives the steps wants to find again after a crash."""

    facts: Mapping[str, Any] = field(default_factory=dict)
    """In JSON's types."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    log_lines: bytes = b""
    """Follow those of the journals before, unless `begins_log`."""
    begins_log: bool = False


@dataclass(frozen=True)
class CommitInterval:
    """How often steps are committed."""

    num_steps: int = 1
    """0: none is, unless somebody asks for it."""
    seconds: float = math.inf
    """Nor is there more time between two commits."""

    def is_over(self, num_steps: int, seconds: float) -> bool:
        """Whether a step is to be committed that ends so much after the last commit."""
        return 0 < self.num_steps <= num_steps or seconds >= self.seconds

    @classmethod
    def asked_for(cls, setting: int | str) -> CommitInterval:
        """What `commit_every` says; where that is "auto", each step until there is a plan."""
        seconds = interval_s(setting)
        if seconds is not None:
            return cls(0, seconds)
        return cls(setting) if isinstance(setting, int) else cls()


def decide_alone(interval: CommitInterval, num_steps: int, since_s: float, step_s: float) -> bool:
    """Whether a step that begins is to be committed: the ``num_steps``-th since the last commit, which was asked for
    ``since_s`` ago. Steps take ``step_s``."""
    return interval.is_over(num_steps, since_s + step_s)


class StepCommits:
    """Has a store committed as the steps of one engine go by, and goes back to the last commit.

    Whether a step will be committed is decided when it begins: its updates then write all records. In other steps what
    lives in RAM stays there. A commit that nobody foresaw writes that first.
    """

    def __init__(
        self,
        store: Store,
        step_counts: StepCounts,
        timeline: Timeline,
        missed: MissedSteps | None = None,
        *,
        run_when_written: Callable[[Callable[[], None]], None],
        run_between_updates: Callable[[Callable[[], None]], None],
        interval: CommitInterval,
        decide: Callable[[CommitInterval, int, float, float], bool] = decide_alone,
    ) -> None:
        """`run_when_written`, `run_between_updates`: see `GradientPipeline`. A store that keeps one version is
        committed only on request, whatever the `interval`. `missed`: chunks of the store that are steps behind.
        `decide`: see `decide_alone`."""
        self._store = store
        self._decide = decide
        self._step_counts = step_counts
        self._timeline = timeline
        self._missed = missed
        self._run_when_written = run_when_written
        self._run_between_updates = run_between_updates
        self._interval = interval if self.are_kept else CommitInterval(num_steps=0)
        self._asked_s = time.monotonic()
        self._began_s: float | None = None
        self._steps_since = 0
        """Steps that have ended since a commit was asked for."""
        self.is_due = self.are_kept
        """Whether the step in progress, or the one that has just ended, is to be committed."""
        self._has_begun = self._goes_on = False
        self.each_step = True
        """Whether each step is committed by itself."""
        self._describe: Describe | None = _nothing
        self.last_commit_s = 0.0
        self.num_commits = 0

    @property
    def are_kept(self) -> bool:
        """Whether the store holds its last commit until the next one: it has two versions."""
        return self._store.num_homes > 1

    def leave_to_journal(self) -> None:
        """From now on whoever has a journal to go with each step calls `request`."""
        self.each_step = False

    def describe_first(self, describe: Describe) -> None:
        """Have the first commit put the files beside the records that ``describe`` makes: it is called by the thread
        that asks for that commit. Until then those of an earlier run stay. Too late if there was a commit already."""
        if self._describe is not None:
            self._describe = describe

    def keep_what_was_loaded(self) -> None:
        """Before the first update of all: the first step can then be undone as any other. Not earlier: until here the
        steps of the run before are there to go back to."""
        if not self._has_begun:
            self._has_begun = True
            if self.each_step:
                self._tell_what_ends()
                self.request(even_in_place=True)

    def _tell_what_ends(self) -> None:
        """Warn where the next commit takes the place of an earlier run's last one, to which nobody has gone back."""
        last = self._store.committed
        if last is None or last.is_torn or self._goes_on or not self.are_kept:
            return
        logger.warning(
            "the last step of an earlier run in %s, after update %d, is overwritten from here on; to go on from such a "
            "step, call engine_of(model).go_back_to_commit() before the first one",
            self._store.paths[0].path,
            max(map(int, last.facts.get("num_updates", {}).values()), default=0),
        )

    def follow_interval(self, interval: CommitInterval) -> None:
        """From the next step on."""
        if self.are_kept:
            self._interval = interval

    def begin_step(self) -> None:
        """A step's first forward begins: decide whether the step will be committed."""
        now_s = time.monotonic()
        step_s = now_s - self._began_s if self._began_s is not None else 0.0
        self._began_s = now_s
        self.is_due = self._decide(self._interval, self._steps_since + 1, now_s - self._asked_s, step_s)
        keeps_new = not self.is_due
        self._run_between_updates(lambda: self._store.keep_new_in_ram(keeps_new))

    @property
    def has_more(self) -> bool:
        """Whether steps have ended that are not committed."""
        return self._steps_since > 0

    def end_step(self) -> None:
        """A step is over; its updates may still run."""
        self._steps_since += 1
        if self.each_step and self.is_due:
            self.request()

    def request(self, journal: Journal | None = None, *, even_in_place: bool = False) -> None:
        """Have the steps so far committed as soon as their updates are written; does not wait for that. `journal` is
        found again when the engine goes back. Where the next update would overwrite the commit, only if
        `even_in_place`."""
        if self.are_kept or even_in_place:
            self._steps_since, self._asked_s = 0, time.monotonic()
            model_files = self._describe() if self._describe is not None else None
            self._describe = None
            self._run_when_written(lambda: self._write(journal or Journal(), model_files))

    def _write(self, journal: Journal, model_files: Mapping[str, bytes] | None) -> None:
        """All updates are in the store."""
        began_s = time.perf_counter()
        num_updates = {part.name: count for part, count in self._step_counts.items() if part.trainable}
        facts = {"durability": self._store.durability, "num_updates": num_updates, **journal.facts}
        files = dict(journal.files)
        if (packed := self._missed.packed() if self._missed is not None else None) is not None:
            files[MISSED_STEPS_NAME] = packed
        with self._timeline.task(UPDATES_WAIT, "commit"):
            self._store.commit(
                facts, files, journal.log_lines, keep_log=not journal.begins_log, model_files=model_files
            )
        self.last_commit_s = time.perf_counter() - began_s
        self.num_commits += 1

    def go_back(self) -> Commit:
        """Forget what was written since the last commit. Raises ValueError if there is none, `TornStoreError` if it
        was overwritten."""
        last = self._store.committed
        if last is None:
            raise ValueError(f"nothing is committed in {self._store.paths[0].path}; train from the start")
        self._store.drop_drafts()
        self._goes_on = True
        if self._missed is not None:
            self._missed.restore(last.journal.get(MISSED_STEPS_NAME))
        num_updates = last.facts.get("num_updates")
        if not isinstance(num_updates, dict):
            problem = f"commit {last.number} does not say how often parameters were updated, in"
            raise StorageError(problem, path=self._store.paths[0].path, advice="resume from a checkpoint")
        self._step_counts.update(
            {part: int(num_updates[part.name]) for part in self._step_counts if part.name in num_updates}
        )
        return last


def _nothing() -> None:
    """Nobody has anything to write."""
