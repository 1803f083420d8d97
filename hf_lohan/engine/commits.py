"""Decides which steps are committed, and commits a step after its updates, with the files that a resumed run needs."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from hf_lohan.config import interval_s
from hf_lohan.files import StorageError
from hf_lohan.store import Commit, Store
from hf_lohan.timeline import UPDATES_WAIT, Timeline
from hf_lohan.updates import MISSED_STEPS_NAME, MissedSteps, StepCounts

logger = logging.getLogger(__name__)

Describe = Callable[[], Mapping[str, bytes] | None]
"""Returns the content of the files that a commit has besides the records, by name or relative path."""


@dataclass(frozen=True)
class Journal:
    """State of the training loop that is committed with a step, for a resume after a crash."""

    facts: Mapping[str, Any] = field(default_factory=dict)
    """JSON values by name."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    log_lines: bytes = b""
    """Lines to append to the lines of earlier journals."""
    begins_log: bool = False
    """Whether `log_lines` replace the lines of earlier journals."""


@dataclass(frozen=True)
class CommitInterval:
    """How often steps are committed."""

    num_steps: int = 1
    """Steps between commits, or 0 if steps are committed only on request."""
    seconds: float = math.inf
    """The longest time between commits."""

    def is_over(self, num_steps: int, seconds: float) -> bool:
        """Return whether to commit a step that ends this many steps and seconds after the last commit."""
        return 0 < self.num_steps <= num_steps or seconds >= self.seconds

    @classmethod
    def asked_for(cls, setting: int | str) -> CommitInterval:
        """Return the interval of a `commit_every` setting. With "auto", each step is committed until a plan exists."""
        seconds = interval_s(setting)
        if seconds is not None:
            return cls(0, seconds)
        return cls(setting) if isinstance(setting, int) else cls()


def decide_alone(interval: CommitInterval, num_steps: int, since_s: float, step_s: float) -> bool:
    """Return whether to commit the step that begins. It is the ``num_steps``-th since the last commit, which was
    requested ``since_s`` seconds ago. Steps take ``step_s`` seconds."""
    return interval.is_over(num_steps, since_s + step_s)


def has_steps(store: Store) -> bool:
    """Return whether the store has a committed step, after an update, that a run can return to."""
    whole = [commit for commit in store.kept_commits if not commit.is_torn] if store.num_homes > 1 else []
    counts = [commit.facts.get("num_updates") for commit in whole]
    return any(isinstance(count, dict) and any(count.values()) for count in counts)


class StepCommits:
    """Commits an engine's steps to its store, and restores the last commit.

    The decision to commit a step is made when the step begins, because the updates of a committed step write all
    records. In other steps, records with a copy in RAM are not written. A commit on request writes these records first.
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
        """``missed`` has the chunks whose records are some steps old. `GradientPipeline` describes ``run_when_written``
        and ``run_between_updates``. ``decide`` has the arguments of `decide_alone`. A store that keeps one version
        ignores ``interval`` and is committed only on request."""
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
        """Number of steps that have ended since the last request of a commit."""
        self.is_due = self.are_kept
        """Whether the step in progress, or the step that has just ended, will be committed."""
        self._has_begun = self._goes_on = False
        self.each_step = True
        """Whether the engine requests a commit of each step that is due."""
        self._describe: Describe | None = _nothing
        self.run_facts: Callable[[], Mapping[str, Any]] = dict
        """Returns the facts of the run that each commit and checkpoint has."""
        self.resume_facts: Callable[[Mapping[str, Any]], None] = lambda _facts: None
        """Continues with the facts of an earlier commit or checkpoint."""
        self.last_commit_s = 0.0
        self.num_commits = 0

    @property
    def are_kept(self) -> bool:
        """Whether the store has two versions, and thus keeps the last commit until the next one."""
        return self._store.num_homes > 1

    def leave_to_journal(self) -> None:
        """From now on, commit a step only if the owner of the journal calls `request`."""
        self.each_step = False

    def describe_first(self, describe: Describe) -> None:
        """Have the first commit add the files that ``describe`` returns. Until then an earlier run's files stay. The
        thread that requests the commit calls ``describe``. Has no effect after a commit."""
        if self._describe is not None:
            self._describe = describe

    def add_facts(self, facts: Callable[[], Mapping[str, Any]], resume: Callable[[Mapping[str, Any]], None]) -> None:
        """Add the JSON values that ``facts`` returns, by name, to each commit. ``resume`` is called with all facts of
        the commit from which a run continues."""
        self.run_facts, self.resume_facts = facts, resume

    def keep_what_was_loaded(self) -> None:
        """Commit the loaded weights before the first update of the run, so that the first step can be undone. Until
        then the last commit of an earlier run stays and can be restored.

        Updates wait until all ranks have this commit, and reads of other ranks wait for updates. So a rank must call
        this before it gives other ranks gradients or norms, which their updates need. That is before a backward with
        updates, and before ranks agree on norms. Then no rank waits for the commit of a rank that waits for weights.
        """
        if not self._has_begun:
            self._has_begun = True
            if self.each_step:
                self._warn_of_overwrite()
                self.request(even_in_place=True)

    def _warn_of_overwrite(self) -> None:
        """Warn if the next commit replaces the last commit of an earlier run that this run does not continue."""
        last = self._store.committed
        if last is None or last.is_torn or self._goes_on or not self.are_kept:
            return
        logger.warning(
            "this run overwrites the last step of an earlier run in %s (after update %d); to continue from such a "
            "step, call engine_of(model).go_back_to_commit() before the first step",
            self._store.paths[0].path,
            max(map(int, last.facts.get("num_updates", {}).values()), default=0),
        )

    def follow_interval(self, interval: CommitInterval) -> None:
        """Use this interval from the next step on."""
        if self.are_kept:
            self._interval = interval

    def begin_step(self) -> None:
        """Decide whether a step will be committed, at the beginning of its first forward."""
        now_s = time.monotonic()
        step_s = now_s - self._began_s if self._began_s is not None else 0.0
        self._began_s = now_s
        self.is_due = self._decide(self._interval, self._steps_since + 1, now_s - self._asked_s, step_s)
        keeps_new = not self.is_due
        self._run_between_updates(lambda: self._store.ram.keep_new(keeps_new))

    @property
    def has_more(self) -> bool:
        """Whether steps have ended since the last request of a commit."""
        return self._steps_since > 0

    def end_step(self) -> None:
        """Record that a step has ended. Its updates may still run."""
        self._steps_since += 1
        if self.each_step and self.is_due:
            self.request()

    def request(self, journal: Journal | None = None, *, even_in_place: bool = False) -> None:
        """Commit the steps so far with ``journal`` when their updates are written. Returns without waiting. With
        ``even_in_place``, a commit is written even if the next update will overwrite its records."""
        if self.are_kept or even_in_place:
            self._steps_since, self._asked_s = 0, time.monotonic()
            model_files = self._describe() if self._describe is not None else None
            self._describe = None
            facts = {**self.run_facts(), **(journal.facts if journal is not None else {})}
            journal = replace(journal or Journal(), facts=facts)
            self._run_when_written(lambda: self._write(journal, model_files))

    def _write(self, journal: Journal, model_files: Mapping[str, bytes] | None) -> None:
        """Write the commit. The store must have all updates."""
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
        """Drop all writes since the last commit. Raises ValueError if there is no commit, and `TornStoreError` if it
        was overwritten."""
        last = self._store.committed
        if last is None:
            raise ValueError(f"nothing is committed in {self._store.paths[0].path}; train from the beginning")
        self._store.drop_drafts()
        self._goes_on = True
        self.resume_facts(last.facts)
        if self._missed is not None:
            self._missed.restore(last.journal.get(MISSED_STEPS_NAME))
        num_updates = last.facts.get("num_updates")
        if not isinstance(num_updates, dict):
            problem = f"commit {last.number} does not say how many updates its parameters had, in"
            raise StorageError(problem, path=self._store.paths[0].path, advice="resume from a checkpoint")
        self._step_counts.update(
            {part: int(num_updates[part.name]) for part in self._step_counts if part.name in num_updates}
        )
        return last


def _nothing() -> None:
    """Return None, because there are no files to write."""
