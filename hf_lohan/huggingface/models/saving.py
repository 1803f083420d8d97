"""Saves a model whose weights are in the store with `save_pretrained`, piece by piece."""

from __future__ import annotations

import logging
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hf_lohan.absent import parameter_behind
from hf_lohan.checkpoint.safetensors_stream import TensorSpec, write_safetensors
from hf_lohan.compat.torch_private import without_hooks
from hf_lohan.compat.transformers_conversions import SavedTensor, SavingConversion, saved_by
from hf_lohan.compat.transformers_private import config_saved_with
from hf_lohan.config.offload_config import SaveDtype
from hf_lohan.engine import CollectiveReads, OffloadEngine, ParameterAccess
from hf_lohan.files.directories import disk_full_named
from hf_lohan.huggingface.arguments import by_name, names_of
from hf_lohan.huggingface.models.adapters import PendingMerges, saves_adapters
from hf_lohan.huggingface.progress import advance, long_work
from hf_lohan.model import StoredForm
from hf_lohan.ranks import Links

logger = logging.getLogger(__name__)

_MASTERS_NUMEL = 1 << 20
"""Number of masters that are read at a time."""

_REFUSED = {
    "distributed_checkpoint": "leave it out, because all ranks save one checkpoint together",
    "path_initial_model_for_weight_conversion": (
        "leave it out, then load the base and the saved adapters in memory with peft.PeftModel.from_pretrained, and "
        "save that model with this argument"
    ),
}
"""Arguments of `save_pretrained` that are not supported, with advice."""


def dtypes_of(model: nn.Module) -> dict[str, torch.dtype]:
    return {name: parameter.dtype for name, parameter in model.named_parameters()}


def dtypes_to_save(form: StoredForm, asked: SaveDtype, loaded: Mapping[str, torch.dtype]) -> dict[str, torch.dtype]:
    """Return a dict from weight to the dtype in which it is saved, if this is not its working dtype. ``loaded``: dtypes
    in which weights were loaded. Raises ValueError if checkpoints would round trained float32 weights."""
    blocks = form.model_blocks.blocks
    is_float32 = all(block.master.working_dtype == torch.float32 for block in blocks)
    if asked == "bfloat16" and is_float32 and any(block.state_numel for block in blocks):
        raise ValueError(
            "save_dtype: bfloat16 would also round the float32 weights in this run's checkpoints, so a resumed run "
            "would not be exact; leave save_dtype at auto, and write a bfloat16 model of the last step with lohan "
            "export RUN OUT --dtype bfloat16"
        )
    computing_bfloat16 = (block for block in blocks if block.master.working_dtype == torch.bfloat16)
    names = (part.name for block in computing_bfloat16 for part in block.slices)
    return {
        name: torch.float32
        for name in names
        if asked == "float32" or (asked == "auto" and loaded.get(name) == torch.float32)
    }


@dataclass(frozen=True)
class StoredModel:
    """A model whose weights are in a store, with or without an engine."""

    model: Any
    access: Callable[[], ParameterAccess]
    """Called again for each weight, because an engine waits for the weight's updates in this call."""
    links: Links = field(default_factory=Links.alone)
    collective_reads: CollectiveReads | None = None
    """Set on rank 0 while it saves, if there are several ranks."""
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)
    """Maps stored names of weights to the dtypes in which they are saved, if these are not the dtypes in the store."""
    merges: PendingMerges | None = None
    """Adapters that are merged into the weights while they are saved."""

    @property
    def reads(self) -> ParameterAccess | CollectiveReads:
        return self.collective_reads or self.access()

    @classmethod
    def from_engine(cls, engine: OffloadEngine) -> StoredModel:
        return cls(engine.model, lambda: engine.parameters, engine.links, dtypes=engine.layout.saved_dtypes)


def _counted(tensor: Tensor) -> Tensor:
    """Show a tensor that was read in the progress of the work."""
    advance(tensor.nbytes)
    return tensor


class SavedWeights(Mapping[str, Tensor]):
    """Maps names in a model's state dict to weights with adapters merged into them. Each access reads one weight."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], merges: PendingMerges | None) -> None:
        self._parameters = parameters
        self._merges = merges
        self._last_merged: dict[nn.Parameter, Tensor] = {}

    @abstractmethod
    def dtype_of(self, name: str) -> torch.dtype:
        """Return the dtype in which a weight is saved."""

    @abstractmethod
    def _read(self, parameter: nn.Parameter) -> Tensor:
        """Return a weight without adapters. It may be a view of a file."""

    @abstractmethod
    def _read_pieces(self, parameter: nn.Parameter) -> Iterator[Tensor]:
        """Iterate over the pieces of a flattened weight without adapters."""

    @abstractmethod
    def _read_row(self, parameter: nn.Parameter, row: int) -> Tensor:
        """Return row ``row`` of a weight without adapters as [1, ...]."""

    @abstractmethod
    def _to_merge(self, parameter: nn.Parameter) -> Tensor:
        """Return a copy of a weight."""

    def __getitem__(self, name: str) -> Tensor:
        merged = self._merged(name)
        return _counted(self._read(self._parameters[name]) if merged is None else merged)

    def pieces(self, name: str) -> Iterator[Tensor]:
        """Iterate over the pieces of a flattened weight. A piece is valid until the next piece is read."""
        merged = self._merged(name)
        pieces = self._read_pieces(self._parameters[name]) if merged is None else [merged.view(-1)]
        yield from map(_counted, pieces)

    def rows(self, name: str, row: int | None) -> Tensor:
        """Return row ``row`` of a weight as [1, ...], or all rows if it is None."""
        if row is None:
            return self[name]
        merged = self._merged(name)
        return _counted(self._read_row(self._parameters[name], row) if merged is None else merged[row : row + 1])

    def _merged(self, name: str) -> Tensor | None:
        """Return a weight with adapters merged into it, or None without such adapters. The last result is kept."""
        parameter = self._parameters[name]
        if self._merges is None or parameter not in self._merges:
            return None
        if parameter not in self._last_merged:
            self._last_merged.clear()  # frees memory before the next merge
            self._last_merged = self._merges.merged(parameter, self._to_merge)
        return self._last_merged[parameter].to("cpu", self.dtype_of(name)).contiguous()

    def __contains__(self, name: object) -> bool:
        return name in self._parameters  # the default of Mapping would read the weight

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)


class StoredWeights(SavedWeights):
    """The weights in a store, including aliases of tied weights."""

    def __init__(self, stored_model: StoredModel, parameters: Iterable[tuple[str, nn.Parameter]] | None = None) -> None:
        """`parameters`: the weights and their names, by default all parameters of the model."""
        self._stored_model = stored_model
        if parameters is None:
            parameters = stored_model.model.named_parameters(remove_duplicate=False)
        self._name_of = {parts[0][1].parameter: name for name, parts in stored_model.reads.parts.items()}
        stored = {name: parameter for name, parameter in parameters if parameter in self._name_of}
        super().__init__(stored, stored_model.merges)
        self._stored_name = {name: self._name_of[parameter] for name, parameter in stored.items()}

    def dtype_of(self, name: str) -> torch.dtype:
        block, _ = self._stored_model.reads.parts[self._stored_name[name]][0]
        return self._stored_model.dtypes.get(self._stored_name[name], block.master.working_dtype)

    def _read(self, parameter: nn.Parameter) -> Tensor:
        stored_name, reads = self._name_of[parameter], self._stored_model.reads
        if stored_name not in self._stored_model.dtypes:
            return reads.read_parameter(stored_name)
        shape = reads.parts[stored_name][0][1].shape
        return self._elements(stored_name, 0, shape.numel()).view(shape)

    def _read_pieces(self, parameter: nn.Parameter) -> Iterator[Tensor]:
        stored_name, reads = self._name_of[parameter], self._stored_model.reads
        if stored_name not in self._stored_model.dtypes:
            return (piece for _, piece in reads.read_pieces(stored_name, "param"))
        numel = reads.parts[stored_name][0][1].shape.numel()
        firsts = range(0, numel, _MASTERS_NUMEL)
        return (self._elements(stored_name, first, min(first + _MASTERS_NUMEL, numel)) for first in firsts)

    def _read_row(self, parameter: nn.Parameter, row: int) -> Tensor:
        stored_name = self._name_of[parameter]
        shape = self._stored_model.reads.parts[stored_name][0][1].shape[1:]
        return self._elements(stored_name, row * shape.numel(), (row + 1) * shape.numel()).view(1, *shape)

    def _elements(self, stored_name: str, first: int, last: int) -> Tensor:
        """Return elements [first, last) of a flattened weight, in the dtype in which it is saved."""
        reads, dtype = self._stored_model.reads, self._stored_model.dtypes.get(stored_name)
        read = reads.read_masters if dtype == torch.float32 else reads.read_elements
        elements = read(stored_name, first, last)
        return elements if dtype is None else elements.to(dtype)

    def _to_merge(self, parameter: nn.Parameter) -> Tensor:
        return self._stored_model.reads.read_parameter(self._name_of[parameter])

    def aliases(self) -> set[str]:
        """Return all names of tied weights except each weight's first name."""
        first = {stored: name for name, stored in reversed(self._stored_name.items())}
        return {name for name, stored in self._stored_name.items() if first[stored] != name}


def saving_to(path: str | Path) -> AbstractContextManager[None]:
    """In this context a full disk raises `DiskFullError`, which names ``path``."""
    return disk_full_named("cannot save the model to", path, "free space, or save to another drive")


def save_together(stored_model: StoredModel, path: str | Path, save: Callable[..., Any], **kwargs: Any) -> Any:
    """Call `save` with the model and ``kwargs``, and return its result. All ranks call this. Rank 0 saves, and the
    other ranks take part in its reads. ``path`` is the file or folder that `save` writes. A full disk raises
    `DiskFullError`, which names ``path``."""
    ranks, reads = stored_model.links.ranks, CollectiveReads(stored_model.access, stored_model.links)
    with saving_to(path):
        if not ranks.others:
            return save(stored_model, **kwargs)
        if ranks.rank != 0:
            return reads.follow_rank_0()
        kwargs.pop("is_main_process", None)  # rank 0 writes, even if the caller chose another rank
        with reads.leading():
            return save(replace(stored_model, collective_reads=reads), **kwargs)


def save_pretrained_from_store(
    stored_model: StoredModel, stock: Callable[..., Any], save_directory: str | Path, *args: Any, **kwargs: Any
) -> Any:
    """Call `save_from_store`. All ranks call this together."""
    save = partial(save_from_store, stock=stock, save_directory=save_directory)
    return save_together(stored_model, save_directory, save, **saving_arguments(stock, args, kwargs))


def saving_arguments(stock: Callable[..., Any], given: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of the method ``stock`` after the folder by name. Raises TypeError as a call would."""
    return by_name(f"after the folder, {stock.__qualname__}", (names_of(stock) or [])[1:], given, named)


def save_from_store(
    stored_model: StoredModel, stock: Callable[..., Any], save_directory: str | Path, **kwargs: Any
) -> Any:
    """Call the stock `save_pretrained` with the stored weights in place of placeholders. Weights are written piece by
    piece, and experts one by one. If transformers makes a tensor from several weights, or reorders rows of a weight,
    these weights are in RAM meanwhile. With an argument `state_dict` its tensors are saved, and stored weights in place
    of its placeholders. Raises ValueError for arguments that are not supported."""
    model, given = stored_model.model, kwargs.pop("state_dict", None)
    for name, advice in _REFUSED.items():
        if kwargs.get(name):
            raise ValueError(f"save_pretrained({name}={kwargs[name]!r}) is not supported under offload; {advice}")
    if saves_adapters(model):
        adapters, embeddings = kwargs.get("selected_adapters"), kwargs.get("save_embedding_layers", "auto")
        with without_hooks(model):  # PEFT runs prompt encoders, and LSTM uses other kernels without gradients
            state_dict = _adapter_state_dict(stored_model, given, adapters, embeddings)
            return stock(model, save_directory, state_dict=state_dict, **kwargs)
    dtype = dtype_of_config(model, StoredWeights(stored_model))
    return save_weights(model, *saved_state_dict(stored_model, given), dtype, stock, save_directory, **kwargs)


def saved_state_dict(
    stored_model: StoredModel, given: Mapping[str, Tensor] | None = None
) -> tuple[dict[str, Tensor], StoredWeights]:
    """Return the state dict to save, with stored weights on the meta device, and a mapping that reads these weights.
    ``given``: the caller's state dict, for example of averages. Its placeholders stand for weights in the store."""
    if given is None:
        weights = StoredWeights(stored_model)
        return on_meta(stored_model.model.state_dict(), weights), weights
    behind = {name: parameter_behind(tensor) for name, tensor in given.items()}
    weights = StoredWeights(stored_model, ((name, p) for name, p in behind.items() if p is not None))
    return on_meta(given, weights), weights


def dtype_of_config(model: nn.Module, weights: SavedWeights) -> torch.dtype | None:
    """Return the dtype for the config of a saved model: the dtype of its first floating point weight."""
    dtypes = (weights.dtype_of(name) for name, _ in model.named_parameters() if name in weights)
    return next((dtype for dtype in dtypes if dtype.is_floating_point), None)


def save_weights(
    model: Any,
    state_dict: dict[str, Tensor],
    weights: SavedWeights,
    dtype: torch.dtype | None,
    stock: Callable[..., Any],
    save_directory: str | Path,
    **kwargs: Any,
) -> Any:
    """Call the stock `save_pretrained` with ``weights`` in place of the meta tensors of ``state_dict``, as
    `save_from_store` does. ``dtype``: the dtype that the config names."""
    # The stock method removes tied weights from the dict. `forms` keeps them alive, so that their `id`s stay unique.
    forms = {name: state_dict[name] for name in weights}
    names = {id(form): name for name, form in forms.items()}

    def write_file(tensors: Mapping[str, Tensor], path: str, metadata: dict[str, str]) -> None:
        pieces = _FilePieces(weights, names, converted)
        specs = [
            TensorSpec(name, tensor.dtype, tensor.numel(), pieces.iterate(name, tensor), shape=tuple(tensor.shape))
            for name, tensor in sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))
        ]
        write_safetensors(Path(path), specs, metadata)

    with (
        long_work(f"saving {save_directory}", num_bytes(forms)),
        config_saved_with(getattr(model, "config", None), dtype),
        saved_by(model, write_file) as converted,
    ):
        return stock(model, save_directory, state_dict=state_dict, **kwargs)


def on_meta(state_dict: Mapping[str, Tensor], weights: SavedWeights) -> dict[str, Tensor]:
    """Return the state dict with stored weights on the meta device, in the dtypes in which they are saved."""
    return {
        name: torch.empty(tensor.shape, dtype=weights.dtype_of(name), device="meta") if name in weights else tensor
        for name, tensor in state_dict.items()
    }


def num_bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


class _FilePieces:
    """Reads the pieces of the tensors of one file."""

    def __init__(self, weights: SavedWeights, names: Mapping[int, str], converted: Mapping[int, SavedTensor]) -> None:
        """`names` maps the `id` of a weight on the meta device to its name. ``converted`` maps the `id` of a tensor to
        its description, if transformers made it from weights on the meta device."""
        self._weights = weights
        self._names = names
        self._converted = converted
        self._last: tuple[SavingConversion | None, int | None, list[Tensor]] = (None, None, [])
        """Results of the last conversion for one row. The next tensor of the file is usually among these tensors."""

    def iterate(self, name: str, tensor: Tensor) -> Iterator[Tensor]:
        """Iterate over the pieces of a tensor in order. A piece is valid until the next piece is read."""
        if tensor.device.type != "meta":
            yield tensor
        elif id(tensor) in self._names:
            yield from self._weights.pieces(self._names[id(tensor)])
        elif id(tensor) in self._converted:
            yield from self._convert(self._converted[id(tensor)])
        else:
            raise RuntimeError(
                f"transformers saves {name}, but hf_lohan does not know from which weights it is made; save with "
                "save_original_format=False"
            )

    def _convert(self, saved: SavedTensor) -> Iterator[Tensor]:
        conversion, num_rows = saved.conversion, saved.conversion.num_rows
        if num_rows is None:
            yield self._results(conversion, None)[saved.index]
        elif conversion.is_split:
            kind, row = divmod(saved.index, num_rows)
            yield self._results(conversion, row)[kind]
        else:
            for row in range(num_rows):
                yield self._results(conversion, row)[saved.index]

    def _results(self, conversion: SavingConversion, row: int | None) -> list[Tensor]:
        if self._last[:2] != (conversion, row):
            self._last = (None, None, [])  # frees memory before the next conversion
            self._last = (conversion, row, conversion.results(lambda form: self._value(form, row)))
        return self._last[2]

    def _value(self, form: Tensor, row: int | None) -> Tensor:
        if form.device.type != "meta":
            return form if row is None else form[row : row + 1]
        return self._weights.rows(self._names[id(form)], row)


def _adapter_state_dict(
    stored_model: StoredModel,
    given: Mapping[str, Tensor] | None,
    selected_adapters: Sequence[str] | None,
    save_embedding_layers: bool | str,
) -> dict[str, Tensor]:
    """Return the state dict for PEFT. Tensors that PEFT saves (adapters, and perhaps embeddings) have values. All other
    tensors are on the meta device."""
    from peft import get_peft_model_state_dict

    model = stored_model.model
    state_dict, weights = saved_state_dict(stored_model, given)
    saved = {name for name, parameter in model.named_parameters() if parameter.requires_grad and name in weights}
    names = {id(tensor): name for name, tensor in state_dict.items() if name in weights}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT repeats the warnings when it saves
        # PEFT raises an error later for adapters that do not exist.
        for adapter in model.peft_config.keys() & (selected_adapters or model.peft_config):
            tensors = get_peft_model_state_dict(
                model, state_dict=state_dict, adapter_name=adapter, save_embedding_layers=save_embedding_layers
            )
            saved.update(names[id(tensor)] for tensor in tensors.values() if id(tensor) in names)
    return {**state_dict, **{name: weights[name] for name in saved}}
