"""Exports the model of a store as a plain Hugging Face model. The code that trained it is not needed."""

from __future__ import annotations

import json
import os
from collections.abc import Container
from functools import partial
from pathlib import Path
from typing import Any, cast, get_args

import torch
import transformers
from safetensors.torch import load, load_file
from torch import nn

from hf_lohan.checkpoint.generations import opened_stores
from hf_lohan.checkpoint.model_description import BUFFERS_NAME, FACTS_NAME, MODEL_FORMAT_VERSION
from hf_lohan.checkpoint.resume_point import store_paths_of
from hf_lohan.checkpoint.whole_folder import check_new_folder, unfinished_checkpoint
from hf_lohan.config.offload_config import SaveDtype
from hf_lohan.costs import Quantization
from hf_lohan.device import BufferPool, CpuDevice
from hf_lohan.engine import ParameterAccess
from hf_lohan.files.directories import keep_from_others, temporary_folder
from hf_lohan.files.durable_file import write_folder
from hf_lohan.huggingface.models.saving import StoredModel, save_pretrained_from_store
from hf_lohan.model import StoredForm, base_of, stored_form
from hf_lohan.optim import MomentDtype, UpdateRule
from hf_lohan.store import Store
from hf_lohan.updates import MISSED_STEPS_NAME, MissedSteps, UpToDateRecords

_BUFFER_BYTES = 4 << 20
_NUM_BUFFERS = 4


def export_model(run: str | Path, out: str | Path, dtype: str = "auto") -> int | None:
    """Write the last committed model to the folder `out`. Returns its global step, or None if the run had no Trainer.

    Args:
        run: the output folder of a run, or the folder of its store.
        out: a new or empty folder. It appears only when it is complete.
        dtype: the dtype of the weights. "auto" is the dtype in which the run saves weights (`save_dtype`).

    Raises ValueError if nothing is committed or `out` has files, `StoreInUseError` if the run is still using the store,
    and `CorruptionError` if weights are damaged.
    """
    if dtype not in get_args(SaveDtype):
        raise ValueError(f"dtype={dtype!r} is not supported; give one of {', '.join(get_args(SaveDtype))}")
    check_new_folder(out)
    keep_from_others()
    paths = store_paths_of(run)
    with opened_stores(paths) as (store, *others):
        if others:
            raise ValueError(
                f"{paths[0][0]} has the stores of {1 + len(others)} ranks, each with a part of the model; merge them "
                f"with lohan reshard {run} --ranks 1 --remove-old, and export again"
            )
        if store.committed is None:
            raise ValueError(f"nothing is committed in {store.paths[0].path}; there is no model to export")
        target = Path(os.path.abspath(out))
        with unfinished_checkpoint(str(target.parent), target.name, f"_unfinished_{target.name}") as unfinished:
            _export_store(store, unfinished / target.name, dtype)
        step = store.committed.facts.get("global_step")
        return int(step) if step is not None else None


def _moment_dtype(store: Store) -> MomentDtype:
    name = store.model.optimizer_state_dtype
    if name not in get_args(MomentDtype):
        raise ValueError(
            f"the store in {store.paths[0].path} has optimizer_state_dtype={name}, which this version of hf_lohan does "
            "not know; upgrade hf_lohan"
        )
    return cast(MomentDtype, name)


def _rules(facts: dict[str, Any], model: nn.Module) -> dict[nn.Parameter, UpdateRule]:
    rule_of = {name: UpdateRule.parse(text) for text, names in facts.get("optimizers", {}).items() for name in names}
    return {parameter: rule_of[name] for name, parameter in model.named_parameters() if name in rule_of}


def described_model(store: Store) -> tuple[Any, StoredForm]:
    """Return the model that a store describes, on the meta device, and the form of its records. Raises ValueError if
    the store has no description, or if the description does not match the records."""
    if store.model_folder is None:
        raise ValueError(
            f"the store in {store.paths[0].path} has no description of its model, so only the code that trains the "
            "model can save it"
        )
    folder = Path(store.model_folder)
    assert store.committed is not None
    files = store.committed.model_files
    if FACTS_NAME not in files:
        raise ValueError(f"{folder / FACTS_NAME} is missing, so only the code that trains the model can save it")
    model: Any = _build_described(folder, files)
    facts = _read_facts(folder)
    dtypes = {record.dtype for record in store.records if record.kind == "param"}
    # If the model has several dtypes, the description has them all. A rank's shard may have records of only one.
    working_dtype = getattr(torch, dtypes.pop()) if len(dtypes) == 1 and "dtypes" not in facts else None
    quantization = Quantization.parse(facts["quantize"]) if "quantize" in facts else None
    # Each expert may be a block or not. The run's budgets decided this.
    for streams_experts in (False, True):
        form = stored_form(
            model,
            working_dtype,
            _moment_dtype(store),
            partial(_rules, facts),
            streams_experts=streams_experts,
            quantization=quantization,
        )
        if form.identity.fingerprint == store.model.fingerprint:
            break
    else:
        raise ValueError(
            f"the model that {folder} describes does not match the store's records, because it was trained with "
            "another version of transformers or hf_lohan; use that version, or a checkpoint"
        )
    return model, form


def _saved_dtypes(form: StoredForm, facts: dict[str, Any], asked: str) -> dict[str, torch.dtype]:
    """Return a dict from weight to the dtype in which it is written, if this is not its stored dtype."""
    working = {part.name: block.master.working_dtype for block in form.model_blocks.blocks for part in block.slices}
    if asked == "auto":
        saved = facts.get("saved_dtypes", {})
        return {name: getattr(torch, text) for text, names in saved.items() for name in names if name in working}
    if asked == "bfloat16" and form.master.working_dtype == torch.bfloat16:
        return {}  # float32 weights stay float32
    return {name: getattr(torch, asked) for name, dtype in working.items() if dtype != getattr(torch, asked)}


def _export_store(store: Store, out: Path, dtype: str) -> None:
    model, form = described_model(store)
    folder = Path(str(store.model_folder))
    assert store.committed is not None
    if store.records != form.records:
        raise ValueError(
            f"the records in {store.paths[0].path} do not match the complete model that {folder} describes; use the "
            "version of hf_lohan that made the store, or a checkpoint"
        )
    if BUFFERS_NAME in store.committed.journal:  # the buffers of the committed step
        model.load_state_dict(load(store.committed.journal[BUFFERS_NAME]), strict=False, assign=True)
    pool = BufferPool(CpuDevice(), name="export", num_buffers=_NUM_BUFFERS, buffer_bytes=_BUFFER_BYTES)
    blocks = form.model_blocks.blocks
    missed = MissedSteps(blocks, [chunk for block in blocks for chunk in block.cut(_BUFFER_BYTES)])
    missed.restore(store.committed.journal.get(MISSED_STEPS_NAME))
    access = ParameterAccess(UpToDateRecords(store, blocks, missed), blocks, pool)
    base_of(model).config.dtype = form.master.working_dtype
    stored_model = StoredModel(model, lambda: access, dtypes=_saved_dtypes(form, _read_facts(folder), dtype))
    save_pretrained_from_store(stored_model, type(model).save_pretrained, out)
    files = store.model_files or {}
    if "tokenizer_config.json" in files:
        with temporary_folder() as own_folder:  # a folder with only the files of the commit
            write_folder(own_folder, {name: content for name, content in files.items() if Path(name).name == name})
            transformers.AutoTokenizer.from_pretrained(own_folder).save_pretrained(out)


def _build_described(folder: Path, files: Container[str]) -> Any:
    """Build the described model on the meta device from the commit's ``files`` in the folder. Frozen weights are
    frozen, and buffers have values. Raises ValueError if transformers does not have the model's class."""
    facts = _read_facts(folder)
    model_class: Any = getattr(transformers, facts["model_class"], None)
    if not (isinstance(model_class, type) and issubclass(model_class, transformers.PreTrainedModel)):
        raise ValueError(
            f"{folder} has a model of class {facts['model_class']!r}, which transformers {transformers.__version__} "
            "does not have; load the model with its own code and resume from a checkpoint instead"
        )
    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = model_class(config)
        for adapter in facts["adapters"]:
            model = _with_adapter(model, folder / adapter, adapter)
    trainable = set(facts["trainable"])
    dtypes = facts.get("dtypes", {})
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trainable)
        if name in dtypes:
            parameter.data = parameter.data.to(getattr(torch, dtypes[name]))
    model.load_state_dict(load_file(folder / BUFFERS_NAME), strict=False, assign=True)
    if "generation_config.json" in files:
        base_of(model).generation_config = transformers.GenerationConfig.from_pretrained(folder)
    return model


def _read_facts(folder: Path) -> dict[str, Any]:
    file = folder / FACTS_NAME
    facts: dict[str, Any] = json.loads(file.read_text())
    if facts["format_version"] != MODEL_FORMAT_VERSION:
        raise ValueError(
            f"{file} has format {facts['format_version']}, and this version of hf_lohan reads format "
            f"{MODEL_FORMAT_VERSION}; update hf_lohan"
        )
    outside = [name for name in facts["adapters"] if Path(name).name != name]
    if outside:
        raise ValueError(f"{file} names an adapter outside its folder: {outside[0]!r}")
    return facts


def _with_adapter(model: Any, folder: Path, name: str) -> Any:
    from peft import PeftConfig, PeftModel, get_peft_model  # PEFT may not be installed

    config = PeftConfig.from_pretrained(str(folder))
    if isinstance(model, PeftModel):
        model.add_adapter(name, config)
        return model
    return get_peft_model(model, config, adapter_name=name)
