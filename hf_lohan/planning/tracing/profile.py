"""Profiles parameters, FLOPs and bytes of a model's step by block, without weights and without computing."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.func import functional_call

from hf_lohan.activations.chunked_head import ChunkedLoss, chunked_head_of, whole_logits
from hf_lohan.activations.chunked_layers import whole_layers
from hf_lohan.activations.layer_runs.module_state import state_kept
from hf_lohan.compat.torch_private import FakeTensorMode, own_parameters
from hf_lohan.costs import ExpertsProfile, SizeClass
from hf_lohan.costs.model_profile import BlockProfile, ModelProfile
from hf_lohan.hardware import AttentionShape, MatrixShape
from hf_lohan.model.block import Block
from hf_lohan.model.discovery import ModelBlocks
from hf_lohan.model.experts import find_experts
from hf_lohan.planning.tracing.chunk_trace import LayersOnPaper
from hf_lohan.planning.tracing.operations import AttentionWithoutDropout, BlockTrace
from hf_lohan.planning.tracing.trace import ModelTrace


@dataclass(frozen=True, kw_only=True)
class TracedModel:
    profile: ModelProfile
    matrix_shapes: tuple[MatrixShape, ...]
    """Shapes of all matrix products, most FLOPs first. A device is measured with them."""
    attention: AttentionShape | None = None
    """The fused attention with the most FLOPs; None without any."""
    whole_because: str | None = None
    """Why a layer that may run in chunks was traced whole; completes "because each ..."."""
    keys: tuple[int, int] = (0, 0)
    """Largest number of a token's elements in the keys and values of a layer, and the bytes of an element. Known only
    for layers that were traced in chunks of a row."""


def trace_model(
    model: nn.Module,
    blocks: ModelBlocks,
    *,
    batch_size: int,
    sequence_length: int,
    device: torch.device | str = "cpu",
    fused_attention: bool = False,
    chunked_loss: ChunkedLoss | None = None,
    on_paper: LayersOnPaper | None = None,
) -> TracedModel:
    """Trace one forward of a causal LM over `batch_size` sequences that fill `sequence_length`.

    The trace runs on fake tensors, which have only shapes, so any size takes seconds, and parameters may be on meta.
    Only the first of equal layers is traced. Experts that are separate blocks are one operation of their layer. Call
    this before an engine registers hooks on the model.

    Args:
        device: the device on which the forward would run. Kernel names depend on it. The installed torch must support
        it.
        chunked_loss: the condition for computing the loss in chunks.
        on_paper: the layers that run in chunks. With None all run whole.
        fused_attention: use fused kernels for attention with dropout. Accelerators have these kernels, and the CPU does
        not.
    """
    with on_fake_tensors(model, torch.device(device)) as (fake_mode, tensors), contextlib.ExitStack() as stack:
        model.train()  # because dropout is part of a step
        modules = modules_of(blocks)
        outer = [(module, block.name) for block, users in modules.items() if not _is_layer(block) for module in users]
        layers = [users[0] for block, users in modules.items() if _is_layer(block)]
        fused = {experts.module: experts for experts in find_experts(model).values()} if blocks.experts else {}
        experts = [fused[module] for module in blocks.experts]
        weights = {name: tensors[name] for name, _ in model.named_parameters()}
        attention = AttentionWithoutDropout() if fused_attention else None
        trace = ModelTrace(
            fake_mode, layers, outer, weights, tensors, experts=experts, on_paper=on_paper, attention=attention
        )
        ids = torch.zeros(batch_size, sequence_length, dtype=torch.long, device=device)
        stack.enter_context(loss_in_chunks(model, chunked_loss, trace.repeat))
        stack.enter_context(whole_layers(model))
        if on_paper is not None:
            stack.enter_context(on_paper.layers.masks_pending())
            on_paper.layers.begin_forward()
            for norm in on_paper.layers.norms:
                stack.enter_context(norm.traced(on_paper.tokens_of_norms, trace.repeat))
        if attention is not None:
            stack.enter_context(attention)
        stack.enter_context(trace())
        output = functional_call(
            model, tensors, kwargs={"input_ids": ids, "labels": ids, "use_cache": False}, tie_weights=False
        )
        loss = output if isinstance(output, Tensor) else output.loss
        del output  # frees the logits, as Trainer does
        trace.trace_loss(loss)
    profile = ModelProfile(
        blocks=tuple(_block_profile(block, users, trace, blocks.experts) for block, users in modules.items()),
        batch_size=batch_size,
        sequence_length=sequence_length,
        param_itemsize=blocks.blocks[0].slices[0].parameter.element_size(),
    )
    reasons = on_paper.reasons if on_paper is not None else []
    products, attentions = Counter[MatrixShape](), Counter[AttentionShape]()
    for block in (*trace.of_layer.values(), *trace.of_outer.values()):
        products.update(block.products)
        attentions.update(block.attentions)
    shapes = (replace(shape, count=count) for shape, count in products.items())
    return TracedModel(
        profile=profile,
        matrix_shapes=tuple(sorted(shapes, key=lambda shape: -shape.count * shape.flops)),
        attention=max(attentions, key=lambda shape: attentions[shape] * shape.flops, default=None),
        whole_because=reasons[0] if reasons else None,
        keys=max(on_paper.keys, default=(0, 0)) if on_paper is not None else (0, 0),
    )


def _is_layer(block: Block) -> bool:
    return block.size_class is SizeClass.LAYER


def modules_of(model_blocks: ModelBlocks) -> dict[Block, list[nn.Module]]:
    """Return, by block, the modules whose forwards count for it. These are its layer, or the modules outside the layers
    that use its parameters."""
    modules: dict[Block, list[nn.Module]] = {
        block: [] for block in model_blocks.blocks if block.size_class is not SizeClass.EXPERT
    }
    for module, blocks in model_blocks.needs.items():
        if blocks:
            # A layer may also use shared weights. A tied head counts for the block that owns its weight.
            matching = [block for block in blocks if _is_layer(block) == (module in model_blocks.layers)]
            modules[(matching or list(blocks))[0]].append(module)
    return modules


@contextlib.contextmanager
def on_fake_tensors(model: nn.Module, device: torch.device) -> Iterator[tuple[FakeTensorMode, dict[str, Tensor]]]:
    """Yield a fake mode, and fake parameters and buffers by name, for `functional_call`. State that the model's
    forwards change is restored at the end."""
    fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
    with fake_mode:
        tensors = _fake_tensors(model, device)
    with state_kept(model, device, spared=model.buffers()):
        yield fake_mode, tensors


@contextlib.contextmanager
def loss_in_chunks(model: nn.Module, chunked_loss: ChunkedLoss | None, repeat: Callable[[int], None]) -> Iterator[None]:
    """In this context, a forward computes the loss in chunks if ``chunked_loss`` says so. ``repeat``: `on_repeat`."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(whole_logits(model))
        chunked_head = chunked_head_of(model, chunked_loss and replace(chunked_loss, on_repeat=repeat))
        if chunked_head is not None:
            stack.callback(chunked_head.attach())
        yield


def _fake_tensors(model: nn.Module, device: torch.device) -> dict[str, Tensor]:
    """Return fake parameters and buffers, by name."""
    fakes: dict[Tensor, Tensor] = {}
    named: dict[str, Tensor] = {}
    # Each module has one name, because torch would leave fakes in modules that have several names.
    for prefix, module in model.named_modules():
        tensors = (*own_parameters(module), *module.named_buffers(recurse=False, remove_duplicate=False))
        for name, tensor in tensors:
            if tensor not in fakes:
                fakes[tensor] = torch.empty(
                    tensor.shape, dtype=tensor.dtype, device=device, requires_grad=tensor.requires_grad
                )
            named[f"{prefix}.{name}" if prefix else name] = fakes[tensor]
    return named


def _block_profile(
    block: Block, modules: Sequence[nn.Module], trace: ModelTrace, experts: Mapping[nn.Module, Sequence[Block]]
) -> BlockProfile:
    is_layer, parameters = _is_layer(block), [part.parameter for part in block.slices]
    traced = trace.of_layer.get(modules[0]) if is_layer else trace.of_outer.get(block.name)
    traced = traced or BlockTrace()  # the block's modules did not run
    return BlockProfile(
        name=block.name,
        size_class=block.size_class,
        num_params=sum(parameter.numel() for parameter in parameters),
        num_trainable_params=sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
        param_bytes=block.fetched_bytes if block.packed_slices else sum(parameter.nbytes for parameter in parameters),
        flops=traced.flops,
        decoded_numel=block.packed_numel,
        input_bytes=traced.input_bytes if is_layer else 0,
        operations=tuple(traced.operations[: traced.num_run_again]) if is_layer else (),
        saved_bytes=traced.saved_bytes,
        working_bytes=traced.working_bytes,
        moved_bytes=traced.moved_bytes,
        fused_bytes=tuple((how, of.num_bytes) for how, of in traced.fused.items()) if is_layer else (),
        graph_bytes=traced.graph_bytes if is_layer else 0,
        num_chunks=traced.num_chunks,
        repeated_flops=traced.repeated_flops,
        repeated_bytes=traced.repeated_bytes,
        experts=_experts_profile(modules, traced, experts) if is_layer else None,
    )


def _experts_profile(
    modules: Sequence[nn.Module], traced: BlockTrace, experts: Mapping[nn.Module, Sequence[Block]]
) -> ExpertsProfile | None:
    """Return the profile of one layer's experts. If the forward did not reach them, each token is assumed to choose one
    expert."""
    of_layer = [experts[module] for layer in modules[:1] for module in layer.modules() if module in experts]
    if not of_layer:
        return None
    blocks, parts = of_layer[0], of_layer[0][0].slices
    return ExpertsProfile(
        num_experts=len(blocks),
        num_chosen=traced.experts.num_chosen if traced.experts else 1,
        num_params=sum(part.numel for part in parts),
        num_trainable_params=sum(part.numel for part in parts if part.trainable),
        param_bytes=blocks[0].fetched_bytes,
        decoded_numel=blocks[0].packed_numel,
        num_tokens=traced.experts.num_tokens if traced.experts else 0,
        inner_bytes=traced.experts.inner_bytes if traced.experts else 0,
    )


def with_owners(profile: ModelProfile, blocks: ModelBlocks) -> ModelProfile:
    """Return the profile with the ranks that own the experts of each layer. Kept traces do not have these ranks."""
    owners = {
        of[0].name: tuple(block.owner for block in of if block.owner is not None) for of in blocks.experts.values()
    }

    def owned(block: BlockProfile) -> BlockProfile:
        if block.experts is None:
            return block
        of_layer = next((of for name, of in owners.items() if name.startswith(f"{block.name}.")), ())
        return replace(block, experts=replace(block.experts, owners=of_layer))

    return replace(profile, blocks=tuple(map(owned, profile.blocks)))
