"""The connections of this process to the other ranks of its run: made once, when the first model is offloaded."""

from __future__ import annotations

import os

from accelerate import PartialState
from accelerate.utils import parse_flag_from_env

from hf_lohan.compat.torch_private import default_process_group_store
from hf_lohan.device import num_gpus
from hf_lohan.huggingface.rank_guards import check_joined
from hf_lohan.ranks import ONE_RANK, Links, Ranks, connect

_FIRST_TIMEOUT_S = 600.0
"""Ranks start, import and load at different speeds."""
_links: Links | None = None


def ranks_here() -> Ranks:
    """Which rank this process is, by what its launcher said. Raises ValueError if that is not enough."""
    num_launched = os.environ.get("WORLD_SIZE", "1")
    if num_launched == "1":
        return ONE_RANK
    on_cpu = parse_flag_from_env("ACCELERATE_USE_CPU") or num_gpus() == 0
    state = PartialState(cpu=on_cpu)  # the one that Trainer or an Accelerator has made, if there is one
    check_joined(state.num_processes)
    num_local = os.environ.get("LOCAL_WORLD_SIZE", "")
    if not num_local.isdigit():
        raise ValueError(
            f"LOCAL_WORLD_SIZE={num_local!r} does not say how many of the {num_launched} processes are on each "
            "machine; set it, or start them with lohan launch or torchrun, which do"
        )
    return Ranks(state.process_index, state.num_processes, state.local_process_index, int(num_local))


def links_to_other_ranks() -> Links:
    """To all other processes that a launcher started with this one; alone where it is the only one. Raises
    RankFailedError or RankTimeoutError where they do not come."""
    global _links
    if _links is None:
        ranks = ranks_here()
        if not ranks.others:
            return Links.alone()
        _links = connect(ranks, default_process_group_store(), _FIRST_TIMEOUT_S)
    return _links
