"""Counts the operations of a forward, with their FLOPs, their bytes and the names that they have in a run."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import flop_registry

from hf_lohan.activations.kernel_names import ATTENTION_KERNELS, Operation, anchor_name
from hf_lohan.compat.torch_private import (
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    StorageWeakRef,
    TorchDispatchMode,
    operation_name,
    schema_of,
    storage_id,
    tree_leaves,
)
from hf_lohan.costs.model_profile import Fusion, OperationProfile
from hf_lohan.hardware import AttentionShape, MatrixShape
from hf_lohan.model import WrittenWeightError
from hf_lohan.planning.tracing.experts_on_paper import NAME, ExpertsTrace

aten = torch.ops.aten
_DEVICE = torch.ops.prim.device.default
_NONE: Mapping[str, Tensor] = MappingProxyType({})
_NO_TENSORS = (int, float, str, type(None), torch.dtype, torch.device)

_MAX_REAL_NUMEL = 1 << 22
_FACTORS_AT = {"mm": 0, "bmm": 0, "_grouped_mm": 0, "addmm": 1, "baddbmm": 1}
"""Argument index of the first factor. The second factor is the next argument."""


def _grouped_product_flops(a: Tensor, b: Tensor, *args: Any, **kwargs: Any) -> int:
    """Return the FLOPs of a grouped product, in which each row of `a` is multiplied only by its group's matrix."""
    num_groups = a.shape[0] if a.dim() == 3 and b.dim() == 2 else 1
    return 2 * a.numel() // num_groups * b.shape[-1]


def _attention_flops(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> int:
    """Return the FLOPs of an attention over all pairs of a query and a key."""
    num_pairs = math.prod(query.shape[:-1]) * key.shape[-2]
    return 2 * num_pairs * (query.shape[-1] + value.shape[-1])


def _attention_backward_flops(
    grad_output: Tensor, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
) -> int:
    """Return the FLOPs of an attention's backward. It has five matrix products where the forward has two."""
    return 5 * _attention_flops(query, key, value) // 2


_FLOP_FORMULAS: dict[Any, Callable[..., int]] = {
    aten._grouped_mm: _grouped_product_flops,
    aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flops,
    aten._scaled_dot_product_fused_attention_overrideable: _attention_flops,
    aten._scaled_dot_product_fused_attention_overrideable_backward: _attention_backward_flops,
}


def flops_of(func: Operation, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> int:
    """Return the FLOPs of one call. They are 0 except for products, attentions and convolutions. An attention counts
    the pairs of a query and a key that its kernel computes. A causal kernel leaves out later keys, and a mask leaves
    out none."""
    packet = getattr(func, "overloadpacket", func)
    if (formula := _FLOP_FORMULAS.get(packet)) is not None:
        flops = formula(*args, **kwargs)
    elif (registered := flop_registry.get(packet)) is not None:
        flops = int(registered(*args, **kwargs, out_val=output))
    else:
        return 0
    if isinstance(func, OpOverload) and operation_name(func).startswith(ATTENTION_KERNELS):
        return int(flops * _share_of_pairs(func, args, kwargs))
    return flops


def _named(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by name."""
    return dict(zip((argument.name for argument in schema_of(func).arguments), args, strict=False)) | kwargs


def _share_of_pairs(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    """Return the share of all pairs of a query and a key that an attention kernel computes."""
    named = _named(func, args, kwargs)
    if not named.get("is_causal"):
        return 1.0
    num_queries: int
    num_keys: int
    num_queries, num_keys = named["query"].shape[-2], named["key"].shape[-2]
    # With more keys than queries, the first query sees one key in the CPU's kernel. Elsewhere the last query sees all.
    seen_by_first = 1 if "for_cpu" in operation_name(func) else max(1, num_keys - num_queries + 1)
    num_growing = min(num_queries, num_keys - seen_by_first + 1)
    num_pairs = num_growing * (2 * seen_by_first + num_growing - 1) // 2 + (num_queries - num_growing) * num_keys
    return num_pairs / (num_queries * num_keys)


def product_of(func: Operation, args: tuple[Any, ...]) -> MatrixShape | None:
    """Return the shape of a matrix product; None for other operations. Assumes that tokens are spread evenly over
    groups."""
    at = _FACTORS_AT.get(operation_name(func)) if isinstance(func, OpOverload) and func.namespace == "aten" else None
    if at is None:
        return None
    a, b = args[at], args[at + 1]
    num_matrices = b.shape[0] if b.dim() == 3 else 1
    num_rows = a.shape[-2] if a.dim() == b.dim() else -(-a.shape[0] // num_matrices)
    return MatrixShape(num_rows, a.shape[-1], b.shape[-1], num_matrices=num_matrices)


def _attention_of(func: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> AttentionShape | None:
    """Return the shape of a fused attention; None for other operations. The number of tokens is the number of keys."""
    if not (isinstance(func, OpOverload) and operation_name(func).startswith(ATTENTION_KERNELS)):
        return None
    query, key, value = (_named(func, args, kwargs)[name] for name in ("query", "key", "value"))
    num_heads = math.prod(query.shape[:-2])
    return AttentionShape(
        num_heads=num_heads, num_tokens=key.shape[-2], key_dim=query.shape[-1], value_dim=value.shape[-1]
    )


@dataclass(eq=False)
class _Kernel:
    """Operations that run as one kernel."""

    kind: Hashable
    read: dict[int, dict[Hashable, int]] = field(default_factory=dict)
    """The bytes of each view that the kernel reads, by storage."""
    has_run: bool = False
    """Whether other kernels have read its outputs, so that no operation can be added to it."""


class FusedBytes:
    """Counts the bytes that operations read and write if an operation runs in one kernel with the operations whose
    outputs it uses. A kernel reads each tensor once, and writes only tensors that other kernels read."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._maker: dict[int, _Kernel] = {}
        """For each storage that is not written to memory, the kernel that makes it."""

    def add(self, kind: Hashable, args: Any, output: Any, *, is_in_place: bool = False, times: int = 1) -> None:
        """Count ``times`` equal calls. Operations of one kind may share a kernel. An operation of kind None has its own
        kernel, whose bytes do not count."""
        used = list(tensors_in(args))
        inputs = {storage_id(tensor) for tensor in used}
        kernel = _Kernel(kind)
        for key in inputs if kind is not None else ():
            maker = self._maker.get(key)
            if maker is not None and maker is not kernel and maker.kind == kind and not maker.has_run:
                kernel.read |= maker.read
                self._maker |= {made: kernel for made, by in self._maker.items() if by is maker}
        for tensor in used:
            key, num_bytes = storage_id(tensor), tensor.untyped_storage().nbytes()
            if self._maker.get(key) is kernel:
                continue
            if (maker := self._maker.pop(key, None)) is not None:
                maker.has_run = True
                self.num_bytes += times * num_bytes
            views = kernel.read.setdefault(key, {})
            view = tensor.storage_offset(), tensor.shape, tensor.stride()
            if kind is not None and view not in views:
                views[view] = min(_held_bytes(tensor), num_bytes - sum(views.values()))
                self.num_bytes += times * views[view]
        for key in {storage_id(tensor) for tensor in tensors_in(output)}:
            if key not in inputs or is_in_place:
                for other in {kernel, *self._maker.values()}:  # a tensor that was freed may have had the same id
                    other.read.pop(key, None)
                self._maker.pop(key, None)
                if kind is not None:
                    self._maker[key] = kernel

    def end(self, outputs: Any) -> None:
        """Count the tensors that the block returns."""
        self.add(None, outputs, ())


@dataclass
class BlockTrace:
    operations: list[OperationProfile] = field(default_factory=list)
    products: Counter[MatrixShape] = field(default_factory=Counter)
    attentions: Counter[AttentionShape] = field(default_factory=Counter)
    flops: int = 0
    moved_bytes: int = 0
    fused: dict[Fusion, FusedBytes] = field(default_factory=lambda: {"compile": FusedBytes(), "liger": FusedBytes()})
    """See `ModelProfile.fused`."""
    saved_bytes: int = 0
    saved: dict[int, int] = field(default_factory=dict, repr=False)
    """Bytes of the tensors that autograd saves, by storage."""
    read: dict[int, StorageWeakRef] = field(default_factory=dict, repr=False)
    """Storages that products and attention read. The references keep their keys from being used again."""
    made: dict[int, StorageWeakRef] = field(default_factory=dict, repr=False)
    """Storages that products and attention made."""
    working_bytes: int = 0
    input_bytes: int = 0
    num_run_again: int = 0
    """Number of operations of a recomputation, which stops at the last tensor that autograd saved."""
    experts: ExpertsTrace | None = None
    """Experts that stream one by one."""
    num_chunks: int = 1
    """See `BlockProfile` for this and the next two fields."""
    repeated_flops: int = 0
    repeated_bytes: int = 0
    times: int = 1
    """Number of equal calls that the next call stands for."""
    _counts: Counter[str] = field(default_factory=Counter, repr=False)

    @property
    def graph_bytes(self) -> int:
        """See `BlockProfile`."""
        if self.experts is not None or self.num_chunks > 1:
            return 0
        output_bytes = sum(operation.output_bytes for operation in self.operations[: self.num_run_again])
        return output_bytes + sum(self.saved[key] for key in self.saved.keys() & self.read.keys() - self.made.keys())

    def add_experts(self, experts: ExpertsTrace, *, module: str = "") -> None:
        """Count one call of a layer's experts. Raises ValueError for a second module of experts in the layer."""
        if self.experts is not None:
            raise ValueError(f"{module} is the second module of experts in its layer; set experts to with_layer")
        self.experts = experts
        self.flops += experts.flops
        for shape in experts.products:
            self.products[shape] += 1
        self.operations.append(experts.operation(self._counts[NAME], module))
        self._counts[NAME] += 1

    def add(
        self, func: Operation, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, *, module: str = ""
    ) -> None:
        """Count one call of `func` in the submodule ``module``."""
        flops = self.times * flops_of(func, args, kwargs, output)
        self.flops += flops
        kind = anchor_name(func)
        moved_bytes = moved_bytes_of(func, args, kwargs, output) if kind is None else 0
        if kind is not None or moved_bytes:
            # torch.compile fuses all operations that it can. A kernel of Liger has the operations of one module.
            kinds: dict[Fusion, Hashable] = {"compile": "", "liger": module}
            for how, of in kinds.items():
                of = of if kind is None else None
                self.fused[how].add(of, (args, kwargs), output, is_in_place=_is_mutable(func), times=self.times)
        if kind is None:
            self.moved_bytes += self.times * moved_bytes
            return
        if (product := product_of(func, args)) is not None:
            self.products[product] += self.times
        if (attention := _attention_of(func, args, kwargs)) is not None:
            self.attentions[attention] += self.times
        for tensors, storages in (((args, kwargs), self.read), (output, self.made)):
            storages |= {storage_id(tensor): StorageWeakRef(tensor.untyped_storage()) for tensor in tensors_in(tensors)}
        name = f"{kind}#{self._counts[kind]}"
        self._counts[kind] += 1
        output_bytes = sum(tensor.nbytes for tensor in tensors_in(output))
        self.operations.append(OperationProfile(name=name, flops=flops, output_bytes=output_bytes, module=module))


def tensors_in(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif type(values) in (tuple, list):
        for value in values:
            yield from tensors_in(value)
    elif type(values) is dict:
        for value in values.values():
            yield from tensors_in(value)
    elif not isinstance(values, _NO_TENSORS):
        yield from (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor))


def _held_bytes(tensor: Tensor) -> int:
    """Return the bytes of memory of a tensor. An expanded tensor has less memory than elements."""
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())


def _is_mutable(func: Operation) -> bool:
    return isinstance(func, OpOverload) and bool(schema_of(func).is_mutable)


def _written_by(func: Operation, args: tuple[Any, ...]) -> Iterator[Tensor]:
    """Yield the arguments that a call writes to. Does not count `set_`, which parametrizations use to keep the values,
    and calls that change only the shape of a view, such as `t_`."""
    if not isinstance(func, OpOverload) or torch.Tag.inplace_view in func.tags or operation_name(func) == "set_":
        return
    if schema_of(func).is_mutable:
        for argument, value in zip(schema_of(func).arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                yield from tensors_in(value)


def moved_bytes_of(func: Operation, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> int:
    """Return the bytes that a call reads and writes in the device's memory; 0 for views."""
    read = list(tensors_in((args, kwargs)))
    written = list(tensors_in(output))
    known = {storage_id(tensor) for tensor in read}
    if read and not _is_mutable(func) and all(storage_id(tensor) in known for tensor in written):
        return 0
    return sum(_held_bytes(tensor) for tensor in (*read, *written))


class LiveBytes:
    """Tracks the memory that operations allocate, and its peak."""

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def add_output(self, args: Any, output: Any) -> None:
        """Count the memory of an operation's ``output``, but not the memory of its ``args``."""
        inputs = {storage_id(tensor) for tensor in tensors_in(args)}
        added = [tensor for tensor in tensors_in(output) if storage_id(tensor) not in inputs]
        if not added:
            return
        for tensor in added:
            storage = tensor.untyped_storage()
            self._alive[storage_id(tensor)] = StorageWeakRef(storage), storage.nbytes()
        for key in [key for key, (ref, _) in self._alive.items() if ref.expired()]:
            del self._alive[key]
        self.peak_bytes = max(self.peak_bytes, sum(num_bytes for _, num_bytes in self._alive.values()))

    def forget(self, tensors: Any) -> None:
        """Stop counting the memory of these tensors, as if they were freed."""
        for tensor in tensors_in(tensors):
            self._alive.pop(storage_id(tensor), None)


class FakeOperations(TorchDispatchMode):
    """Runs operations on fake tensors, and notes each with `note_call`. It may be entered again inside ``fake_mode``,
    to see operations before that mode sees them."""

    supports_higher_order_operators = True

    def __init__(self, fake_mode: FakeTensorMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fake_mode = fake_mode
        self._inside = False

    def note_before(self) -> None:
        """Called before each operation."""

    def note_call(self, func: Operation, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Called after each operation."""

    def __torch_dispatch__(
        self, func: Operation, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _DEVICE and isinstance(args[0], FakeTensor):  # half of all calls
            return args[0].fake_device
        if self._inside or func is _DEVICE:  # operations inside a fake operation do not count
            return func(*args, **kwargs)
        self._inside = True
        try:
            self.note_before()
            output = _run_on_fake_tensors(self.fake_mode, func, args, kwargs)
            self.note_call(func, args, kwargs, output)
            return output
        finally:
            self._inside = False

    @contextlib.contextmanager
    def uncounted(self) -> Iterator[None]:
        """Count no operations within this context."""
        before, self._inside = self._inside, True
        try:
            yield
        finally:
            self._inside = before


class OperationTrace(FakeOperations):
    """Counts operations for the block `target`. Raises WrittenWeightError for an operation that writes to a weight."""

    def __init__(self, target: BlockTrace, fake_mode: FakeTensorMode, weights: Mapping[str, Tensor] = _NONE) -> None:
        super().__init__(fake_mode)
        self._weight_names = {storage_id(weight): name for name, weight in weights.items()}
        self.target = target
        """The block that operations are added to. It is replaced when another block begins."""
        self.live = LiveBytes()
        self.is_in_backward = False
        self.module = ""

    def note_call(self, func: Operation, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        self.live.add_output((args, kwargs), output)
        for written in _written_by(func, args):
            if (name := self._weight_names.get(storage_id(written))) is not None:
                raise WrittenWeightError(name)
        if not self.is_in_backward:
            self.target.add(func, args, kwargs, output, module=self.module)

    def add_experts(self, experts: ExpertsTrace) -> None:
        """Count experts as one operation."""
        self.target.add_experts(experts, module=self.module)


def _run_on_fake_tensors(
    fake_mode: FakeTensorMode, func: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call `func` in a trace, where some arguments are fake tensors."""
    if func is aten.rand.default and len(args[0]) == 0:
        # A single random number decides whether a layer is skipped (OPT's layerdrop). 1 is never below a
        # probability, so all layers are counted.
        return torch.ones([])
    if func is aten._grouped_mm.default and _has_unknown_output_shape(*args):
        a, b, offsets = args[0], args[1], args[2] if len(args) > 2 else kwargs["offs"]
        groups = [offsets.numel()] if b.dim() == 2 else []
        return a.new_empty(*groups, a.shape[0], b.shape[-1])
    if _would_be_large(args):
        with fake_mode:
            return func(*args, **kwargs)
    return func(*args, **kwargs)


def _has_unknown_output_shape(a: Tensor, b: Tensor, *args: Any) -> bool:
    """Return whether torch cannot infer a grouped product's output shape. It can only for bfloat16."""
    return isinstance(a, FakeTensor) and a.dtype != torch.bfloat16 and a.dim() == 2


def _would_be_large(args: tuple[Any, ...]) -> bool:
    """Return whether a real tensor would be large. Real tensors with values that matter are small. A mask of all pairs
    of tokens must not be computed."""
    tensors = list(tensors_in(args))
    if any(isinstance(tensor, FakeTensor) for tensor in tensors):
        return False
    is_size = not tensors and bool(args) and isinstance(args[0], list | tuple)  # of a new tensor
    shapes = [torch.Size(args[0])] if is_size else [tensor.shape for tensor in tensors]
    longest = itertools.zip_longest(*(reversed(shape) for shape in shapes), fillvalue=1)
    return math.prod(max(sizes) for sizes in longest) > _MAX_REAL_NUMEL


class AttentionWithoutDropout(TorchFunctionMode):
    """Lets the CPU choose its fused kernel, which moves and saves the same bytes as an accelerator's kernel with
    dropout."""

    def __init__(self) -> None:
        super().__init__()
        self._has_dropout = False

    @contextlib.contextmanager
    def with_dropout(self) -> Iterator[None]:
        """Leave the dropout of attention unchanged within this context."""
        self._has_dropout = True
        try:
            yield
        finally:
            self._has_dropout = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is F.scaled_dot_product_attention and not self._has_dropout:
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            kwargs.pop("dropout_p", None)
        return func(*args, **kwargs)
