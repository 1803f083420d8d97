"""A store turned into a plain Hugging Face model, without the code that trained it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, cast, get_args

import torch
from safetensors.torch import load

from hf_lohan.checkpoint.resume_point import store_paths_of
from hf_lohan.checkpoint.whole_folder import unfinished_checkpoint
from hf_lohan.device import BufferPool, CpuDevice
from hf_lohan.engine import ParameterAccess
from hf_lohan.files import IoEngine, StorePath
from hf_lohan.huggingface.model_description import BUFFERS_NAME, build_described, described_tokenizer
from hf_lohan.huggingface.saving import StoredModel, save_pretrained_from_store
from hf_lohan.model import stored_form
from hf_lohan.optim import MomentDtype
from hf_lohan.store import Store

_BUFFER_BYTES = 4 << 20
_NUM_BUFFERS = 4
_MAX_SHARD_BYTES = 2 * 1000**3


def export(run: str | Path, out: str | Path) -> int | None:
    """Write the model that was committed last into the folder `out`; returns its global step, where Trainer told one.

    Args:
        run: the output folder of a run, or the folder of its store.
        out: a new or empty folder.

    The folder is there when it is whole. Raises ValueError if there is nothing to export or `out` is in use,
    `StoreInUseError` while the run goes on, and `CorruptionError` if a byte of the weights is not what was written.
    """
    if os.path.lexists(out) and not (os.path.isdir(out) and not os.listdir(out)):
        raise ValueError(f"{str(out)!r} is there and is no empty folder; give a new one")
    paths = store_paths_of(run)
    io = IoEngine(num_threads=2, piece_bytes=_BUFFER_BYTES, max_inflight_bytes=_NUM_BUFFERS * _BUFFER_BYTES)
    try:
        with Store.open([StorePath(path) for path in paths], model=None, engine=io) as store:
            if store.committed is None:
                raise ValueError(f"nothing is committed in {store.paths[0].path}; there is no model to export")
            target = Path(os.path.abspath(out))
            with unfinished_checkpoint(str(target.parent), target.name, f"_unfinished_{target.name}") as unfinished:
                _export_store(store, unfinished / target.name)
            step = store.committed.facts.get("global_step")
            return int(step) if step is not None else None
    finally:
        io.close()


def _moment_dtype(store: Store) -> MomentDtype:
    name = store.model.optimizer_state_dtype
    if name not in get_args(MomentDtype):
        raise ValueError(
            f"the store in {store.paths[0].path} has optimizer_state_dtype={name}, which this hf_lohan does not know; "
            "upgrade it"
        )
    return cast(MomentDtype, name)


def _export_store(store: Store, out: Path) -> None:
    if store.model_folder is None:
        raise ValueError(
            f"the store in {store.paths[0].path} tells nothing of its model, so it cannot be exported without the code "
            "that trains it"
        )
    folder = Path(store.model_folder)
    model: Any = build_described(folder)
    working_dtype = getattr(torch, next(record.dtype for record in store.records if record.kind == "param"))
    form = stored_form(model, working_dtype, _moment_dtype(store))
    if form.identity.fingerprint != store.model.fingerprint:
        raise ValueError(
            f"the model that {folder} describes is not laid out as its records are (it was trained with another "
            "version of transformers or hf_lohan); use that version, or a checkpoint"
        )
    assert store.committed is not None
    if BUFFERS_NAME in store.committed.journal:  # as they were at that step
        model.load_state_dict(load(store.committed.journal[BUFFERS_NAME]), strict=False, assign=True)
    pool = BufferPool(CpuDevice(), name="export", num_buffers=_NUM_BUFFERS, buffer_bytes=_BUFFER_BYTES)
    access = ParameterAccess(store, form.model_blocks.blocks, form.master, pool)
    base = model.get_base_model() if hasattr(model, "peft_config") else model
    base.config.dtype = working_dtype
    stored_model = StoredModel(model, lambda: access, _MAX_SHARD_BYTES)
    save_pretrained_from_store(stored_model, type(model).save_pretrained, out)
    tokenizer = described_tokenizer(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(out)
