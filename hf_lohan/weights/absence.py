"""Who brings weights that are absent, as those see it who need them; and what is said where nobody can."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn


class GradientsAway:
    """Whether gradients of a step are not where torch puts them: between a backward and its step."""

    def __init__(self) -> None:
        self._is_any = False
        self.forgotten: set[nn.Parameter] = set()
        """Parameters whose gradient a loop has set to None since."""

    def __bool__(self) -> bool:
        return self._is_any

    def note(self) -> None:
        """One went."""
        self._is_any = True

    def forget(self, parameter: nn.Parameter) -> None:
        """A loop sets a parameter's gradient to None."""
        if self._is_any:
            self.forgotten.add(parameter)

    def clear(self) -> None:
        """The step has taken them, or forgotten them."""
        self._is_any = False
        self.forgotten.clear()


@dataclass(frozen=True, eq=False)
class ViewOf:
    """Which parameter a tensor is a view of, and how to see the weights as it does."""

    parameter: nn.Parameter
    steps: tuple[Callable[[Any], Any], ...]

    def of(self, weights: Tensor) -> Tensor:
        """The same view of the parameter's weights."""
        for step in self.steps:
            weights = step(weights)
        return weights


class Brought(Protocol):
    """Weights that were brought for one operation."""

    def weight(self, parameter: nn.Parameter) -> Tensor:
        """What to use in place of an absent parameter; asked for each use, since each has a gradient of its own."""

    def kept(self, output: Any) -> Any:
        """What the operation gave, in memory of its own where it would be a view of what is taken away again."""


class Absence(Protocol):
    """Who has taken parameters away, and can bring them."""

    gradients_away: GradientsAway

    def reading(self, parameters: Sequence[nn.Parameter]) -> AbstractContextManager[Brought]:
        """Brings absent parameters for one operation. Raises where no true number can be given."""

    def copied(self, parameter: nn.Parameter) -> nn.Parameter:
        """An ordinary parameter that stays. Raises where that could be a whole model."""

    def gathered(self, parameters: Sequence[nn.Parameter]) -> AbstractContextManager[None]:
        """Within, absent parameters are ordinary ones; what is changed of them is stored when it ends."""

    def note_view(self, view: Tensor, view_of: ViewOf) -> None:
        """A view of an absent parameter was made, which autograd may save."""


def refusal(name: str) -> str:
    """Why a call cannot have weights, and what to call instead."""
    called = {"__reduce_ex__": "pickle", "__deepcopy__": "copy.deepcopy"}.get(name, name)
    return (
        f"a weight of an offloaded model is in the store, where {called} cannot reach it; save the model with "
        "trainer.save_model() or model.save_pretrained(), read weights with accelerator.get_state_dict(model) or "
        "hf_lohan.engine_of(model).parameters.read_parameter(name), change them within "
        "hf_lohan.gathered_parameters(...), and change dtype or device before the model is offloaded"
    )


def gone(name: str) -> str:
    """Why a call cannot have weights any more."""
    return (
        f"{name} needs a weight whose offloaded model is gone, and with it the way to the store; keep a reference to "
        "the model for as long as its weights are read, or load what was saved of it"
    )


def gradient_refusal(name: str) -> str:
    """Why a call cannot have gradients, and what to call instead."""
    return (
        f"a gradient of an offloaded model went to the optimizer, where {name} cannot reach it; clip with "
        "accelerator.clip_grad_norm_ or max_grad_norm, and scale the loss instead of gradients"
    )
