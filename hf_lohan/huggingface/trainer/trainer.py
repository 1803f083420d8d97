"""`Trainer` with the argument `offload=`."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import torch
import transformers
from accelerate.utils import TorchDynamoPlugin
from torch import Tensor, nn
from tqdm.auto import tqdm  # type: ignore[import-untyped]
from transformers import TrainerCallback, TrainingArguments
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.trainer_pt_utils import LabelSmoother
from transformers.trainer_utils import get_last_checkpoint

from hf_lohan.activations import ChunkedHead, Smoothing
from hf_lohan.checkpoint.epoch_random import EpochRandomNumbers
from hf_lohan.checkpoint.model_description import describe_model, load_buffers, save_buffers
from hf_lohan.checkpoint.optimizer_states import load_master_residuals, load_optimizer_states, save_optimizer_states
from hf_lohan.checkpoint.resume_point import ResumePoint
from hf_lohan.checkpoint.whole_folder import remove_unfinished
from hf_lohan.compat.accelerate_private import become
from hf_lohan.compat.transformers_private import add_logged_loss, use_one_gpu
from hf_lohan.compat.trl_private import default_arguments, step_number, trained_on
from hf_lohan.config import ALL_AUTO, FITS_OR_NOT, OffloadConfig
from hf_lohan.engine import OffloadEngine
from hf_lohan.engine.model_hooks import step_shape
from hf_lohan.engine.ranks import all_agree
from hf_lohan.files.directories import keep_from_others
from hf_lohan.huggingface.accelerator import OffloadAwareAccelerator
from hf_lohan.huggingface.arguments import NOT_GIVEN, by_name, choose_offload, names_of, take_launched_precision
from hf_lohan.huggingface.attachment import from_pretrained, offload_model
from hf_lohan.huggingface.compiling import check_compiling
from hf_lohan.huggingface.equal_runs import check_equal_arguments
from hf_lohan.huggingface.guards import (
    check_arguments,
    check_given_model,
    check_has_model,
    check_model,
    check_model_init_kwargs,
    check_optimizer,
    check_optimizers,
    check_runs_together,
    check_streamed,
    ids_within_vocabulary,
    why_trainer_runs_in_turn,
)
from hf_lohan.huggingface.local_run import settings_given
from hf_lohan.huggingface.models.recipe import take_torch_dtype
from hf_lohan.huggingface.models.reloading import has_weights, reload_weights
from hf_lohan.huggingface.offloaded_model import (
    answering_out_of_memory,
    attached_to,
    engine_of,
    recompute_without_reentry,
    run_plan_of,
)
from hf_lohan.huggingface.optimizers import StoreOptimizerMixin, config_named_by_optim
from hf_lohan.huggingface.progress import begin_step, trainer_line
from hf_lohan.huggingface.ranks import check_sequence_ranks, ranks_here
from hf_lohan.huggingface.trainer.in_memory import choose_place, load_in_memory
from hf_lohan.huggingface.trainer.rank_trainer import RankTrainerMixin
from hf_lohan.huggingface.trainer.step_journal import StepJournal, Termination, check_journal, resume_in_data
from hf_lohan.huggingface.trainer.trl_models import TrlModelsMixin
from hf_lohan.huggingface.trainer.whole_checkpoints import CompleteCheckpointsMixin
from hf_lohan.huggingface.trainer_mixin import TrainerMixin
from hf_lohan.model import base_of
from hf_lohan.planning import MicroBatches
from hf_lohan.record import RunRecord, record_folder
from hf_lohan.report.run_data import STORE_FOLDER

logger = logging.getLogger(__name__)


@dataclass
class ChunkedSmoother(LabelSmoother):
    """Upstream's label smoother. If the forward has already smoothed its labels in chunks, it returns the loss of the
    forward."""

    def __post_init__(self) -> None:
        self._of_thread = threading.local()
        """The smoothing of each thread. Micro-batches run in their own threads and share a Trainer."""

    @contextlib.contextmanager
    def using(self, smoothing: Smoothing) -> Iterator[None]:
        """In this context, this thread's forward uses ``smoothing``."""
        self._of_thread.smoothing = smoothing
        try:
            yield
        finally:
            self._of_thread.smoothing = None

    def __call__(
        self, model_output: Any, labels: Tensor, shift_labels: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        smoothing: Smoothing | None = getattr(self._of_thread, "smoothing", None)
        if smoothing is not None and labels is smoothing.labels and shift_labels:
            return smoothing.loss(num_items_in_batch)
        loss: Tensor = super().__call__(model_output, labels, shift_labels, num_items_in_batch)
        return loss


class ChunkedSmoothingMixin(TrainerMixin):
    """Smooths labels chunk by chunk in the model's cross entropy. Upstream calls the model without labels instead, and
    smooths over all logits. Both omit other terms of the model's loss, such as a router loss."""

    model: Any
    compute_loss_func: Any
    label_smoother: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if type(self.label_smoother) is LabelSmoother:
            self.label_smoother = ChunkedSmoother(self.label_smoother.epsilon, self.label_smoother.ignore_index)

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Same as upstream, but smooth labels in chunks if logits are computed in chunks."""
        head = self._smoothing_head(inputs)
        with contextlib.ExitStack() as stack:
            stack.enter_context(ids_within_vocabulary(self.model, inputs))
            if head is not None:
                smoother: ChunkedSmoother = self.label_smoother
                smoothing = Smoothing(smoother.epsilon, inputs["labels"], smoother.ignore_index)
                stack.enter_context(smoother.using(smoothing))
                stack.enter_context(head.smoothing(smoothing))
            return super().compute_loss(model, inputs, *args, **kwargs)

    def _smoothing_head(self, inputs: dict[str, Any]) -> ChunkedHead | None:
        """Return the head that smooths in chunks. None for small logits, evaluation, or a custom loss or smoother."""
        head = attached_to(self.model).chunked_head
        is_upstreams = type(self.label_smoother) is ChunkedSmoother and self.compute_loss_func is None
        ids, labels = inputs.get("input_ids"), inputs.get("labels")
        if head is None or not is_upstreams or not torch.is_grad_enabled() or ids is None or labels is None:
            return None
        shifts = type(base_of(self.model)).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()  # same as upstream
        return head if shifts and head.applies_to(ids.numel()) else None


TRACKERS = (
    *("azure_ml", "clearml", "comet_ml", "dagshub", "mlflow"),
    *("neptune", "swanlab", "tensorboard", "trackio", "wandb"),
)
"""Experiment trackers whose `on_log` may be called twice in a step."""


class RecordedRun(TrainerCallback):
    def __init__(self, record: RunRecord) -> None:
        self.record = record

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.record.begin_run(
            step=state.global_step,
            num_steps=state.max_steps,
            num_micro_batches=args.gradient_accumulation_steps,
        )

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.record.begin_step()
        begin_step(state.global_step + 1, state.max_steps, self.record.planned_step_s)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.record.end_step(state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.record.lines.log(state.global_step, logs or {})

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.record.end_run()


def log_to_trackers(trainer: Any, figures: dict[str, float | int]) -> None:
    """Log figures as `lohan/...` to TensorBoard, W&B and other trackers, but not to the console or the log history."""
    logs = {f"lohan/{name}": value for name, value in figures.items()}
    trackers = tuple(INTEGRATION_TO_CALLBACK[name] for name in TRACKERS if name in INTEGRATION_TO_CALLBACK)
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, trackers):
            callback.on_log(trainer.args, trainer.state, trainer.control, logs=logs, model=trainer.model)


def _how_to_offload(config: OffloadConfig, args: TrainingArguments) -> dict[str, Any]:
    """Return the arguments of `from_pretrained` and `offload_model` that follow from the arguments of a Trainer."""
    micro_batches = MicroBatches.of_run(config, args.gradient_accumulation_steps)
    return {
        "torch_device": args.device,
        "default_ssd_path": Path(args.output_dir) / STORE_FOLDER,
        "hold_gradients": micro_batches.holds_gradients(args.max_grad_norm),
        "sums_gradients": micro_batches.sums_gradients,
    }


_LOADING_ARGUMENTS = ("peft_config", "quantization_config")
"""Arguments of `from_pretrained` that `OffloadTrainerMixin` takes, unless the trainer itself has them (as in TRL)."""


class OffloadTrainerMixin(
    TrlModelsMixin, ChunkedSmoothingMixin, CompleteCheckpointsMixin, StoreOptimizerMixin, RankTrainerMixin
):
    """Adds `offload=` to `transformers.Trainer` or any subclass: `class MyTrainer(OffloadTrainerMixin, Trainer)`.

    Args:
        offload: None (the stock Trainer, unchanged), "lohan" (everything automatic), a YAML path, a dict, or an
            `OffloadConfig`. "auto" is the stock Trainer for a run that fits the device, and "lohan" for other runs. The
            default is `args.offload` of `LohanArguments`, or LOHAN_OFFLOAD in the environment, or None.
        model_init_kwargs: keyword arguments of `hf_lohan.from_pretrained`, such as `revision`, `trust_remote_code` and
            `model_class`. Trainers of TRL have this argument in their training arguments.

    With offload, `model` may be the path of a checkpoint, or the name of a model in the Hub. Its weights are streamed
    to the store. `peft_config` and `quantization_config` are the same as in `hf_lohan.from_pretrained`. Raises
    ValueError for arguments that offloading does not support exactly.
    """

    default_offload: ClassVar[Any] = None
    """The default of `offload` under `lohan launch`."""
    _is_initialized = False
    _is_in_memory = False
    """Whether `offload="auto"` chose the stock Trainer."""
    _loading: Mapping[str, Any] = MappingProxyType({})
    """Arguments for loading the model, by name."""
    _model_init_kwargs: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, model: Any = None, *rest: Any, offload: Any = NOT_GIVEN, **kwargs: Any) -> None:
        if not (self._is_initialized or self._makes_models):
            own = set(self._upstream_names())
            self._loading = {name: kwargs.pop(name) for name in _LOADING_ARGUMENTS if name in kwargs.keys() - own}
            if "model_init_kwargs" not in own:
                loading = dict(kwargs.pop("model_init_kwargs", None) or {})
                check_model_init_kwargs(loading, model)
                if "torch_dtype" in loading:
                    loading["dtype"] = take_torch_dtype(loading, loading.get("dtype", "auto"))
                self._model_init_kwargs = loading
        if self._is_initialized or not self._initialize_offload((model, *rest), kwargs, offload):
            if self._is_in_memory and isinstance(model, str | Path) and not self._makes_models:
                args = self._by_name((model, *rest), kwargs).get("args")
                model = load_in_memory(model, args or TrainingArguments("tmp_trainer"), self._model_init_kwargs)
            super().__init__(model, *rest, **kwargs)
        else:
            self._construct(super().__init__, self._by_name((model, *rest), kwargs))

    @classmethod
    def _upstream_names(cls) -> list[str]:
        """Return the names of the arguments that the class after this mixin takes by position."""
        for base in cls.__mro__[cls.__mro__.index(OffloadTrainerMixin) + 1 :]:
            if "__init__" in vars(base) and (own := names_of(vars(base)["__init__"])) is not None:
                return own
        return []

    def _by_name(self, given: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
        """Return all arguments of the class after this mixin by name, because their order depends on the trainer.
        Raises TypeError for arguments that a call would refuse."""
        return by_name(type(self).__name__, self._upstream_names(), given, named)

    def _initialize_offload(self, given: Sequence[Any], named: Mapping[str, Any], offload: Any) -> bool:
        """Initialize the attributes of the mixins before upstream's attributes. ``given`` and ``named``: the
        constructor's arguments. Returns whether the trainer offloads."""
        self._is_initialized = True
        model = given[0] if given and given[0] is not None else named.get("model")
        offload = choose_offload(offload, (*given, *named.values()), self.default_offload)
        has_engine = isinstance(model, nn.Module) and engine_of(model) is not None
        check_given_model(model, is_offloaded=offload is not None, makes_models=self._makes_models)
        if offload == FITS_OR_NOT:
            if self._loading:
                logger.warning(
                    "offload='auto' offloads this run, because %s is for a model that is streamed", min(self._loading)
                )
            offload = ALL_AUTO if has_engine or self._loading else self._choose_place(given, named)
        self._offload_config: OffloadConfig | None = None
        self._recorded_run: RecordedRun | None = None
        self._journal: StepJournal | None = None
        self._termination = Termination()
        self._resume_point = ResumePoint()
        self._waiting_micro_batches: tuple[Callable[[], Tensor], ...] = ()
        self._runs_together: bool | None = None
        if self._loading and not (offload is not None and isinstance(model, str | Path)):
            raise ValueError(
                f"{next(iter(self._loading))} is for a checkpoint that offload streams; pass offload and the path of a "
                "checkpoint, or a model that already has its adapters"
            )
        if offload is not None or has_engine:
            keep_from_others()
            self._offload_config = settings_given(offload)
        return self._offload_config is not None

    def _choose_place(self, given: Sequence[Any], named: Mapping[str, Any]) -> str | None:
        """Return the value of `offload` that `offload="auto"` means here, and log the reason."""
        settings = self._by_name(given, named) if given else named
        choice = choose_place(type(self), settings, self._model_init_kwargs, makes_models=self._makes_models)
        args = settings.get("args")
        (tqdm.write if args is None or args.should_log else logger.info)(choice.sentence)
        self._is_in_memory = choice.in_memory
        return None if choice.in_memory else ALL_AUTO

    def _construct(self, make: Callable[..., None], settings: dict[str, Any]) -> None:
        """Call the constructor ``make`` with ``settings``, its arguments by name."""
        assert self._offload_config is not None
        model = settings.get("model")
        check_has_model(settings)
        args = settings.get("args") or default_arguments(type(self), model) or TrainingArguments("tmp_trainer")
        settings["args"] = args
        is_launched_in_bf16 = take_launched_precision(args)
        check_arguments(args)
        check_model(model)
        if args.torch_compile:
            plugin = TorchDynamoPlugin(backend=args.torch_compile_backend, mode=args.torch_compile_mode)
            check_compiling(self._offload_config, args.device, plugin)
        check_sequence_ranks(self._offload_config.ranks.per_row, ranks_here())
        self.optimizer, self.optimizer_cls_and_kwargs = None, settings.get("optimizer_cls_and_kwargs")
        optimizers = settings.get("optimizers") or (None, None)
        check_optimizers(model, optimizers, self.optimizer_cls_and_kwargs, self._offload_config)
        if optimizers[0] is None and self.optimizer_cls_and_kwargs is None:
            self._offload_config = config_named_by_optim(args, self._offload_config)
        if isinstance(model, nn.Module) and (engine := engine_of(model)) is not None:
            # In TRL's arguments bf16=True is the default, so the user may not have set it.
            is_asked = is_launched_in_bf16 or (args.bf16 and not self._makes_models)
            check_streamed(engine, bf16=is_asked, moment_dtype=self._offload_config.moment_dtype)
        use_one_gpu(args)
        with self._replacing_models(settings):
            if isinstance(model, Path | str) and not self._makes_models:
                settings["model"] = self._stream_model(model, args, **self._model_init_kwargs, **self._loading)
            make(**settings)
        self._replace_jit_checkpoints()

    def _stream_model(self, path: str | Path, args: TrainingArguments, **kwargs: Any) -> Any:
        config = self._offload_config
        assert config is not None
        check_equal_arguments(args, self._links)
        how, optimizer = _how_to_offload(config, args), self._optimizer_choice(args)
        with trainer_line(args, "loading"):
            return from_pretrained(path, offload=config, bf16=args.bf16, optimizer=optimizer, **how, **kwargs)

    # The engine is attached late, after all code that patches or wraps the model has run.

    @property
    def offload_engine(self) -> OffloadEngine | None:
        """The engine of `self.model`. None before training, evaluation or loading begins."""
        return engine_of(self.model)

    def _ensure_engine(self) -> OffloadEngine | None:
        if self._offload_config is None:
            return None
        args, model, engine = self.args, self.model, self.offload_engine
        if engine is None:
            check_model(model)
            if self._record is not None:  # `model_init` made a new model, but the old model's engine holds the store
                self._record.engine.close()
            engine = offload_model(
                model,
                self._offload_config,
                working_dtype=torch.bfloat16 if args.bf16 else None,
                rules=self._rules(),
                is_beside_others=True,
                **_how_to_offload(self._offload_config, args),
            )
        if self._record is None or self._record.engine is not engine:
            if self._recorded_run is not None:
                self.remove_callback(self._recorded_run)
            write_line = tqdm.write if args.should_log else logger.info
            folder = record_folder(Path(args.output_dir), engine.links.ranks)
            self._recorded_run = RecordedRun(RunRecord(engine, run_plan_of(engine), folder, write_line))
            self.add_callback(self._recorded_run)
        return engine

    @property
    def _record(self) -> RunRecord | None:
        return self._recorded_run.record if self._recorded_run is not None else None

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        if self._offload_config is not None:
            become(self.accelerator, OffloadAwareAccelerator)

    def _move_model_to_device(self, model: Any, device: torch.device) -> None:
        if self._offload_config is None:
            super()._move_model_to_device(model, device)

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Same as upstream, but `resume_from_checkpoint="last_step"` resumes from the last committed step of the store,
        and `True` from this step, or from a newer checkpoint. If a kill came between a checkpoint and the commit of its
        step, `True` resumes from the commit before. An attempt that torchrun restarted resumes automatically. After
        SIGTERM the run ends when its step is committed.

        Raises ValueError if no step or checkpoint exists to resume from.
        """
        if self._offload_config is None:
            if self._is_in_memory and resume_from_checkpoint == "last_step":
                raise ValueError(
                    "resume_from_checkpoint='last_step' needs a store, and offload='auto' trains this run in memory; "
                    "pass resume_from_checkpoint=True to resume from the last checkpoint"
                )
            return super().train(resume_from_checkpoint, *args, **kwargs)
        with self._ending_all_ranks_on_error(), answering_out_of_memory(lambda: self.model, self._offload_config):
            if self.args.should_save:
                remove_unfinished(self.args.output_dir)
            self._links.barrier("the removal of a killed save's files")
            check_equal_arguments(self.args, self._links)
            self._resume_point = ResumePoint()  # the point of an earlier call must not remain if `choose` raises
            self._resume_point = ResumePoint.choose(
                self._asked_of_ranks(resume_from_checkpoint),
                self._wait_for_store_paths,
                self.args.output_dir,
                get_last_checkpoint,
                check_journal,
                self._links,
            )
            self._agree_on_resume(self._resume_point)
            self._termination = Termination(self._links)
            self.last_whole_checkpoint = output = None
            with self._termination, trainer_line(self.args, "step"):
                try:
                    output = super().train(self._resume_point.folder, *args, **kwargs)
                finally:
                    if self._record is not None:
                        self._record.lines.write_trace()
            if self._termination.any_rank_requested():  # the last step's commit may still be in progress
                if self.offload_engine is not None:
                    self.offload_engine.close()
                self._termination.exit()
        return output

    def _init_training_state(
        self, max_steps: int, num_steps: int, num_epochs: int, resume_from_checkpoint: str | None, *args: Any
    ) -> tuple[int, int]:
        counted: tuple[int, int]
        counted = super()._init_training_state(max_steps, num_steps, num_epochs, resume_from_checkpoint, *args)
        if self._offload_config is None or resume_from_checkpoint is None:
            return counted
        return resume_in_data(self, self._resume_point, resume_from_checkpoint, counted)

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None, **kwargs: Any
    ) -> Any:
        self._waiting_micro_batches, self._runs_together = (), None  # a failed run may have left micro-batches
        if self._offload_config is not None:
            recompute_without_reentry(self.model)
        engine = self._ensure_engine()
        if engine is not None:
            self._check_batches(train_dataloader)
            self._start_journal(engine, resume_from_checkpoint)
        prepared = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint, **kwargs)
        if engine is not None:
            check_optimizer(self.optimizer)  # a subclass may have created the optimizer
        return prepared

    def _start_journal(self, engine: OffloadEngine, resume_from_checkpoint: str | None) -> None:
        if self._journal is not None:
            self.remove_callback(self._journal)
        engine.commits.describe_first(functools.partial(describe_model, self.model, engine, self.processing_class))
        ranks = engine.links.ranks
        suffix = f"_{ranks.rank}" if ranks.others else ""  # the file name that Trainer uses
        epoch = EpochRandomNumbers(self._save_rng_state, self._load_rng_state, suffix)
        self._journal = StepJournal(self, engine, self._write_journal_files, self._termination, epoch)
        self._journal.resume(self._resume_point, resume_from_checkpoint)
        self.add_callback(self._journal)

    def _write_journal_files(self, folder: str) -> None:
        super()._save_optimizer_and_scheduler(folder)
        self._save_optimizer_files(folder)
        self._save_scaler(folder)
        self._save_rng_state(folder)
        save_buffers(self.model, folder)
        self._write_step_facts(folder)

    def _run_epoch(self, *args: Any, **kwargs: Any) -> Any:
        if self._offload_config is not None and self.state.global_step >= self.state.max_steps:
            # The resumed run has already taken all its steps, but upstream would take one more.
            self.control.should_training_stop = True
            return None
        if self._journal is not None:
            is_first = kwargs["epoch"] == kwargs["epochs_trained"]
            is_rest = is_first and kwargs["steps_trained_in_current_epoch"] > 0
            self._journal.begin_epoch(kwargs["epoch"], kwargs["steps_in_epoch"], is_rest=is_rest)
        return super()._run_epoch(*args, **kwargs)

    def _maybe_log_save_evaluate(
        self, tr_loss: Any, grad_norm: Any, model: Any, trial: Any, *args: Any, **kwargs: Any
    ) -> None:
        super()._maybe_log_save_evaluate(tr_loss, grad_norm, model, trial, *args, **kwargs)
        if self.args.enable_jit_checkpoint and self._termination.ends_here():
            self._save_unless_saved(model, trial)
        if self._record is not None:
            self._record.lines.flush()
        if self._journal is not None:
            self._journal.after_step()

    def _evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        is_on_start = kwargs.get("skip_scheduler", False)
        logged = self.state.log_history if self._resume_point.commit is not None else []
        if is_on_start and any(name.startswith("eval_") for row in logged if not row["step"] for name in row):
            return {}  # the run that is resumed has evaluated on its start
        metrics: dict[str, float] = super()._evaluate(*args, **kwargs)
        return metrics

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        if self._ensure_engine() is None:
            return super().evaluation_loop(*args, **kwargs)
        with trainer_line(self.args, "evaluation batch", kwargs.get("dataloader", next(iter(args), None))):
            return super().evaluation_loop(*args, **kwargs)

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Same as upstream, but micro-batches that run together wait for the last micro-batch of the step. The other
        calls return zero. The last call adds all losses to the sum for the log in upstream's order. Each micro-batch
        runs upstream's `training_step` with a deferred backward."""
        record = self._record
        if record is None:
            return super().training_step(model, inputs, *args, **kwargs)
        run: Callable[[], Tensor] = functools.partial(super().training_step, model, inputs, *args, **kwargs)
        if self._runs_together is None:
            self._runs_together = self._choose_order(record.engine, inputs)
        if self._runs_together:
            record.count_tokens(inputs)
            waiting = (*self._waiting_micro_batches, run)
            if not self.accelerator.sync_gradients:
                self._waiting_micro_batches = waiting
                return torch.zeros((), device=self.args.device)
            self._waiting_micro_batches = ()
            *others, loss = [run()] if len(waiting) == 1 else record.engine.run_micro_batches(waiting)
            for other in others:
                add_logged_loss(self, other)
        else:
            number = step_number(self)
            loss = run()
            record.count_tokens(trained_on(self, inputs, number))
        record.announce_run()
        return loss

    def _choose_order(self, engine: OffloadEngine, inputs: Any) -> bool:
        """Return whether the micro-batches of a step run together. ``inputs``: inputs of the first micro-batch."""
        micro_batches = MicroBatches.of_run(engine.config, self.args.gradient_accumulation_steps)
        if micro_batches.run_together is not None:
            if micro_batches.run_together:
                check_runs_together(self)
            return micro_batches.run_together
        shape, reason = step_shape((), inputs) if isinstance(inputs, Mapping) else None, why_trainer_runs_in_turn(self)
        if shape is None:
            reason = reason or "their inputs have no token ids, which are needed to plan a step"
        may_run_together = all_agree(engine.links, "whether micro-batches may run together", reason is None)
        if not may_run_together or shape is None:
            reason = reason or "those of another rank may not run together"
            logger.info("vertical_micro_batches: auto runs micro-batches one after the other: %s", reason)
            return False
        return engine.choose_order(replace(shape, num_micro_batches=micro_batches.number))

    def log(self, logs: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        super().log(logs, *args, **kwargs)
        if self._record is not None and "loss" in logs:
            log_to_trackers(self, self._record.figures())

    # Checkpoints. The model's `save_pretrained` streams its weights (see `attachment.attach`).

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        if (engine := self.offload_engine) is not None:
            save_optimizer_states(engine, output_dir)
            if self._journal is not None:
                self._journal.add_to_checkpoint(output_dir)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        engine = self.offload_engine
        if engine is not None and self._resume_point.commit is not None:
            self._go_back_to_commit(engine, checkpoint)
        elif engine is not None and checkpoint is not None:
            reload_weights(engine, self.model, checkpoint)
            load_optimizer_states(engine, checkpoint)
        super()._load_optimizer_and_scheduler(checkpoint)

    def _go_back_to_commit(self, engine: OffloadEngine, journal_folder: str | None) -> None:
        commit = self._resume_point.commit
        assert commit is not None and journal_folder is not None, "the folder has the journal of the step"
        restored = engine.go_back_to_commit()
        if restored.number != commit.number:
            raise RuntimeError(
                f"step {restored.facts.get('global_step')} was committed after this resume began, with a batch size "
                "that failed later; resume again with a batch size that fits"
            )
        load_buffers(self.model, journal_folder)
        self._read_step_facts(journal_folder)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Do nothing under offload. Weights and optimizer states are loaded together when training begins, and again
        for each batch size that is tried."""
        if self._ensure_engine() is None:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        engine, best = self.offload_engine, self.state.best_model_checkpoint
        is_here = engine is not None and has_weights(self.model, best)
        if engine is None or not all_agree(self._links, "whether the best model is there", is_here):
            if is_here:
                logger.warning(
                    "another rank has no best model in %s, so all ranks keep the weights of the last step", best
                )
            else:
                super()._load_best_model()  # logs a warning that the checkpoint is gone
            return
        logger.info("loading the best model from %s (score: %s)", best, self.state.best_metric)
        reload_weights(engine, self.model, best)
        load_master_residuals(engine, best)


class Trainer(OffloadTrainerMixin, transformers.Trainer):
    """`transformers.Trainer` with `offload=`."""
