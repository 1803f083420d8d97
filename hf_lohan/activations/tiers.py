"""Keeps, swaps or recomputes the layers' activations according to the plan's placements."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hf_lohan.activations.layer_frame import LayerFrame
from hf_lohan.activations.layer_runs.module_state import repeatable
from hf_lohan.activations.saved_graph import SavedGraph, SavedView
from hf_lohan.activations.swapper import ActivationSwapper
from hf_lohan.activations.trace import LayerTrace
from hf_lohan.compat.torch_private import tree_leaves, version_of
from hf_lohan.costs import (
    FETCH_AHEAD,
    GRAPH,
    INPUT,
    LAYERS_LEAVING,
    ActivationPlacements,
    LayerPlacements,
    Placement,
)
from hf_lohan.device import Device, HostStack

Sizes: TypeAlias = Mapping[str, Mapping[str, int]]
"""Bytes that one micro-batch could swap, by layer and operation. Operations are in the order of backward."""


_SWAPPED = (Placement.CPU, Placement.SSD)


class SavedInput:
    """The object that autograd saves instead of a layer's input."""

    def __init__(self, frame: LayerFrame, stored: Any) -> None:
        self.frame = frame
        self.stored = stored

    def load(self) -> Tensor:
        return self.frame.load_saved(self.stored)


class _OfThread(threading.local):
    pack: Callable[[Tensor], Tensor | SavedInput | SavedView] | None = None
    """Returns the object to save instead of a tensor, while a layer saves its input or its graph's tensors."""


class ActivationTiers:
    """Runs layers with torch's non-reentrant checkpointing and stores their activations according to the placements.

    A layer without placements is recomputed by plain checkpointing, without a dispatch mode, unless it is traced.
    """

    def __init__(self, device: Device, layer_names: Mapping[nn.Module, str], ram: HostStack | None = None) -> None:
        """``layer_names`` has the name of each layer's block. `ActivationSwapper` describes ``ram``."""
        self._device = device
        self._layer_names = layer_names
        self.swapper = ActivationSwapper(device, ram)
        self._placements: ActivationPlacements = {}
        self._stretches: dict[str, int] = {}
        """Maps a layer to the number of its stretch, which is a sequence of layers that swap the same operations."""
        self._stretch: int | None = None
        """The number of the stretch whose backward runs."""
        self._fetch_ahead, self._layers_leaving = FETCH_AHEAD, LAYERS_LEAVING
        self._trace: dict[str, LayerTrace] | None = None
        """The traces, or None if layers are not traced."""
        self._frames: list[weakref.ref[LayerFrame]] = []
        self._forward_number = 0
        self._saving = _OfThread()  # micro-batches that run together have a thread each
        self.runs_in_chunks: dict[nn.Module, Callable[[tuple[Any, ...], Any], bool]] = {}
        """Maps a layer that may run in chunks to a function that returns whether a call runs in chunks. The function
        gets the call's positional arguments and the function that `run_layer` gets."""
        self.run_whole: dict[nn.Module, Callable[..., Any]] = {}
        """Maps these layers to a function that calls another function while the layer runs whole."""
        self.compiled: dict[nn.Module, Callable[[Any], Any]] = {}
        """Maps a compiled layer to a function that returns the compiled form of the function that `run_layer` gets."""
        self._graph_bytes: dict[str, tuple[int, int]] = {}
        """For each compiled layer, the number of the last forward that did not recompute it, and the bytes that this
        forward saved without the layer's input."""

    def watch(self) -> Mapping[str, LayerTrace]:
        """Trace layers until `end_watching`. Returns the mapping that receives the traces."""
        self._trace = {}
        return self._trace

    @property
    def is_watching(self) -> bool:
        """Whether layers are traced."""
        return self._trace is not None

    def end_watching(self) -> None:
        self._trace = None

    def set_placements(self, placements: ActivationPlacements) -> None:
        """Use these placements from the next layer on."""
        self._placements = placements
        number, before = 0, None
        for name in self._layer_names.values():
            own = {operation for operation, at in placements.get(name, {}).items() if at in _SWAPPED}
            number, before = number + (own != before), own
            self._stretches[name] = number

    def set_windows(self, *, fetch_ahead: int, layers_leaving: int) -> None:
        """From the next layer on, fetch the tensors of ``fetch_ahead`` layers before their backward, and keep the
        tensors of ``layers_leaving`` layers on the device after their forward."""
        self._fetch_ahead, self._layers_leaving = fetch_ahead, layers_leaving

    def run_layer(self, function: Any, *args: Any) -> Any:
        """Replaces `torch.utils.checkpoint.checkpoint` in a model's layers."""
        layer = _layer_of(function)
        if layer is not None and layer in self.runs_in_chunks and self.runs_in_chunks[layer](args, function):
            return function(*args)  # its chunks are run again instead
        is_compiled, given = layer in self.compiled, function
        if layer is not None and is_compiled:
            function = self.compiled[layer](function)
        elif layer is not None and layer in self.run_whole:  # also in a recomputation, after chunks were chosen
            function = partial(self.run_whole[layer], function)
        name = self._layer_names.get(layer) if layer is not None else None
        if not torch.is_grad_enabled():
            return function(*args)
        placements = self._placements.get(name, {}) if name is not None else {}
        trace = None if is_compiled else self._trace
        saves_graph = is_compiled and self._has_room_for_graph(name, placements)
        if not saves_graph:
            function = repeatable(function, layer, name or type(layer or function).__name__)
        if name is None or (trace is None and not placements):
            return checkpoint(function, *args, use_reentrant=False)
        self._let_earlier_layers_leave()
        hidden = args[0] if args and isinstance(args[0], Tensor) else None
        if trace is not None:
            trace.setdefault(name, LayerTrace()).begin(hidden)
        frame = self._new_frame(name, placements)
        version = None if hidden is None else version_of(hidden)
        try:
            if saves_graph:
                graph = SavedGraph(frame, hidden, _tensors_beside(layer, given, args))
                self._saving.pack = graph.pack
                output = function(*args)
                self._graph_bytes[name] = self._forward_number, graph.num_bytes
            else:
                self._saving.pack = None if hidden is None else partial(_pack_input, frame, hidden.data_ptr())
                contexts = frame.contexts_of_whole if is_compiled else frame.contexts
                output = checkpoint(function, *args, use_reentrant=False, context_fn=contexts)
        finally:
            self._saving.pack = None
        if is_compiled and frame.swapped and hidden is not None and version_of(hidden) != version:
            raise RuntimeError(
                f"the compiled layer {name} writes to its input, which may not have left the device yet; leave "
                "torch_compile off, or set activations: recompute"
            )
        # The model may write to the output without the frame's knowledge.
        frame.finish_storing(leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor))
        self.swapper.mark(name)
        return output

    def _has_room_for_graph(self, name: str | None, placements: LayerPlacements) -> bool:
        """Return whether a compiled layer keeps or swaps what its graph saves. Without room it is recomputed."""
        placement = placements.get(GRAPH, Placement.RECOMPUTE)
        if name is None or placement not in _SWAPPED:
            return placement is Placement.GPU
        return self.swapper.free_bytes >= self._graph_bytes.get(name, (0, 0))[1]

    @property
    def graph_bytes(self) -> dict[str, int]:
        """Bytes that compiled layers saved in the last forward without their inputs. Recomputed layers are left out."""
        return {name: size for name, (number, size) in self._graph_bytes.items() if number == self._forward_number}

    # Layers in chunks (`ChunkFrames`). Each chunk has a frame, and the placements apply to every chunk.

    def begin_chunk(self, layer_name: str) -> LayerFrame | None:
        """Begin a chunk of a layer. Returns None if everything is recomputed."""
        self._let_earlier_layers_leave()
        placements = {name: at for name, at in self._placements.get(layer_name, {}).items() if name != INPUT}
        return self._new_frame(layer_name, placements) if placements else None

    def begin_input(self, layer_name: str) -> LayerFrame | None:
        """Begin to store a layer's input. Returns None if it stays on the device."""
        placements = self._placements.get(layer_name, {})
        return self._new_frame(layer_name, {INPUT: placements[INPUT]}) if INPUT in placements else None

    def empty(self, shape: Sequence[int], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Allocate a contiguous tensor on the device of ``like``."""
        if like.device != self._device.torch_device:
            return like.new_empty(tuple(shape), dtype=dtype)
        return self._device.arena.empty(shape, dtype or like.dtype)

    def end_layer(self, layer_name: str) -> None:
        """End a layer's forward in chunks."""
        self.swapper.mark(layer_name)

    def _new_frame(self, layer_name: str, placements: LayerPlacements) -> LayerFrame:
        frame = LayerFrame(
            layer_name,
            placements,
            self.swapper,
            self._device,
            on_forward=self._end_saving,
            on_backward=self.begin_backward,
            trace=None if self._trace is None else self._trace.get(layer_name),
            forward_number=self._forward_number,
        )
        self._frames.append(weakref.ref(frame))
        return frame

    def begin_forward(self) -> None:
        """Begin a forward of the model. A loss or an error may keep frames of earlier forwards alive."""
        self._saving.pack = None
        self._device.arena.begin_pass("forward")
        self._forward_number += 1
        self.swapper.begin_forward()

    def expect_backward(self) -> None:
        """Fetch the tensors of the last layers, because the forward has ended."""
        for frame in self._of_this_forward()[: -self._fetch_ahead - 1 : -1]:
            self._prefetch(frame)
        # The tensors above are on the device together with the head's tensors, so they are not in this pass's block.
        self._device.arena.begin_pass("backward")
        self._stretch = None

    def end_backward(self) -> None:
        """Return the memory of the backward's arena, which evaluation and generation may need."""
        self._device.arena.begin_pass(None)

    def close(self) -> None:
        """End the swapper's thread."""
        self.swapper.close()
        self._device.arena.begin_pass(None)

    # Hooks for tensors that autograd saves outside the layers.

    def pack(self, tensor: Tensor) -> Tensor | SavedInput | SavedView:
        """Return the object to save instead of ``tensor``. A layer's input and the tensors of its graph may be swapped;
        other tensors are kept."""
        return tensor if self._saving.pack is None else self._saving.pack(tensor)

    def unpack(self, saved: SavedInput | SavedView) -> Tensor:
        """Return the tensor that was packed."""
        return saved.load()

    def _end_saving(self) -> None:
        self._saving.pack = None

    def begin_backward(self, frame: LayerFrame) -> None:
        if frame.is_in_backward:
            return
        frame.is_in_backward = True
        self._prefetch(frame)
        stretch = self._stretches.get(frame.block_name, 0)
        if stretch != self._stretch:
            # Layers that swap more have larger blocks of memory, which must not exist during the backward of others.
            self._stretch = stretch
            self._device.arena.begin_pass(("backward", stretch))
        frames = self._alive()
        if frame in frames:
            below = frames[: frames.index(frame)]
            for earlier in below[: -self._fetch_ahead - 1 : -1]:
                self._prefetch(earlier)
        self._device.arena.free_blocks()

    def _prefetch(self, frame: LayerFrame) -> None:
        if frame.is_prefetched:
            return
        frame.is_prefetched = True
        for swapped in frame.swapped:
            self.swapper.prefetch(swapped)

    def _let_earlier_layers_leave(self) -> None:
        frames = self._of_this_forward()
        if len(frames) >= self._layers_leaving:
            self.swapper.drain(frames[-self._layers_leaving].swapped)

    def _of_this_forward(self) -> list[LayerFrame]:
        return [frame for frame in self._alive() if frame.forward_number == self._forward_number]

    def _alive(self) -> list[LayerFrame]:
        frames = [frame for ref in self._frames if (frame := ref()) is not None]
        self._frames = [weakref.ref(frame) for frame in frames]
        return frames


def _layer_of(function: Any) -> nn.Module | None:
    """Return the layer of the function that `checkpoint` runs. transformers passes ``partial(forward, layer,
    **kwargs)`` or ``layer.__call__``; diffusers passes the layer."""
    if isinstance(function, nn.Module):
        return function
    while isinstance(function, partial):
        if function.args and isinstance(function.args[0], nn.Module):
            return function.args[0]
        function = function.func
    owner = getattr(function, "__self__", None)
    return owner if isinstance(owner, nn.Module) else None


def _pack_input(frame: LayerFrame, address: int, tensor: Tensor) -> Tensor | SavedInput:
    if tensor.data_ptr() != address or not tensor.is_floating_point():
        return tensor
    stored = frame.store_saved(tensor)
    return tensor if stored is tensor else SavedInput(frame, stored)


def _tensors_beside(layer: nn.Module | None, function: Any, args: tuple[Any, ...]) -> Iterator[Tensor]:
    """Iterate over the tensors that a layer's forward gets beside its input and its weights."""
    yield from () if layer is None else layer.buffers()
    given: list[Any] = [*args[1:]]
    while isinstance(function, partial):
        given += (function.args, function.keywords)
        function = function.func
    yield from (leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor))


def placed_bytes(sizes: Sizes, placements: ActivationPlacements) -> tuple[int, int]:
    """Return the bytes that a micro-batch swaps to RAM and to the SSD."""
    totals = {Placement.CPU: 0, Placement.SSD: 0}
    for name, of_layer in sizes.items():
        for operation, placement in placements.get(name, {}).items():
            if placement in totals:
                totals[placement] += of_layer.get(operation, 0)
    return totals[Placement.CPU], totals[Placement.SSD]


def swap_everything(sizes: Sizes, ram_bytes: int) -> dict[str, dict[str, Placement]]:
    """Return placements that swap everything. Tensors that backward needs first go to RAM, others to the SSD."""
    placements: dict[str, dict[str, Placement]] = {}
    free_bytes = ram_bytes
    for name in reversed(list(sizes)):
        placements[name] = {}
        for operation, num_bytes in sizes[name].items():
            fits = num_bytes <= free_bytes
            free_bytes -= num_bytes if fits else 0
            placements[name][operation] = Placement.CPU if fits else Placement.SSD
    return placements
