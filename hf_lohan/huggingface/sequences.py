"""Divides the rows of a Trainer's batches among ranks (`ranks.per_row`), and refuses batches that cannot be divided.

A rank gets two pieces of each row, with explicit position ids. Labels are shifted before rows are cut, so that the last
token of a piece predicts the first token of the next piece. Masks are made for all tokens of a row (`CutRows`).
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import IterableDataset
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hf_lohan.activations.token_ranges import CutRows, RowPieces
from hf_lohan.compat.transformers_private import documents_of, is_causal_lm_loss
from hf_lohan.huggingface.attention import computes_a_part, next_forward_of
from hf_lohan.model import base_of
from hf_lohan.ranks import RanksDisagreeError, RowLinks, bytes_of

ROWS = "rows_of_ranks"
"""Key of the `CutRows` in a cut batch."""
_IGNORED = -100
_CUT_INPUTS = frozenset(("input_ids", "attention_mask", "position_ids", "labels", "shift_labels"))
_ROPE_BY_LENGTH = ("dynamic", "longrope")
"""Types of rotary embeddings whose frequencies depend on the largest position in a forward."""


def own_parts(batches: Iterable[Any], links: RowLinks) -> Iterator[dict[str, Any]]:
    """Yield this rank's part of each batch (`cut_rows`). All ranks that share rows call this together. Raises
    RanksDisagreeError if their batches differ, because a rank would then attend to keys of other tokens."""
    for batch in batches:
        if len(set(links.all_gather("the rows of a batch", _digest(batch)))) > 1:
            raise RanksDisagreeError(
                f"ranks.per_row: {links.ranks.num_ranks} ranks share rows, but they have different batches; give all "
                "ranks the same dataset, not a part for each rank, and draw no random numbers in the dataset or the "
                "data collator"
            )
        yield cut_rows(batch, links.ranks.rank, links.ranks.num_ranks)


def _digest(batch: Any) -> bytes:
    digest = hashlib.sha256()
    for name in sorted(_CUT_INPUTS) if isinstance(batch, Mapping) else ():
        if isinstance(tensor := batch.get(name), Tensor):
            digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} ".encode())
            digest.update(bytes_of(tensor.cpu()).numpy().data)
    return digest.digest()


def cut_rows(batch: Any, number: int, num_ranks: int) -> dict[str, Any]:
    """Return the part of a batch that rank ``number`` computes, if ``num_ranks`` share each row. Raises ValueError for
    a batch that cannot be divided."""
    named = batch if isinstance(batch, Mapping) else {}
    others = [name for name, value in named.items() if value is not None and name not in _CUT_INPUTS]
    ids, labels, targets = (named.get(name) for name in ("input_ids", "labels", "shift_labels"))
    if others or not isinstance(ids, Tensor) or ids.dim() != 2 or (labels is None and targets is None):
        what = f"the input {others[0]!r}" if others else "no input_ids [rows, tokens] with labels"
        raise ValueError(
            f"ranks.per_row: {num_ranks} divides batches of token ids and labels, but this batch has {what}; leave "
            "ranks.per_row out"
        )
    num_rows, length = ids.shape
    if length < 2 * num_ranks:
        raise ValueError(
            f"ranks.per_row: {num_ranks} divides each row into {2 * num_ranks} pieces, but a row of this batch has "
            f"{length} tokens; pack or pad rows to at least {2 * num_ranks} tokens, or lower ranks.per_row"
        )
    padding, positions, documents = named.get("attention_mask"), named.get("position_ids"), None
    if padding is not None:
        if padding.shape != ids.shape:
            raise ValueError(
                f"ranks.per_row: {num_ranks} needs an attention_mask [rows, tokens], but the attention_mask of this "
                f"batch has shape {tuple(padding.shape)}; leave ranks.per_row out"
            )
        is_token = padding.bool()
        if bool((is_token[:, 1:] & ~is_token[:, :-1]).any()):
            raise ValueError(
                f"ranks.per_row: {num_ranks} needs rows that begin with a token, but a row of this batch begins with "
                "padding; set tokenizer.padding_side = 'right'"
            )
    if positions is None:
        positions = torch.arange(length, device=ids.device).expand(num_rows, -1)
    elif positions.dim() != 2 or positions.shape[1] != length:
        raise ValueError(
            f"ranks.per_row: {num_ranks} needs position_ids [rows, tokens], but the position_ids of this batch have "
            f"shape {tuple(positions.shape)}; leave ranks.per_row out"
        )
    else:
        positions = positions.expand(num_rows, -1)
        documents = documents_of(positions) if padding is None else None  # same condition as in transformers
    if targets is None:
        assert labels is not None
        targets = F.pad(labels, (0, 1), value=_IGNORED)[:, 1:]
    pieces = RowPieces(length, number, num_ranks)
    own_targets = pieces.take(targets)
    if padding is not None:
        padding = None if bool(padding.all()) else padding.bool()
    return {
        "input_ids": pieces.take(ids),
        "position_ids": pieces.take(positions),
        # Models need labels for a loss, and some versions of Trainer count them.
        "labels": F.pad(own_targets, (1, 0), value=_IGNORED),
        "shift_labels": own_targets,
        ROWS: CutRows(pieces, documents, padding),
    }


@contextlib.contextmanager
def sharing_rows(model: Any, rows: CutRows, targets: Tensor) -> Iterator[None]:
    """In this context, a training forward computes a part of ``rows``. Raises ValueError if the model does not compute
    its loss from ``targets``."""
    base = base_of(model)
    stock, has_own = base.loss_function, "_loss_function" in vars(base)
    num_calls = 0

    def loss_function(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_calls
        if not computes_a_part():  # planning traces a forward of whole rows
            return stock(*args, **kwargs)
        if kwargs.get("shift_labels") is not targets:
            raise _foreign_loss(base)
        num_calls += 1
        return stock(*args, **kwargs)

    base.loss_function = loss_function
    try:
        with next_forward_of(rows):
            yield
        if num_calls != 1:
            raise _foreign_loss(base)
    finally:
        if has_own:
            base.loss_function = stock
        else:
            del base._loss_function


def _foreign_loss(model: Any) -> ValueError:
    return ValueError(
        f"ranks.per_row divides the loss of causal language models among ranks, but {type(model).__name__} computes "
        "its loss in another way here; train a causal language model with Trainer, or leave ranks.per_row out"
    )


def check_model_of_rows(model: nn.Module) -> None:
    """Raise ValueError for a model that needs all tokens of a row outside its layers."""
    base = base_of(model)
    name, config = type(base).__name__, getattr(base, "config", None)
    if name not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() or not is_causal_lm_loss(base.loss_function):
        raise _foreign_loss(base)
    problem = None
    if "position_ids" not in inspect.signature(type(base).forward).parameters:
        problem = "takes no position_ids"
    elif getattr(config, "output_router_logits", False):
        problem = "adds a loss of its routers over all tokens (output_router_logits)"
    elif (kind := _rope_by_length(config.to_dict() if config is not None else {})) is not None:
        problem = f"has rotary embeddings of type {kind!r}, which depend on the longest position of a forward"
    elif any(isinstance(module, nn.Dropout) and module.p > 0 for module in base.modules()):
        problem = "has dropout, which draws different random numbers on each rank; set its probability to 0"
    if problem is not None:
        raise ValueError(f"ranks.per_row cannot divide the rows of {name}, because it {problem}; leave it out")


def _rope_by_length(config: Any) -> str | None:
    if not isinstance(config, Mapping):
        return None
    kind = config.get("rope_type", config.get("type"))
    if kind in _ROPE_BY_LENGTH:
        return str(kind)
    return next((found for value in config.values() if (found := _rope_by_length(value)) is not None), None)


def check_trainer_of_rows(trainer: Any, num_ranks: int) -> None:
    """Raise ValueError if a Trainer's settings would change the results of ranks that share rows."""
    args = trainer.args
    reads_on_rank_0 = isinstance(trainer.train_dataset, IterableDataset) and (
        args.accelerator_config.dispatch_batches is not False
    )
    refused = {
        "average_tokens_across_devices=False, because ranks divide by their own tokens; set it to True": (
            not args.average_tokens_across_devices
        ),
        "label_smoothing_factor, which smooths unshifted labels; leave it out": args.label_smoothing_factor,
        "compute_loss_func, which does not get the shifted labels; leave it out": trainer.compute_loss_func is not None,
        "neftune_noise_alpha, which draws different noise on each rank; leave it out": (
            args.neftune_noise_alpha is not None
        ),
        "a model whose loss takes no num_items_in_batch; leave ranks.per_row out": (
            not trainer.model_accepts_loss_kwargs
        ),
        "an IterableDataset that rank 0 reads for all; set dispatch_batches to False in accelerator_config": (
            reads_on_rank_0
        ),
        "split_batches=True, which gives each rank different rows of a batch; leave it out of accelerator_config": (
            args.accelerator_config.split_batches
        ),
    }
    for what, is_refused in refused.items():
        if is_refused:
            raise ValueError(f"ranks.per_row: {num_ranks} cannot be combined with {what}")
