"""Tiny quantized checkpoints, made by hand: codes and scales as the formats' own programs write them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny_experts import tiny_experts
from torch import Tensor
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, Mxfp4Config

from hf_lohan.testing.models import tiny_model

Tensors = dict[str, Tensor]


def write_quantized(folder: Path, model: Any, config: dict[str, Any], encode: Callable[[str, Tensor], Tensors]) -> Path:
    """Save ``model`` in ``folder`` with what ``encode`` makes of each tensor, in two files."""
    model.save_pretrained(folder)
    tensors: Tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        tensors |= encode(name, tensor)
    (folder / "model.safetensors").unlink()
    write_files(folder, tensors)
    saved = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**saved, "quantization_config": config}))
    return folder


def write_files(folder: Path, tensors: Tensors) -> None:
    """Two files, with codes and their scales in different ones."""
    names = sorted(tensors)
    files = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, some in files.items():
        save_file({name: tensors[name].contiguous() for name in some}, folder / file, metadata={"format": "pt"})
    weight_map = {name: file for file, some in files.items() for name in some}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def is_linear(name: str, tensor: Tensor) -> bool:
    """Whether a tensor is a matrix of a decoder layer and no router."""
    return ".layers." in name and tensor.dim() == 2 and "gate.weight" not in name and "router" not in name


def fp8_folder(folder: Path, model: Any, block: tuple[int, int] = (16, 32)) -> Path:
    def encode(name: str, tensor: Tensor) -> Tensors:
        if not is_linear(name, tensor):
            return {name: tensor}
        codes, scales = encode_fp8(tensor, block)
        return {name: codes, f"{name}_scale_inv": scales}

    config = {"quant_method": "fp8", "weight_block_size": list(block), "activation_scheme": "dynamic"}
    return write_quantized(folder, model, config, encode)


def encode_fp8(weight: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """float8 codes [rows, columns] and float32 scales [blocks of rows, blocks of columns]."""
    grid = [-(-size // of) for size, of in zip(weight.shape, block, strict=True)]
    scales, codes = torch.empty(grid), torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    for i in range(grid[0]):
        for j in range(grid[1]):
            part = (slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1]))
            scales[i, j] = weight[part].abs().max() / 448
            codes[part] = (weight[part] / scales[i, j]).to(torch.float8_e4m3fn)
    return codes, scales


def mxfp4_folder(folder: Path, model: Any) -> Path:
    def encode(name: str, tensor: Tensor) -> Tensors:
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            return {name: tensor}
        blocks, scales = encode_mxfp4(tensor)
        return {f"{name}_blocks": blocks, f"{name}_scales": scales}

    return write_quantized(folder, model, {"quant_method": "mxfp4", "modules_to_not_convert": []}, encode)


def encode_mxfp4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Of [experts, columns, rows]: codes [experts, rows, columns / 32, 16], and exponents of two plus 127."""
    groups = weight.transpose(1, 2).unflatten(2, (-1, 32))
    exponents = torch.floor(torch.log2(groups.abs().amax(3).clamp(min=2**-100))) - 2
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    scaled = groups / torch.exp2(exponents).unsqueeze(3)
    codes = (scaled.abs().unsqueeze(-1) - values).abs().argmin(-1) + 8 * (scaled < 0)
    return (codes[..., ::2] + 16 * codes[..., 1::2]).to(torch.uint8), (exponents + 127).to(torch.uint8)


def pack_int32(values: Tensor, bits: int) -> Tensor:
    """Integers [rows, columns] into int32 [rows, columns * bits / 32], the first in the lowest bits."""
    per_word = 32 // bits
    offsets = torch.nn.functional.pad(values.long() + (1 << bits - 1), (0, -values.shape[1] % per_word))
    words = (offsets.unflatten(1, (-1, per_word)) << torch.arange(0, 32, bits)).sum(2)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def compressed_folder(folder: Path, group: dict[str, Any], packs: str) -> tuple[Path, dict[str, Tensor]]:
    """Save a Llama in the format of compressed-tensors and return its dequantized weights by name. `packs` is the
    format of codes and scales."""
    products: dict[str, Tensor] = {}
    generator = torch.Generator().manual_seed(0)

    def encode(name: str, tensor: Tensor) -> dict[str, Tensor]:
        if "_proj" not in name:
            return {name: tensor}
        rows, columns = tensor.shape
        size = {"tensor": columns, "channel": columns, "group": 32, "block": 40}[group["strategy"]]
        height = {"tensor": rows, "block": 24}.get(group["strategy"], 1)
        grid = (-(-rows // height), -(-columns // size))
        scales = (torch.rand(grid, generator=generator) + 0.5).to(torch.bfloat16)
        each = scales.float().repeat_interleave(height, 0).repeat_interleave(size, 1)[:rows, :columns]
        if packs == "float8":
            codes = tensor.to(torch.float8_e4m3fn)
            products[name] = codes.float() * each
            return {name: codes, f"{name}_scale": scales.flatten() if group["strategy"] == "tensor" else scales}
        bits = group["num_bits"]
        low, high = -(1 << bits - 1), (1 << bits - 1) - 1
        numbers = torch.randint(low, high + 1, (rows, columns), generator=generator)
        encoded = {f"{name}_packed": pack_int32(numbers, bits), f"{name}_scale": scales}
        encoded[f"{name}_shape"] = torch.tensor([rows, columns])
        if not group["symmetric"]:
            zeros = torch.randint(low, high + 1, grid, generator=generator)
            encoded[f"{name}_zero_point"] = pack_int32(zeros.t(), bits).t()
            numbers = numbers - zeros.repeat_interleave(size, 1)[:, :columns]
        products[name] = numbers.float() * each
        return encoded

    config = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized" if packs == "float8" else "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": group}},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
    }
    return write_quantized(folder, tiny_model("llama", hidden_size=72), config, encode), products


KINDS: dict[str, tuple[Callable[[Path], Path], Any]] = {
    "llama-fp8": (lambda folder: fp8_folder(folder, tiny_model("llama")), FineGrainedFP8Config),
    "mixtral-fp8": (lambda folder: fp8_folder(folder, tiny_model("mixtral")), FineGrainedFP8Config),
    "gpt_oss-mxfp4": (lambda folder: mxfp4_folder(folder, tiny_experts("GptOssConfig")), Mxfp4Config),
}
"""How a folder is made, and the config with which transformers dequantizes it."""


def dequantized(path: Path, kind: str, dtype: torch.dtype = torch.float32) -> Any:
    """The model that transformers dequantizes in memory."""
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, quantization_config=KINDS[kind][1](dequantize=True))
