"""The private API of torch that offloading needs."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import cache
from importlib.util import find_spec
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._dynamo import eval_frame
from torch._ops import HigherOrderOperator as HigherOrderOperator
from torch._ops import OpOverload as OpOverload
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.autograd import Variable
from torch.autograd.graph import Node, saved_tensors_hooks
from torch.backends.cuda import SDPAParams, can_use_efficient_attention, can_use_flash_attention
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import _rendezvous_handlers
from torch.multiprocessing.reductions import StorageWeakRef as StorageWeakRef
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends, sdpa_kernel
from torch.optim import _adafactor, _muon
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_map_only as tree_map_only
from torch.utils.checkpoint import CheckpointError

fused_adamw_: Callable[..., None] = torch._fused_adamw_
fused_adam_: Callable[..., None] = torch._fused_adam_
adafactor: Callable[..., None] = _adafactor.adafactor
READS_VALUES = (DataDependentOutputException, DynamicOutputShapeException)
"""Errors of operations that need the values of fake tensors."""
_NO_TIMEOUT = timedelta(days=365)
"""Timeout of our own groups. `Watch` decides when a rank is lost."""
newton_schulz: Callable[..., Tensor] = _muon._zeropower_via_newtonschulz
adjusted_muon_lr: Callable[..., float] = _muon._adjust_lr


def mark_optimizer_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Prevent a scheduler's warning that ``optimizer`` has not stepped, if another object takes its steps."""
    marked: Any = optimizer
    marked._opt_called = True


def default_process_group_store() -> Any:
    """Return the key-value store of the default process group. Raises ValueError if there is no group."""
    return distributed_c10d._get_default_store()


def prefix_rendezvous(prefix: str) -> None:
    """Put ``prefix`` before all keys that torch.distributed uses in this process to connect processes that a launcher
    started. torch has no argument for this if another library makes the process group."""
    stock = _rendezvous_handlers["env"]

    def prefixed(*args: Any, **kwargs: Any) -> Iterator[tuple[PrefixStore, int, int]]:
        for store, rank, num_ranks in stock(*args, **kwargs):
            yield PrefixStore(prefix, store), rank, num_ranks

    _rendezvous_handlers["env"] = prefixed


def nccl_group(store: Any, rank: int, num_ranks: int, device: torch.device) -> Any:
    """Make a process group of GPUs, separate from torch's own groups. All its ranks call this together and wait for
    each other. They connect through ``store``."""
    options = torch.distributed.ProcessGroupNCCL.Options()
    group = torch.distributed.ProcessGroupNCCL(store, rank, num_ranks, options)
    group.eager_connect_single_device(device)
    group._set_default_timeout(_NO_TIMEOUT)
    return group


def gloo_group(store: Any, rank: int, num_ranks: int, host: str, connects_within: timedelta) -> Any:
    """Make a process group of CPUs, as `nccl_group` makes one of GPUs. ``host``: the address at which other ranks reach
    this rank."""
    gloo: Any = torch.distributed.ProcessGroupGloo
    options = gloo._Options()
    settings = {"_devices": [_gloo_device(host, os.getpid())], "_timeout": connects_within, "_threads": 4}
    for name, value in settings.items():
        setattr(options, name, value)
    group = gloo(store, rank, num_ranks, options)
    group._set_default_timeout(_NO_TIMEOUT)
    return group


@cache
def _gloo_device(host: str, _pid: int) -> Any:
    """Return the device of all groups of this process. Its thread polls the connections 100 times a second."""
    return torch.distributed.ProcessGroupGloo.create_device(hostname=host)


def begin_sends(group: Any, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> list[Any]:
    """Begin to send tensors to ranks of a group, and to receive tensors from them, all at once. Returns the works. With
    a CUDA group, works follow the current stream."""
    if not (sends or receives):
        return []  # a group that has coalesced nothing returns no work
    works: list[Any] = []
    if group.supports_coalescing:
        group._start_coalescing()
    try:
        works += [group.send([tensor], peer, 0) for peer, tensor in sends]
        works += [group.recv([tensor], peer, 0) for peer, tensor in receives]
    finally:  # before this, NCCL ignores an abort by this thread
        coalesced = group._end_coalescing() if group.supports_coalescing else None
    return works if coalesced is None else [coalesced]


def set_collectives_timeout(timeout_s: float) -> None:
    """Set the timeout of the default process group's collectives."""
    # Public since torch 2.15, where the private function warns.
    set_timeout = getattr(torch.distributed, "set_timeout", None) or distributed_c10d._set_pg_timeout
    set_timeout(timedelta(seconds=timeout_s))


def cpu_has_bfloat16_units() -> bool:
    """Return whether bfloat16 matmuls are fast on this CPU."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def allocator_settings() -> str:
    """Return the current settings of the caching allocator of device memory."""
    return str(torch._C._accelerator_getAllocatorSettings())


def set_allocator_settings(settings: str) -> None:
    """Replace all settings of the caching allocator."""
    torch._C._accelerator_setAllocatorSettings(settings)


def is_compiled() -> bool:
    """Return whether the caller runs in `torch.compile`, in a compiled graph or between two graphs."""
    return torch.compiler.is_compiling() or callable(eval_frame.get_eval_frame_callback())


def compilers() -> list[str]:
    """Return the names of the backends of `torch.compile` on this machine."""
    names: list[str] = torch.compiler.list_backends()
    return [name for name in (*names, "eager", "aot_eager") if name != "tvm" or find_spec("tvm") is not None]


def allow_graphs(number: int) -> None:
    """Have `torch.compile` keep at least this number of graphs of a function. With more graphs, it would run the
    function eagerly."""
    settings: Any = torch._dynamo.config
    settings.recompile_limit = max(settings.recompile_limit, number)


def records_cuda_graphs() -> bool:
    """Return whether the backend "inductor" records CUDA graphs in all modes."""
    from torch._inductor import config

    return bool(config.triton.cudagraphs)


def missing_compiler(device: torch.device) -> str | None:
    """Return the name of a tool that the backend "inductor" lacks on this machine to compile for a device, or None."""
    if device.type == "cpu":
        from torch._inductor.cpp_builder import get_cpp_compiler  # imports the compiler
        from torch._inductor.exc import InvalidCxxCompiler

        try:
            get_cpp_compiler()
        except InvalidCxxCompiler:
            return "a C++ compiler"
        return None
    from torch.utils._triton import has_triton

    return None if has_triton() else "Triton"


def is_dispatched() -> bool:
    """Return whether a dispatch mode sees the operations of this thread, as a trace does."""
    return _get_current_dispatch_mode() is not None


# Tensors.


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that `state_dict` has, by name. `state_dict` would also make a tensor of each parameter."""
    return {
        f"{path}.{name}".lstrip("."): buffer
        for path, module in model.named_modules(remove_duplicate=False)
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False)
        if name not in module._non_persistent_buffers_set
    }


def version_of(tensor: Tensor) -> int:
    """Return how often the tensor or an alias of it was written to."""
    return int(tensor._version)


def writing_in_same_version(tensors: Iterable[Tensor]) -> AbstractContextManager[object]:
    """Have writes to the tensors in this context not count in `version_of`, as DDP's copies of buffers do not."""
    context: AbstractContextManager[object] = torch.autograd._unsafe_preserve_version_counter(tuple(tensors))
    return context


def storage_id(tensor: Tensor) -> int:
    """Return a number that identifies a tensor's storage while the storage exists, even if it has no memory."""
    return int(tensor.untyped_storage()._cdata)


def in_own_storage(tensor: Tensor) -> Tensor:
    """Return a tensor with the same memory and its own storage, which only views of this tensor share."""
    with torch.inference_mode(mode=False):  # training cannot use tensors that are made in inference mode
        own: Tensor = torch._C._from_dlpack(torch._C._to_dlpack(tensor))
    return own


def aliases_count_versions() -> AbstractContextManager[object]:
    """Have `detach` share the version counter in dispatch modes too, although these run below autograd."""
    guard: AbstractContextManager[object] = torch._C._SetExcludeDispatchKeyGuard(
        torch._C.DispatchKey.ADInplaceOrView, False
    )
    return guard


# Operations and dispatch modes.


def operation_name(operation: OpOverload) -> str:
    """Return the name of the operation without namespace and overload."""
    return str(operation._opname)


def schema_of(operation: OpOverload) -> Any:
    """Return the operation's schema: its arguments, and which of them it writes to."""
    return operation._schema


def without_torch_function() -> AbstractContextManager[object]:
    """Have torch's functions treat subclasses of Tensor as plain tensors."""
    return torch._C.DisableTorchFunctionSubclass()


@contextmanager
def without_modes() -> Iterator[None]:
    """Hide torch's operations from all active modes."""
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        yield


# Autograd.


def hook_on_saved_tensors() -> Any:
    """Return the function that packs the tensors that autograd saves now, or None."""
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks and hooks[0]


def call_behind_backward(callback: Callable[[], None]) -> None:
    """Call ``callback`` at the end of the backward in progress, as FSDP and DDP do."""
    Variable._execution_engine.queue_callback(callback)


@contextmanager
def checkpoint_errors_as(told: Callable[[str], Exception]) -> Iterator[None]:
    """Have the backward of operations in this context raise ``told(reason)`` instead of torch's `CheckpointError`.
    Enter this context in a checkpoint's forward."""
    pack, unpack = torch._C._autograd._top_saved_tensors_default_hooks(True)

    def unpack_or_tell(saved: Any) -> Any:
        try:
            return unpack(saved)
        except CheckpointError as error:
            lines = str(error).removeprefix("torch.utils.checkpoint: ").splitlines()
            raise told(lines[0].rstrip(".")) from error

    with saved_tensors_hooks(pack, unpack_or_tell):
        yield


def is_in_backward() -> bool:
    """Return whether autograd is calling this thread's code, in a backward or a recomputation."""
    return int(torch._C._current_graph_task_id()) != -1


def sequence_number(node: Node) -> int:
    """Return the node's number in the order of recording. Backward runs the node with the largest number first."""
    return int(node._sequence_nr())


# Modules.


def has_gradient_hook(tensor: Tensor) -> bool:
    """Return whether a hook sees the tensor's gradient, other than the hook of `take_gradients_by`."""
    return bool(tensor._backward_hooks) or sees_sum_of_gradients(tensor)


def take_gradients_by(hook: Callable[[Any], None], parameter: nn.Parameter) -> Any:
    """Register a post-accumulate hook that takes the parameter's gradient, and return its handle."""
    handle = parameter.register_post_accumulate_grad_hook(hook)
    parameter._taking_hook = handle.id  # type: ignore[attr-defined]
    return handle


def take_gradients_last(parameter: Any) -> None:
    """Move the hook of `take_gradients_by` behind hooks that were registered later, which need the gradient."""
    hooks, own = parameter._post_accumulate_grad_hooks, getattr(parameter, "_taking_hook", None)
    if own in hooks:
        hooks[own] = hooks.pop(own)


def sees_sum_of_gradients(tensor: Any) -> bool:
    """Return whether the tensor has a post-accumulate hook other than that of `take_gradients_by`."""
    return bool(set(tensor._post_accumulate_grad_hooks or ()) - {getattr(tensor, "_taking_hook", None)})


def own_parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return (name, parameter) pairs of a module without its children. A tied parameter occurs under each name."""
    return [(name, parameter) for name, parameter in module._parameters.items() if parameter is not None]


def children_of(module: nn.Module) -> list[nn.Module]:
    """Return the children of a module. A child with several names occurs once for each name."""
    return [child for child in module._modules.values() if child is not None]


def table_of_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the dict in which a module keeps its own parameters."""
    return module._parameters


def put_parameter(module: nn.Module, name: str, parameter: Any) -> None:
    """Replace a parameter without the checks of `nn.Module`."""
    module._parameters[name] = parameter


def module_hooks(module: nn.Module) -> Iterator[Callable[..., Any]]:
    """Iterate over the functions that run before and after a module's forward and backward."""
    tables = (module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks)
    for hook in chain.from_iterable(table.values() for table in tables):
        yield getattr(hook, "func", hook)  # of a `partial`


@contextmanager
def without_hooks(model: nn.Module) -> Iterator[None]:
    """Disable the current forward hooks of the model and its modules within this context."""
    before = {module: (module._forward_hooks, module._forward_pre_hooks) for module in model.modules()}
    for module in before:
        module._forward_hooks, module._forward_pre_hooks = OrderedDict(), OrderedDict()
    try:
        yield
    finally:
        for module, (after, ahead) in before.items():
            # Hooks that the model registered in the context stay. A model may record its routers in this way.
            after.update(module._forward_hooks)
            ahead.update(module._forward_pre_hooks)
            module._forward_hooks, module._forward_pre_hooks = after, ahead


# Attention.


def attention_kernels() -> list[SDPBackend]:
    """Return the kernels that `scaled_dot_product_attention` may use, the preferred ones first."""
    kernels: list[SDPBackend] = _cur_sdpa_kernel_backends(with_priority=True)
    return kernels


@contextmanager
def using_attention_kernels(kernels: list[SDPBackend]) -> Iterator[None]:
    """Have `scaled_dot_product_attention` use these kernels within this context."""
    if kernels == attention_kernels():
        yield
        return
    with sdpa_kernel(kernels, set_priority=True):
        yield


def attention_after(query: Tensor, key: Tensor, value: Tensor, *, scale: float | None = None) -> Tensor:
    """Return the attention of the last tokens of a row over all earlier tokens and themselves, without a mask.

    Shapes are [rows, heads, queries, size] and [rows, key heads, keys, size]. There are not fewer keys than queries. If
    no kernel does this, attention over earlier keys and causal attention over the queries' own keys are joined. A mask
    is made only if no fused kernel of the device supports these sizes and this dtype.
    """
    num_earlier = key.shape[2] - query.shape[2]
    is_grouped = query.shape[1] != key.shape[1]
    if num_earlier == 0:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=is_grouped)
    if query.device.type != "cpu":
        if can_use_flash_attention(SDPAParams(query, key, value, None, 0.0, False, is_grouped)):
            with _disable_current_modes():  # within a dispatch mode this subclass cannot be made
                from torch.nn.attention.bias import causal_lower_right  # imports torch.compile's machinery

                mask = causal_lower_right(query.shape[2], key.shape[2])
            # Its own function is called, because in a trace torch treats subclasses of Tensor as plain tensors.
            sdpa, options = F.scaled_dot_product_attention, {"scale": scale, "enable_gqa": is_grouped}
            lower: Tensor = mask.__torch_function__(sdpa, (), (query, key, value, mask), options)
            return lower
        if is_grouped:  # the other kernels need a key head for each query head
            key, value = (tensor.repeat_interleave(query.shape[1] // tensor.shape[1], 1) for tensor in (key, value))
        if not can_use_efficient_attention(SDPAParams(query, key, value, None, 0.0, False, False)):
            seen = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril(num_earlier)
            return F.scaled_dot_product_attention(query, key, value, seen, scale=scale)
    output: Tensor = _AttentionAfter.apply(query, key, value, scale)  # type: ignore[no-untyped-call]
    return output


_KERNELS_WITH_CHOSEN_SUMS = (
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
)
"""Attention kernels whose argument 4 decides whether they return the sums of exponentials."""


def with_sums(operation: object, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return arguments with which an attention kernel also returns the sums that its backward needs. If no gradient is
    recorded, as in the forward of a layer in chunks, torch does not request them from some kernels."""
    if operation in _KERNELS_WITH_CHOSEN_SUMS:
        return (*args[:4], True, *args[5:])
    return args


class _AttentionAfter(torch.autograd.Function):
    """Attention over earlier keys and over the queries' own keys, joined by their sums of exponentials."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        num = key.shape[2] - query.shape[2]

        def attend(first: int, last: int, *, is_causal: bool) -> tuple[Tensor, Tensor, list[Tensor]]:
            keys, values = key[:, :, first:last], value[:, :, first:last]
            if query.device.type == "cpu":
                kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
                output, sums, *others = kernel(query, keys, values, 0.0, is_causal, scale=scale)
            else:
                kernel = torch.ops.aten._scaled_dot_product_efficient_attention
                output, sums, *others = kernel(query, keys, values, None, True, 0.0, is_causal, scale=scale)
            return output, sums, others

        own, own_sums, others = attend(num, key.shape[2], is_causal=True)
        past, past_sums, _ = attend(0, num, is_causal=False)
        sums = torch.logaddexp(own_sums, past_sums)  # kernels may pad them with infinities
        own_share, past_share = (
            (of_part - sums)[:, :, : query.shape[2]].exp().unsqueeze(-1) for of_part in (own_sums, past_sums)
        )
        output: Tensor = (own.to(sums.dtype) * own_share).add_(past.to(sums.dtype) * past_share)
        output = output.to(query.dtype)
        ctx.save_for_backward(query, key, value, output, sums, *others)
        ctx.scale = scale
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        query, key, value, output, sums, *others = ctx.saved_tensors
        num = key.shape[2] - query.shape[2]

        def back(first: int, last: int, *, is_causal: bool) -> tuple[Tensor, ...]:
            inputs = gradient, query, key[:, :, first:last], value[:, :, first:last]
            grads: tuple[Tensor, ...]
            if query.device.type == "cpu":
                kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
                grads = kernel(*inputs, output, sums, 0.0, is_causal, scale=ctx.scale)
            else:
                kernel = torch.ops.aten._scaled_dot_product_efficient_attention_backward
                needed = [True, True, True, False]
                grads = kernel(*inputs, None, output, sums, *others, 0.0, needed, is_causal, scale=ctx.scale)
            return grads[:3]

        of_key, of_value = torch.empty_like(key), torch.empty_like(value)
        past_query, of_key[:, :, :num], of_value[:, :, :num] = back(0, num, is_causal=False)
        of_query, of_key[:, :, num:], of_value[:, :, num:] = back(num, key.shape[2], is_causal=True)
        return past_query.add_(of_query), of_key, of_value, None


def parts_of_sparse(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Return the indices and values of a sparse tensor, which may have an index several times. Autograd forgets that a
    gradient is coalesced, and torch would sort all its indices to coalesce it again."""
    return tensor._indices(), tensor._values()
