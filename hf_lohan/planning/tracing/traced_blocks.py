"""Traces a model divided into blocks as in a run. Equal traces of a process are made once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from torch.func import functional_call

from hf_lohan.activations import ChunkedLoss, chunked_head_of
from hf_lohan.compat.torch_private import READS_VALUES
from hf_lohan.model import ModelBlocks, discover_blocks
from hf_lohan.planning.tracing.chunk_trace import LayersOnPaper
from hf_lohan.planning.tracing.operations import BlockTrace, OperationTrace
from hf_lohan.planning.tracing.profile import TracedModel, on_fake_tensors, trace_model
from hf_lohan.planning.tracing.trace import signature_of
from hf_lohan.threads import ThreadSettings, uninterrupted

_Trace = TypeVar("_Trace")
_MOST_TRACED = 64
_traced: dict[Any, TracedModel] = {}
"""Traces of this process, because a resumed or repeated run has the same model."""
_NO_SETTINGS = frozenset({"_name_or_path", "_commit_hash", "dtype", "transformers_version"})
"""Entries of a model's config that do not change its forward."""


def trace_blocks(
    model: nn.Module,
    *,
    batch_size: int,
    sequence_length: int,
    device: torch.device | str = "cpu",
    fused_attention: bool = False,
    chunked_loss: ChunkedLoss | None = None,
    found: ModelBlocks | None = None,
    on_paper: LayersOnPaper | None = None,
) -> TracedModel:
    """Trace the forward of a causal LM (on meta, or in memory and not offloaded), divided into blocks as in a run.
    ``found``: the model's blocks, by default its layers with all their experts. ``on_paper``: layers in chunks.

    Raises ValueError (DiscoveryError) for a model without layers, with fewer positions than the sequence has tokens, or
    whose forward needs more than token ids.
    """
    chunked_head = chunked_head_of(model, chunked_loss)
    if chunked_head is None or not chunked_head.applies_to(batch_size * sequence_length):
        chunked_loss = None  # without large logits the trace is the same
    said = vars(model.config) if hasattr(model, "config") else {}
    settings = {name: value for name, value in said.items() if name not in _NO_SETTINGS}
    streams_experts = found is not None and bool(found.experts)
    packed = tuple(block.fetched_bytes for block in found.blocks if block.packed_slices) if found is not None else ()
    chunk_tokens = None if on_paper is None else (on_paper.chunk_tokens, on_paper.has_costs)
    shape = (batch_size, sequence_length, str(device), fused_attention, chunked_loss, streams_experts, packed)
    key = (signature_of(model), repr(settings), *shape, chunk_tokens)
    if key not in _traced:
        _check_positions(model, sequence_length)
        if len(_traced) >= _MOST_TRACED:
            del _traced[next(iter(_traced))]
        trace = partial(
            trace_model,
            model,
            found or discover_blocks(model),
            batch_size=batch_size,
            sequence_length=sequence_length,
            device=device,
            fused_attention=fused_attention,
            chunked_loss=chunked_loss,
            on_paper=on_paper,
        )
        _traced[key] = run_trace(model, trace, device)
    return _traced[key]


def forward_without_values(model: nn.Module, **inputs: Any) -> Any:
    """Return the fake output of a model's forward on the CPU without gradients. ``inputs`` are real tensors, because
    models read the values of token ids and masks. Raises ValueError if the forward fails."""

    def run() -> Any:
        with contextlib.ExitStack() as stack:
            fake_mode, tensors = stack.enter_context(on_fake_tensors(model, torch.device("cpu")))
            stack.enter_context(torch.no_grad())
            stack.enter_context(OperationTrace(BlockTrace(), fake_mode))
            return functional_call(model, tensors, kwargs=inputs, tie_weights=False)

    return run_trace(model, run, "cpu", "keys and values cannot be counted")


def run_trace(
    model: nn.Module, trace: Callable[[], _Trace], device: torch.device | str, so: str = "its steps cannot be planned"
) -> _Trace:
    """Run a trace of a model. Raises ValueError if the forward fails or needs values. ``so``: what the error means."""
    # Fake tensors and modes are Python code that torch also calls in places where an exception ends the process.
    try:
        return uninterrupted(trace, ThreadSettings(torch.device(device).type))
    except ValueError:
        raise
    except Exception as error:
        fails = "fails on token ids alone"
        if isinstance(error, READS_VALUES):
            fails = "reads values of tensors, and a trace knows only their shapes"
        raise ValueError(
            f"the forward of {type(model).__name__} {fails}, so {so}: {type(error).__name__}: {error}"
        ) from error


_NO_POSITIONS = ("prompt_encoder", "token_type", "segment")
"""Parts of names of embeddings that do not embed positions."""


def _check_positions(model: Any, sequence_length: int) -> None:
    words = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    # A tower for images has its own positions, which a text does not use.
    for name, module in (decoder if isinstance(decoder, nn.Module) else model).named_modules():
        if module is words or any(other in name for other in _NO_POSITIONS):
            continue
        if isinstance(module, nn.Embedding) and module.num_embeddings < sequence_length:
            raise ValueError(
                f"the model has {module.num_embeddings} positions ({name}), fewer than the sequence length of "
                f"{sequence_length}; use shorter sequences"
            )
