"""Tiny models with adapters over frozen bases, which are packed while they are written to a store, or have the bytes of
a quantized checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from quantized_folders import KINDS, compressed_folder, dequantized
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from hf_lohan.config import OffloadConfig
from hf_lohan.costs import Quantization
from hf_lohan.engine import ParameterAccess, drain_model
from hf_lohan.huggingface.models.checkpoint_form import CheckpointForm, read_form
from hf_lohan.huggingface.models.hub import opened_tensors, quantization_of
from hf_lohan.huggingface.models.weight_sink import WeightSink
from hf_lohan.model.discovery import find_layers
from hf_lohan.model.packed_weights import name_in_base, packed_forms
from hf_lohan.testing.models import tiny_model

INT4 = {"type": "int", "num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False}
TARGETS = {"gpt2": ["c_attn", "c_fc"]}
_SIZES = {"gpt2": {"n_embd": 128}}


@dataclass(frozen=True)
class Base:
    """A model whose frozen weights a store packs, and how the store gets its weights."""

    model: Any
    quantization: Quantization
    encoded: CheckpointForm | None = None
    """The checkpoint that has packed the weights."""

    def write(self, access: ParameterAccess) -> None:
        """Write all weights. The model then has none."""
        blocks = {block: None for parts in access.parts.values() for block, _ in parts}
        if self.encoded is None:
            drain_model(list(blocks), access)
            return
        names = {name_in_base(name): name for name, p in self.model.named_parameters() if not p.requires_grad}
        sink = WeightSink(access, names)
        with opened_tensors(self.encoded.path) as tensors:
            self.encoded.replace_tensors(tensors, sink)
        for name, parameter in self.model.named_parameters():
            if access.parts[name][0][1].packed is None:
                access.write_parameter(name, parameter)
            parameter.data = parameter.data.new_empty(0)

    def decoded(self) -> Base:
        """The same model with the weights to which packed ones are decoded, and nothing to pack."""
        if self.encoded is None:
            for parameter, form in packed_forms(self.model, find_layers(self.model), self.quantization).items():
                parameter.data = packed_and_decoded(parameter.detach(), form)
        return Base(self.model, Quantization(method="none"))


def packed_and_decoded(weight: Tensor, form: Any) -> Tensor:
    units = weight.reshape(-1, form.unit_numel)
    found = torch.empty_like(units)
    for unit, out in zip(units, found, strict=True):
        packer = form.packer()
        _, codes = packer.pack(form.stored_order(unit))
        form.decode_(out, 0, codes, 0, packer.pack_scales())
    return found.view_as(weight)


@torch.no_grad()
def take_decoded(model: Any, access: ParameterAccess) -> int:
    """Copy the weights of a packed store into a model without adapters. Returns how many weights that changes."""
    names = {name_in_base(name): name for name in access.parts}
    changed = 0
    for name, parameter in model.named_parameters():
        decoded = access.read_parameter(names[name])
        changed += not torch.equal(decoded, parameter)
        parameter.copy_(decoded)
    return changed


def base_of(
    kind: str,
    form: dict[str, Any] | None = None,
    *,
    folder: Path | None = None,
    trains: str = "",
    num_layers: int = 3,
    make_model: Callable[[], Any] | None = None,
) -> Base:
    """A model of a family to pack in this ``form``, or a kind of quantized checkpoint, which is written to ``folder``
    at first. ``trains``: weights that are trained instead of adapters."""
    import peft

    torch.manual_seed(0)
    encoded: CheckpointForm | None = None
    if kind in KINDS or kind == "llama-int4":
        assert folder is not None
        model, encoded = _published(kind, folder)
    else:
        sizes = _SIZES.get(kind, {"hidden_size": 128})
        model = make_model() if make_model else tiny_model(kind, num_layers=num_layers, **sizes)
    if trains:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(trains in name)
    else:
        torch.manual_seed(1)
        targets = TARGETS.get(kind, ["q_proj", "v_proj"])
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM"))
    if encoded is None:
        return Base(model.train(), Quantization.parse(form))
    frozen = [name_in_base(name) for name, p in model.named_parameters() if not p.requires_grad]
    quantization = encoded.settings(OffloadConfig(), torch.float32, frozen).quantize
    assert quantization.weights
    return Base(model.train(), quantization, encoded)


def _published(kind: str, folder: Path) -> tuple[Any, CheckpointForm]:
    """The model that transformers decodes, and the checkpoint."""
    path = folder / kind
    products: dict[str, Tensor] = {}
    if kind == "llama-int4":
        path, products = compressed_folder(path, INT4, "int32")
        model = tiny_model("llama", hidden_size=72)
        with torch.no_grad():
            for name, product in products.items():
                model.get_parameter(name).copy_(product)
    else:
        path = path if path.exists() else KINDS[kind][0](path)
        model = dequantized(path, kind)
    form = read_form(path, config := AutoConfig.from_pretrained(path), quantization_of(config))
    with torch.device("meta"):
        skeleton: nn.Module = AutoModelForCausalLM.from_config(form.model_config)
    form.fit(skeleton)
    return model, form
