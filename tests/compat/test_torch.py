"""The private API of torch that we use. A failure names what an upgrade has changed."""

from __future__ import annotations

import platform
import threading
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import TCPStore
from torch.distributed.rendezvous import _rendezvous_handlers, rendezvous
from torch.utils.checkpoint import checkpoint

from hf_lohan.compat import torch_private as private


def test_the_fused_adamw_kernel_has_the_expected_arguments() -> None:
    names = [argument.name for argument in private.schema_of(torch.ops.aten._fused_adamw_.default).arguments]
    states = ["exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "state_steps"]
    settings = ["lr", "beta1", "beta2", "weight_decay", "eps", "amsgrad", "maximize"]
    expected = ["self", "grads", *states, *settings]
    assert names[: len(expected)] == expected, "torch._fused_adamw_ has other arguments"
    flat = [torch.ones(8) for _ in range(4)]
    weights, gradients, exp_avg, exp_avg_sq = flat
    private.fused_adamw_(
        [weights], [gradients], [exp_avg], [exp_avg_sq], [], [torch.tensor(1.0)],
        lr=0.1, beta1=0.9, beta2=0.99, weight_decay=0.0, eps=1e-8, amsgrad=False, maximize=False,
    )  # fmt: skip
    assert not torch.equal(weights, torch.ones(8)), "torch._fused_adamw_ does not write its weights in place"


def test_the_fused_adam_kernel_has_the_arguments_of_adamw() -> None:
    of_adam, of_adamw = (
        [argument.name for argument in private.schema_of(operation.default).arguments]
        for operation in (torch.ops.aten._fused_adam_, torch.ops.aten._fused_adamw_)
    )
    assert of_adam == of_adamw, "torch._fused_adam_ has other arguments than torch._fused_adamw_"


def test_compiled_code_is_detected() -> None:
    seen = []
    torch.compile(lambda: seen.append(private.is_compiled()), backend="eager")()
    assert seen == [True] and not private.is_compiled()


def test_persistent_buffers_are_those_of_the_state_dict() -> None:
    norm = nn.BatchNorm1d(3, affine=False)
    model = nn.Sequential(norm, nn.Sequential(norm))
    model.register_buffer("own", torch.zeros(2))
    model.register_buffer("not_saved", torch.zeros(2), persistent=False)
    model.register_buffer("absent", None)
    found, expected = private.persistent_buffers(model), model.state_dict()
    assert list(found) == list(expected) and len(found) == 7
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_muon_equals_its_parts() -> None:
    """`newton_schulz` and `adjusted_muon_lr` together give the update of `torch.optim.Muon`."""
    parameter = nn.Parameter(torch.zeros(8, 4))
    parameter.grad = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    muon = torch.optim.Muon([parameter], lr=0.1, weight_decay=0.0, nesterov=False, momentum=0.0)
    group = muon.param_groups[0]
    muon.step()
    settings = group["ns_coefficients"], group["ns_steps"], group["eps"]
    update = private.newton_schulz(parameter.grad.bfloat16(), *settings)
    adjusted = private.adjusted_muon_lr(0.1, None, parameter.shape)
    expected = torch.zeros(8, 4).add_(update, alpha=-adjusted)
    assert torch.equal(parameter, expected), "torch.optim.Muon computes another update"


def test_the_default_group_has_a_store() -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        store = private.default_process_group_store()
        store.set("key", "value")
        assert store.get("key") == b"value", "the default group's store is not a key-value store"
    finally:
        torch.distributed.destroy_process_group()


def test_the_timeout_of_collectives_can_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        private.set_collectives_timeout(7.5)
        backend = torch.distributed.group.WORLD._get_backend(torch.device("cpu"))
        assert backend.options._timeout.total_seconds() == 7.5, "the timeout of collectives did not change"
    finally:
        torch.distributed.destroy_process_group()


def test_members_of_a_group_send_to_each_other() -> None:
    store, ended = torch.distributed.HashStore(), []

    def run(rank: int) -> None:
        group = private.gloo_group(store, rank, 2, "127.0.0.1", timedelta(seconds=60))
        assert group.options._timeout.days >= 365, "operations of the group would time out"
        ours, theirs = torch.full((1000,), rank), torch.empty(1000, dtype=torch.int64)
        for work in private.begin_sends(group, [(1 - rank, ours)], [(1 - rank, theirs)]):
            work.wait()
        assert theirs.eq(1 - rank).all(), "the tensors did not arrive"
        ended.append(rank)
        while len(ended) < 2:
            time.sleep(1e-3)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert sorted(ended) == [0, 1]


def test_a_group_that_coalesces_gets_no_empty_operation() -> None:
    """NCCL returns no work for one."""

    class Group:
        supports_coalescing = True

        def _start_coalescing(self) -> None:
            self.num_begun = 0

        def send(self, *_operation: object) -> None:
            self.num_begun += 1

        def _end_coalescing(self) -> object:
            return self if self.num_begun else None

    group = Group()
    assert private.begin_sends(group, [], []) == []
    assert private.begin_sends(group, [(1, torch.empty(1))], []) == [group]


def test_a_group_that_refuses_an_operation_ends_what_was_begun() -> None:
    """Until then NCCL keeps all calls of the thread, an abort among them."""
    calls: list[str] = []

    class Group:
        supports_coalescing = True

        def _start_coalescing(self) -> None:
            calls.append("start")

        def send(self, *_operation: object) -> None:
            raise RuntimeError("NCCL communicator was aborted")

        def _end_coalescing(self) -> None:
            calls.append("end")

    with pytest.raises(RuntimeError, match="was aborted"):
        private.begin_sends(Group(), [(1, torch.empty(1))], [])
    assert calls == ["start", "end"]


def test_groups_of_gpus_have_the_methods_that_we_call() -> None:
    if not torch.distributed.is_nccl_available():
        pytest.skip("this torch was built without NCCL")
    kind = torch.distributed.ProcessGroupNCCL
    names = ("eager_connect_single_device", "_set_default_timeout", "supports_coalescing", "send", "recv", "abort")
    for name in (*names, "_start_coalescing", "_end_coalescing", "Options"):
        assert hasattr(kind, name), name


def test_a_marked_optimizer_causes_no_scheduler_warning() -> None:
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(1))])
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    private.mark_optimizer_stepped(optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler.step()  # a warning means that schedulers no longer read optimizer._opt_called


@pytest.mark.skipif(platform.machine() != "x86_64", reason="reads CPU flags of x86")
def test_fast_bfloat16_matches_the_cpu_flags() -> None:
    flags = set(Path("/proc/cpuinfo").read_text().split())
    is_fast = {"avx512bw", "avx512vl", "avx512dq"} <= flags or "avx_ne_convert" in flags
    assert private.cpu_has_bfloat16_units() is is_fast, "_is_mkldnn_bf16_supported disagrees with the CPU flags"


def test_tensor_versions_count_writes() -> None:
    tensor = torch.zeros(2)
    before = private.version_of(tensor)
    tensor.view(2).add_(1)
    assert private.version_of(tensor) == before + 1, "Tensor._version does not count writes through aliases"


def test_storages_have_ids() -> None:
    tensor = torch.zeros(4)
    assert private.storage_id(tensor) == private.storage_id(tensor[1:]), "aliases have different storage ids"
    assert private.storage_id(tensor) != private.storage_id(tensor.clone()), "UntypedStorage._cdata is not unique"
    assert private.StorageWeakRef(tensor.untyped_storage()) == private.StorageWeakRef(tensor[1:].untyped_storage())


def test_below_autograd_an_alias_can_share_the_version_counter() -> None:
    aliases: list[Tensor] = []

    class Look(private.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if func is torch.ops.aten.mul.Tensor:
                with private.aliases_count_versions():
                    aliases.append(args[0].detach())
            return func(*args, **(kwargs or {}))

    tensor = torch.zeros(2)
    with Look():
        torch.mul(tensor, 2.0)
    tensor.add_(1)
    assert private.version_of(aliases[0]) == private.version_of(tensor), "_SetExcludeDispatchKeyGuard does nothing"


def test_operations_have_a_name_and_a_schema() -> None:
    operation = torch.ops.aten.add_.Tensor
    assert isinstance(operation, private.OpOverload)
    assert private.operation_name(operation) == "add_", "OpOverload._opname moved"
    assert private.schema_of(operation).is_mutable, "OpOverload._schema does not tell which operations write"
    assert [a.name for a in private.schema_of(operation).arguments][:2] == ["self", "other"]


def test_fake_tensors_do_not_compute() -> None:
    with private.FakeTensorMode() as mode:
        fake = mode.from_tensor(torch.zeros(3, 4))
    assert isinstance(fake @ fake.t(), private.FakeTensor), "FakeTensorMode returns real tensors"


def test_subclasses_and_modes_can_be_bypassed() -> None:
    class Loud(Tensor):
        @classmethod
        def __torch_function__(cls, *_args: object, **_kwargs: object) -> object:
            raise AssertionError

    class Mode(private.TorchDispatchMode):
        def __torch_dispatch__(self, *_args: object, **_kwargs: object) -> object:
            raise AssertionError

    tensor = torch.zeros(2)
    with private.without_torch_function():
        assert tensor.as_subclass(Loud).sum() == 0, "torch._C.DisableTorchFunctionSubclass has no effect"
    with Mode(), private.without_modes():
        tensor.sum()  # raises if torch._C._DisableTorchDispatch has no effect


def test_a_callback_runs_at_the_end_of_a_backward() -> None:
    seen: list[str] = []
    weight = nn.Parameter(torch.ones(2))
    output = weight * 2
    output.register_hook(lambda _: private.call_behind_backward(lambda: seen.append("end")))
    weight.register_post_accumulate_grad_hook(lambda _: seen.append("gradient"))
    output.sum().backward()
    assert seen == ["gradient", "end"], "Variable._execution_engine.queue_callback runs at another time"


def test_nodes_are_numbered_in_order_of_recording() -> None:
    first = torch.ones(1, requires_grad=True) * 2
    second = first * 2
    assert first.grad_fn is not None and second.grad_fn is not None
    assert private.sequence_number(first.grad_fn) < private.sequence_number(second.grad_fn), "Node._sequence_nr moved"


def test_parameters_can_be_replaced() -> None:
    module, other = nn.Linear(2, 2, bias=False), nn.Parameter(torch.zeros(2, 2))
    assert private.own_parameters(module) == [("weight", module.weight)], "Module._parameters moved"
    private.put_parameter(module, "weight", other)
    assert module.weight is other and list(module.parameters()) == [other]


def test_hooks_can_be_disabled_and_restored() -> None:
    module = nn.Linear(2, 2)
    called: list[str] = []
    module.register_forward_pre_hook(lambda *_: called.append("pre"))
    module.register_forward_hook(lambda *_: called.append("post"))
    with private.without_hooks(module):
        module(torch.zeros(2))
    assert not called, "Module._forward_hooks or ._forward_pre_hooks moved"
    module(torch.zeros(2))
    assert called == ["pre", "post"]


def test_the_class_of_a_parameter_can_be_changed_and_restored() -> None:
    """Absent parameters rely on this."""
    value = nn.Parameter(torch.ones(3))

    class Other(nn.Parameter):
        pass

    value.__class__ = Other
    assert isinstance(value, Other) and value.grad is None
    value.__class__ = nn.Parameter  # type: ignore[assignment]
    checkpoint(lambda x: x * value, torch.ones(3), use_reentrant=False).sum().backward()
    assert value.grad is not None, "Tensor.__class__ cannot be changed and restored"


def test_allocator_settings_are_replaced() -> None:
    before = private.allocator_settings()
    try:
        private.set_allocator_settings("max_split_size_mb:128")
        assert private.allocator_settings() == "max_split_size_mb:128"
        private.set_allocator_settings("garbage_collection_threshold:0.5")
        assert private.allocator_settings() == "garbage_collection_threshold:0.5"
    finally:
        private.set_allocator_settings(before)


def test_the_keys_of_a_rendezvous_get_a_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher's store outlives its workers, and has the keys of earlier ones."""
    agent = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    agent.set("addresses", "of the first attempt")
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("TORCHELASTIC_USE_AGENT_STORE", "True")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(agent.port))
    monkeypatch.setitem(_rendezvous_handlers, "env", _rendezvous_handlers["env"])
    private.prefix_rendezvous("attempt/1")
    store, rank, num_ranks = next(rendezvous("env://"))
    assert (rank, num_ranks, store.check(["addresses"])) == (0, 1, False)
    store.set("addresses", "of the second")
    assert agent.get("attempt/1/addresses") == b"of the second"


def test_attention_after_earlier_keys_runs_within_a_dispatch_mode() -> None:
    """torch's `CausalBias`, which a GPU's kernels take, cannot be made within one, and layers in chunks are tried and
    recomputed within one."""

    class Passing(private.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    query, key = torch.empty(1, 4, 4, 8, device="meta"), torch.empty(1, 2, 12, 8, device="meta")
    with Passing():
        output = private.attention_after(query, key, key)
    assert output.shape == query.shape
