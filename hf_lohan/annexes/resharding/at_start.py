"""Reshards at the start of a run that continues with another number of ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

from hf_lohan.annexes.resharding.reshard import LoggedProgress
from hf_lohan.annexes.resharding.reshard_together import reshard_together
from hf_lohan.checkpoint.generations import RunStores
from hf_lohan.config import SsdPath
from hf_lohan.huggingface.progress import advance, long_work
from hf_lohan.huggingface.ranks import launch_id, log_once
from hf_lohan.model import Block
from hf_lohan.ranks import Links
from hf_lohan.store import Store
from hf_lohan.wording import times


def reshard_for_these_ranks(
    found: RunStores,
    given: Sequence[SsdPath],
    links: Links,
    opened: tuple[Store, Sequence[Block]] | None = None,
) -> None:
    """Copy the last step of a run with another number of ranks to new stores of these ranks, and log this. The old
    stores stay. ``given``: the ssd paths of the settings, with capacities. ``opened``: this rank's own store and its
    blocks, if a model was streamed to it. All ranks call this together. Raises the errors of `reshard_together`."""
    log_once(
        links,
        f"step {found.last.step} was committed by {times(found.num_ranks, 'rank')}, and its stores are resharded for "
        f"{times(links.ranks.num_ranks, 'rank')}",
    )
    capacities = [ssd.capacity if isinstance(ssd.capacity, int) else None for ssd in given]
    progress = LoggedProgress("resharded")
    with shown_copy(progress, is_shown=links.ranks.rank == 0) as on_copied:
        reshard_together(found, links, launch_id(), capacities, opened, on_copied)
    log_once(links, progress.text())


@contextlib.contextmanager
def shown_copy(progress: LoggedProgress, *, is_shown: bool = True) -> Iterator[Callable[[int, int], None]]:
    """Yield a callback that counts copied bytes in ``progress``, and shows them in a line on the terminal."""
    with contextlib.ExitStack() as line:

        def on_copied(num_bytes: int, total_bytes: int) -> None:
            if is_shown:
                if not progress.num_bytes:
                    line.enter_context(long_work("resharding the stores", total_bytes))
                advance(num_bytes)
                progress.advance(num_bytes, total_bytes)

        yield on_copied
