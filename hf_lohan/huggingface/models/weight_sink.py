"""Writes the weights of a checkpoint to the store, tensor by tensor, so that the model is never in RAM."""

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from hf_lohan.compat.transformers_conversions import loaded_in_rows
from hf_lohan.compat.transformers_private import is_loaded, mark_loaded
from hf_lohan.engine import ParameterAccess
from hf_lohan.huggingface.progress import advance, long_work
from hf_lohan.threads import return_freed_memory

_RETURNED_AFTER_BYTES = 256 << 20
"""Each time this many bytes are stored, loading returns freed memory to the system."""
_MOST_ROWS_BYTES = 32 << 20
"""Larger weights are read and converted in pieces. A piece has at most this size, and at most the size of a buffer."""


class WeightSink:
    def __init__(
        self, access: ParameterAccess, names: Mapping[str, str] | None = None, *, of_any_dtype: bool = True
    ) -> None:
        """`names` maps names of weights during loading to their stored names. Weights that are not in it stay in
        memory. Without ``of_any_dtype`` each weight must have its working dtype."""
        self.most_bytes = min(access.piece_bytes, _MOST_ROWS_BYTES)
        self.written: set[str] = set()
        self._stored_packed: set[str] = set()
        self._access = access
        self._names = names
        self._of_any_dtype = of_any_dtype
        self._freed_bytes = 0
        """Bytes of weights that were stored since freed memory was last returned. transformers frees these."""

    @property
    def total_bytes(self) -> int:
        """Bytes of all weights that may be written."""
        names = self._access.parts if self._names is None else set(self._names.values())
        parts = [pair for name in names for pair in self._access.parts[name]]
        return sum(part.numel * block.master.working_dtype.itemsize for block, part in parts)

    def store_weight(self, name: str, weight: Tensor) -> bool:
        """Write a weight. Returns False if the store has no weight of this name. Raises ValueError for a wrong shape or
        dtype."""
        stored = self._stored_name(name)
        if stored in self._stored_packed:
            self._count(stored, weight)
            return True
        if stored not in self._access.parts:
            return False  # an alias of a tied weight, because only the first name is stored
        self._check_dtype(stored, weight)
        self._access.write_parameter(stored, weight)
        self._count(stored, weight)
        return True

    def store_rows(self, name: str, shape: torch.Size, first: int, rows: Tensor) -> bool:
        """Write rows of a weight, starting at row ``first``. Returns False if the store has no weight of this name and
        shape."""
        stored = self._stored_name(name)
        if stored in self._stored_packed:
            self._count(stored, rows)
            return True
        if stored not in self._access.parts or self._access.parts[stored][0][1].shape != shape:
            return False
        if not self._access.takes_rows(stored):
            return False
        self._check_dtype(stored, rows)
        self._access.write_elements(stored, first * shape[1:].numel(), rows)
        self._count(stored, rows)
        return True

    def is_packed(self, name: str) -> bool:
        stored = self._stored_name(name)
        return stored in self._access.parts and self._access.parts[stored][0][1].packed is not None

    def store_bytes(self, name: str, kind: str, first: int, content: Tensor) -> None:
        """Write bytes of a weight that is packed in the checkpoint, beginning with byte ``first`` of its ``kind``
        ("codes" or "scales"). `store_weight` and `store_rows` then write nothing for it."""
        stored = self._stored_name(name)
        self._access.write_packed(stored, kind, first, content)
        self._stored_packed.add(stored)

    def shape_of(self, name: str) -> torch.Size:
        return self._access.parts[self._stored_name(name)][0][1].shape

    def _stored_name(self, name: str) -> str:
        """Return the stored name of a weight, or "" if the weight stays in memory."""
        return name if self._names is None else self._names.get(name, "")

    def _count(self, name: str, weight: Tensor) -> None:
        num_bytes = weight.numel() * self._dtype_of(name).itemsize
        self.written.add(name)
        advance(num_bytes)
        self._freed_bytes += num_bytes
        if self._freed_bytes >= _RETURNED_AFTER_BYTES:
            self._freed_bytes = 0
            return_freed_memory()

    def _check_dtype(self, name: str, weight: Tensor) -> None:
        if not self._of_any_dtype and weight.dtype != self._dtype_of(name):
            raise ValueError(
                f"{name} is loaded with dtype {weight.dtype}, but the model's config has {self._dtype_of(name)}; "
                "load the model with dtype='float32', or in memory"
            )

    def _dtype_of(self, name: str) -> torch.dtype:
        block, _ = self._access.parts[name][0]
        return block.master.working_dtype


@contextlib.contextmanager
def streamed_to(sink: WeightSink, name: str) -> Iterator[dict[str, int]]:
    """In this context, pass each weight to `sink` after transformers has loaded, renamed, fused and cast it, and
    replace it with a meta parameter. Large weights are passed a few rows at a time. Other weights are passed whole, by
    torch's registration hooks. Yields the dict of unused tensors of `loaded_in_rows`."""
    parents: dict[nn.Module, tuple[nn.Module, str]] = {}

    def name_of(module: nn.Module, name: str) -> str:
        while module in parents:
            module, own_name = parents[module]
            name = f"{own_name}.{name}"
        return name

    def on_module(module: nn.Module, name: str, submodule: nn.Module | None) -> None:
        if submodule is not None:
            parents[submodule] = (module, name)

    def on_parameter(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.device.type == "meta" or not is_loaded(parameter):
            return None
        if not sink.store_weight(name_of(module, name), parameter):
            return None
        meta = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)
        mark_loaded(meta)
        return meta

    hooks = [
        register_module_module_registration_hook(on_module),
        # torch's documentation allows the hook to return a replacement, but the type annotation does not.
        register_module_parameter_registration_hook(on_parameter),  # type: ignore[arg-type]
    ]
    try:
        rows = loaded_in_rows(sink.store_rows, sink.most_bytes)
        with long_work(f"streaming {name}", sink.total_bytes), rows as unused:
            yield unused
    finally:
        for hook in hooks:
            hook.remove()


def store_the_rest(model: nn.Module, access: ParameterAccess, names: Mapping[str, str]) -> None:
    """Store the weights that the checkpoint does not have, such as new heads. Then make every parameter with a stored
    name a placeholder."""
    stored = {name: parameter for name, parameter in model.named_parameters() if name in names}
    for name, parameter in stored.items():
        if parameter.device.type != "meta":
            access.write_parameter(names[name], parameter)
    dtypes = {name: access.parts[names[name]][0][0].master.working_dtype for name in names}
    make_placeholders(model, dtypes, only=set(stored.values()))


def make_placeholders(
    model: nn.Module, dtypes: Mapping[str, torch.dtype] | None = None, only: Container[nn.Parameter] | None = None
) -> None:
    """Make all parameters, or ``only`` these, placeholders without values. ``dtypes`` maps names to new dtypes."""
    for name, parameter in list(model.named_parameters()):
        if only is not None and parameter not in only:
            continue
        dtype = (dtypes or {}).get(name, parameter.dtype)
        placeholder = nn.Parameter(
            torch.full((1,), float("nan")).to(dtype).expand(parameter.shape),
            requires_grad=parameter.requires_grad,
        )
        # The parameter object stays, so that weights stay tied. `.data` of a meta parameter cannot be set.
        torch.utils.swap_tensors(parameter, placeholder)
