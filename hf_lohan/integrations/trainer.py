"""`Trainer` with one more argument."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import nn
from transformers import TrainingArguments

from hf_lohan.config import OffloadConfig
from hf_lohan.integrations.accelerator import OffloadAwareAccelerator
from hf_lohan.integrations.attachment import engine_of, offload_model
from hf_lohan.integrations.guards import check_arguments, check_model, check_optimizer, check_optimizers
from hf_lohan.integrations.loading import from_pretrained, reload_weights
from hf_lohan.integrations.optimizer_checkpoint import (
    load_master_residuals,
    load_optimizer_states,
    save_optimizer_states,
)
from hf_lohan.integrations.run_summary import RunSummary
from hf_lohan.optim import OffloadAdamW
from hf_lohan.runtime import OffloadEngine

logger = logging.getLogger(__name__)

_STORE_FOLDER = Path("lohan") / "store"


if TYPE_CHECKING:
    from transformers import Trainer as _TrainerBase
else:
    _TrainerBase = object  # a mixin: `super()` is whatever Trainer it is mixed into


class OffloadTrainerMixin(_TrainerBase):
    """Adds `offload=` to `transformers.Trainer` or any subclass: `class MyTrainer(OffloadTrainerMixin, Trainer)`.

    Args:
        offload: None (the stock Trainer, untouched), "lohan" (everything automatic), a YAML path, a dict, or an
            `OffloadConfig`.

    `model` may then also be the path of a checkpoint, which is streamed into the store. Raises ValueError for
    arguments that offloading cannot honour exactly.
    """

    def __init__(
        self, model: Any = None, args: TrainingArguments | None = None, *rest: Any, offload: Any = None, **kwargs: Any
    ) -> None:
        self._offload_config: OffloadConfig | None = None
        self._run_summary: RunSummary | None = None
        already = isinstance(model, nn.Module) and engine_of(model) is not None
        if offload is not None or already:
            self._offload_config = OffloadConfig.load(offload)
            args = args or TrainingArguments(output_dir="tmp_trainer")
            self._check(model, args, kwargs)
            args._n_gpu = min(args.n_gpu, 1)  # nn.DataParallel would copy placeholders to every GPU
            if isinstance(model, str | Path):
                model = self._load(model, args)
        super().__init__(model, args, *rest, **kwargs)

    def _check(self, model: Any, args: TrainingArguments, kwargs: dict[str, Any]) -> None:
        check_arguments(args)
        check_model(model)
        check_optimizers(kwargs.get("optimizers", (None, None)), kwargs.get("optimizer_cls_and_kwargs"))

    def _load(self, path: str | Path, args: TrainingArguments) -> Any:
        return from_pretrained(
            path,
            offload=self._offload_config,
            torch_device=args.device,
            bf16=args.bf16,
            default_ssd_path=Path(args.output_dir) / _STORE_FOLDER,
            hold_gradients=_holds_gradients(args),
        )

    # The engine: attached late, after everything that patches or wraps the model has had its turn.

    @property
    def offload_engine(self) -> OffloadEngine | None:
        """The engine of `self.model`, once training, evaluation or loading has begun."""
        return engine_of(self.model)

    def _ensure_engine(self) -> OffloadEngine | None:
        if self._offload_config is None:
            return None
        engine = self.offload_engine
        if engine is None:
            args, model = self.args, self.model
            check_model(model)
            self._close_previous()
            engine = offload_model(
                model,
                self._offload_config,
                torch_device=args.device,
                default_ssd_path=Path(args.output_dir) / _STORE_FOLDER,
                working_dtype=torch.bfloat16 if args.bf16 else None,
                hold_gradients=_holds_gradients(args),
            )
        if self._run_summary is None or self._run_summary.engine is not engine:
            if self._run_summary is not None:
                self.remove_callback(self._run_summary)
            self._run_summary = RunSummary(engine)
            self.add_callback(self._run_summary)
        return engine

    def _close_previous(self) -> None:
        """`model_init` made a new model: the old one's engine holds the store."""
        if self._run_summary is not None:
            self._run_summary.engine.close()

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        if self._offload_config is not None:
            self.accelerator.__class__ = OffloadAwareAccelerator

    def _move_model_to_device(self, model: Any, device: torch.device) -> None:
        if self._offload_config is None:
            super()._move_model_to_device(model, device)

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        engine = self._ensure_engine()
        prepared = super()._prepare_for_training(*args, **kwargs)
        if engine is not None:
            check_optimizer(self.optimizer)  # a subclass may have made it without asking us
        return prepared

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        self._ensure_engine()
        return super().evaluation_loop(*args, **kwargs)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        engine = self._ensure_engine()
        if engine is not None and self.optimizer is None:
            training_args = self.args
            # Upstream groups the parameters by weight decay; only the class it instantiates is ours.
            self.optimizer_cls_and_kwargs = (
                OffloadAdamW,
                {
                    "lr": training_args.learning_rate,
                    "betas": (training_args.adam_beta1, training_args.adam_beta2),
                    "eps": training_args.adam_epsilon,
                    "engine": engine,
                },
            )
        optimizer = super().create_optimizer(*args, **kwargs)
        if engine is not None:
            check_optimizer(self.optimizer)
        return optimizer

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if self._run_summary is not None:
            self._run_summary.count_tokens(inputs)
        return super().training_step(model, inputs, *args, **kwargs)

    def log(self, logs: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        if self._run_summary is not None and "loss" in logs:
            logs.update({f"lohan/{name}": value for name, value in self._run_summary.figures().items()})
        super().log(logs, *args, **kwargs)

    # Checkpoints. Weights are saved by the model's own `save_pretrained`, which streams (see `attachment.attach`).

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        engine = self.offload_engine
        if engine is not None:
            save_optimizer_states(engine, output_dir)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        engine = self.offload_engine
        if engine is not None and checkpoint is not None:
            load_optimizer_states(engine, checkpoint)
        super()._load_optimizer_and_scheduler(checkpoint)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        engine = self._ensure_engine()
        if engine is None:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        else:
            reload_weights(engine, self.model, resume_from_checkpoint)

    def _load_best_model(self) -> None:
        engine = self.offload_engine
        if engine is None:
            super()._load_best_model()
            return
        best = self.state.best_model_checkpoint
        logger.info("loading the best model from %s (score: %s)", best, self.state.best_metric)
        reload_weights(engine, self.model, best)
        load_master_residuals(engine, best)


def _holds_gradients(args: TrainingArguments) -> bool:
    """Whether gradients must wait for `step()`: their norm decides about clipping, or later backwards add to them."""
    return args.max_grad_norm > 0 or args.gradient_accumulation_steps > 1


class Trainer(OffloadTrainerMixin, transformers.Trainer):
    """`transformers.Trainer` with `offload=`."""
