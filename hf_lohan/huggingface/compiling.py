"""Compiles layers with `torch.compile`, as accelerate's regional compilation does: each kind of layer once.

A graph gets a layer's weights as arguments, so the weights may be in any slot. It hides its operations, so the tensors
that it saves for its backward are kept, swapped or recomputed together.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType
from typing import Any

import torch
from accelerate.utils import DynamoBackend, TorchDynamoPlugin
from torch import nn
from transformers import Cache

from hf_lohan.activations import has_foreign_forward
from hf_lohan.compat.accelerate_private import compiled_regions
from hf_lohan.compat.torch_private import allow_graphs, compilers, is_dispatched, missing_compiler, records_cuda_graphs
from hf_lohan.compat.transformers_private import cache_among, own_forward, runs_as_checkpoint
from hf_lohan.config import OffloadConfig
from hf_lohan.engine import OffloadEngine
from hf_lohan.huggingface.offloaded_model import keep_activations_beside_cache
from hf_lohan.huggingface.progress import long_work
from hf_lohan.planning import RunPlan
from hf_lohan.ranks import check_equal

logger = logging.getLogger(__name__)

_RECORDS_GRAPHS = ("reduce-overhead", "max-autotune")
"""Modes that record CUDA graphs."""
_IS_COMPILED = "because layers with a cache are not compiled; call the model with use_cache=True"
_MOST_GRAPHS = 64
"""Maximum number of graphs for a kind of layer. Graphs depend on windows, training, lengths and frozen weights."""


def check_compiling(config: OffloadConfig, device: torch.device, plugin: TorchDynamoPlugin) -> None:
    """Raise ValueError if accelerate's ``plugin`` has settings that offload does not support."""
    if not _compiles(plugin):
        return
    backend, mode = plugin.backend.value.lower(), plugin.mode
    given = f"backend {backend!r}" if backend == "cudagraphs" else f"mode {mode!r}"
    if backend == "cudagraphs" or mode in _RECORDS_GRAPHS or (plugin.options or {}).get("triton.cudagraphs"):
        raise ValueError(
            f"torch.compile with the {given} records CUDA graphs, which read weights at fixed addresses, but streamed "
            "weights move between slots; use the backend 'inductor' with the mode 'default' or "
            "'max-autotune-no-cudagraphs'"
        )
    if backend == "inductor" and device.type == "cuda" and records_cuda_graphs():
        raise ValueError(
            "torch._inductor.config.triton.cudagraphs is set, and CUDA graphs read weights at fixed addresses, but "
            "streamed weights move between slots; set it to False, or leave torch_compile off"
        )
    if backend not in (available := compilers()):
        raise ValueError(
            f"torch.compile has no backend {backend!r} on this machine; use 'inductor', or another of "
            f"{', '.join(available)}"
        )
    if backend == "inductor" and (missing := missing_compiler(device)) is not None:
        raise ValueError(
            f"{missing} is missing, and torch.compile needs it for the device {device.type!r}; install it, use another "
            "backend, or leave torch_compile off"
        )
    if config.chunks.layers not in ("auto", False):
        raise ValueError(
            f"chunks.layers: {config.chunks.layers} cuts layers into chunks of tokens, and a compiled layer cannot be "
            "cut; set chunks.layers to auto or false, or leave torch_compile off"
        )
    if config.ranks.per_row > 1:
        raise ValueError(
            f"ranks.per_row: {config.ranks.per_row} divides the tokens of a layer among ranks, and a compiled layer "
            "cannot be divided; leave ranks.per_row out, or leave torch_compile off"
        )


def compile_model(engine: OffloadEngine, plan: RunPlan | None, plugin: TorchDynamoPlugin) -> None:
    """Compile an offloaded model if accelerate's ``plugin`` asks for it. All ranks call this together, once for each
    model. Raises ValueError if this is not possible, and RanksDisagreeError if the plugins of ranks differ."""
    advice = "give all ranks the same torch_compile, dynamo_backend and ACCELERATE_DYNAMO_ variables"
    settings = {name: str(value) for name, value in vars(plugin).items()}
    check_equal("the settings of torch.compile", lambda: settings, engine.links, advice)
    if not _compiles(plugin):
        return
    check_compiling(engine.config, engine.device.torch_device, plugin)
    all_layers = engine.layout.model_blocks.layers
    layers = [layer for layer in all_layers if _is_compilable(engine, layer)]
    if len(layers) < len(all_layers):
        why = "their experts run one by one" if engine.experts else "another library has replaced their forwards"
        logger.info(
            "torch.compile leaves %d of %d layers eager, because %s",
            len(all_layers) - len(layers),
            len(all_layers),
            why,
        )
    if not layers:
        return
    allow_graphs(_MOST_GRAPHS)
    options = {**plugin.to_kwargs(), "backend": plugin.backend.value.lower()}
    forms = _Forms(options, engine.links.watch.beat)
    for layer in layers:
        engine.activations.compiled[layer] = forms.of_checkpoint
    for module in (*layers, *_regions_outside_layers(engine)):
        module.forward = functools.partial(_forward, forms, module)
    if getattr(getattr(engine.model, "config", None), "use_cache", False):
        if engine.config.activations == "keep":
            keep_activations_beside_cache(engine.model, _IS_COMPILED)
        engine.model.register_forward_pre_hook(_without_cache, with_kwargs=True)
    if plan is not None:
        plan.compile_layers()
    kinds = ", ".join(sorted({type(layer).__name__ for layer in layers}))
    logger.info("torch.compile compiles each kind of layer once (%s), in the first steps", kinds)


def _compiles(plugin: TorchDynamoPlugin) -> bool:
    return bool(plugin.backend != DynamoBackend.NO and not plugin.disable)


def _is_compilable(engine: OffloadEngine, module: nn.Module) -> bool:
    """Return whether a graph can contain a module. A graph cannot contain the hooks that load a block."""
    inside = set(module.modules())
    loading = (engine.layout.model_blocks.needs.keys() | engine.experts.keys()) - {module}
    return inside.isdisjoint(loading) and not has_foreign_forward(module)


def _regions_outside_layers(engine: OffloadEngine) -> Iterator[nn.Module]:
    layers = set(engine.layout.model_blocks.layers)
    for module in compiled_regions(engine.model):
        # A graph of one operation gains nothing. Its weights may be shared, or be rows of an embedding.
        is_one_operation = isinstance(module, nn.Embedding | nn.Linear | nn.ModuleList | nn.ModuleDict)
        if module not in layers and not is_one_operation and _is_compilable(engine, module):
            yield module


def _without_cache(_model: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Set `use_cache=False` in a forward for a loss, because layers with a cache are not compiled."""
    is_for_loss = torch.is_grad_enabled() or kwargs.get("labels") is not None
    if is_for_loss and kwargs.get("use_cache") is None and cache_among(kwargs) is None:
        kwargs = {**kwargs, "use_cache": False}
    return args, kwargs


def _forward(forms: _Forms, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    if runs_as_checkpoint(module):
        return type(module).forward(module, *args, **kwargs)  # this forward calls `ActivationTiers.run_layer`
    forward = own_forward(module)
    # Calls with a cache run eager, because generation has new shapes at each token, and graphs depend on the cache.
    if cache_among(kwargs) is None and not any(isinstance(value, Cache) for value in args):
        forward = forms.of(forward)
    return forward(module, *args, **kwargs)


class _Forms:
    def __init__(self, options: Mapping[str, Any], before: Callable[[], object]) -> None:
        """``options``: arguments of `torch.compile`. ``before`` is called before a function is compiled."""
        self._options = options
        self._before = before
        self._forms: dict[Callable[..., Any], Callable[..., Any]] = {}

    def of(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return the compiled form of a forward. In a trace, return the forward, because a graph hides operations."""
        if is_dispatched():
            return forward
        if forward not in self._forms:
            self._forms[forward] = torch.compile(forward, **self._options)
            return functools.partial(self._compile, self._forms[forward])
        return self._forms[forward]

    def of_checkpoint(self, function: Any) -> Any:
        """Return the compiled form of the function that transformers passes to a layer's checkpoint."""
        if isinstance(function, functools.partial) and isinstance(function.func, FunctionType):
            return functools.partial(self._run, function)
        return function  # in transformers before 5.23 the function calls `_forward`

    def _run(self, function: functools.partial[Any], *args: Any) -> Any:
        return self.of(function.func)(*function.args, *args, **function.keywords)

    def _compile(self, form: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._before()
        with long_work("compiling layers"):
            return form(*args, **kwargs)
