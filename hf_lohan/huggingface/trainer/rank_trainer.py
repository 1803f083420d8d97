"""The part of `Trainer` for runs of several ranks."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Iterator, Sized
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_utils import get_last_checkpoint

from hf_lohan.checkpoint.generations import RunStores, resharding_for
from hf_lohan.checkpoint.resume_point import LAST_STEP, ResumePoint, newest_checkpoint, point_of_attempt
from hf_lohan.config import SsdPath
from hf_lohan.files import ForeignStoreError
from hf_lohan.huggingface.models.saving import StoredModel, saving_to
from hf_lohan.huggingface.models.state_dicts import WEIGHTS_NAME, save_state_dict, saves_itself
from hf_lohan.huggingface.ranks import (
    check_batches,
    launch_id,
    links_to_other_ranks,
    log_once,
    num_restarts,
    stores_here,
)
from hf_lohan.huggingface.sequences import ROWS, check_trainer_of_rows, own_parts, sharing_rows
from hf_lohan.huggingface.trainer_mixin import TrainerMixin
from hf_lohan.planning.shared_machine import rank_paths
from hf_lohan.ranks import Links, RankFailedError, check_equal
from hf_lohan.report.run_data import STORE_FOLDER
from hf_lohan.store.rank_folders import shared_directory
from hf_lohan.wording import times

logger = logging.getLogger(__name__)


class RankTrainerMixin(TrainerMixin):
    """Ranks agree on decisions that must be equal, and a rank that fails ends the other ranks."""

    accelerator: Any
    model: Any
    _found: RunStores
    """The stores that the last `train` found at the ssd paths."""

    @property
    def _links(self) -> Links:
        """Links to the other ranks. There are none without offload."""
        return Links.alone() if self._offload_config is None else links_to_other_ranks()

    @contextlib.contextmanager
    def _ending_all_ranks_on_error(self) -> Iterator[None]:
        """In this context, an error also ends the other ranks, because they would wait for this rank."""
        try:
            try:
                yield
            except RuntimeError as error:
                if not isinstance(error, RankFailedError):
                    # Upstream's collectives fail if a rank is gone, but do not name that rank.
                    self._links.watch.find_cause("what Trainer gathers from all ranks")
                raise
        except (Exception, KeyboardInterrupt) as error:
            self._links.fail(error)
            raise

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Same as upstream, but ranks first wait for each other over the links. Upstream's collectives do not name a
        missing rank, and may not notice it immediately."""
        control = self.control
        if control.should_log or control.should_evaluate or control.should_save:
            self._links.barrier("what is logged, evaluated and saved")
        super()._maybe_log_save_evaluate(*args, **kwargs)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        """Same as upstream, but wait for all ranks first, as in `_maybe_log_save_evaluate`. If a rank ends earlier than
        the others, an error names it immediately."""
        self._links.barrier("the end of training")
        return super()._finalize_training(*args, **kwargs)

    def _wait_for_store_paths(self) -> list[str]:
        """Wait for the store's last commit, and return the folders of this rank's store."""
        engine = self.offload_engine
        if engine is not None:
            engine.wait_for_updates()
            return [path.path for path in engine.tiers.store.paths]
        return self._found.own_folders(self._links.ranks.rank, self._links.ranks.num_ranks)

    def _stores_here(self) -> RunStores:
        """Return the stores at this run's ssd paths, or at the model's paths if the model was loaded to other paths."""
        config, default = self._offload_config, Path(self.args.output_dir) / STORE_FOLDER
        assert config is not None
        if self.offload_engine is not None:
            given = rank_paths(config.ssd_paths(default), self._links.ranks)
            own = self._wait_for_store_paths()
            if {_real_directory(path) for path in own} != {_real_directory(ssd.path) for ssd in given}:
                config = replace(config, ssd=tuple(map(SsdPath, own)))
        return stores_here(config, default, self._links)

    def _asked_of_ranks(self, asked: str | bool | None) -> str | bool | None:
        """Return the state to resume from, for ``asked``, the argument of `train`. By default a restarted attempt
        continues where the failed attempt ended. If another number of ranks committed the last step, its stores are
        resharded first. If a part of these stores is gone, return a checkpoint."""
        found = self._found = self._stores_here()
        output_dir, num_ranks = self.args.output_dir, self._links.ranks.num_ranks
        own = found.own_folders(self._links.ranks.rank, num_ranks)
        if {*map(os.path.realpath, self._wait_for_store_paths())} != {*map(os.path.realpath, own)}:
            raise ForeignStoreError(
                f"the stores in {' and '.join(found.directories[0])} were resharded after the model was loaded; load "
                "it again"
            )
        is_of_run = found.is_of_run(output_dir, os.path.join(output_dir, STORE_FOLDER))
        if not is_of_run and found.num_ranks != num_ranks:
            raise ForeignStoreError(
                f"{' and '.join(found.directories[0])} has steps of the run in {found.last.output_dir}, which had "
                f"another number of ranks, and this run's output_dir is {os.path.realpath(output_dir)}; use the same "
                "output_dir, or give this run another ssd path"
            )
        is_copy = found.state == "own" and found.last.resharded_from is not None
        is_last_step = asked is True or asked == LAST_STEP or (not asked and found.is_of_launch)
        if not is_last_step:
            found.refuse_other_ranks(num_ranks)
        if not is_last_step and is_copy:
            raise ValueError(
                f"the stores in {' and '.join(self._wait_for_store_paths())} have step {found.last.step} of "
                f"{times(found.last.resharded_from or 0, 'rank')}, and this run would overwrite it; pass "
                f'resume_from_checkpoint="{LAST_STEP}" to continue from it, or give this run another output_dir or '
                "ssd path"
            )
        if not (is_last_step and is_of_run):
            return self._asked_after_restart(asked)
        if found.state == "lost":
            return self._asked_after_restart(self._checkpoint_after_loss(asked))
        if found.state == "reshardable":
            self._reshard()
        if folders := found.may_delete(self._links.ranks.rank):
            logger.warning("no run needs the stores in %s any more; you may delete them", folders)
        return asked or LAST_STEP if is_copy or found.state == "reshardable" else self._asked_after_restart(asked)

    def _reshard(self) -> None:
        found, num_ranks = times(self._found.num_ranks, "rank"), times(self._links.ranks.num_ranks, "rank")
        reshard = resharding_for(f"continuing a run of {found} with {num_ranks}").reshard_for_these_ranks
        engine, default = self.offload_engine, Path(self.args.output_dir) / STORE_FOLDER
        assert self._offload_config is not None
        opened = None if engine is None else (engine.tiers.store, engine.layout.blocks)
        try:
            given = self._offload_config.ssd_paths(default)
            reshard(self._found, given, self._links, opened)
        except BaseException:
            if engine is not None:  # the store may have a mix of this model's weights and copied weights
                engine.commits.leave_to_journal()
                engine.close()
            raise

    def _checkpoint_after_loss(self, asked: str | bool | None) -> str | bool | None:
        """Return the checkpoint to resume from if a part of the stores is gone, and log the number of lost steps."""
        output_dir, last, why_lost = self.args.output_dir, self._found.last, self._found.why_lost
        checkpoint = newest_checkpoint(last.last_checkpoint, last.run_id, output_dir)
        if asked or (checkpoint is not None and not os.path.isdir(checkpoint)):
            checkpoint = get_last_checkpoint(output_dir) if os.path.isdir(output_dir) else None
        cost = f"costs {times(max(last.step - _step_of(checkpoint), 0), 'step')}"
        if asked == LAST_STEP:
            raise ValueError(
                f"step {last.step}, the last committed step, cannot be resumed, because {why_lost}; restore its "
                + (
                    "folder"
                    if checkpoint is None
                    else f"folder, or pass resume_from_checkpoint=True to continue from {checkpoint}, which {cost}"
                )
            )
        if asked and checkpoint is None:
            return asked  # upstream raises an error, because there is no checkpoint
        log_once(
            self._links,
            f"the last committed step, {last.step}, is lost, because {why_lost}. The run continues from "
            f"{checkpoint or 'its beginning'}, which {cost}. The rest of the old stores stays, and can be used if the "
            "missing part is restored before this run commits a step",
        )
        return checkpoint

    def _asked_after_restart(self, asked: str | bool | None) -> str | bool | None:
        launch = launch_id()
        if asked or launch is None:
            return asked
        # A machine that joined later does not know the number of attempts.
        restarts = self._links.all_gather("the number of this attempt", str(num_restarts()).encode())
        if not any(map(int, restarts)):
            return asked
        point = point_of_attempt(launch, self._wait_for_store_paths(), self.args.output_dir, self._links)
        if self.args.should_log:
            found = (
                "from its beginning, because no step of this launch is committed on all ranks"
                if point is None
                else f"from {point}"
            )
            logger.warning("attempt %d of this run continues %s", max(map(int, restarts)) + 1, found)
        return asked if point is None else point

    def _agree_on_resume(self, point: ResumePoint) -> None:
        """Raise RanksDisagreeError if ranks would resume from different states."""
        what, advice = "the state from which to resume", "resume from a checkpoint that all ranks can read"
        check_equal(what, lambda: {what: _describe(point)}, self._links, advice)

    def _check_batches(self, train_dataloader: Any) -> None:
        """Raise ValueError if ranks would take different numbers of steps."""
        num_batches = -1
        if isinstance(train_dataloader, Sized):
            with contextlib.suppress(TypeError):  # the data loader may have no length
                num_batches = len(train_dataloader)
        check_batches(int(num) for num in self._links.all_gather("the number of batches", str(num_batches).encode()))

    # Rows that several ranks share (`sequence_ranks`).

    @property
    def num_row_ranks(self) -> int:
        """Number of ranks that share each row of a training batch."""
        engine = self.offload_engine
        config = self._offload_config if engine is None else engine.config
        return 1 if config is None else config.ranks.per_row

    def get_train_dataloader(self) -> Any:
        """Same as upstream, but ranks that share rows get the same batches."""
        if self.num_row_ranks == 1:
            return super().get_train_dataloader()
        check_trainer_of_rows(self, self.num_row_ranks)
        with self.accelerator.loading_for(self.num_row_ranks):
            return super().get_train_dataloader()

    def get_total_train_batch_size(self, args: Any) -> int:
        """Same as upstream, but ranks that share rows count once."""
        return int(super().get_total_train_batch_size(args)) // self.num_row_ranks

    def get_batch_samples(self, epoch_iterator: Any, *args: Any, **kwargs: Any) -> Any:
        """Same as upstream, but divide batches among the ranks that share their rows, before labels are counted."""
        engine = self.offload_engine
        if engine is not None and engine.tiers.row_memory is not None:
            epoch_iterator = own_parts(epoch_iterator, engine.tiers.row_memory.links)
        return super().get_batch_samples(epoch_iterator, *args, **kwargs)

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Same as upstream, but the model's forward gets the rows if the batch has only parts of them."""
        rows = inputs.get(ROWS)
        if rows is None:
            return super().compute_loss(model, inputs, *args, **kwargs)
        inputs = {name: value for name, value in inputs.items() if name != ROWS}
        with sharing_rows(self.model, rows, inputs["shift_labels"]):
            return super().compute_loss(model, inputs, *args, **kwargs)

    def _save_optimizer_files(self, folder: str) -> None:
        """Save the files of optimizer and scheduler on every rank, because each rank has its own journal. Upstream
        saves them on rank 0 only."""
        if not self.args.should_save:
            torch.save(self.optimizer.state_dict(), os.path.join(folder, OPTIMIZER_NAME))
            torch.save(self.lr_scheduler.state_dict(), os.path.join(folder, SCHEDULER_NAME))

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Same as upstream, but all ranks take part, because each has a shard of the weights."""
        engine, folder = self.offload_engine, output_dir or self.args.output_dir
        if engine is None:
            super()._save(output_dir, state_dict)
            return
        model, file = self.accelerator.unwrap_model(self.model), Path(folder) / f"{WEIGHTS_NAME}.safetensors"
        with saving_to(folder):
            if not saves_itself(model):
                super()._save(output_dir, {})  # no weights are passed, because upstream would save placeholders
                save_state_dict(StoredModel.from_engine(engine), file, state_dict)
            elif self.args.should_save:
                super()._save(output_dir, state_dict)
            else:
                model.save_pretrained(folder)


def _real_directory(path: str) -> str:
    return os.path.realpath(shared_directory(path))


def _describe(point: ResumePoint) -> str:
    if point.commit is not None:
        return f"step {point.commit.facts.get('global_step')} of its store"
    if point.folder is True:
        return "its last checkpoint"
    return f"the checkpoint {point.folder}" if point.folder else "the start"


def _step_of(checkpoint: str | None) -> int:
    """Return the step of a checkpoint, or 0 for None or a folder without a step."""
    if checkpoint is None:
        return 0
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        return int(json.loads((Path(checkpoint) / TRAINER_STATE_NAME).read_text(encoding="utf-8"))["global_step"])
    return 0
