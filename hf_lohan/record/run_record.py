"""Writes a run's settings, figures and plan to `<folder>/lohan/{config,summary,plan}.json`. Prints two lines."""

from __future__ import annotations

import json
import logging
import os
import statistics
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

from hf_lohan import __version__
from hf_lohan.costs import OffloadPlan
from hf_lohan.engine import OffloadEngine
from hf_lohan.files import CapacityError, StorageError, replace_durably, write_failure
from hf_lohan.files.directories import make_folders
from hf_lohan.hardware import AnonymousMemoryPeak
from hf_lohan.optim import OffloadOptimizer
from hf_lohan.planning.run_plan import RunPlan
from hf_lohan.planning.wear import Wear, wear_of
from hf_lohan.ranks import Ranks
from hf_lohan.record.steps import StepLines, device_memory
from hf_lohan.report.run_data import (
    CORRECTED_PLAN_NAME,
    FOLDER,
    PATHS_OF_RANKS,
    PLAN_NAME,
    PRIVATE_FOLDER,
    SETTINGS_NAME,
    SUMMARY_NAME,
)
from hf_lohan.store.rank_folders import rank_folder, shared_directory
from hf_lohan.threads import usable_cpus
from hf_lohan.wording import count, format_bytes

logger = logging.getLogger(__name__)

_NUM_STEPS_TO_PLAN = 2
"""After this number of steps, a run that still has no plan prints "not planned"."""


def record_folder(output_dir: Path, ranks: Ranks) -> Path:
    """Return the folder for a rank's figures. For rank 0 it is the run's folder. `lohan report` reads all folders."""
    if ranks.rank == 0:
        return output_dir
    return Path(rank_folder(str(output_dir / PRIVATE_FOLDER), ranks.rank, ranks.num_ranks))


_MUCH_SWAPPED_BYTES = 256 << 20
"""A run warns if more bytes are swapped out during a step. The kernel may swap out a little of idle programs."""
_CLEARLY_FITS = 0.7
"""If a run needs less than this fraction of the device's memory, it prints that offloading is not needed. The planner
counts 16 bytes for each weight. The stock Trainer needs up to 22, with a copy for autocast and the temporaries of an
optimizer that is not fused. So the limit is below 16/22. `offload="auto"` counts the copy and temporaries too."""


class RunRecord:
    """Times steps, counts tokens and writes the run's files. The trainer or the loop calls its methods.

    The summary is written when training begins, when the plan is made, and when training ends, so that an unfinished or
    killed run has a summary.
    """

    def __init__(self, engine: OffloadEngine, plan: RunPlan | None, folder: Path, say: Callable[[str], None]) -> None:
        self.engine = engine
        self._plan = plan
        self._say = say
        self._peak = AnonymousMemoryPeak()
        self.lines = StepLines(engine, plan)
        self._folder = folder
        self._num_planned_steps: int | None = None
        self._step_s: list[float] = []
        self._step_tokens: list[int] = []
        self._num_tokens = 0
        self._began_s = 0.0
        self._cpu_load = 0.0
        """Load average of the machine in the last minute before training, in CPUs."""
        self._written_plan: OffloadPlan | None = None
        self._is_announced = self._has_warned_of_swap = False
        self._swapped_out_bytes = 0
        """Bytes that the machine had written to swap space when the last step ended."""

    @property
    def _now(self) -> OffloadPlan | None:
        return self._plan.plan if self._plan is not None else None

    @property
    def planned_step_s(self) -> float | None:
        """Predicted seconds of a step, or None without a plan."""
        return self._now.prediction.step_s if self._now is not None else None

    # During the run.

    def begin_run(self, *, step: int, num_steps: int | None, num_micro_batches: int = 1) -> None:
        """Begin training after `step`. The last step is `num_steps`. None means that the last step is not known."""
        folder, self._num_planned_steps = self._folder / FOLDER, num_steps
        self._is_announced = False
        _refuse_folders(folder)
        self._cpu_load = os.getloadavg()[0]
        self._swapped_out_bytes = _swapped_out_bytes()
        self._peak.start()
        if self._plan is not None and num_steps is not None:
            self._plan.begin_run(num_steps=num_steps - step, num_micro_batches=num_micro_batches)
        settings = self.engine.config.to_dict()
        of_ranks = self.engine.tiers.paths_of_ranks
        if len({tuple(map(shared_directory, paths)) for paths in of_ranks}) > 1:
            for ssd, paths in zip(settings["ssd"], zip(*of_ranks, strict=False), strict=False):
                ssd[PATHS_OF_RANKS] = paths
        self._write(SETTINGS_NAME, settings)
        self._write_summary(is_finished=False)
        self.lines.begin_run(folder, step)

    def begin_step(self) -> None:
        self._began_s = time.perf_counter()
        self._num_tokens = 0
        self.lines.begin_step()

    def count_tokens(self, inputs: Any) -> None:
        ids = inputs.get("input_ids") if hasattr(inputs, "get") else None
        self._num_tokens += ids.numel() if ids is not None else 0

    def announce_run(self) -> None:
        """Print one line on this run, once and as soon as the plan is known. Called after each micro-batch."""
        planned = self._now.prediction if self._now is not None else None
        if self._is_announced or (planned is None and len(self._step_s) < _NUM_STEPS_TO_PLAN):
            return
        self._is_announced = True
        layout, tiers, config = self.engine.layout, self.engine.tiers, self.engine.config
        step = f"a step should take {planned.step_s:.3g} s, bound by {planned.bottleneck}" if planned else "not planned"
        in_all = ""
        if (process := self.engine.planned_memory.process) is not None:
            process.note_peak(self._peak.peak_bytes)
            in_all = f"the process should take {format_bytes(process.expected_bytes)} of RAM in all; "
        wear = self._wear()
        words = f"; {wear.words}" if wear is not None else ""
        if wear is not None and wear.is_much and self.engine.links.ranks.rank == 0:
            logger.warning("%s", wear.words)
            words = ""
        self._say(
            f"hf_lohan: training {layout.num_parameters:,} parameters of {layout.identity.model_class}; state in "
            f"{' and '.join(path.path for path in tiers.store.paths)} ({format_bytes(tiers.store.size_bytes)}); "
            f"RAM: {format_bytes(layout.cpu_bytes)} of {format_bytes(config.cpu_memory)}; device memory: "
            f"{format_bytes(layout.plan.gpu_pool_bytes)} of {format_bytes(config.gpu_memory)}; "
            f"{in_all}{step}{words}{self._need_not()}"
        )

    def _wear(self) -> Wear | None:
        plan = self._plan
        return wear_of(plan.now, plan.num_steps) if plan is not None and plan.now is not None else None

    def _need_not(self) -> str:
        """Return a clause for a run that clearly fits without offloading, and "" for other runs."""
        fit = self._now.in_memory if self._now is not None else None
        if fit is None or fit.activations != "keep" or fit.needed_bytes > _CLEARLY_FITS * fit.memory_bytes:
            return ""
        return (
            f"; without offloading it would need {format_bytes(fit.needed_bytes)} of the device's "
            f"{format_bytes(fit.memory_bytes)}, so offloading is not needed"
        )

    def end_step(self, step: int) -> None:
        self._step_s.append(time.perf_counter() - self._began_s)
        self._step_tokens.append(self._num_tokens)
        self.announce_run()
        self._warn_of_swap()
        if self._now is not self._written_plan:
            try:
                self._write_summary(is_finished=False)
            except (CapacityError, StorageError) as error:  # the end of training writes the summary again
                logger.warning("cannot write the summary of the run so far: %s", error)
        self.lines.end_step(step, num_tokens=self._num_tokens, anon_rss_bytes=self._peak.take_recent_peak())

    def _warn_of_swap(self) -> None:
        before, self._swapped_out_bytes = self._swapped_out_bytes, _swapped_out_bytes()
        num_bytes, limit = self._swapped_out_bytes - before, self.engine.config.cpu_memory
        ranks = self.engine.links.ranks
        if num_bytes > _MUCH_SWAPPED_BYTES and not self._has_warned_of_swap and ranks.local_rank == 0:
            self._has_warned_of_swap = True
            logger.warning(
                "the machine swapped out %s during a step, so steps take longer; set cpu_memory to at most %s (it is "
                "%s)",
                *map(format_bytes, (num_bytes, max(limit // 2, limit - num_bytes // ranks.num_local), limit)),
            )

    def end_run(self) -> None:
        self._peak.stop()
        if self.engine.is_closed:  # a closed engine has no figures, but the lines of the steps can be written
            self.lines.flush()
            return
        self.engine.wait_for_updates()  # figures of the run include the updates of the last step
        self._write_summary(is_finished=True)
        self.lines.end_run()
        if self._step_s:
            figures, prediction = self.figures(), self._prediction()
            planned_s = prediction["predicted_step_s"]
            against = f" (planned: {planned_s:.3g} s)" if planned_s else ""
            self._say(
                f"hf_lohan: {len(self._step_s)} steps of {figures['step_s']:.3g} s{against}, "
                f"{figures['tokens_per_s']:,.0f} tokens a second; more figures are in {self._folder / FOLDER}; "
                f"`lohan report {self._folder}` writes them as one HTML page"
            )

    # The files.

    def figures(self) -> dict[str, Any]:
        """Return the figures so far. Times are medians over steps. Bytes are counted since the store was opened."""
        engine, tiers = self.engine, self.engine.tiers
        self._peak.sample()
        return {
            "num_steps": len(self._step_s),
            "step_s": statistics.median(self._step_s) if self._step_s else 0.0,
            "tokens_per_s": sum(self._step_tokens) / sum(self._step_s) if self._step_s else 0.0,
            "ssd_read_bytes": tiers.io.read_bytes,
            "ssd_write_bytes": tiers.io.write_bytes,
            "store_bytes": tiers.store.size_bytes,
            "scratch_bytes": tiers.store.scratch_bytes,
            "num_commits": engine.commits.num_commits,
            "last_commit_s": engine.commits.last_commit_s,
            "num_skipped_steps": engine.skipped_steps.total,
            "clip_rate": engine.clip_history.clip_rate,
            "num_speculated_steps": engine.clip_history.num_speculated,
            "num_redone_steps": engine.clip_history.num_redone,
            "undone_update_s": engine.undone_update_s,
            "swapped_bytes": engine.activations.swapper.swapped_bytes,
            "spilled_bytes": engine.activations.swapper.spilled_bytes,
            "peak_gpu_pool_bytes": engine.peak_gpu_pool_bytes,
            **device_memory(engine, self._plan),
            "peak_cpu_pool_bytes": tiers.peak_cpu_pool_bytes + engine.activations.swapper.high_water_bytes,
            "peak_anon_rss_bytes": self._peak.peak_bytes,
            **({"planned_process_bytes": process.expected_bytes} if (process := engine.planned_memory.process) else {}),
            **({"peak_shared_key_bytes": keys.peak_bytes} if (keys := tiers.row_memory) is not None else {}),
            **tiers.codecs.figures(),
            **({"embedding_rows_bytes": rows.num_bytes} if (rows := engine.embedding_rows) is not None else {}),
            **({"expert_rows": asdict(of_experts)} if (of_experts := engine.rows_by_rank()) is not None else {}),
        }

    def card_lines(self) -> list[str]:
        """Return three lines about the run for a model card, or [] before the first step or after the engine closed."""
        if not self._step_s or self.engine.is_closed:
            return []
        figures, layout = self.figures(), self.engine.layout
        dtype = str(layout.master.working_dtype).removeprefix("torch.")
        return [
            f"Trained with hf_lohan {__version__}: {count(layout.num_parameters)} parameters in {dtype}, of which "
            f"one block at a time was on the device. The training state took {format_bytes(figures['store_bytes'])} "
            "on SSD.",
            f"{figures['num_steps']} steps of {figures['step_s']:.3g} s (median), "
            f"{figures['tokens_per_s']:,.0f} tokens a second.",
            f"{format_bytes(figures['ssd_read_bytes'])} read from SSD and {format_bytes(figures['ssd_write_bytes'])} "
            "written.",
        ]

    def _write_summary(self, *, is_finished: bool) -> None:
        engine, wear = self.engine, self._wear()
        self._written_plan = self._now
        facts = {
            "config": engine.config.to_dict(),
            "durability": engine.tiers.store.durability,
            "commit_every_steps": self._now.commit_every_steps if self._now is not None else None,
            "num_parameters": engine.layout.num_parameters,
            "hardware": engine.device.describe(),
            "is_finished": is_finished,
            "wear": asdict(wear) if wear is not None else None,
            "num_planned_steps": self._num_planned_steps,
            "model_class": engine.layout.identity.model_class,
            "cpu_load": self._cpu_load,
            "num_cpus": usable_cpus(),
            "dtype": str(engine.layout.master.working_dtype).removeprefix("torch."),
            "versions": {"hf_lohan": __version__, "torch": torch.__version__, "transformers": version("transformers")},
        }
        self._write(SUMMARY_NAME, {**self.figures(), **facts, **self._prediction()})
        if self._plan is not None and self._plan.first is not None and self._plan.now is not None:
            # The number of tokens in a chunk may be chosen after the first plan.
            chunk_tokens = self._plan.first.plan.chunk_tokens or self._plan.chunk_tokens
            self._write(PLAN_NAME, replace(self._plan.first.plan, chunk_tokens=chunk_tokens).to_mapping())
            if self._plan.now is not self._plan.first:
                self._write(CORRECTED_PLAN_NAME, self._plan.now.plan.to_mapping())

    def _prediction(self) -> dict[str, Any]:
        """Return the planner's figures, which are None without a plan."""
        planned = self._plan.first if self._plan is not None else None
        first = planned.plan.prediction if planned is not None else None
        last = self._now.prediction if self._now is not None else None
        return {
            "predicted_step_s": first.step_s if first else None,
            "corrected_step_s": last.step_s if last else None,
            "bottleneck": last.bottleneck if last else None,
            "floor_by_resource_s": first.floor_by_resource_s if first else {},
            "measured_hardware": planned.hardware.to_mapping() if planned is not None else None,
            "prediction": first.to_mapping() if first else None,
        }

    def _write(self, name: str, content: dict[str, Any]) -> None:
        folder = self._folder / FOLDER
        text = json.dumps(content, indent=2) + "\n"
        try:
            make_folders(folder)
        except OSError as error:
            raise write_failure(str(folder), len(text), error) from error
        # The write is atomic, because a killed run resumes with these files.
        replace_durably(str(folder / name), text.encode())


def _swapped_out_bytes() -> int:
    """Return the bytes that the machine has written to swap space since it started, or 0 if this is not known."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # psutil warns if /proc/vmstat is hidden
        return int(psutil.swap_memory().sout)


def _refuse_folders(folder: Path) -> None:
    """Raise `StorageError` before training if a folder has the name of a file that the run writes. Files with these
    names are replaced."""
    for name in (SETTINGS_NAME, SUMMARY_NAME, PLAN_NAME, CORRECTED_PLAN_NAME):
        file = folder / name
        if file.is_dir() and not file.is_symlink():
            raise StorageError("this run writes a file, but there is a folder at", path=str(file), advice="move it")


class LoopRecord:
    """Writes `<folder>/lohan/` for a training loop without a Trainer. The number of steps is not known. A step begins
    with a forward and ends with the optimizer's step."""

    def __init__(self, engine: OffloadEngine, plan: RunPlan | None, folder: Path, say: Callable[[str], None]) -> None:
        self.engine = engine
        self._record = RunRecord(engine, plan, folder, say)
        self._num_steps = 0
        self._has_begun = self._has_ended = self._is_in_step = False
        engine.model.register_forward_pre_hook(self._before_forward, with_kwargs=True)

    def follow_optimizer(self, optimizer: OffloadOptimizer) -> None:
        optimizer.register_step_post_hook(self._after_step)

    def resume(self) -> None:
        """Continue counting from the step number of the loaded parameters."""
        self._num_steps = max(self.engine.step_counts.values())

    def _before_forward(self, _model: nn.Module, args: Any, inputs: Mapping[str, Any]) -> None:
        if self._has_ended or not torch.is_grad_enabled():
            return
        if not self._has_begun:
            self._has_begun = True
            self._record.begin_run(step=self._num_steps, num_steps=None)
        if not self._is_in_step:
            self._is_in_step = True
            self._record.begin_step()
        self._record.count_tokens(inputs if "input_ids" in inputs or not args else {"input_ids": args[0]})

    def _after_step(self, *_: Any) -> None:
        if self._is_in_step:
            self._is_in_step = False
            self._num_steps += 1
            self._record.end_step(self._num_steps)

    def log(self, values: Mapping[str, Any]) -> None:
        """Record the numbers that the loop logs for its last step. Values that are not numbers are ignored."""
        if self._has_begun:
            self._record.lines.log(
                self._num_steps, {name: value for name, value in values.items() if _is_number(value)}
            )

    def end_run(self) -> None:
        if self._has_begun and not self._has_ended:
            self._has_ended = True
            try:
                self._record.end_run()
            finally:
                self._record.lines.write_trace()


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError, RuntimeError):  # a list, a word or a tensor with several elements
        return False
    return True
