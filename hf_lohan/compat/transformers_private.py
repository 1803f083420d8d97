"""The private API of transformers that offloading needs. `tests/compat` lists the Trainer methods that our mixins
override."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, Trainer, TrainingArguments, masking_utils
from transformers import trainer as stock_module
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _grouped_linear, grouped_mm_experts_forward
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.utils.output_capturing import _active_collector

from hf_lohan.compat.patches import replaced

LOG_SUMS = ("_tr_loss", "_globalstep_last_logged", "current_flos")
"""Attributes of Trainer with sums since the last log, which a checkpoint does not have."""
CACHE_NAMES = ("cache", "past_key_values", "layer_past", "cache_params")
"""Names of the key-value cache in a forward's arguments and outputs. "cache" is new in transformers 5.24."""
_ELEMENTS_OF_A_THREAD = 32768
"""torch's GRAIN_SIZE: an elementwise kernel on the CPU gives a thread at least this number of elements."""
_VECTOR_BYTES = 128
"""Number of bytes that an elementwise kernel computes at once: two vectors of AVX-512."""


# Trainer.


def use_one_gpu(args: TrainingArguments) -> None:
    """Prevent `nn.DataParallel`, which would copy placeholders to every GPU."""
    args._n_gpu = min(args.n_gpu, 1)


def log_sums(trainer: Trainer) -> dict[str, float]:
    """Return the sums for `restore_log_sums`. Raises AttributeError for a Trainer without them."""
    return {name: float(getattr(trainer, name)) for name in LOG_SUMS}


def restore_log_sums(trainer: Any, sums: Mapping[str, float]) -> None:
    """Restore the sums, so that a resumed Trainer logs the same averages."""
    trainer._tr_loss.fill_(sums["_tr_loss"])
    trainer._total_loss_scalar -= sums["_tr_loss"]  # this call's average counts only its own steps
    for name in LOG_SUMS[1:]:
        setattr(trainer, name, type(getattr(trainer, name))(sums[name]))


def add_logged_loss(trainer: Any, loss: Tensor) -> None:
    """Add a micro-batch's loss to the sum for the log, as Trainer does with the loss that `training_step` returns."""
    if trainer.args.logging_nan_inf_filter:  # chosen on the device, so that the host does not wait for the loss
        num_steps = 1 + trainer.state.global_step - trainer._globalstep_last_logged
        loss = torch.where(loss.isfinite(), loss, trainer._tr_loss / num_steps)
    trainer._tr_loss += loss


# Generation.


def cache_among(values: Mapping[str, Any]) -> Any:
    """Return the cache in the keyword arguments or the outputs of a forward, or None."""
    return next((value for name, value in values.items() if name in CACHE_NAMES and value is not None), None)


def fills_cache(model: Any) -> bool:
    """Return whether a forward of the model makes a cache if its caller does not decide."""
    generates = isinstance(model, PreTrainedModel) and model.can_generate()
    return generates and bool(getattr(model.config.get_text_config(decoder=True), "use_cache", False))


def put_cache(output: Any, cache: Any) -> None:
    """Put a cache into the output of a forward that has none."""
    name = next((name for name in CACHE_NAMES if name in getattr(output, "__dataclass_fields__", ())), None)
    if name is not None and getattr(output, name) is None:
        setattr(output, name, cache)


# Recomputation.


def run_layers_by(model: nn.Module, run_layer: Callable[..., Any]) -> None:
    """Have `run_layer` run recomputed layers, even if recomputation is enabled later. This replaces a method of
    transformers' models that is called however recomputation is enabled."""
    for module in model.modules():
        stock = getattr(module, "_set_gradient_checkpointing", None)
        if stock is not None:
            setattr(module, "_set_gradient_checkpointing", _set_and_run_by(run_layer, stock))  # noqa: B010 - bound


def _set_and_run_by(run_layer: Callable[..., Any], stock: Any) -> Any:
    @functools.wraps(stock)  # callers inspect its signature
    def set_checkpointing(*args: Any, **kwargs: Any) -> None:
        stock(*args, **kwargs)
        for module in stock.__self__.modules():
            if hasattr(module, "_gradient_checkpointing_func"):
                module._gradient_checkpointing_func = run_layer

    return set_checkpointing


def own_forward(layer: nn.Module) -> Callable[..., Any]:
    """Return the forward of a layer's class, without the wrapper of transformers that runs it as a checkpoint."""
    forward = type(layer).forward
    return forward.__wrapped__ if _may_checkpoint(forward) else forward  # type: ignore[attr-defined]


def runs_as_checkpoint(layer: Any) -> bool:
    """Return whether a layer's forward calls `run_layer`. Before transformers 5.23, only `__call__` calls it."""
    is_on = getattr(layer, "gradient_checkpointing", False) and layer.training and torch.is_grad_enabled()
    return bool(is_on) and _may_checkpoint(type(layer).forward)


def _may_checkpoint(forward: Any) -> bool:
    return getattr(getattr(forward, "__code__", None), "co_name", "") == "forward_with_checkpointing"


def is_reentrant(module: nn.Module) -> bool:
    """Return whether a layer uses reentrant checkpointing, which runs gradient hooks twice."""
    function = getattr(module, "_gradient_checkpointing_func", None)
    return bool(getattr(function, "keywords", {}).get("use_reentrant"))


def make_non_reentrant(module: Any) -> None:
    """Switch a layer to non-reentrant checkpointing and keep its other arguments."""
    function = module._gradient_checkpointing_func
    keywords = {**function.keywords, "use_reentrant": False}
    module._gradient_checkpointing_func = functools.partial(function.func, *function.args, **keywords)


# The Hub.


@contextlib.contextmanager
def uploads_without(others: Sequence[str | Path], folder: str) -> Iterator[None]:
    """Exclude the folders ``others`` from Trainer's uploads of ``folder`` to the Hub."""
    api = stock_module.hf_api()
    stock = api.upload_folder
    folder = os.path.realpath(folder)
    inside = [os.path.relpath(os.path.realpath(os.path.join(folder, other)), folder) for other in others]
    patterns = [f"{path}/*" for path in inside if not path.startswith(os.pardir)]

    def upload_folder(*args: Any, **kwargs: Any) -> Any:
        if os.path.realpath(kwargs["folder_path"]) == folder:
            kwargs["ignore_patterns"] = [*(kwargs.get("ignore_patterns") or []), *patterns]
        return stock(*args, **kwargs)

    with replaced(api, upload_folder=upload_folder):
        yield


# Loading and saving.


def build_from_config(
    model_class: Any, config: Any, dtype: torch.dtype, code: Mapping[str, Any] = MappingProxyType({})
) -> Any:
    """Make a model of a class. An auto class chooses the class by ``config``. ``code``: `trust_remote_code` and
    `code_revision`."""
    if hasattr(model_class, "from_config"):
        return model_class.from_config(config, dtype=dtype, **{"trust_remote_code": False, **code})
    return model_class._from_config(config, dtype=dtype)


IMPLEMENTATIONS = ("attn_implementation", "experts_implementation")
"""Arguments of `from_pretrained` that a config and its parts keep under private names."""


def set_implementations(config: Any, chosen: Mapping[str, Any]) -> None:
    """Set some of `IMPLEMENTATIONS` in a config and its parts, as `from_pretrained` does."""
    for name, value in chosen.items():
        setattr(config, f"_{name}", value)


@contextlib.contextmanager
def config_saved_with(config: Any, dtype: torch.dtype | None) -> Iterator[None]:
    """Have ``config`` saved with this dtype. `save_pretrained` of a model would use the dtype of its parameters."""
    if dtype is None or not isinstance(config, PreTrainedConfig):
        yield
        return
    own, stock = config.dtype, PreTrainedConfig.save_pretrained

    def save(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self is config:
            config.dtype = dtype
        return stock(self, *args, **kwargs)

    try:
        with replaced(PreTrainedConfig, save_pretrained=save):
            yield
    finally:
        config.dtype = own


def saves_active_adapter(model: Any) -> bool:
    """Return whether a model of transformers has adapters from `add_adapter`. Then `save_pretrained` saves only the
    active adapter."""
    return isinstance(model, PreTrainedModel) and bool(getattr(model, "_hf_peft_config_loaded", False))


def is_loaded(parameter: nn.Parameter) -> bool:
    return bool(getattr(parameter, "_is_hf_initialized", False))


def mark_loaded(parameter: nn.Parameter) -> None:
    """Prevent the random initialization of the parameter."""
    parameter._is_hf_initialized = True  # type: ignore[attr-defined]


def groups_experts(model: Any) -> bool:
    """Return whether a model's experts can run as one grouped matrix product."""
    return bool(model._can_set_experts_implementation())


def register_experts(name: str, forward: Callable[..., Tensor]) -> None:
    """Register ``forward(module, hidden_states, top_k_index, top_k_weights)`` for experts as ``name``."""
    if name not in ALL_EXPERTS_FUNCTIONS:
        ALL_EXPERTS_FUNCTIONS.register(name, forward)


def run_experts_by(experts: Iterable[nn.Module], name: str) -> None:
    """Have these experts use the forward that is registered as ``name``."""
    for module in experts:
        module.config._experts_implementation = name  # type: ignore[union-attr]


def grouped_experts(module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    output: Tensor = grouped_mm_experts_forward(module, hidden_states, top_k_index, top_k_weights)
    return output


def one_expert(module: Any, rows: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
    """Run ``rows`` [n, hidden] through one expert with the operations of `grouped_experts`. ``weights`` maps names in
    the module to tensors [1, ...]."""
    ends = torch.full((1,), rows.shape[0], dtype=torch.int32, device=rows.device)  # a copy to the device would wait
    up = "gate_up_proj" if module.has_gate else "up_proj"

    def linear(rows: Tensor, name: str) -> Any:
        bias = None
        if module.has_bias:  # indexing has a backward that adds row by row
            bias = weights[f"{name}_bias"][torch.zeros(rows.shape[0], dtype=torch.long, device=rows.device)]
        if weights[name].dtype == torch.bfloat16:
            return _grouped_linear(rows, weights[name], ends, bias=bias, is_transposed=module.is_transposed)
        return _one_group_linear(rows, weights[name].squeeze(0), bias, is_transposed=module.is_transposed)

    output: Tensor = linear(_activated(module, linear(rows, up)), "down_proj")
    return output


def _activated(module: Any, hidden: Tensor) -> Tensor:
    """Apply the gate or the activation, with the same bits as for the rows of all experts together.

    On a CPU, torch divides the elements of a large tensor between threads. If a thread's last elements fill no vector,
    they are computed differently, and the last bit of `exp` differs. So the rows are divided so that each thread gets
    whole vectors, as with the rows of all experts.
    """
    activation = module._apply_gate if module.has_gate else module.act_fn
    if hidden.device.type != "cpu":
        return activation(hidden)  # type: ignore[no-any-return]
    pieces: list[int] = []
    width = hidden.shape[-1] // (2 if module.has_gate else 1)
    while (left := hidden.shape[0] - sum(pieces)) > 0:
        pieces.append(rows_in_whole_vectors(left, width, hidden.element_size()))
    return torch.cat([activation(piece) for piece in hidden.split(pieces)]) if len(pieces) > 1 else activation(hidden)


def rows_in_whole_vectors(most: int, width: int, element_size: int) -> int:
    """Return the largest number of rows [width], up to ``most``, that elementwise kernels on the CPU divide between
    threads at whole vectors; 1 if there is none."""
    for rows in range(most, 1, -1):
        num_threads = min(torch.get_num_threads(), -(-rows * width // _ELEMENTS_OF_A_THREAD))
        if num_threads <= 1 or -(-rows * width // num_threads) * element_size % _VECTOR_BYTES == 0:
            return rows
    return 1


def _one_group_linear(rows: Tensor, weight: Tensor, bias: Tensor | None, *, is_transposed: bool) -> Tensor:
    """Compute `_grouped_linear` of one group for dtypes without a grouped kernel, such as float32. torch's fallback
    makes the host wait for the device, to read the ends of groups."""
    with torch.autocast(rows.device.type, enabled=False):  # autocast does not apply to grouped products
        output: Tensor = rows.to(weight.dtype) @ (weight if is_transposed else weight.T)
    return output if bias is None else output.add_(bias)


# Masks and attention.


@dataclass(frozen=True, slots=True)
class MaskPattern:
    """The known properties of a function (row, head, query, key) that returns whether the query sees the key."""

    is_causal: bool
    """Whether no query sees a later key."""
    is_known: bool
    """Whether a query sees all keys within its window and document that are not hidden by `is_causal`."""
    window: int | None = None
    """Number of keys that a query sees, including its own."""
    documents: Tensor | None = None
    """[rows, tokens], the index of each token's document."""


def mask_pattern(function: Callable[..., Any]) -> MaskPattern:
    """Return the known properties of one of transformers' mask functions."""
    name = getattr(function, "__qualname__", "")
    code = getattr(function, "__code__", None)
    if code is None or getattr(function, "__module__", "") != masking_utils.__name__:
        return MaskPattern(is_causal=False, is_known=False)
    closure = getattr(function, "__closure__", None) or ()
    cells = {name: cell.cell_contents for name, cell in zip(code.co_freevars, closure, strict=True)}
    if function is masking_utils.causal_mask_function:
        return MaskPattern(is_causal=True, is_known=True)
    if name == "sliding_window_overlay.<locals>.inner_mask":
        return MaskPattern(is_causal=False, is_known=True, window=cells["sliding_window"])
    if name == "packed_sequence_mask_function.<locals>.inner_mask":
        return MaskPattern(is_causal=False, is_known=True, documents=cells["packed_sequence_mask"])
    if name == "remap_positions_for_packed_sequence.<locals>.inner_mask":
        return mask_pattern(cells["mask_function"])  # positions rise within a document, and `and_masks` adds documents
    if name == "and_masks.<locals>.and_mask":
        parts = [mask_pattern(part) for part in cells["mask_functions"]]
        return MaskPattern(
            is_causal=any(part.is_causal for part in parts),
            is_known=all(part.is_known for part in parts),
            window=min((part.window for part in parts if part.window is not None), default=None),
            documents=next((part.documents for part in parts if part.documents is not None), None),
        )
    if name == "or_masks.<locals>.or_mask":
        parts = [mask_pattern(part) for part in cells["mask_functions"]]
        return MaskPattern(is_causal=all(part.is_causal for part in parts), is_known=False)
    return MaskPattern(is_causal=False, is_known=False)


def mask_function(pattern: MaskPattern) -> Callable[..., Any]:
    """Return the function of a known causal pattern."""
    functions = [masking_utils.causal_mask_function]
    if pattern.window is not None:
        functions.append(masking_utils.sliding_window_overlay(pattern.window))
    if pattern.documents is not None:
        functions.append(masking_utils.packed_sequence_mask_function(pattern.documents))
    combined: Callable[..., Any] = masking_utils.and_masks(*functions)
    return functions[0] if len(functions) == 1 else combined


def documents_of(position_ids: Tensor) -> Tensor | None:
    """Return the index of each token's document, [rows, tokens], as transformers finds it from position ids if no mask
    is given. None if no row has several documents."""
    documents: Tensor | None = masking_utils.find_packed_sequence_indices(position_ids)
    return documents


def is_causal_lm_loss(function: Any) -> bool:
    """Return whether a model's loss is `ForCausalLMLoss`, which takes `shift_labels`."""
    return function is ForCausalLMLoss


def is_causal_mask_skipped(options: Mapping[str, Any]) -> bool:
    """Return whether `sdpa_mask` makes no mask for these options, because attention is causal without one."""
    if not options.get("allow_is_causal_skip", True):
        return False
    padding = options.get("attention_mask")
    return bool(
        masking_utils._ignore_causal_mask_sdpa(
            padding,
            options["q_length"],
            options["kv_length"],
            options.get("q_offset", 0),
            options.get("kv_offset", 0),
            options.get("local_size"),
        )
    )


def replace_function(functions: Any, name: str, replacement: Callable[..., Any]) -> None:
    """Have transformers call ``replacement``, whose first argument is the stock function, for ``name`` in
    ``functions``, its table of mask or attention functions."""
    stock = functions[name]
    if getattr(stock, "func", None) is not replacement:
        type(functions).register(name, functools.partial(replacement, stock))


# Outputs that models record from their modules, such as routers' logits.


def recorded_names() -> tuple[str, ...]:
    """Return the names of the outputs that the running forward records, except the hidden states, which it records from
    whole layers."""
    return tuple(name for name in _active_collector.get() or () if name != "hidden_states" and name[0] != "_")


class _InOrder(list[Any]):
    """A list of one name's outputs that also records the order of all names."""

    def __init__(self, name: str, order: list[tuple[str, Tensor]]) -> None:
        super().__init__()
        self._name = name
        self._order = order

    def append(self, output: Any) -> None:
        self._order.append((self._name, output))


@contextlib.contextmanager
def recording_outputs(names: Sequence[str]) -> Iterator[list[tuple[str, Tensor]]]:
    """Record the outputs of these names in this context, separately from the outputs of the running forward."""
    order: list[tuple[str, Tensor]] = []
    token = _active_collector.set({name: _InOrder(name, order) for name in names})
    try:
        yield order
    finally:
        _active_collector.reset(token)


def add_recorded_outputs(outputs: Sequence[tuple[str, Tensor]]) -> None:
    """Add (name, output) pairs to the recorded outputs of the running forward."""
    collected = _active_collector.get() or {}
    for name, output in outputs:
        if name in collected:
            collected[name].append(output)
