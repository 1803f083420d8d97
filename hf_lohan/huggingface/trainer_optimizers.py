"""The optimizer that Trainer makes, or was given, over the store."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hf_lohan.config import OffloadConfig
from hf_lohan.engine import OffloadEngine
from hf_lohan.huggingface.optimizers import OptimizerChoice, choose_optimizer, rules_of, take_over
from hf_lohan.model import Rules
from hf_lohan.optim import OffloadOptimizer

if TYPE_CHECKING:
    from transformers import Trainer as _TrainerBase
    from transformers import TrainingArguments
else:
    _TrainerBase = object  # a mixin: `super()` is whatever Trainer it is mixed into


class StoredOptimizers(_TrainerBase):
    """Mixed into a Trainer: its optimizer is ours, of whatever kind was asked for."""

    optimizer: Any
    optimizer_cls_and_kwargs: Any
    _offload_config: OffloadConfig | None

    if TYPE_CHECKING:

        def _ensure_engine(self) -> OffloadEngine | None: ...

    def _rules(self) -> Rules:
        """Whose states the store is to have."""
        if self.optimizer is None:
            return self._optimizer_choice(self.args).rules
        return rules_of([getattr(self.optimizer, "optimizer", self.optimizer)])

    def _optimizer_choice(self, args: TrainingArguments) -> OptimizerChoice:
        config = self._offload_config
        assert config is not None
        return choose_optimizer(args, self.optimizer_cls_and_kwargs, self.get_optimizer_cls_and_kwargs, config)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        engine = self._ensure_engine()
        if engine is None:
            return super().create_optimizer(*args, **kwargs)
        asked = self.optimizer_cls_and_kwargs
        if self.optimizer is None:
            # Upstream groups the parameters by weight decay; only the class it instantiates is ours.
            self.optimizer_cls_and_kwargs = self._optimizer_choice(self.args).over(engine)
        try:
            super().create_optimizer(*args, **kwargs)
        finally:
            self.optimizer_cls_and_kwargs = asked
        if not isinstance(getattr(self.optimizer, "optimizer", self.optimizer), OffloadOptimizer):
            self.optimizer = take_over(self.optimizer, engine)
        return self.optimizer
