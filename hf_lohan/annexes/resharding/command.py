"""`lohan reshard`: copies the last step of a run, shows a progress bar, and prints the result."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from hf_lohan.annexes.resharding.at_start import shown_copy
from hf_lohan.annexes.resharding.reshard import LoggedProgress, reshard
from hf_lohan.cli.stores import print_line, ssd_paths_of
from hf_lohan.wording import times


def reshard_stores(
    stores: Sequence[str], num_ranks: int, *, removes_old: bool, balances: bool = False, num_nodes: int | None = None
) -> None:
    """Copy the last step of a run for another number of ranks, and print the new folders. ``balances`` gives experts to
    other owners. Raises the errors of `reshard`, and ValueError for ``num_nodes`` without ``balances``."""
    if num_nodes is not None and not balances:
        raise ValueError("--nodes is only used with --balance, which divides experts; leave it out, or add --balance")
    console, logged = Console(stderr=True), LoggedProgress("copied")
    with shown_copy(logged) as on_copied:
        resharded = reshard(
            ssd_paths_of(stores),
            num_ranks,
            removes_old=removes_old,
            balances=balances,
            num_nodes=num_nodes,
            on_copied=on_copied,
        )
    print_line(console, logged.text())
    step = resharded.global_step
    what = f"commit {resharded.commit_number}" if step is None else f"step {step}"
    text = f"{what} of {times(resharded.num_ranks_before, 'rank')} is in {', '.join(resharded.folders)}"
    if (balanced := resharded.balanced) is not None:
        is_same = resharded.num_ranks_before == num_ranks
        before = f"before it was {balanced.most_before:.2f} times"
        print_line(
            Console(),
            f"in {balanced.num_rows:,} counted rows of experts, the most loaded rank of a layer has on average "
            f"{balanced.most_after:.2f} times the mean load ({times(num_ranks, 'rank')} on "
            f"{times(balanced.num_nodes, 'node')}); "
            + (before if is_same else f"without --balance it would be {balanced.most_before:.2f} times"),
        )
    if not removes_old:
        text += (
            "; a run continues from there. The old stores stay: on each ssd path, you may delete "
            f"{resharded.old_files} (--remove-old does this), or {resharded.new_files} to continue as before"
        )
    print_line(Console(), text)
