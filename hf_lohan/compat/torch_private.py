"""What torch offers nobody, and offloading needs."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._dynamo import eval_frame
from torch._ops import HigherOrderOperator as HigherOrderOperator
from torch._ops import OpOverload as OpOverload
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.autograd import Variable
from torch.autograd.graph import Node
from torch.distributed import distributed_c10d
from torch.multiprocessing.reductions import StorageWeakRef as StorageWeakRef
from torch.optim import _adafactor, _muon
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_map_only as tree_map_only

fused_adamw_: Callable[..., None] = torch._fused_adamw_
fused_adam_: Callable[..., None] = torch._fused_adam_
adafactor: Callable[..., None] = _adafactor.adafactor
newton_schulz: Callable[..., Tensor] = _muon._zeropower_via_newtonschulz
adjusted_muon_lr: Callable[..., float] = _muon._adjust_lr


def mark_optimizer_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Let a scheduler of an optimizer whose steps another one takes not warn that it comes before the first step."""
    marked: Any = optimizer
    marked._opt_called = True


def default_process_group_store() -> Any:
    """The key-value store that all processes of the default process group share. Raises ValueError where there is
    none."""
    return distributed_c10d._get_default_store()


def set_collectives_timeout(timeout_s: float) -> None:
    """From now on a collective of the default process group fails when it has waited for so long."""
    distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s))


def cpu_has_bfloat16_units() -> bool:
    """Whether bfloat16 matmuls are fast on this CPU."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def allocator_settings() -> str:
    """Those of the caching allocator of device memory, as `PYTORCH_ALLOC_CONF` or who set them later has them."""
    return str(torch._C._accelerator_getAllocatorSettings())


def set_allocator_settings(settings: str) -> None:
    """From now on, in place of all that were set before."""
    torch._C._accelerator_setAllocatorSettings(settings)


def is_compiled() -> bool:
    """Whether the caller runs under `torch.compile`, within a compiled graph or between two."""
    return torch.compiler.is_compiling() or callable(eval_frame.get_eval_frame_callback())


# Tensors.


def version_of(tensor: Tensor) -> int:
    """How often it was written to, its aliases included."""
    return int(tensor._version)


def storage_id(tensor: Tensor) -> int:
    """Names its storage, also one without memory, for as long as that lives."""
    return int(tensor.untyped_storage()._cdata)


def aliases_count_versions() -> AbstractContextManager[object]:
    """Within, `detach` gives an alias that shares the version counter also below autograd, where dispatch modes run."""
    guard: AbstractContextManager[object] = torch._C._SetExcludeDispatchKeyGuard(
        torch._C.DispatchKey.ADInplaceOrView, False
    )
    return guard


# Operations, and what looks at them.


def operation_name(operation: OpOverload) -> str:
    """Without namespace and overload."""
    return str(operation._opname)


def schema_of(operation: OpOverload) -> Any:
    """Its arguments, and whether it writes to one."""
    return operation._schema


def without_torch_function() -> AbstractContextManager[object]:
    """Within, subclasses of Tensor are plain tensors to torch's functions."""
    return torch._C.DisableTorchFunctionSubclass()


@contextmanager
def without_modes() -> Iterator[None]:
    """Within, no mode that is on sees what torch does."""
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        yield


# Autograd.


def call_behind_backward(callback: Callable[[], None]) -> None:
    """In a backward: call this when all of it is done. FSDP and DDP do the same."""
    Variable._execution_engine.queue_callback(callback)


def is_in_backward() -> bool:
    """Whether autograd calls this thread's code, to undo an operation or to run one again."""
    return int(torch._C._current_graph_task_id()) != -1


def sequence_number(node: Node) -> int:
    """Backward runs what was recorded later, and has the larger number, first."""
    return int(node._sequence_nr())


# Modules.


def has_gradient_hook(tensor: Tensor) -> bool:
    """Whether `register_hook` was called on it."""
    return bool(tensor._backward_hooks)


def own_parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """A module's own by their names, tied ones each time."""
    return [(name, parameter) for name, parameter in module._parameters.items() if parameter is not None]


def put_parameter(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Set one that is there, without anybody's looking."""
    module._parameters[name] = parameter


@contextmanager
def structure_kept(model: nn.Module) -> Iterator[None]:
    """Behind it the model's modules have the children, and the kinds (attributes that are strings), that they had
    before: some forwards replace a submodule, whose making draws random numbers."""
    before = [(module, dict(module._modules), dict(vars(module))) for module in model.modules()]
    try:
        yield
    finally:
        for module, children, settings in before:
            module._modules.clear()
            module._modules.update(children)
            vars(module).update({name: value for name, value in settings.items() if isinstance(value, str)})


@contextmanager
def without_hooks(model: nn.Module) -> Iterator[None]:
    """Within, calling the model or a module of it calls none of its forward hooks so far."""
    before = {module: (module._forward_hooks, module._forward_pre_hooks) for module in model.modules()}
    for module in before:
        module._forward_hooks, module._forward_pre_hooks = OrderedDict(), OrderedDict()
    try:
        yield
    finally:
        for module, (after, ahead) in before.items():
            # What a model hooks into itself at its first forward (to record its routers, say) stays.
            after.update(module._forward_hooks)
            ahead.update(module._forward_pre_hooks)
            module._forward_hooks, module._forward_pre_hooks = after, ahead
