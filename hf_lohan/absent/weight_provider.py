"""How absent weights are borrowed, and the errors where they cannot be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn


class MovedGradients:
    """Whether gradients of the current step were moved to the host, so that `.grad` does not have them: true between a
    backward and its step."""

    def __init__(self) -> None:
        self._has_any = False
        self.forgotten: set[nn.Parameter] = set()
        """Parameters whose `.grad` the training loop has set to None since then."""

    def __bool__(self) -> bool:
        return self._has_any

    def mark_moved(self) -> None:
        """A gradient was moved."""
        self._has_any = True

    def forget_gradient(self, parameter: nn.Parameter) -> None:
        """The training loop set a parameter's gradient to None."""
        if self._has_any:
            self.forgotten.add(parameter)

    def clear(self) -> None:
        """The step has applied or dropped its gradients."""
        self._has_any = False
        self.forgotten.clear()


@dataclass(frozen=True, eq=False)
class WeightView:
    """A view of an absent parameter: the parameter, and the operations that lead to the view."""

    parameter: nn.Parameter
    steps: tuple[Callable[[Any], Any], ...]

    def apply_to(self, weights: Tensor) -> Tensor:
        """The same view of the parameter's values."""
        for step in self.steps:
            weights = step(weights)
        return weights


class BorrowedWeights(Protocol):
    """Weights on the device for the time of one operation."""

    def weight(self, parameter: nn.Parameter) -> Tensor:
        """The tensor to use in place of an absent parameter. Called once for each use, as each has its own gradient."""

    def copy_views(self, output: Any) -> Any:
        """The operation's output, with copies in place of views of memory that is given back."""


class WeightProvider(Protocol):
    """Brings the weights of absent parameters."""

    moved_gradients: MovedGradients

    def borrow_weights(self, parameters: Sequence[nn.Parameter]) -> AbstractContextManager[BorrowedWeights]:
        """Bring weights for one operation. Raises RuntimeError where their values are not defined."""

    def copy_parameter(self, parameter: nn.Parameter) -> nn.Parameter:
        """An ordinary parameter with the same values. Raises RuntimeError where that could copy a whole model."""

    def gather_parameters(self, parameters: Sequence[nn.Parameter]) -> AbstractContextManager[None]:
        """Within the context, absent parameters are ordinary ones. At its end, changed values are stored."""

    def note_view(self, view: Tensor, weight_view: WeightView) -> None:
        """A view of an absent parameter was made, which autograd may save."""


def weight_refusal(name: str) -> str:
    """The error of a call that cannot read absent weights, with the calls that can."""
    call = {"__reduce_ex__": "pickle", "__deepcopy__": "copy.deepcopy"}.get(name, name)
    return (
        f"a weight of an offloaded model is in the store, where {call} cannot reach it; save the model with "
        "trainer.save_model() or model.save_pretrained(), read weights with accelerator.get_state_dict(model) or "
        "hf_lohan.engine_of(model).parameters.read_parameter(name), change them within "
        "hf_lohan.gathered_parameters(...), and change dtype or device before the model is offloaded"
    )


def no_model_refusal(name: str) -> str:
    """The error of a call that reads an absent weight after its model was garbage collected."""
    return (
        f"{name} needs a weight whose offloaded model is gone, and with it the way to the store; keep a reference to "
        "the model for as long as its weights are read, or load what was saved of it"
    )


def gradient_refusal(name: str) -> str:
    """The error of a call that cannot read a moved gradient, with the calls that replace it."""
    return (
        f"a gradient of an offloaded model went to the optimizer, where {name} cannot reach it; clip with "
        "accelerator.clip_grad_norm_ or max_grad_norm, and scale the loss instead of gradients"
    )
