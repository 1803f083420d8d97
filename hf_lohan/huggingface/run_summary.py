"""What a run was told, moved and held: `<output_dir>/lohan/{config,summary}.json`, and the same figures in the logs."""

from __future__ import annotations

import json
import logging
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import TrainerCallback

import hf_lohan
from hf_lohan.engine import OffloadEngine
from hf_lohan.files import CapacityError, StorageError, replace_durably, write_failure
from hf_lohan.hardware import AnonymousMemoryPeak
from hf_lohan.huggingface.attachment import run_plan_of
from hf_lohan.planner import OffloadPlan
from hf_lohan.report import CONFIG_NAME, FOLDER, SUMMARY_NAME

logger = logging.getLogger(__name__)


class RunSummary(TrainerCallback):
    """Times steps, counts tokens and writes the summary when training ends; a first one when it begins and another
    when it has a plan, for who looks at a run that goes on or was killed."""

    def __init__(self, engine: OffloadEngine) -> None:
        self.engine = engine
        self._peak = AnonymousMemoryPeak()
        self._step_s: list[float] = []
        self._step_tokens: list[int] = []
        self.num_tokens = 0
        """Of the step in progress, or the last one."""
        self._began_s = 0.0
        self._written_plan: OffloadPlan | None = None

    def count_tokens(self, inputs: Any) -> None:
        """Count one micro-batch."""
        ids = inputs.get("input_ids") if hasattr(inputs, "get") else None
        self.num_tokens += ids.numel() if ids is not None else 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._peak.start()
        plan = run_plan_of(self.engine)
        if plan is not None and state.max_steps > 0:
            plan.begin(num_steps=state.max_steps - state.global_step)
        settings = self.engine.config.to_dict()
        for ssd in settings["ssd"]:
            ssd["path"] = os.path.abspath(ssd["path"])  # read from other working directories, too
        self._write(args, CONFIG_NAME, settings)
        self._write_summary(args, state, is_finished=False)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._began_s = time.perf_counter()
        self.num_tokens = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._step_s.append(time.perf_counter() - self._began_s)
        self._step_tokens.append(self.num_tokens)
        plan = run_plan_of(self.engine)
        if plan is not None and plan.plan is not self._written_plan:
            try:
                self._write_summary(args, state, is_finished=False)
            except (CapacityError, StorageError) as error:  # it is written again, when training ends
                logger.warning("the summary of the run so far is not written: %s", error)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.engine.settle()  # the last step's updates and their bytes belong to the run
        self._peak.stop()
        self._write_summary(args, state, is_finished=True)

    def stop_watching(self) -> None:
        """Look at the process's memory no more."""
        self._peak.stop()

    def take_recent_memory_peak(self) -> int:
        """The most anonymous memory, in bytes, since this was called last."""
        return self._peak.take_recent_peak()

    def _write_summary(self, args: Any, state: Any, *, is_finished: bool) -> None:
        engine, plan = self.engine, run_plan_of(self.engine)
        self._written_plan = plan.plan if plan is not None else None
        facts = {
            "config": engine.config.to_dict(),
            "durability": engine.tiers.store.durability,
            "num_parameters": engine.layout.num_parameters,
            "hardware": engine.device.describe(),
            "is_finished": is_finished,
            "num_planned_steps": state.max_steps or None,
            "model_class": engine.layout.identity.model_class,
            "dtype": str(engine.layout.master.working_dtype).removeprefix("torch."),
            "versions": {
                "hf_lohan": hf_lohan.__version__,
                "torch": torch.__version__,
                "transformers": transformers.__version__,
            },
            **self._prediction(),
        }
        self._write(args, SUMMARY_NAME, {**self.figures(), **facts})

    def _prediction(self) -> dict[str, Any]:
        """What the planner said beside what was measured; None where nothing was planned."""
        plan = run_plan_of(self.engine)
        first = plan.first_prediction if plan is not None else None
        hardware = plan.measured_hardware if plan is not None else None
        last = plan.plan.prediction if plan is not None and plan.plan is not None else None
        return {
            "predicted_step_s": first.step_s if first else None,
            "corrected_step_s": last.step_s if last else None,
            "bottleneck": last.bottleneck if last else None,
            "floor_by_resource_s": plan.floor_by_resource_s if plan is not None else {},
            "measured_hardware": hardware.to_mapping() if hardware is not None else None,
            "prediction": first.to_mapping() if first else None,
        }

    def _write(self, args: Any, name: str, content: dict[str, Any]) -> None:
        folder = Path(args.output_dir) / FOLDER
        text = json.dumps(content, indent=2) + "\n"
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise write_failure(str(folder), len(text), error) from error
        # Whole or not at all: a run that is killed here is resumed by what is written here.
        replace_durably(str(folder / name), text.encode())

    def figures(self) -> dict[str, float | int]:
        """The numbers so far. Times are medians over steps; bytes count since the store was opened."""
        engine, tiers = self.engine, self.engine.tiers
        self._peak.sample()
        return {
            "num_steps": len(self._step_s),
            "step_s": statistics.median(self._step_s) if self._step_s else 0.0,
            "tokens_per_s": sum(self._step_tokens) / sum(self._step_s) if self._step_s else 0.0,
            "ssd_read_bytes": tiers.io.read_bytes,
            "ssd_write_bytes": tiers.io.write_bytes,
            "store_bytes": tiers.store_bytes,
            "scratch_bytes": tiers.scratch_bytes,
            "num_commits": engine.step_log.num_commits,
            "last_commit_s": engine.step_log.last_commit_s,
            "num_skipped_steps": engine.skipped_steps.total,
            "clip_rate": engine.clip_history.clip_rate,
            "num_speculated_steps": engine.clip_history.num_speculated,
            "num_redone_steps": engine.clip_history.num_redone,
            "undone_update_s": engine.undone_update_s,
            "swapped_bytes": engine.activations.swapper.swapped_bytes,
            "spilled_bytes": engine.activations.swapper.spilled_bytes,
            "peak_gpu_pool_bytes": engine.peak_gpu_pool_bytes,
            "peak_cpu_pool_bytes": tiers.peak_cpu_pool_bytes + engine.activations.swapper.high_water_bytes,
            "peak_anon_rss_bytes": self._peak.peak_bytes,
        }
