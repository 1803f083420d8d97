"""Engines of tiny models with tight budgets, and twins of these models that torch trains in memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import hf_lohan.engine.tiers
from hf_lohan.compat.transformers_private import one_expert
from hf_lohan.config import OffloadConfig
from hf_lohan.device import CpuDevice, Device
from hf_lohan.engine import EngineEvents, OffloadEngine, ParameterAccess, drain_model, open_tiers
from hf_lohan.files import FileBackend
from hf_lohan.hardware.direct_io import DirectIo
from hf_lohan.huggingface.offloaded_model import enable_checkpointing, enable_recompute, stream_experts
from hf_lohan.huggingface.optimizers import rules_of, take_over
from hf_lohan.model import Rules, adamw_everywhere
from hf_lohan.optim import OffloadAdamW
from hf_lohan.planning import OffloadLayout, lay_out
from hf_lohan.ranks import Links
from hf_lohan.testing.models import tiny_batch, tiny_model

EngineFactory = Callable[..., OffloadEngine]
ConfigFactory = Callable[..., OffloadConfig]

RANK_SETTINGS: dict[str, Any] = {
    "cpu_memory": "6MiB",
    "gpu_memory": "1MiB",
    "_io_threads": 1,
    "prefetch_blocks": 1,
    "activations": "recompute",
    "experts": "with_layer",
}
"""Of ranks that are threads of one process."""
ONE_GENERATOR = threading.Lock()
"""Held while such a rank draws its model, because all threads share torch's generator."""

HELD_OR_ACTIVE = pytest.mark.parametrize("hold_gradients", [True, False], ids=["held", "active"])


class PlannedError(Exception):
    """Raised on purpose."""


def resolved(folder: Path | str, *, memory_bytes: int = 1 << 30, **settings: Any) -> OffloadConfig:
    """Return settings for a store in `folder` on a machine with `memory_bytes` of RAM and of device memory."""
    return OffloadConfig.load({"ssd": str(folder), **settings}).resolve(
        host_memory_bytes=memory_bytes, device_memory_bytes=memory_bytes, num_cpus=2, default_ssd_path=str(folder)
    )


def open_engine(
    model: Any,
    layout: OffloadLayout,
    config: OffloadConfig,
    device: Device | None = None,
    links: Links | None = None,
    **parts: Any,
) -> OffloadEngine:
    """Write the model's weights to its store and return its engine."""
    tiers = open_tiers(layout, config, device or CpuDevice(), links)
    drain_model(layout.blocks, ParameterAccess(tiers.store, layout.blocks, tiers.states, links))
    return OffloadEngine(model, layout, tiers, config, **parts)


@pytest.fixture
def make_config(tmp_path: Path) -> ConfigFactory:
    """Make resolved configurations with a store in the test's folder."""

    def make(**settings: Any) -> OffloadConfig:
        defaults = {
            "cpu_memory": "3MiB",
            "gpu_memory": "1MiB",
            "prefetch_blocks": 1,
            "experts": "with_layer",
            "_io_threads": 2,
            "_io_piece_bytes": 1 << 20,
        }
        return resolved(tmp_path / "store", **{**defaults, **settings})

    return make


@pytest.fixture
def build_engine(make_config: ConfigFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[EngineFactory]:
    """Offload models from memory. The engines close with the test."""
    engines: list[OffloadEngine] = []

    def build(
        model: Any,
        *,
        hold_gradients: bool = True,
        sums_gradients: bool = True,
        dtype: torch.dtype | None = torch.float32,
        device: Device | None = None,
        backend: FileBackend | None = None,
        events: EngineEvents | None = None,
        rules: Rules = adamw_everywhere,
        **settings: Any,
    ) -> OffloadEngine:
        if backend is not None:
            monkeypatch.setattr(hf_lohan.engine.tiers, "open_direct_io", lambda *_: DirectIo(backend))
        config = make_config(**settings)
        device = device or CpuDevice()
        layout = lay_out(
            model,
            config,
            working_dtype=dtype,
            hold_gradients=hold_gradients,
            sums_gradients=sums_gradients,
            memory_is_host=device.memory_is_host,
            rules=rules,
        )
        engines.append(open_engine(model, layout, config, device, events=events, compute_expert=one_expert))
        stream_experts(engines[-1].experts)
        return engines[-1]

    yield build
    for engine in engines:
        engine.close()


class Twins:
    """Two copies of one model: `stock` is trained by torch in memory, `model` by an engine. Each step is taken with
    both. `assert_equal` then compares weights, states and step counts bit for bit.
    """

    def __init__(
        self,
        stock: Any,
        engine: OffloadEngine,
        optimizers: tuple[torch.optim.Optimizer, torch.optim.Optimizer] | None = None,
        **hyperparameters: Any,
    ) -> None:
        """Use one torch optimizer for each model, AdamW by default. The engine takes over the second one."""
        self.stock, self.model, self.engine = stock, engine.model, engine
        if optimizers is not None:
            self.stock_optimizer, (self.optimizer, _) = optimizers[0], take_over([optimizers[1]], engine)
            return
        settings = {"lr": 1e-3, "weight_decay": 0.1, **hyperparameters}
        trainable = [[p for p in model.parameters() if p.requires_grad] for model in self.models]
        self.stock_optimizer = torch.optim.AdamW(trainable[0], fused=True, **settings)
        self.optimizer = OffloadAdamW(trainable[1], engine=engine, **settings)

    @property
    def models(self) -> tuple[Any, Any]:
        return self.stock, self.model

    def losses(self, batch_seed: int, *, rng_seed: int | None = None, scale: float = 1.0, **shape: int) -> list[Tensor]:
        """Return the losses of both models on one batch of `tiny_batch`, and check that they are equal."""
        losses = []
        for model in self.models:
            if rng_seed is not None:
                torch.manual_seed(rng_seed)
            losses.append(model(**tiny_batch(seed=batch_seed, **shape)).loss * scale)
        assert torch.equal(losses[0], losses[1]), f"loss {losses[1]} instead of {losses[0]}"
        return losses

    def backward(self, batch_seed: int, **options: Any) -> None:
        for loss in self.losses(batch_seed, **options):
            loss.backward()

    def clip(self, max_norm: float) -> None:
        expected = torch.nn.utils.clip_grad_norm_(self.stock.parameters(), max_norm)
        assert torch.equal(self.engine.clip_grad_norm(max_norm), expected)

    def step(self) -> None:
        for optimizer in (self.stock_optimizer, self.optimizer):
            optimizer.step()
            optimizer.zero_grad()

    def train(self, num_steps: int, *, first_seed: int = 100, max_norm: float = 0.0) -> None:
        for number in range(num_steps):
            self.backward(first_seed + number)
            if max_norm:
                self.clip(max_norm)
            self.step()

    def assert_equal(self) -> None:
        access = self.engine.parameters  # waits for the updates of the last step
        slices = {part.name: part for part in self.engine.parameter_slices}
        for name, parameter in self.stock.named_parameters():
            assert torch.equal(access.read_parameter(name), parameter), name
            state = self.stock_optimizer.state.get(parameter, {})
            if "step" in state or isinstance(self.optimizer, OffloadAdamW):
                assert self.engine.step_counts[slices[name]] == int(state.get("step", 0)), name
            for kind in state.keys() - {"step"}:
                assert torch.equal(access.read_flat(name, kind), state[kind].flatten()), (name, kind)


TwinsFactory = Callable[..., Twins]


@pytest.fixture
def make_twins(build_engine: EngineFactory) -> TwinsFactory:
    """Make twins of a family or of the models of `model_factory`, whose calls must return equal models."""

    def make(
        family: str = "llama",
        *,
        model_factory: Callable[[], Any] | None = None,
        recompute: bool = False,
        hyperparameters: dict[str, Any] | None = None,
        optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
        **engine_settings: Any,
    ) -> Twins:
        models = [(model_factory or partial(tiny_model, family))().train() for _ in range(2)]
        optimizers = None
        if optimizer is not None:
            optimizers = optimizer(models[0].parameters()), optimizer(models[1].parameters())
            engine_settings["rules"] = rules_of(optimizers[1:])
        engine = build_engine(models[1], **engine_settings)
        if recompute:
            enable_checkpointing(models[0])
            enable_recompute(models[1], engine)
        return Twins(models[0], engine, optimizers, **(hyperparameters or {}))

    return make
