"""Finds the rank of this process, connects it to other ranks, and checks runs of several ranks.

The checks run before anything is written.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import psutil
import torch
from accelerate import Accelerator, ParallelismConfig, PartialState
from accelerate.utils import parse_flag_from_env
from transformers import GenerationMixin, TrainingArguments

from hf_lohan.checkpoint.generations import RunStores, find_stores, refuse_steps
from hf_lohan.compat.torch_private import default_process_group_store, prefix_rendezvous, set_collectives_timeout
from hf_lohan.config import AUTO, OffloadConfig, RankSettings
from hf_lohan.device import num_gpus
from hf_lohan.files import ForeignStoreError
from hf_lohan.files.directories import make_directory
from hf_lohan.files.lock import DirectoryLock
from hf_lohan.huggingface.equal_runs import check_equal_packages
from hf_lohan.model import Block
from hf_lohan.planning import OffloadLayout
from hf_lohan.planning.shared_machine import searched_directories
from hf_lohan.ranks import SINGLE_RANK, Links, Ranks, connect
from hf_lohan.store import RecordSpec
from hf_lohan.store.commits import COMMIT_NAME
from hf_lohan.store.manifest import read_manifest
from hf_lohan.store.rank_folders import shared_directory
from hf_lohan.store.store_folders import remove_store

logger = logging.getLogger(__name__)

_FIRST_TIMEOUT_S = 600.0
"""Timeout before a plan. It is long, because ranks start, import and load at different speeds."""
_OTHER_PARALLELISM = ("tp_size", "cp_size", "sp_size", "dp_shard_size")
_SEQUENCE_PARALLELISM = ("cp_size", "sp_size")
_links: Links | None = None


def launch_id() -> str | None:
    """Return an id that all attempts of one launch of torchrun share on this machine. None if torchrun did not start
    this process. accelerate's launcher uses torchrun too."""
    run_id = os.environ.get("TORCHELASTIC_RUN_ID")
    if run_id is None:
        return None
    launcher = psutil.Process(os.getppid())
    return f"{run_id}/{launcher.pid}/{launcher.create_time():.2f}"


def num_restarts() -> int:
    """Return the number of earlier attempts of the same launch of torchrun, which all failed."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def separate_attempts() -> None:
    """Make a restarted attempt connect only its own processes. The launcher's key-value store still has the addresses
    of the failed attempt's processes, and torch would connect to these. Without a store of the launcher nothing is
    done: each attempt has its own store, and machines that join later do not know the number of attempts."""
    if num_restarts() and os.environ.get("TORCHELASTIC_USE_AGENT_STORE", "True") == "True":
        prefix_rendezvous(f"attempt/{num_restarts()}")


def ranks_here() -> Ranks:
    """Return the ranks, from the environment variables that the launcher of this process sets. Raises ValueError if
    these are incomplete."""
    num_launched = os.environ.get("WORLD_SIZE", "1")
    if num_launched == "1":
        return SINGLE_RANK
    on_cpu = parse_flag_from_env("ACCELERATE_USE_CPU") or num_gpus() == 0
    state = PartialState(cpu=on_cpu)  # a Trainer or an Accelerator may have created this shared state
    check_joined(state.num_processes)
    num_local = os.environ.get("LOCAL_WORLD_SIZE", "")
    if not num_local.isdigit():
        raise ValueError(
            f"LOCAL_WORLD_SIZE={num_local!r} is not the number of processes on each machine ({num_launched} processes "
            "were started in all); set it, or start the processes with lohan launch or torchrun, which set it"
        )
    return Ranks(state.process_index, state.num_processes, state.local_process_index, int(num_local))


def links_to_other_ranks() -> Links:
    """Return the links to all other processes that a launcher started together with this process. There are none if
    this is the only process. Raises RankFailedError or RankTimeoutError if another process does not connect, and
    RanksDisagreeError if it has other packages."""
    global _links
    if _links is None:
        ranks = ranks_here()
        if not ranks.others:
            return Links.alone()
        _links = connect(ranks, default_process_group_store(), _FIRST_TIMEOUT_S)
        check_equal_packages(_links)
    return _links


class StepTimeouts:
    """Sets the timeout for silent ranks, for the links and for torch's collectives. A number in the settings applies
    after the first plan, because ranks measure the hardware one after another before it. `auto` follows the slowest
    step so far."""

    def __init__(self, links: Links, settings: RankSettings) -> None:
        self._links = links
        self._settings = settings
        self._slowest_step_s = 0.0
        self._began_s: float | None = None

    def step_planned(self) -> None:
        if self._settings.timeout != AUTO:
            self._set()

    def step_began(self) -> None:
        now_s, before_s = time.monotonic(), self._began_s
        self._began_s = now_s
        if before_s is not None:
            self._slowest_step_s = max(self._slowest_step_s, now_s - before_s)
            self._set()

    def _set(self) -> None:
        timeout_s = self._settings.timeout_s(self._slowest_step_s)
        self._links.watch.timeout_s = timeout_s
        if torch.distributed.is_initialized():
            set_collectives_timeout(timeout_s)


def check_rank_arguments(args: TrainingArguments) -> None:
    """Raise ValueError for `TrainingArguments` with which ranks would not take steps together."""
    check_joined(args.world_size)
    check_parallelism(getattr(args, "parallelism_config", None) or _parallelism_of_environment())
    if args.world_size == 1:
        return
    loaders = args.accelerator_config
    even_batches = loaders.get("even_batches", True) if isinstance(loaders, dict) else loaders.even_batches
    refused = {
        "auto_find_batch_size=True lets each rank try batch sizes by itself, but ranks must take steps together; set "
        "per_device_train_batch_size": args.auto_find_batch_size,
        "even_batches=False allows one rank fewer batches than the others, which would wait for it; leave it out of "
        "accelerator_config": not even_batches,
        "save_on_each_node=True makes a checkpoint on each machine, but all ranks save their parts to one checkpoint; "
        "leave it off, and put output_dir on a file system that all machines share": args.save_on_each_node,
    }
    for sentence, is_refused in refused.items():
        if is_refused:
            raise ValueError(sentence)


def check_rank_accelerator(accelerator: Accelerator) -> None:
    """Raise ValueError for an `Accelerator` whose processes would not train together."""
    check_joined(accelerator.num_processes)
    check_parallelism(accelerator.parallelism_config)
    if accelerator.num_processes > 1 and not accelerator.even_batches:
        raise ValueError(
            "even_batches=False allows one rank fewer batches than the others, which would wait for it; leave it on"
        )


def check_joined(num_processes: int) -> None:
    """Raise ValueError if a launcher started several processes that are not connected."""
    num_launched = os.environ.get("WORLD_SIZE", "1")
    if num_processes == 1 and num_launched.isdigit() and int(num_launched) > 1:
        raise ValueError(
            f"WORLD_SIZE={num_launched}: {num_launched} processes were launched together, but each would train alone "
            "and write the same files; launch them with lohan launch, or set ACCELERATE_USE_CPU=true (use_cpu=True in "
            "TrainingArguments) to train on CPUs"
        )


def _parallelism_of_environment() -> ParallelismConfig | None:
    return ParallelismConfig() if parse_flag_from_env("ACCELERATE_USE_PARALLELISM_CONFIG") else None


def check_parallelism(parallelism: Any) -> None:
    """Raise ValueError for a `ParallelismConfig` that shards models or sequences."""
    for name in _OTHER_PARALLELISM:
        size = getattr(parallelism, name, None) or 1
        if size > 1:
            if name in _SEQUENCE_PARALLELISM:
                raise ValueError(
                    f"{name}={size} shards sequences by a backend that cannot follow streamed weights; leave "
                    f"parallelism_config out, and set ranks.per_row: {size} in the offload settings"
                )
            raise ValueError(
                f"{name}={size} shards the model or its sequences, but offload computes both whole on each GPU; leave "
                "parallelism_config out of the arguments and of accelerate's config, so that each process is a rank "
                "with its own batches"
            )


def stores_here(config: OffloadConfig, default_ssd_path: str | os.PathLike[str], links: Links) -> RunStores:
    """Return the stores at the ssd paths of ``config``. All ranks call this together. Raises the errors of
    `find_stores`."""
    launch, given = launch_id(), config.ssd_paths(default_ssd_path)
    return find_stores(searched_directories(given, links.ranks), links, launch)


def at_stores(
    config: OffloadConfig, default_ssd_path: str | os.PathLike[str], links: Links
) -> tuple[OffloadConfig, RunStores]:
    """Return the config with the folders of this rank's store as ssd paths, and the stores that were found. All ranks
    call this together. Raises the errors of `stores_here`."""
    found = stores_here(config, default_ssd_path, links)
    folders = found.own_folders(links.ranks.rank, links.ranks.num_ranks)
    given = config.ssd_paths(default_ssd_path)
    own = [replace(ssd, path=path, names_ranks=False) for ssd, path in zip(given, folders, strict=True)]
    return replace(config, ssd=tuple(own)), found


def refuse_changed(found: RunStores, links: Links) -> None:
    """Raise `ForeignStoreError` if another process has made a newer generation since the stores were ``found``. Later
    runs would continue from the newer generation. All ranks call this together."""
    if find_stores(found.directories, links, None).generation != found.generation:
        raise ForeignStoreError(
            f"the stores in {' and '.join(found.directories[0])} were resharded by another process while this run "
            "began; start again"
        )


def remove_left_copy(paths: Sequence[str], records: Sequence[RecordSpec]) -> None:
    """Remove the incomplete copy of a killed reshard from the folders of this rank's new store, unless it has the same
    ``records`` and no commit."""
    manifest = next(filter(None, map(read_manifest, paths)), None)
    is_committed = any(os.path.lexists(os.path.join(path, COMMIT_NAME)) for path in paths)
    if is_committed or (manifest is not None and manifest.layout.records != tuple(records)):
        with contextlib.ExitStack() as locks:
            for path in paths:
                locks.callback(DirectoryLock(path).close)
            refuse_steps(paths)
            remove_store(paths)


def log_once(links: Links, sentence: str) -> None:
    if links.ranks.rank == 0:
        logger.warning(sentence)


def check_layout(
    layout: OffloadLayout, folders: Sequence[str], found: RunStores, links: Links, *, is_beside_others: bool = False
) -> None:
    """Raise ValueError if several ranks cannot train the model. Unless ``is_beside_others``, also raise it if the run
    has ``found`` stores of another number of ranks. All ranks call this together. Creates the directories of the
    ``folders`` in which this rank creates its store."""
    num_ranks = links.ranks.num_ranks
    check_rules(layout.blocks, num_ranks)
    if not is_beside_others or found.fingerprint not in ("", layout.identity.fingerprint):
        found.refuse_other_ranks(num_ranks)
    if found.state in ("reshardable", "lost"):
        remove_left_copy(folders, layout.records)
    for folder in folders:
        if shared_directory(folder) != folder:
            make_directory(shared_directory(folder))
    links.barrier("the directories of the ssd paths to exist")


def check_rank_model(model: Any, ranks: Ranks) -> None:
    """Raise ValueError for adapters that several ranks cannot save together."""
    adapters = getattr(model, "peft_config", {})
    prompts = [name for name, config in adapters.items() if getattr(config, "is_prompt_learning", False)]
    if ranks.others and prompts:
        raise ValueError(
            f"the adapter {prompts[0]!r} learns prompts, which PEFT computes on one rank alone when it saves; train it "
            "in one process, or use LoRA"
        )


_STOCK_GENERATE = "_lohan_stock_generate"
"""Attribute of a module with the former `generate` of the instance, or None if only its class has one."""


def generate_together(model: Any, links: Links, is_closed: Callable[[], bool]) -> None:
    """Make all ranks begin `generate` together, because they load the blocks of a forward together. If torch connects
    the ranks, a rank with complete sequences continues until all ranks are complete. Otherwise it only serves its
    weights to the others. `generate` raises RanksDisagreeError if another rank makes another call. If ``is_closed()``
    is true, nothing changes."""
    for module in model.modules() if links.ranks.others else ():
        if isinstance(module, GenerationMixin):
            vars(module).setdefault(_STOCK_GENERATE, vars(module).get("generate"))
            module.generate = functools.partial(_generate_together, weakref.ref(module), links, is_closed)


def _generate_together(
    generating: weakref.ref[Any], links: Links, is_closed: Callable[[], bool], *args: Any, **kwargs: Any
) -> Any:
    module = generating()
    assert module is not None, "a method of the module is running"
    stock = vars(module)[_STOCK_GENERATE] or functools.partial(type(module).generate, module)
    if is_closed():
        return stock(*args, **kwargs)
    links.barrier("model.generate")
    if torch.distributed.is_initialized():
        return stock(*args, **{"synced_gpus": True, **kwargs})
    generated = stock(*args, **kwargs)
    links.barrier("the end of model.generate")
    return generated


def check_sequence_ranks(sequence_ranks: int, ranks: Ranks) -> None:
    """Raise ValueError if ``sequence_ranks`` does not divide the ranks of a node."""
    if ranks.num_local % sequence_ranks:
        raise ValueError(
            f"ranks.per_row: {sequence_ranks} does not divide the {ranks.num_local} ranks of each machine; start a "
            f"multiple of {sequence_ranks} ranks on each (lohan launch --num_processes), or change ranks.per_row"
        )


def check_rules(blocks: Iterable[Block], num_ranks: int) -> None:
    """Raise ValueError for optimizers that need whole parameters, because a rank has only shards."""
    whole = sorted({block.master.rule.name for block in blocks if block.needs_whole})
    if num_ranks > 1 and whole:
        raise ValueError(
            f"{' and '.join(whole)} needs whole parameters, but each of {num_ranks} ranks has a shard of them; use "
            "AdamW, or train in one process"
        )


def check_batches(nums_of_ranks: Iterable[int]) -> None:
    """Raise ValueError if ranks would take different numbers of micro-batches in an epoch."""
    nums = list(nums_of_ranks)
    for rank, num in enumerate(nums):
        if num != nums[0]:
            raise ValueError(
                f"rank 0 has {nums[0]} batches in an epoch and rank {rank} has {num}, so one rank would wait for the "
                "other forever; let accelerate prepare the data loader, or give each rank the same number"
            )
