"""Reading a weight gives its current value and the right gradient, within and outside a forward."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from covering import slow_but
from engines import EngineFactory, Twins
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hf_lohan.absent import gathered_parameters
from hf_lohan.testing.models import tiny_batch, tiny_model

HEAD, LAYER, EMBEDDING = "lm_head.weight", "model.layers.1.mlp.up_proj.weight", "model.embed_tokens.weight"


class _KeepsWeight(torch.autograd.Function):
    """Takes the weight itself and saves it, as fused heads do."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        return torch.stack([(part @ weight.t()).logsumexp(-1).sum() for part in hidden.split(7)]).sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        hidden, weight = ctx.saved_tensors
        probabilities = (hidden @ weight.t()).softmax(-1) * gradients[0]
        return probabilities @ weight, probabilities.t() @ hidden


class _KeepsTransposed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight.t())
        return hidden @ weight.t()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        hidden, transposed = ctx.saved_tensors
        return gradients[0] @ transposed.t(), gradients[0].t() @ hidden


class _KeepsOnItself(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.hidden, ctx.weight = hidden, weight
        return hidden @ weight.t()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        return gradients[0] @ ctx.weight, gradients[0].t() @ ctx.hidden


def _weight(model: nn.Module, name: str) -> nn.Parameter:
    return model.get_parameter(name)


def _flat(hidden: Tensor) -> Tensor:
    return hidden.reshape(-1, hidden.shape[-1])


IN_FORWARD: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "linear": lambda m, h: nn.functional.linear(h, _weight(m, HEAD)).logsumexp(-1).mean(),
    "matmul of t()": lambda m, h: (h @ _weight(m, HEAD).t()).logsumexp(-1).mean(),
    "matmul of .T": lambda m, h: (h @ _weight(m, HEAD).T).logsumexp(-1).mean(),
    "used twice": lambda m, h: (h @ _weight(m, HEAD).t()).mean() * (h @ (2 * _weight(m, HEAD)).t()).mean(),
    "einsum": lambda m, h: torch.einsum("bsh,vh->bsv", h, _weight(m, HEAD)).logsumexp(-1).mean(),
    "rows": lambda m, h: _weight(m, HEAD)[torch.tensor([3, 5, 3])].square().sum() + h.mean(),
    "a slice": lambda m, h: (h @ _weight(m, HEAD)[10:20].t()).square().mean(),
    "chunks": lambda m, h: torch.cat([h @ w.t() for w in _weight(m, HEAD).chunk(4)], -1).logsumexp(-1).mean(),
    "embedding": lambda m, h: (nn.functional.embedding(torch.arange(8), _weight(m, EMBEDDING)).mean() * h).sum(),
    "detached": lambda m, h: (h @ _weight(m, HEAD).detach().t()).logsumexp(-1).mean(),
    "detached, in turns": lambda m, h: (
        (h @ _weight(m, HEAD).detach().t()).logsumexp(-1).mean()
        + (h @ _weight(m, EMBEDDING).detach().t()).logsumexp(-1).mean()
        + (h @ _weight(m, LAYER).detach().t()).square().mean()
        + (h @ _weight(m, LAYER.replace("1", "3")).detach().t()).square().mean()
        + (h @ _weight(m, LAYER.replace("1", "2")).detach().t()).square().mean()
    ),
    "a layer's": lambda m, h: (h @ _weight(m, LAYER).t()).square().mean(),
    "two blocks'": lambda m, h: (_weight(m, HEAD).sum() * _weight(m, EMBEDDING).mean() * h).mean(),
    "a function that saves it": lambda m, h: _KeepsWeight.apply(_flat(h), _weight(m, HEAD)),
    "a function that saves t()": lambda m, h: _KeepsTransposed.apply(_flat(h), _weight(m, HEAD)).logsumexp(-1).mean(),
    "a function that keeps it as an attribute": lambda m, h: (
        _KeepsOnItself.apply(_flat(h), _weight(m, HEAD)).logsumexp(-1).mean()
    ),
    "checkpointed": lambda m, h: checkpoint(
        lambda h: (h @ _weight(m, HEAD).t()).logsumexp(-1).mean(), h, use_reentrant=False
    ),
    "a vector's norm": lambda m, h: _weight(m, "model.norm.weight").norm() * h.mean(),
    "stack of all layers'": lambda m, h: (
        sum(p.square().sum() for n, p in m.named_parameters() if "layers" in n) + h.mean()
    ),
}

OUT_OF_FORWARD: dict[str, Callable[[Any], Tensor]] = {
    "L2 of all": lambda m: sum((p.square().sum() for p in m.parameters()), torch.zeros(())),
    "L1 of one": lambda m: _weight(m, LAYER).abs().sum(),
    "norm of the head": lambda m: _weight(m, HEAD).norm(),
    "norms of rows": lambda m: torch.linalg.vector_norm(_weight(m, HEAD), dim=1).mean(),
    "product of two": lambda m: (_weight(m, LAYER) @ _weight(m, LAYER).t()).trace(),
}


class _ReadsMore(nn.Module):
    """A causal LM whose forward also reads a weight."""

    def __init__(self, inner: nn.Module, read: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.read = inner, read

    def forward(self, **inputs: Any) -> Any:
        hidden = self.inner.model(input_ids=inputs["input_ids"]).last_hidden_state
        more = self.read(self.inner, hidden)  # the backward of this term runs in the middle of the model's backward
        output = self.inner(**inputs)
        output.loss = output.loss + 0.1 * more
        return output


def _make_twins(build_engine: EngineFactory, wrap: Callable[[Any], Any], **settings: Any) -> Twins:
    stock, offloaded = (wrap(tiny_model("llama", num_layers=4)) for _ in range(2))
    return Twins(stock, build_engine(offloaded, **{"gpu_memory": "600KiB", **settings}))


QUICK_READS = (
    *("linear", "einsum", "rows", "chunks", "embedding", "detached, in turns", "two blocks'", "checkpointed"),
    *("a function that saves it", "a function that keeps it as an attribute"),
)


@pytest.mark.covering(1)
@pytest.mark.parametrize("read", slow_but(QUICK_READS, IN_FORWARD))
@pytest.mark.parametrize("clips", [True, False], ids=["clipped", "updated in backward"])
def test_a_read_within_the_forward_is_exact(clips: bool, read: str, build_engine: EngineFactory) -> None:
    twins = _make_twins(build_engine, lambda inner: _ReadsMore(inner, IN_FORWARD[read]), hold_gradients=clips)
    for seed in range(3):
        twins.backward(seed)
        if clips:
            twins.clip(1.0)
        twins.step()
    twins.assert_equal()


@pytest.mark.covering(1)
@pytest.mark.parametrize("read", OUT_OF_FORWARD.values(), ids=OUT_OF_FORWARD)
@pytest.mark.parametrize("is_before", [False, True], ids=["after the forward", "before the forward"])
def test_a_penalty_outside_the_forward_is_exact(
    read: Callable[[Any], Tensor], is_before: bool, build_engine: EngineFactory
) -> None:
    twins = _make_twins(build_engine, lambda inner: inner)
    for seed in range(3):
        totals = []
        for model in twins.models:
            early = read(model) if is_before else 0.0
            loss = model(**tiny_batch(seed=seed)).loss
            totals.append(loss + 0.01 * (early if is_before else read(model)))
            totals[-1].backward()
        assert torch.equal(*totals)
        twins.clip(1.0)
        twins.step()
    twins.assert_equal()


def test_a_step_with_only_a_penalty_is_exact(build_engine: EngineFactory) -> None:
    twins = _make_twins(build_engine, lambda inner: inner)
    for seed in range(2):
        for model in twins.models:
            _weight(model, LAYER).square().sum().backward()
        twins.step()
        twins.backward(seed)
        twins.step()
    twins.assert_equal()


def test_repeated_reads_are_prefetched(build_engine: EngineFactory) -> None:
    twins = _make_twins(build_engine, lambda inner: _ReadsMore(inner, IN_FORWARD["chunks"]))
    schedule = twins.engine._prefetcher._schedule
    unforeseen = []
    for seed in range(4):
        before = schedule.num_unforeseen
        twins.backward(seed)
        twins.step()
        unforeseen.append(schedule.num_unforeseen - before)
    assert unforeseen[0] > 0 and unforeseen[-1] == 0, unforeseen


READS: dict[str, Callable[[Any], Any]] = {
    "clone": lambda w: w.clone(),
    "data": lambda w: w.data.clone(),
    "detach().cpu()": lambda w: w.detach().cpu() + 0,
    "float()": lambda w: w.double(),
    "norm": lambda w: w.norm(),
    "mean of .data": lambda w: w.data.mean(),
    "item": lambda w: w[1, 2].item(),
    "tolist": lambda w: w[0].tolist(),
    "numpy": lambda w: torch.from_numpy(w.detach().numpy().copy()),
    "a row": lambda w: w[3].sum(),
    "the last column": lambda w: w[..., -1].sum(),
    "iteration": lambda w: torch.stack([row.sum() for row in w]),
    "view": lambda w: w.view(-1)[17:23] * 1,
    "t()": lambda w: w.t() @ w,
    "isfinite": lambda w: w.isfinite().all(),
    "equal": lambda w: torch.equal(w, w.clone()),
    "histogram": lambda w: torch.histc(w.data, bins=5),
    "lerp into an average": lambda w: torch.zeros(w.shape).lerp_(w.detach(), 0.1),
    "copy_ into another": lambda w: torch.empty(w.shape).copy_(w),
    "foreach": lambda w: torch._foreach_norm([w, w])[1],
    "cat": lambda w: torch.cat([w, w.data]),
    "unbind": lambda w: w.unbind(1)[3] + 1,
    "where": lambda w: torch.where(w > 0, w, 0),
    "std over rows": lambda w: w.std(0),
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("with_grad", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize("name", [LAYER, HEAD])
def test_a_read_outside_a_forward_gives_the_weights_of_the_last_step(
    name: str, with_grad: bool, build_engine: EngineFactory
) -> None:
    twins = _make_twins(build_engine, lambda inner: inner)
    for seed in range(2):
        twins.backward(seed)
        twins.step()
        for what, read in READS.items():
            with torch.set_grad_enabled(with_grad):
                expected, found = (read(_weight(model, name)) for model in twins.models)
            assert type(found) is type(expected), what
            same = torch.equal(found, expected) if isinstance(expected, Tensor) else found == expected
            assert same, f"{what} gives {found} instead of {expected}"
    twins.backward(7)  # the reads must not change later steps
    twins.step()
    twins.assert_equal()


def test_a_read_in_an_evaluation_is_exact(build_engine: EngineFactory) -> None:
    twins = _make_twins(build_engine, lambda inner: _ReadsMore(inner, IN_FORWARD["matmul of t()"]))
    for seed in range(3):
        with torch.no_grad():
            twins.losses(seed)
        twins.backward(seed)
        twins.step()
    twins.assert_equal()


def test_a_read_between_an_updating_backward_and_its_step_is_refused(build_engine: EngineFactory) -> None:
    twins = _make_twins(build_engine, lambda inner: inner, hold_gradients=False)
    twins.backward(0)
    with pytest.raises(RuntimeError, match=r"has already been updated.*max_grad_norm"):
        _weight(twins.model, LAYER).norm()
    twins.step()
    assert torch.equal(_weight(twins.model, LAYER).norm(), _weight(twins.stock, LAYER).norm())


def test_reading_a_weight_already_updated_in_the_backward_is_refused(build_engine: EngineFactory) -> None:
    wrap = lambda inner: _ReadsMore(inner, IN_FORWARD["detached, in turns"])  # noqa: E731
    twins = _make_twins(build_engine, wrap, hold_gradients=False, gpu_memory="412KiB")  # both blocks share one slot
    with pytest.raises(RuntimeError, match=r"has already been updated.*max_grad_norm"):
        twins.backward(0)


def test_another_thread_may_not_read_while_the_model_runs(build_engine: EngineFactory) -> None:
    def read_elsewhere(model: Any, hidden: Tensor) -> Tensor:
        with ThreadPoolExecutor(1) as other:
            return hidden.mean() * other.submit(_weight(model, HEAD).norm).result()

    twins = _make_twins(build_engine, lambda inner: _ReadsMore(inner, read_elsewhere))
    with pytest.raises(RuntimeError, match="another thread read weights"):
        twins.losses(0)
    twins.model.read = IN_FORWARD["linear"]
    twins.stock.read = IN_FORWARD["linear"]
    twins.backward(0)
    twins.step()
    twins.assert_equal()


def test_a_parameter_of_a_subclass_can_be_read(build_engine: EngineFactory) -> None:
    class Special(nn.Parameter):
        pass

    def wrap(model: Any) -> Any:
        model.model.layers[1].mlp.up_proj.weight = Special(_weight(model, LAYER).data.clone())
        return model

    twins = _make_twins(build_engine, wrap)
    assert isinstance(_weight(twins.model, LAYER), Special)
    assert torch.equal(_weight(twins.model, LAYER).norm(), _weight(twins.stock, LAYER).norm())
    twins.backward(0)
    twins.step()
    twins.assert_equal()


_ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("read"), st.sampled_from(sorted(READS)), st.sampled_from([LAYER, HEAD])),
        st.tuples(st.just("train"), st.sampled_from(sorted(IN_FORWARD)), st.none()),
        st.tuples(st.just("penalty"), st.sampled_from(sorted(OUT_OF_FORWARD)), st.none()),
        st.tuples(st.just("evaluate"), st.sampled_from(sorted(IN_FORWARD)), st.none()),
        st.tuples(st.just("write"), st.just(""), st.sampled_from([LAYER, HEAD])),
        st.tuples(st.just("drop"), st.just(""), st.none()),
    ),
    min_size=3,
    max_size=7,
)


@given(actions=_ACTIONS)
@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
def test_any_mixture_of_reads_writes_and_steps_is_exact(
    actions: list[tuple[str, str, str | None]], build_engine: EngineFactory, tmp_path_factory: pytest.TempPathFactory
) -> None:
    wrap = lambda inner: _ReadsMore(inner, IN_FORWARD["linear"])  # noqa: E731
    twins = _make_twins(build_engine, wrap, ssd=str(tmp_path_factory.mktemp("store")))
    try:
        for seed, (action, way, name) in enumerate(actions):
            _act(twins, action, way, name, seed)
        twins.assert_equal()
    finally:
        twins.engine.close()


def _act(twins: Twins, action: str, way: str, name: str | None, seed: int) -> None:
    if action == "read":
        expected, found = (READS[way](_weight(model.inner, name)) for model in twins.models)
        assert torch.equal(found, expected) if isinstance(expected, Tensor) else found == expected
    elif action == "write":
        assert name is not None
        with pytest.raises(RuntimeError, match="in the store"), torch.no_grad():
            _weight(twins.model.inner, name).mul_(2)
    else:
        for model in twins.models:
            if way in IN_FORWARD:
                model.read = IN_FORWARD[way]
        if action == "evaluate":
            with torch.no_grad():
                twins.losses(seed)
            return
        losses = twins.losses(seed)
        if action == "penalty":
            losses = [a + 0.1 * OUT_OF_FORWARD[way](m.inner) for a, m in zip(losses, twins.models, strict=True)]
        for loss in losses:
            loss.backward()
        if action == "drop":
            for model in twins.models:
                model.zero_grad()
            twins.engine.drop_gradients()
        else:
            twins.step()


# Writes.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_changes_of_gathered_parameters_are_stored(dtype: torch.dtype, build_engine: EngineFactory) -> None:
    model = tiny_model("llama").to(dtype)
    expected = model.lm_head.weight.detach().clone()
    engine = build_engine(model, dtype=dtype)
    model(**tiny_batch())
    with torch.no_grad(), gathered_parameters(model.lm_head):
        assert type(model.lm_head.weight) is nn.Parameter
        model.lm_head.weight[3] += 1
        model.lm_head.weight.data[4] = 0
    expected[3] += 1
    expected[4] = 0
    assert torch.equal(engine.parameters.read_parameter(HEAD), expected)
    assert torch.equal(model.lm_head.weight.clone(), expected)
    bias = model(**tiny_batch()).logits[..., 4]
    assert bool((bias == 0).all()), "the forward does not use the new weights"


def test_a_failed_gathering_changes_nothing(build_engine: EngineFactory) -> None:
    model = tiny_model("llama")
    engine = build_engine(model)
    before = engine.parameters.read_parameter(HEAD)
    with pytest.raises(KeyError), torch.no_grad(), gathered_parameters(model.lm_head.weight):
        model.lm_head.weight.zero_()
        raise KeyError
    assert torch.equal(engine.parameters.read_parameter(HEAD), before)
    with pytest.raises(ValueError, match=r"shape \(2, 64\)"), gathered_parameters([model.lm_head.weight]):
        model.lm_head.weight.data = torch.zeros(2, 64)
    with pytest.raises(RuntimeError, match="the model ran while"), gathered_parameters(model.lm_head):
        model(**tiny_batch())
    assert torch.equal(model.lm_head.weight.clone(), before)


def test_training_continues_with_changed_parameters(build_engine: EngineFactory) -> None:
    twins = _make_twins(build_engine, lambda inner: inner)
    for seed in range(3):
        for model in twins.models:
            with torch.no_grad(), gathered_parameters(_weight(model, LAYER)):
                _weight(model, LAYER).mul_(0.5)
        twins.backward(seed)
        twins.clip(1.0)
        twins.step()
    twins.assert_equal()


def test_changing_weights_between_a_forward_and_its_backward_is_refused(build_engine: EngineFactory) -> None:
    model = tiny_model("llama")
    build_engine(model)
    loss = model(**tiny_batch()).loss
    with torch.no_grad(), gathered_parameters(model.lm_head):
        model.lm_head.weight.mul_(2)
    with pytest.raises(RuntimeError, match=r"lm_head\.weight was changed between a forward and its backward"):
        loss.backward()
    model(**tiny_batch()).loss.backward()


def test_gathered_parameters_are_stored_all_or_none(build_engine: EngineFactory) -> None:
    model = tiny_model("llama")
    engine = build_engine(model)
    before = engine.parameters.read_parameter(EMBEDDING)
    weights = [model.model.embed_tokens.weight, model.lm_head.weight]
    with pytest.raises(ValueError, match="shape"), torch.no_grad(), gathered_parameters(weights):
        weights[0].zero_()
        weights[1].data = torch.zeros(2, 64)
    assert torch.equal(engine.parameters.read_parameter(EMBEDDING), before)


def test_parameters_can_be_gathered_after_a_failed_forward(build_engine: EngineFactory) -> None:
    class Fails(nn.Module):
        def forward(self, *_args: Any, **_kwargs: Any) -> None:
            raise MemoryError

    model = tiny_model("llama")
    engine = build_engine(model)
    handle = model.model.layers[1].mlp.register_forward_pre_hook(lambda *_: Fails()())
    with pytest.raises(MemoryError):
        model(**tiny_batch())
    handle.remove()
    with torch.no_grad(), gathered_parameters(model.lm_head):
        model.lm_head.weight.zero_()
    assert not engine.parameters.read_parameter(HEAD).any()
    assert not model(**tiny_batch()).logits.any()


def test_an_explicit_copy_keeps_its_values(build_engine: EngineFactory) -> None:
    twins = _make_twins(build_engine, lambda inner: inner)
    copies = [_weight(model, LAYER).detach().to(torch.float32, copy=True) for model in twins.models]
    arrays: list[Any] = []
    hook = twins.model.model.layers[2].register_forward_hook(
        lambda *_: arrays.append(_weight(twins.model, HEAD).detach().numpy())
    )
    first = _weight(twins.stock, HEAD).detach().clone()
    twins.train(2)
    hook.remove()
    assert torch.equal(*copies)
    assert not torch.equal(copies[0], _weight(twins.stock, LAYER))
    assert torch.equal(torch.from_numpy(arrays[0]), first)


def test_an_absent_weight_has_the_strides_of_a_plain_one(build_engine: EngineFactory) -> None:
    twins = _make_twins(build_engine, lambda inner: inner)
    for see in (lambda w: w, lambda w: w.t(), lambda w: w[3:, ::2], lambda w: w.view(-1, 2).unsqueeze(1)):
        expected, found = (see(_weight(model, LAYER)) for model in twins.models)
        assert (found.stride(), found.is_contiguous()) == (expected.stride(), expected.is_contiguous())


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "read",
    [lambda w: w.square().sum(), lambda w: w.t().square().sum(), lambda w: w[3:9].square().sum()],
    ids=["leaf", "view", "rows"],
)
@pytest.mark.parametrize("name", [HEAD, LAYER])
def test_a_penalty_after_a_joint_forward_of_micro_batches(
    name: str, read: Callable[[Tensor], Tensor], build_engine: EngineFactory
) -> None:
    twins = _make_twins(build_engine, lambda inner: inner)

    def loss_of(model: Any, seed: int) -> Tensor:
        loss: Tensor = model(**tiny_batch(seed=seed)).loss
        return loss + 0.1 * read(_weight(model, name))

    def run(seed: int) -> None:
        assert twins.engine.defer_backward(loss_of(twins.model, seed))

    for step in range(2):
        for seed in (2 * step, 2 * step + 1):
            loss_of(twins.stock, seed).backward()
        twins.engine.run_micro_batches([partial(run, 2 * step), partial(run, 2 * step + 1)])
        twins.step()
    access = twins.engine.parameters
    for other, parameter in twins.stock.named_parameters():
        torch.testing.assert_close(access.read_parameter(other), parameter, rtol=1e-5, atol=1e-6)
