"""Hooks on a model, which load each block before its forward and backward, and pass on each complete gradient."""

from __future__ import annotations

import contextlib
import inspect
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import FrameType
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from hf_lohan.absent import saved_weight_hooks, weight_refusal
from hf_lohan.compat.torch_private import (
    hook_on_saved_tensors,
    is_compiled,
    sees_sum_of_gradients,
    take_gradients_by,
    tree_leaves,
)
from hf_lohan.engine.model_pass import ForwardPass, ModelPass, OneForward, PassParts, PassPhase
from hf_lohan.model import Block, ModelBlocks, ParamSlice, wrapped_models
from hf_lohan.planning import StepShape
from hf_lohan.weights import Slot

_Result = TypeVar("_Result")


class ModelHooks:
    """Reports the model's progress to the current pass, and to the `ForwardPass`, which decides when forwards run."""

    def __init__(self, model: nn.Module, model_blocks: ModelBlocks, model_pass: ModelPass, parts: PassParts) -> None:
        self._pass = model_pass
        self._parts = parts
        self._one_forward = OneForward(model_pass)
        self._forward_pass: ForwardPass = self._one_forward
        self._shared = set(model_blocks.shared)
        self._handles: list[Any] = []
        self._of_thread = threading.local()
        """`outermost` is the outermost model whose forward began last on this thread, and `caller` called its hooks."""
        self._attach(model, model_blocks)

    @contextlib.contextmanager
    def using_forward_pass(self, forward_pass: ForwardPass) -> Iterator[None]:
        """Have ``forward_pass`` run the forwards within this context, and their backward."""
        self._forward_pass = forward_pass
        try:
            yield
        finally:
            self._forward_pass = self._one_forward

    def current_forward_pass(self) -> ForwardPass:
        """Return the `ForwardPass` in use."""
        return self._forward_pass

    def saving(self) -> saved_tensors_hooks:
        """Return a context in which autograd saves handles in place of weights."""
        ring = self._parts.ring
        fetch = _without_reference(self._fetch_saved)
        return saved_weight_hooks(ring.stand_ins, ring.block_behind, fetch, self._parts.activations)

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise RuntimeError(weight_refusal("copy.deepcopy"))

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse to pickle the model, whose hooks are pickled before its weights."""
        raise RuntimeError(weight_refusal("pickle"))

    def remove(self) -> None:
        """Remove the hooks from the model."""
        for handle in self._handles:
            handle.remove()

    def _attach(self, model: nn.Module, model_blocks: ModelBlocks) -> None:
        for block in model_blocks.blocks:
            self._parts.ring.hide(block)
            for part in (part for part in block.trainable_slices if part.is_whole):
                on_gradient = partial(_without_reference(self._on_gradient), part)
                self._handles.append(take_gradients_by(on_gradient, part.parameter))
        for buffer_owner in model.modules():
            for name, buffer in list(buffer_owner.named_buffers(recurse=False, remove_duplicate=False)):
                setattr(buffer_owner, name, buffer.to(self._parts.device.torch_device))
        for whole in wrapped_models(model):
            self._handles.append(whole.register_forward_pre_hook(self._on_model_forward, with_kwargs=True))
            self._handles.append(whole.register_forward_hook(self._on_model_output, always_call=True))
        layers = {layer: index for index, layer in enumerate(model_blocks.layers)}
        for module, blocks in model_blocks.needs.items():
            self._handles.append(module.register_forward_pre_hook(partial(self._on_module_forward, blocks)))
            on_output = partial(self._on_module_output, layers.get(module), blocks)
            self._handles.append(module.register_forward_hook(on_output))

    # Forward.

    def _on_model_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        caller = inspect.currentframe()
        caller = None if caller is None else caller.f_back
        if getattr(self._of_thread, "outermost", module) not in (None, module) and _runs_in(
            caller, self._of_thread.caller
        ):
            return  # it is a part of a forward in progress
        self._of_thread.outermost, self._of_thread.caller = module, caller
        if is_compiled():
            raise RuntimeError(
                "an offloaded model was called in torch.compile, which does not support streamed weights; call the "
                "model without torch.compile"
            )
        if torch.jit.is_tracing():
            raise RuntimeError(
                "an offloaded model was called in torch.jit.trace, which would record loads of its weights; save the "
                "model, and trace it in memory"
            )
        if torch.is_grad_enabled():
            _refuse_hooks_on_saved_tensors()
        self._forward_pass.begin_model()
        if torch.is_grad_enabled():
            self._parts.plan.see_batch(step_shape(args, kwargs))
            self._forward_pass.save_by(self.saving())
        else:
            self._parts.plan.see_evaluation(step_shape(args, kwargs))

    def _on_model_output(self, module: nn.Module, _args: Any, output: Any) -> None:
        if getattr(self._of_thread, "outermost", None) is not module:
            return
        self._of_thread.outermost = self._of_thread.caller = None
        # Without an output, the forward has raised. The next forward cleans up.
        if output is None:
            self._parts.plan.memory.out_of_memory.add_to_current_error()
        self._forward_pass.end_model(is_whole=output is not None)

    def _on_module_forward(self, blocks: tuple[Block, ...], _module: nn.Module, _args: Any) -> None:
        if self._pass.phase is PassPhase.BACKWARD:
            # Before transformers 5.23, recomputation calls layer hooks again. The blocks are already present then.
            self._before_backward(blocks)
            return
        if torch.is_grad_enabled() and self._pass.phase not in (PassPhase.FORWARD, PassPhase.FORWARD_WITH_HEADS):
            raise RuntimeError(
                "a layer was called outside its model's forward with gradients enabled, where the weights that "
                "autograd saves cannot be tracked; call the model instead, or call the layer under torch.no_grad()"
            )
        self._pass.spans.end_span()
        self._forward_pass.enter(blocks)
        if blocks:
            self._pass.spans.begin_span("forward", blocks[0])

    def _on_module_output(
        self, layer: int | None, blocks: tuple[Block, ...], _module: nn.Module, _args: Any, output: Any
    ) -> Any:
        if self._pass.phase is PassPhase.BACKWARD:
            return output
        self._pass.spans.end_span()

        def copy_views(block: Block) -> None:
            nonlocal output
            output = self._copy_views(output, block)

        self._forward_pass.leave(blocks, copy_views)
        return output if layer is None else self._after_layer(layer, blocks, output)

    def _copy_views(self, output: Any, block: Block) -> Any:
        """Return a module's output with copies of views of the block. Raises ValueError if the module has kept these
        views elsewhere."""
        ring = self._parts.ring
        if not any(isinstance(leaf, Tensor) and ring.block_behind(leaf) is block for leaf in tree_leaves(output)):
            raise ValueError(
                f"a view of a weight of {block.name} was kept after the forward that made it, and its memory may get "
                "the weights of another block; keep the parameter itself or a clone() of the view, or give the view to "
                "ctx.save_for_backward"
            )
        return ring.copy_views(output, (block,))

    def _after_layer(self, index: int, blocks: tuple[Block, ...], output: Any) -> Any:
        hidden = output[0] if isinstance(output, tuple | list) else output
        if isinstance(hidden, Tensor) and hidden.requires_grad:
            hidden.register_hook(partial(_without_reference(self._before_backward), blocks))
        return self._forward_pass.after_layer(index, output)

    # Backward.

    def _before_backward(self, blocks: tuple[Block, ...], _gradient: Tensor | None = None) -> None:
        for block in blocks:
            self._fetch_in_backward(block)

    def _fetch_saved(self, block: Block, element: int) -> Tensor:
        slot = self._fetch_in_backward(block)
        self._pass.refuse_new_weight(block, element)
        return slot.weights

    def _fetch_in_backward(self, block: Block) -> Slot:
        self._forward_pass.enter_backward()
        if block in self._shared or self._pass.spans.is_open("backward", block):
            return self._forward_pass.fetch_in_backward(block)
        self._pass.spans.end_span()
        slot = self._forward_pass.fetch_in_backward(block)
        self._pass.spans.begin_span("backward", block)
        return slot

    def _on_gradient(self, part: ParamSlice, parameter: nn.Parameter) -> None:
        if parameter.grad is not None:  # a layer in chunks may not use this parameter
            self._forward_pass.take_gradient(part, parameter)
        if self._parts.pipeline.num_backwards > 1 and sees_sum_of_gradients(parameter):
            raise RuntimeError(
                f"{part.name} has a hook of register_post_accumulate_grad_hook, which would see the gradient of one "
                "backward, and in torch sees the sum of the step's backwards; call backward once for each step "
                "(gradient_accumulation_steps=1), or use register_hook, which sees one gradient in torch too"
            )


def _without_reference(method: Callable[..., _Result]) -> Callable[..., _Result]:
    """Return a function for autograd that calls ``method`` by a weak reference. A graph must not refer to the model,
    because the garbage collector does not see references in graphs."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> _Result:
        method = reference()
        if method is None:
            raise RuntimeError(
                "the model of this backward was deleted; keep a reference to the model until the backward has run"
            )
        return method(*args)

    return call


def _refuse_hooks_on_saved_tensors() -> None:
    """Raise ValueError within `saved_tensors_hooks` of the caller, because autograd calls only the innermost hooks."""
    hook = hook_on_saved_tensors()
    package = str(getattr(hook, "__module__", "")).partition(".")[0]
    if hook is not None and package not in ("hf_lohan", "torch"):  # those of torch keep the values
        raise ValueError(
            f"an offloaded model was called within torch.autograd.graph.saved_tensors_hooks, whose function "
            f"{getattr(hook, '__qualname__', hook)} would get no tensor of the model, because offload keeps, swaps or "
            "recomputes what autograd saves; call the model outside this context, and set activations to choose"
        )


def _runs_in(frame: FrameType | None, caller: FrameType | None) -> bool:
    """Return whether ``frame`` was called from ``caller``. False if an interrupt has ended the forward that ``caller``
    runs. torch calls no hook at the end of this forward."""
    while frame is not None and frame is not caller:
        frame = frame.f_back
    return frame is not None


def step_shape(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> StepShape | None:
    """Return the [batch, sequence] shape of a causal LM's inputs. None if they have no token ids or embeddings."""
    for inputs in (kwargs.get("input_ids"), kwargs.get("inputs_embeds"), *args[:1]):
        if isinstance(inputs, Tensor) and inputs.dim() > 1:
            return StepShape(*inputs.shape[:2])
    return None
