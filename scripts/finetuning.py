"""The run that `finetune_llama.py` and `finetune_opt.py` share, from arguments to metrics."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import text_data
import transformers
from datasets import Dataset, DatasetDict
from finetune_arguments import (
    DTYPES,
    DataArguments,
    Family,
    ModelArguments,
    checkpoint_to_resume,
    choose_block_size,
)
from transformers import (
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    HfArgumentParser,
    TrainingArguments,
)

import hf_lohan
from hf_lohan.config import offload_of_environment
from hf_lohan.device import default_torch_device
from hf_lohan.huggingface.arguments import take_launched_precision
from hf_lohan.huggingface.models.hub import read_model_config
from hf_lohan.huggingface.models.recipe import model_class_of
from hf_lohan.huggingface.optimizers import config_named_by_optim

logger = logging.getLogger(__name__)

Arguments = tuple[ModelArguments, DataArguments, TrainingArguments]


def main(family: Family, argv: Sequence[str] | None = None) -> dict[str, float]:
    """Run a fine-tuning script, and return all metrics. Bad input ends it with one line and exit status 1."""
    parser = HfArgumentParser((ModelArguments, DataArguments, TrainingArguments))
    # Without use_cpu TrainingArguments refuses --bf16 on a CPU.
    parser.set_defaults(use_cpu=default_torch_device().type == "cpu", **family.defaults)
    try:
        arguments: Arguments = parser.parse_args_into_dataclasses(args=argv)
        _set_up_logging(arguments[2])
        trainer, checkpoint = prepare(family, *arguments)
    except (ValueError, OSError) as error:
        logger.debug("traceback of the error below:", exc_info=True)
        sys.exit(f"error: {error}")
    return run(trainer, checkpoint)


def prepare(
    family: Family, model_args: ModelArguments, data_args: DataArguments, args: TrainingArguments
) -> tuple[hf_lohan.Trainer, str | bool | None]:
    """Return a trainer and the checkpoint to resume from, if any. Raises ValueError or OSError for bad input."""
    if not (args.do_train or args.do_eval):
        raise ValueError("nothing to do; give --do_train, --do_eval or both")
    checkpoint = checkpoint_to_resume(data_args.resume or args.resume_from_checkpoint, args.output_dir)
    # Cheap checks come first, and weights last.
    asked = model_args.offload or offload_of_environment(may_fit=False)
    offload = hf_lohan.OffloadConfig.load(asked) if asked else None
    if offload is not None:
        take_launched_precision(args)
        offload = config_named_by_optim(args, offload)
    path, origin = model_args.model_name_or_path, origin_of(model_args)
    config = read_model_config(path, origin)
    if config.model_type not in family.model_types:
        logger.warning("%s is a %r model; the defaults here suit %s", path, config.model_type, family.name)
    tokenizer = AutoTokenizer.from_pretrained(model_args.tokenizer_name or path, **origin)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    data = read_data(data_args, args, tokenizer, block_size=choose_block_size(data_args.block_size, config))
    trainer = hf_lohan.Trainer(
        model=load_model(model_args, args, offload),
        args=args,
        train_dataset=data.get("train"),
        eval_dataset=data.get("validation"),
        # This collator pads labels by position. A collator that masks the pad token would also mask the end-of-text
        # token.
        data_collator=DataCollatorForSeq2Seq(tokenizer),
        processing_class=tokenizer,
        offload=offload,
    )
    return trainer, checkpoint


def load_model(model_args: ModelArguments, args: TrainingArguments, offload: hf_lohan.OffloadConfig | None) -> Any:
    """Load the model to memory, or stream it to the store with offload."""
    path, dtype, origin = model_args.model_name_or_path, DTYPES[model_args.dtype], origin_of(model_args)
    if offload is None:
        model_class = model_class_of(read_model_config(path, origin), origin)
        return model_class.from_pretrained(path, dtype=dtype, **origin)
    return hf_lohan.from_pretrained(
        path,
        offload=offload,
        dtype=dtype,
        bf16=args.bf16,
        torch_device=args.device,
        default_ssd_path=Path(args.output_dir) / "_lohan" / "store",
        # Clipping needs the norm of all gradients first, and accumulation needs their sum.
        hold_gradients=args.max_grad_norm > 0 or args.gradient_accumulation_steps > 1,
        **origin,
    )


def origin_of(model_args: ModelArguments) -> dict[str, Any]:
    """Return the arguments of `from_pretrained` that name the source of the model and its code."""
    return {"revision": model_args.model_revision, "trust_remote_code": model_args.trust_remote_code}


def read_data(data_args: DataArguments, args: TrainingArguments, tokenizer: Any, *, block_size: int) -> DatasetDict:
    """Read the blocks that the run needs: "train" and "validation"."""
    evaluates = args.do_eval or args.eval_strategy != "no"

    def blocks_of(files: list[str]) -> Dataset:
        documents = text_data.read_documents(files, text_column=data_args.text_column)
        return text_data.make_blocks(documents, tokenizer, block_size=block_size, packing=data_args.packing)

    data = DatasetDict()
    if data_args.train_file and (args.do_train or not data_args.validation_file):
        data["train"] = blocks_of(data_args.train_file)
    if evaluates and data_args.validation_file:
        data["validation"] = blocks_of(data_args.validation_file)
    elif evaluates and "train" in data:
        data = text_data.split_off(data["train"], data_args.validation_split_percentage)
    if args.do_train and "train" not in data:
        raise ValueError("--do_train needs data; give --train_file")
    if evaluates and "validation" not in data:
        raise ValueError("--do_eval needs data; give --validation_file or --train_file")
    for name, most in (("train", data_args.max_train_samples), ("validation", data_args.max_eval_samples)):
        if name in data and most is not None:
            data[name] = data[name].select(range(min(most, len(data[name]))))
    logger.info("rows of up to %d tokens: %s", block_size, {name: len(rows) for name, rows in data.items()})
    return data


def run(trainer: hf_lohan.Trainer, checkpoint: str | bool | None) -> dict[str, float]:
    """Train, save and evaluate. Metrics go to the log and to `<output_dir>/*_results.json`."""
    args = trainer.args
    results: dict[str, float] = {}
    if args.do_train:
        metrics = trainer.train(resume_from_checkpoint=checkpoint).metrics
        metrics["train_samples"] = len(trainer.train_dataset)
        trainer.save_model()
        trainer.save_state()
        _report(trainer, "train", metrics)
        results |= metrics
    if args.do_eval:
        metrics = trainer.evaluate()
        metrics["eval_samples"] = len(trainer.eval_dataset)
        metrics["perplexity"] = perplexity(metrics["eval_loss"])
        _report(trainer, "eval", metrics)
        results |= metrics
    return results


def perplexity(loss: float) -> float:
    """e^loss, or infinity if that overflows."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def _report(trainer: hf_lohan.Trainer, split: str, metrics: dict[str, float]) -> None:
    trainer.log_metrics(split, metrics)
    trainer.save_metrics(split, metrics)


def _set_up_logging(args: TrainingArguments) -> None:
    level = args.get_process_log_level()
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", datefmt="%H:%M:%S")
    for name in (__name__, "finetune_arguments", "hf_lohan"):
        logging.getLogger(name).setLevel(level)
    transformers.utils.logging.set_verbosity(level)
