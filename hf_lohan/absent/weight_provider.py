"""The interface that lends absent weights, and the errors of calls that cannot borrow them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn


class MovedGradients:
    """Records whether gradients of the current step were moved to the host, so that `.grad` is empty. That is the
    case between a backward and the optimizer step."""

    def __init__(self) -> None:
        self._has_any = False
        self.forgotten: set[nn.Parameter] = set()
        """Parameters whose `.grad` the training loop has set to None since gradients were moved."""
        self.are_beside_autograd = False
        """Whether a backward moves gradients of parameters that its graph does not have, because experts stream and
        train."""

    def __bool__(self) -> bool:
        return self._has_any

    def mark_moved(self) -> None:
        """Record that a gradient was moved."""
        self._has_any = True

    def forget_gradient(self, parameter: nn.Parameter) -> None:
        """Record that the training loop set a parameter's gradient to None."""
        if self._has_any:
            self.forgotten.add(parameter)

    def clear(self) -> None:
        """Record that the step has applied or dropped its gradients."""
        self._has_any = False
        self.forgotten.clear()


@dataclass(frozen=True, eq=False)
class WeightView:
    """A view of an absent parameter: the parameter, and the operations that lead to the view."""

    parameter: nn.Parameter
    steps: tuple[Callable[[Any], Any], ...]

    def apply_to(self, weights: Tensor) -> Tensor:
        """Return the same view of the parameter's values ``weights``."""
        for step in self.steps:
            weights = step(weights)
        return weights


class BorrowedWeights(Protocol):
    """Weights that are on the device during one operation."""

    def weight(self, parameter: nn.Parameter) -> Tensor:
        """Return the tensor to use in place of an absent parameter. Call this once for each use, because each use has
        its own gradient."""

    def copy_views(self, output: Any) -> Any:
        """Return the operation's output, with copies in place of views of borrowed memory."""


class WeightProvider(Protocol):
    """Loads the weights of absent parameters."""

    moved_gradients: MovedGradients

    def borrow_weights(self, parameters: Sequence[nn.Parameter]) -> AbstractContextManager[BorrowedWeights]:
        """Load weights for one operation. Raises RuntimeError while their values are undefined."""

    def embed(self, table: nn.Parameter, ids: Tensor, padding_idx: int | None) -> Tensor | None:
        """Return the rows ``ids`` of a table if only its rows are loaded. Return None for other parameters."""

    def copy_parameter(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return an ordinary parameter with the same values. Raises RuntimeError if this may copy a whole model."""

    def gather_parameters(self, parameters: Sequence[nn.Parameter]) -> AbstractContextManager[None]:
        """Make absent parameters ordinary parameters within the context, and store changed values at its end."""

    def note_view(self, view: Tensor, weight_view: WeightView) -> None:
        """Record a view of an absent parameter, because autograd may save the view."""


def weight_refusal(name: str) -> str:
    """Return the error for a call ``name`` that cannot read absent weights. It lists calls that can read them."""
    call = {"__reduce_ex__": "pickle", "__deepcopy__": "copy.deepcopy"}.get(name, name)
    if name == "setting .data":
        call += " (as peft.prepare_model_for_kbit_training does: leave it out)"
    return (
        f"a weight of an offloaded model is in the store, which {call} cannot read; save the model with "
        "trainer.save_model() or model.save_pretrained(), read weights with accelerator.get_state_dict(model) or "
        "hf_lohan.engine_of(model).parameters.read_parameter(name), change them within "
        "hf_lohan.gathered_parameters(...), and change dtype or device before the model is offloaded"
    )


def no_model_refusal(name: str) -> str:
    """Return the error for a call that reads an absent weight after its model was garbage collected."""
    return (
        f"{name} needs a weight of an offloaded model that no longer exists; keep a reference to the model while its "
        "weights are in use, or load a saved copy of it"
    )


def inputs_refusal() -> str:
    """Return the error for a backward to some parameters of a model whose experts stream and train."""
    return (
        "backward(inputs=...) and torch.autograd.grad are not supported for weights of a model whose experts stream "
        "one by one, because each backward also computes the experts' gradients; leave inputs out, or set experts: "
        "with_layer"
    )


def gradient_refusal(name: str) -> str:
    """Return the error for a call that cannot read a moved gradient. It lists calls to use instead."""
    return (
        f"a gradient of an offloaded model was moved to the optimizer, so {name} cannot read it; clip with "
        "accelerator.clip_grad_norm_ or max_grad_norm, and scale the loss instead of gradients"
    )
