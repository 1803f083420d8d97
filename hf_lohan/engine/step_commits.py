"""Which steps are committed, and when: behind their updates, without making anybody wait."""

from __future__ import annotations

from collections.abc import Callable

from hf_lohan.engine.step_log import Journal, StepLog
from hf_lohan.store import Store
from hf_lohan.timeline import UPDATES_WAIT, Timeline
from hf_lohan.updates import GradientPipeline


class StepCommits:
    """Commits a store as the steps of one engine go by."""

    def __init__(self, store: Store, step_log: StepLog, pipeline: GradientPipeline, timeline: Timeline) -> None:
        self._store = store
        self._step_log = step_log
        self._pipeline = pipeline
        self._timeline = timeline
        self._has_begun = False
        self.each_step = True
        """Whether each step is committed by itself."""
        self._describe: Callable[[], None] | None = _nothing

    @property
    def are_kept(self) -> bool:
        """Whether the store holds its last commit until the next one: it has two versions."""
        return self._store.num_homes > 1

    def leave_to_journal(self) -> None:
        """From now on whoever has a journal to go with each step calls `commit`."""
        self.each_step = False

    def describe_first(self, write: Callable[[], None]) -> None:
        """Have ``write`` put beside the records what belongs to this model, with the first commit; until then what an
        earlier run wrote stays. Too late if there was a commit already."""
        if self._describe is not None:
            self._describe = write

    def commit_what_was_loaded(self) -> None:
        """Before the first update of all: the first step can then be undone as any other. Not earlier: until here the
        steps of the run before are there to go back to."""
        if not self._has_begun:
            self._has_begun = True
            if self.each_step:
                self.commit(even_in_place=True)

    def end_step(self) -> None:
        """A step is over; its updates may still run."""
        if self.each_step:
            self.commit()

    def commit(self, journal: Journal | None = None, *, even_in_place: bool = False) -> None:
        """Make the steps so far last, as soon as their updates are written; does not wait for that. `journal` is found
        again when the engine goes back. Where the next update would overwrite the commit, only if `even_in_place`."""
        if self.are_kept or even_in_place:
            self._pipeline.when_written(lambda: self._commit_now(journal or Journal()))

    def _commit_now(self, journal: Journal) -> None:
        if self._describe is not None:
            self._describe()
            self._describe = None
        with self._timeline.task(UPDATES_WAIT, "commit"):
            self._step_log.commit(journal)


def _nothing() -> None:
    """Nobody has anything to write."""
