"""The ranks of a run: which one this process is, its connections to the others, and what several ranks cannot do.

What is refused is refused before anything is written, with what to do instead.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from accelerate import Accelerator, PartialState
from accelerate.utils import parse_flag_from_env
from transformers import TrainingArguments

from hf_lohan.compat.torch_private import default_process_group_store
from hf_lohan.config import OffloadConfig
from hf_lohan.device import num_gpus
from hf_lohan.files.directories import make_directory
from hf_lohan.model import Block
from hf_lohan.planning import OffloadLayout
from hf_lohan.ranks import SINGLE_RANK, Links, Ranks, connect
from hf_lohan.store.rank_folders import refuse_other_ranks, shared_directory

_FIRST_TIMEOUT_S = 600.0
"""Ranks start, import and load at different speeds."""
_OTHER_PARALLELISM = ("tp_size", "cp_size", "sp_size", "dp_shard_size")
_links: Links | None = None


def ranks_here() -> Ranks:
    """Which rank this process is, by what its launcher said. Raises ValueError if that is not enough."""
    num_launched = os.environ.get("WORLD_SIZE", "1")
    if num_launched == "1":
        return SINGLE_RANK
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


def check_rank_arguments(args: TrainingArguments) -> None:
    """Raises ValueError for `TrainingArguments` that the ranks of a run cannot follow alike."""
    check_joined(args.world_size)
    check_parallelism(getattr(args, "parallelism_config", None))
    if args.world_size == 1:
        return
    loaders = args.accelerator_config
    even_batches = loaders.get("even_batches", True) if isinstance(loaders, dict) else loaders.even_batches
    refused = {
        "auto_find_batch_size=True tries batch sizes on each rank by itself, and ranks have to take steps together; "
        "set per_device_train_batch_size": args.auto_find_batch_size,
        "even_batches=False lets one rank have fewer batches than the others, which would wait for it; leave "
        "accelerator_config as it is": not even_batches,
        "save_on_each_node=True makes a checkpoint on each machine, and each rank saves its part into one; leave it "
        "off, and put output_dir on a file system that all machines see": args.save_on_each_node,
    }
    for sentence, is_refused in refused.items():
        if is_refused:
            raise ValueError(sentence)


def check_rank_accelerator(accelerator: Accelerator) -> None:
    """Raises ValueError for an `Accelerator` of a raw loop whose processes would not train together."""
    check_joined(accelerator.num_processes)
    check_parallelism(accelerator.parallelism_config)
    if accelerator.num_processes > 1 and not accelerator.even_batches:
        raise ValueError(
            "even_batches=False lets one rank have fewer batches than the others, which would wait for it; leave it on"
        )


def check_joined(num_processes: int) -> None:
    """Raises ValueError if a launcher started several processes that do not know of each other."""
    num_launched = os.environ.get("WORLD_SIZE", "1")
    if num_processes == 1 and num_launched.isdigit() and int(num_launched) > 1:
        raise ValueError(
            f"WORLD_SIZE={num_launched} says that {num_launched} processes were launched together, but each of them "
            "trains alone and all would write the same files; launch them with lohan launch, or set "
            "ACCELERATE_USE_CPU=true (use_cpu=True in TrainingArguments) to train on CPUs"
        )


def check_parallelism(parallelism: Any) -> None:
    """Raises ValueError for a `ParallelismConfig` that cuts models or sequences."""
    for name in _OTHER_PARALLELISM:
        size = getattr(parallelism, name, None) or 1
        if size > 1:
            raise ValueError(
                f"{name}={size} cuts what offload keeps whole on each GPU; leave parallelism_config out, and every "
                "process is a rank with batches of its own"
            )


def check_layout(layout: OffloadLayout, config: OffloadConfig, links: Links) -> None:
    """Raises ValueError for a model that several ranks cannot train, or whose store is that of other ranks. All ranks
    call this together; afterwards the directories are there in which each makes a folder of its own."""
    num_ranks = links.ranks.num_ranks
    check_rules(layout.blocks, num_ranks)
    assert config.ssd != "auto"
    for ssd in config.ssd:
        refuse_other_ranks(shared_directory(ssd.path), num_ranks)
    if num_ranks > 1:
        for ssd in config.ssd:
            make_directory(shared_directory(ssd.path))
        links.barrier("the directories of the ssd paths to be there")


def check_rank_model(model: Any, ranks: Ranks) -> None:
    """Raises ValueError for adapters that several ranks cannot save together."""
    adapters = getattr(model, "peft_config", {})
    prompts = [name for name, config in adapters.items() if getattr(config, "is_prompt_learning", False)]
    if ranks.others and prompts:
        raise ValueError(
            f"the adapter {prompts[0]!r} learns prompts, which PEFT computes on one rank alone when it saves; train it "
            "in one process, or use LoRA"
        )


def check_rules(blocks: Iterable[Block], num_ranks: int) -> None:
    """Raises ValueError for optimizers that need parameters whole, of which each rank has a part."""
    whole = sorted({block.master.rule.name for block in blocks if block.needs_whole})
    if num_ranks > 1 and whole:
        raise ValueError(
            f"{' and '.join(whole)} needs each parameter whole, and with {num_ranks} ranks each has a part of them; "
            "use AdamW, or train in one process"
        )


def check_batches(nums_of_ranks: Iterable[int]) -> None:
    """Raises ValueError if ranks would take different numbers of micro-batches in an epoch."""
    nums = list(nums_of_ranks)
    for rank, num in enumerate(nums):
        if num != nums[0]:
            raise ValueError(
                f"rank 0 has {nums[0]} batches in an epoch and rank {rank} has {num}, so one would wait for the other; "
                "let accelerate prepare the data loader, or give each rank as many"
            )
