"""The plugin of axolotl: a section `lohan:` in the YAML file of a run offloads the run.

axolotl finds the plugin by the entry point group `axolotl.plugins`. Importing this imports axolotl.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel, Field

from hf_lohan.config import ConfigError, OffloadConfig

__all__ = ["AxolotlPlugin", "LohanSection"]

_PLACED = "places or shards the model, which offload streams to its device itself; leave it out"
_LEARNING_RATES = "gives some parameters their own learning rate, which is not supported here; leave it out"
_REFUSED = {
    "rl": "trains from preferences or rewards; use the trainers of hf_lohan.trl for it",
    "reward_model": "trains a reward model; use hf_lohan.trl.RewardTrainer for it",
    "process_reward_model": "trains a reward model; use the trainers of hf_lohan.trl for it",
    "load_in_4bit": "has bitsandbytes pack the base; write adapter: lora, and quantize: nf4 in the section lohan",
    "load_in_8bit": "has bitsandbytes pack the base; write adapter: lora, and quantize: int8 in the section lohan",
    **dict.fromkeys(("fsdp", "fsdp_config", "deepspeed", "device_map", "max_memory"), _PLACED),
    **dict.fromkeys(("activation_offloading", "layer_offloading"), "is what offload does as planned; leave it out"),
    **dict.fromkeys(("loraplus_lr_ratio", "embedding_lr", "embedding_lr_scale", "lr_groups"), _LEARNING_RATES),
    **dict.fromkeys(
        ("relora", "lisa_step_interval", "qat", "fp8", "merge_lora"),
        "changes weights or their modules within the run; leave it out",
    ),
}
"""Settings of axolotl that are not honoured under offload, and what to do."""
_ABOVE_ONE = ("tensor_parallel_size", "context_parallel_size", "expert_parallel_size", "dp_shard_size")
_ADAPTERS = (None, "", "lora")


class LohanSection(BaseModel):
    """What the plugin adds to axolotl's configuration."""

    lohan: dict[str, Any] | str | None = Field(
        default=None, description="Train with the state on SSDs: 'lohan' (all automatic), a YAML file, or a table."
    )


class AxolotlPlugin(BasePlugin):  # type: ignore[misc]
    """Has axolotl train with offloading if its configuration has a section `lohan`. Without the section it does
    nothing."""

    _is_choosing = False

    def get_input_args(self) -> str:
        return f"{LohanSection.__module__}.{LohanSection.__qualname__}"

    def register(self, cfg: Any) -> None:
        """Raise ConfigError for settings that are not allowed, before anything is loaded."""
        if settings_in(cfg) is not None:
            check_run(cfg)

    def get_trainer_cls(self, cfg: Any) -> type[Any] | None:
        """Return the class that axolotl would choose, offloading."""
        settings = settings_in(cfg)
        if settings is None or self._is_choosing:
            return None
        check_run(cfg)
        self._is_choosing = True
        try:
            return offloading(_stock_class(cfg), settings)
        finally:
            self._is_choosing = False


def settings_in(cfg: Any) -> Any:
    """Return the section `lohan` in plain types; None if there is none."""
    return _plain(cfg.get("lohan"))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):  # of a class that has every name
        return {name: _plain(inner) for name, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list) else value


def check_run(cfg: Any) -> None:
    """Raise ConfigError for offload settings that are wrong, and for settings of axolotl that offload does not
    honour."""
    from transformers.training_args import OptimizerNames

    OffloadConfig.load(settings_in(cfg))
    for name, why in _REFUSED.items():
        if cfg.get(name):
            raise ConfigError(f"{name}: {cfg.get(name)} {why}")
    for name in _ABOVE_ONE:
        if (cfg.get(name) or 1) > 1:
            raise ConfigError(f"{name}: {cfg.get(name)} {_PLACED}")
    if cfg.get("adapter") not in _ADAPTERS:
        raise ConfigError(
            f"adapter: {cfg.get('adapter')} is not supported under offload; write adapter: lora, and for a packed base "
            "quantize: nf4 in the section lohan"
        )
    optimizer = getattr(cfg.get("optimizer"), "value", cfg.get("optimizer"))
    if optimizer is not None and optimizer not in {name.value for name in OptimizerNames}:
        raise ConfigError(
            f"optimizer: {optimizer} is axolotl's own, whose states the store cannot have; write "
            "adamw_torch_fused, or optimizer: muon in the section lohan"
        )


def _stock_class(cfg: Any) -> type[Any]:
    """Return the class that axolotl's builder chooses, which asks the plugins first."""
    from axolotl.core.builders import HFCausalTrainerBuilder

    builder = HFCausalTrainerBuilder.__new__(HFCausalTrainerBuilder)
    builder.cfg = cfg
    chosen: type[Any] = builder._get_trainer_cls()
    return chosen


def offloading(stock: type[Any], settings: Any) -> type[Any]:
    """Return a class of axolotl's trainer ``stock`` that offloads with ``settings``."""
    import transformers

    from hf_lohan.huggingface import OffloadTrainerMixin

    class StockGroups(stock):  # type: ignore[misc]
        """Groups parameters as axolotl does for an optimizer that has a name in transformers."""

        def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
            return transformers.Trainer.create_optimizer(self, *args, **kwargs)

    class OffloadingTrainer(OffloadTrainerMixin, StockGroups):
        default_offload = settings

    OffloadingTrainer.__name__ = OffloadingTrainer.__qualname__ = stock.__name__
    return OffloadingTrainer
