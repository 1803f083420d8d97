"""Quantized checkpoints are dequantized while they stream, or refused before a weight is read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from equal_tensors import tensors_in
from packaging.version import Version
from quantized_folders import KINDS, compressed_folder, dequantized, fp8_folder, write_files, write_quantized
from stored_weights import assert_stored, stored
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM, FineGrainedFP8Config
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from hf_lohan import engine_of
from hf_lohan.huggingface.models import recipe, weight_sink
from hf_lohan.huggingface.models.checkpoint_form import read_form
from hf_lohan.huggingface.models.hub import quantization_of
from hf_lohan.quantize import encoded_weights
from hf_lohan.quantize.encoded_weights import EncodedWeight, decode_fp4, decode_numbers
from hf_lohan.testing.models import tiny_model

Load = Callable[..., Any]
SMALL = {"cpu_memory": "16MiB", "gpu_memory": "16MiB"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_weights_equal_those_dequantized_by_transformers(
    kind: str, dtype: torch.dtype, load_streamed: Load, tmp_path: Path
) -> None:
    path = KINDS[kind][0](tmp_path / "quantized")
    stock = dequantized(path, kind, dtype)
    if Version(transformers.__version__) < Version("5.24"):
        stock.to(dtype)  # it leaves the router of Mixtral in float32, and the experts of gpt-oss in bfloat16
    assert_stored(load_streamed(path, dtype=dtype, settings=SMALL), stock)


@pytest.mark.parametrize("kind", ["llama-fp8", "gpt_oss-mxfp4"])
def test_masters_are_dequantized_weights_and_saved_weights_are_rounded(
    kind: str, load_streamed: Load, tmp_path: Path
) -> None:
    path = KINDS[kind][0](tmp_path / "quantized")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    model = load_streamed(path, bf16=True, settings=SMALL)
    products, access = dequantized(path, kind), engine_of(model).parameters  # type: ignore[union-attr]
    for name, weight in products.named_parameters():
        assert torch.equal(access.read_parameter(name), weight.bfloat16()), name
        assert torch.equal(access.read_masters(name, 0, weight.numel()), weight.flatten()), name
    model.save_pretrained(tmp_path / "saved")
    assert not hasattr(AutoConfig.from_pretrained(tmp_path / "saved"), "quantization_config")
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    for name, weight in saved.named_parameters():
        assert torch.equal(weight, products.get_parameter(name).to(torch.bfloat16)), name


class LargestTensor(TorchDispatchMode):
    """Records the bytes of the largest tensor in RAM that an operation makes. Views of mapped files do not count."""

    largest = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = function(*args, **(kwargs or {}))
        taken, made = (
            {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
            for tensors in (_in_ram((args, kwargs)), _in_ram(results))
        )
        self.largest = max([self.largest, *(num_bytes for address, num_bytes in made.items() if address not in taken)])
        return results


def _in_ram(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.device.type == "cpu"]


@pytest.mark.parametrize("kind", ["mixtral-fp8", "gpt_oss-mxfp4"])
def test_no_tensor_is_larger_than_an_expert(
    kind: str, load_streamed: Load, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = KINDS[kind][0](tmp_path / "quantized")
    monkeypatch.setattr(weight_sink, "_MOST_ROWS_BYTES", 1 << 14)
    monkeypatch.setattr(encoded_weights, "_DECODED_AT_ONCE_NUMEL", 1 << 10)
    stream, tracer = recipe.ModelRecipe.stream, LargestTensor()

    def traced(*args: Any, **kwargs: Any) -> Any:
        with tracer:
            return stream(*args, **kwargs)

    monkeypatch.setattr(recipe.ModelRecipe, "stream", traced)
    shapes = [parameter.shape for parameter in load_streamed(path, settings=SMALL).parameters()]
    one_expert = max(shape[1:].numel() for shape in shapes if len(shape) == 3) * 4
    assert one_expert <= tracer.largest < 1.5 * one_expert
    assert max(shape.numel() for shape in shapes) * 4 >= 4 * one_expert


def test_truncated_blocks_at_the_edges_are_dequantized(load_streamed: Load, tmp_path: Path) -> None:
    """Transformers refuses such blocks, or uses smaller ones."""
    path = fp8_folder(tmp_path / "quantized", tiny_model("llama"), block=(24, 40))
    tensors, found = tensors_in(path), stored(load_streamed(path))
    for name, scales in tensors.items():
        if name.endswith("_scale_inv"):
            codes = tensors[name.removesuffix("_scale_inv")]
            each = scales.repeat_interleave(24, 0).repeat_interleave(40, 1)[: codes.shape[0], : codes.shape[1]]
            assert torch.equal(found[name.removesuffix("_scale_inv")], codes.float() * each), name


def fp8_weight(codes: Tensor, scales: Tensor, block: tuple[int, int]) -> EncodedWeight:
    decode = decode_fp4 if codes.dtype == torch.int8 else decode_numbers
    columns = codes.shape[-1] * (2 if codes.dtype == torch.int8 else 1)
    return EncodedWeight(torch.Size((*codes.shape[:-1], columns)), _Stored(codes), _Stored(scales), decode, block)


class _Stored:
    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)

    def get_dtype(self) -> str:
        return {torch.int32: "I32", torch.float8_e4m3fn: "F8_E4M3"}.get(self._tensor.dtype, "other")

    def __getitem__(self, index: Any) -> Tensor:
        return self._tensor[index].clone()


@pytest.mark.parametrize("experts", [(), (3,)])
@pytest.mark.parametrize("scales", ["float32", "bfloat16", "e8m0", "bytes", "one"])
@pytest.mark.parametrize("codes", ["float8", "fp4"])
def test_fp8_equals_transformers_to_the_bit(
    codes: str, scales: str, experts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoded_weights, "_DECODED_AT_ONCE_NUMEL", 5 * 64)
    torch.manual_seed(0)
    block = (12, 64) if scales == "one" else (1, 32) if codes == "fp4" else (4, 16)
    numbers = torch.randint(0, 256, (*experts, 12, 32), dtype=torch.uint8).view(torch.int8)
    if codes == "float8":
        numbers = torch.randn(*experts, 12, 64).to(torch.float8_e4m3fn)
    grid = torch.randint(100, 140, (*experts, 12 // block[0], 64 // block[1]), dtype=torch.uint8)
    if scales in ("float32", "bfloat16", "one"):
        grid = torch.rand(grid.shape).to(torch.bfloat16 if scales == "bfloat16" else torch.float32)
    elif scales == "e8m0":
        grid = grid.view(torch.float8_e8m0fnu)
    expected = Fp8Dequantize(None)._dequantize_one(numbers, grid, torch.float32)
    weight = fp8_weight(numbers, grid, block)
    assert torch.equal(weight[...], expected)
    for first, last in ((0, 3), (1, 2)) if experts else ((0, 12), (3, 11), (7, 8)):
        assert torch.equal(weight.decode(first, last, torch.bfloat16), expected[first:last].to(torch.bfloat16))


def test_mxfp4_equals_transformers_to_the_bit() -> None:
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(2, 255, 16, 16).contiguous()
    scales = torch.arange(255, dtype=torch.uint8).view(1, 255, 1).expand(2, 255, 16).contiguous()  # all but NaN
    shape = torch.Size((2, 16 * 32, 255))
    weight = EncodedWeight(shape, _Stored(blocks), _Stored(scales), decode_fp4, (1, 32), is_transposed=True)
    for dtype in (torch.float32, torch.bfloat16):
        expected = convert_moe_packed_tensors(blocks, scales, dtype=dtype)
        assert torch.equal(weight.decode(0, 2, dtype), expected)
        assert torch.equal(weight.decode(1, 2, dtype), expected[1:])


@pytest.mark.parametrize(
    ("packs", "group"),
    [
        ("float8", {"type": "float", "num_bits": 8, "strategy": "tensor"}),
        ("float8", {"type": "float", "num_bits": 8, "strategy": "channel"}),
        ("float8", {"type": "float", "num_bits": 8, "strategy": "block", "block_structure": [24, 40]}),
        ("int32", {"type": "int", "num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": True}),
        ("int32", {"type": "int", "num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False}),
        ("int32", {"type": "int", "num_bits": 8, "strategy": "channel", "symmetric": False}),
    ],
)
def test_compressed_tensors_are_dequantized(
    packs: str, group: dict[str, Any], load_streamed: Load, tmp_path: Path
) -> None:
    path, products = compressed_folder(tmp_path / "quantized", group, packs)
    found = stored(load_streamed(path))
    assert len(products) == 21
    for name, product in products.items():
        assert torch.equal(found[name], product), name


@pytest.mark.parametrize("dequantize", [True, False])
def test_quantization_config_may_ask_for_dequantization(dequantize: bool, load_streamed: Load, tmp_path: Path) -> None:
    path = KINDS["llama-fp8"][0](tmp_path / "quantized")
    config = FineGrainedFP8Config(dequantize=dequantize)
    if dequantize:
        assert_stored(load_streamed(path, quantization_config=config), dequantized(path, "llama-fp8"))
    else:
        with pytest.raises(ValueError, match=r"leave out quantization_config=FineGrainedFP8Config"):
            load_streamed(path, quantization_config=config)


def test_only_scales_of_activations_of_encoded_weights_are_dropped(tmp_path: Path) -> None:
    """Gemma 3n has a parameter `correct_output_scale`."""
    path = KINDS["llama-fp8"][0](tmp_path / "quantized")
    checkpoint = read_form(path, config := AutoConfig.from_pretrained(path), quantization_of(config))
    tensors: Any = {name: _Stored(tensor) for name, tensor in tensors_in(path).items()}
    module = "model.layers.0.mlp.up_proj"
    kept = ["model.layers.0.altup.correct_output_scale", "model.norm.input_scale", "model.layers.0.mlp_input_scale"]
    dropped = [f"{module}.input_scale", f"{module}.weight_input_scale"]
    one = _Stored(torch.ones(()))
    replaced = checkpoint.replace_tensors({**tensors, **dict.fromkeys([*kept, *dropped], one)})
    assert replaced.keys() >= {*kept, f"{module}.weight"}
    assert not replaced.keys() & set(dropped)


# Refusals, before any weight is read.


def refusal(path: Path, load_streamed: Load, tmp_path: Path) -> str:
    with pytest.raises(ValueError) as error:
        load_streamed(path)
    assert not (tmp_path / "store0").exists()
    sentence = str(error.value)
    assert "\n" not in sentence
    return sentence


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"quant_method": "gptq", "bits": 4}, "gptq"),
        ({"quant_method": "awq", "bits": 4}, "awq"),
        ({"quant_method": "fbgemm_fp8"}, "fbgemm_fp8"),
        ({"quant_method": "never_heard_of"}, "never_heard_of"),
        ({"load_in_4bit": True, "quant_method": "bitsandbytes"}, "bitsandbytes"),
        ({"quant_method": "compressed-tensors", "format": "marlin-24", "config_groups": {}}, "marlin-24"),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"g": {"format": "nvfp4-pack-quantized", "weights": {"type": "float"}}},
            },
            "nvfp4-pack-quantized",
        ),
        ({"quant_method": "compressed-tensors", "config_groups": {"NVFP4": ["Linear"]}}, "the preset 'NVFP4'"),
    ],
)
def test_other_formats_are_refused_by_name(
    config: dict[str, Any], named: str, load_streamed: Load, tmp_path: Path
) -> None:
    path = write_quantized(tmp_path / "quantized", tiny_model("llama"), config, lambda name, tensor: {name: tensor})
    assert named in refusal(path, load_streamed, tmp_path)


@pytest.mark.parametrize("preset", ["FP8_DYNAMIC", "w4a16"])
def test_groups_may_be_named_by_a_preset(preset: str, load_streamed: Load, tmp_path: Path) -> None:
    group: dict[str, Any] = {"type": "float", "num_bits": 8, "strategy": "channel", "symmetric": True}
    if preset == "w4a16":
        group = {"type": "int", "num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": True}
    path, products = compressed_folder(tmp_path / "quantized", group, "float8" if preset != "w4a16" else "int32")
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"]["config_groups"] = {preset: ["Linear"]}
    (path / "config.json").write_text(json.dumps(config))
    if preset == "w4a16":  # has groups of 128
        assert "has shape [144, 3], and the scales of" in refusal(path, load_streamed, tmp_path)
        return
    found = stored(load_streamed(path))
    assert all(torch.equal(found[name], product) for name, product in products.items())


def test_what_autofp8_writes_is_refused_by_its_name(load_streamed: Load, tmp_path: Path) -> None:
    path = KINDS["llama-fp8"][0](tmp_path / "quantized")
    tensors = {
        name.replace("_scale_inv", "_scale"): torch.tensor(0.01) if "_scale" in name else tensor
        for name, tensor in tensors_in(path).items()
    }
    write_files(path, tensors)
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "activation_scheme": "static"}
    (path / "config.json").write_text(json.dumps(config))
    assert "_proj.weight is in the format of AutoFP8" in refusal(path, load_streamed, tmp_path)


@pytest.mark.parametrize("order", ["in order", "reordered", "missing", "missing, by its other name"])
def test_groups_of_other_columns_are_refused(order: str, load_streamed: Load, tmp_path: Path) -> None:
    group = {"type": "int", "num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": True}
    actorder = "dynamic" if "other" in order else "group"
    path, products = compressed_folder(tmp_path / "quantized", {**group, "actorder": actorder}, "int32")
    tensors = tensors_in(path)
    for name in products if "missing" not in order else ():
        tensors[f"{name}_g_idx"] = torch.arange(products[name].shape[1], dtype=torch.int32) // 32
    name = "model.layers.1.mlp.up_proj.weight"
    if order == "reordered":
        tensors[f"{name}_g_idx"] = tensors[f"{name}_g_idx"].flip(0).contiguous()
    write_files(path, tensors)
    if order == "in order":
        assert torch.equal(stored(load_streamed(path))[name], products[name])
    else:
        sentence = refusal(path, load_streamed, tmp_path)
        assert f"{name}_g_idx assigns the columns" in sentence or "_proj.weight_g_idx with the group" in sentence


@pytest.mark.parametrize("kind", ["llama-fp8", "gpt_oss-mxfp4", "compressed"])
@pytest.mark.parametrize("damage", ["missing", "cut short", "not finite"])
def test_damaged_scales_are_refused(kind: str, damage: str, load_streamed: Load, tmp_path: Path) -> None:
    path = tmp_path / "quantized"
    if kind == "compressed":
        group = {"type": "int", "num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": True}
        compressed_folder(path, group, "int32")
    else:
        KINDS[kind][0](path)
    tensors = tensors_in(path)
    name = sorted(name for name in tensors if "_scale" in name)[3]
    if damage == "missing":
        del tensors[name]
    elif damage == "cut short":
        tensors[name] = tensors[name][: tensors[name].shape[0] // 2]
    else:
        tensors[name].flatten()[3] = 255 if tensors[name].dtype == torch.uint8 else float("nan")
    write_files(path, tensors)
    sentence = refusal(path, load_streamed, tmp_path)
    assert {"missing": "has no", "cut short": "has shape", "not finite": "not finite"}[damage] in sentence
    assert name in sentence


def test_a_truncated_file_is_refused(load_streamed: Load, tmp_path: Path) -> None:
    path = KINDS["llama-fp8"][0](tmp_path / "quantized")
    file = path / "model-00002-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert "model-00002-of-00002.safetensors" in refusal(path, load_streamed, tmp_path)


def test_weights_under_names_that_the_model_does_not_know_are_refused(load_streamed: Load, tmp_path: Path) -> None:
    path = KINDS["llama-fp8"][0](tmp_path / "quantized")
    renamed = {name.replace(".1.mlp.up_proj", ".1.mlp.w3"): tensor for name, tensor in tensors_in(path).items()}
    write_files(path, renamed)
    with pytest.raises(ValueError, match=r"lacks model\.layers\.1\.mlp\.up_proj\.weight .*but has .*w3"):
        load_streamed(path)


def test_the_check_reads_only_scales(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = KINDS["llama-fp8"][0](tmp_path / "quantized")
    monkeypatch.setattr(EncodedWeight, "decode", None)
    checkpoint = read_form(path, config := AutoConfig.from_pretrained(path), quantization_of(config))
    assert not hasattr(checkpoint.model_config, "quantization_config")
