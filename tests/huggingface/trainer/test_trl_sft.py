"""Supervised fine-tuning with TRL's trainer equals training in memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from datasets import Dataset
from PIL import Image
from tiny_tokenizer import tiny_tokenizer
from transformers.models.auto import image_processing_auto
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

import hf_lohan
from hf_lohan.compat.trl_private import has_fused_head
from hf_lohan.huggingface.trainer import trl_models
from hf_lohan.testing.models import tiny_config

trl = pytest.importorskip("trl")
import trl_runs  # noqa: E402 - imports trl
from trl_runs import arguments, both, texts  # noqa: E402

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "packing": {"packing": True, "max_length": 32},
    "accumulation": {"gradient_accumulation_steps": 2, "max_steps": 2, "packing": True, "packing_strategy": "wrapped"},
    "evaluation": {"eval_strategy": "steps", "eval_steps": 2, "max_grad_norm": 0.0},
}


@pytest.mark.covering(0)
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_a_streamed_model_learns_as_in_memory(settings: dict[str, Any], checkpoint: Path, tmp_path: Path) -> None:
    eval_dataset = texts(8) if "eval_strategy" in settings else None
    ours, stock = both(
        "SFT",
        tmp_path,
        settings,
        lambda: {"model": str(checkpoint), "train_dataset": texts(), "eval_dataset": eval_dataset},
    )
    trl_runs.assert_same(ours, stock)


@pytest.mark.covering(0)
@pytest.mark.parametrize(
    ("family", "overrides"), [("opt", {}), ("qwen3_moe", {"output_router_logits": True})], ids=["tied", "experts"]
)
def test_tied_heads_and_experts_learn_as_in_memory(family: str, overrides: dict[str, Any], tmp_path: Path) -> None:
    checkpoint = trl_runs.save_checkpoint(tmp_path / "model", family, **overrides)
    ours, stock = both(
        "SFT", tmp_path, {"max_steps": 3}, lambda: {"model": str(checkpoint), "train_dataset": texts()},
        gpu_memory="4MiB", cpu_memory="16MiB",
    )  # fmt: skip
    trl_runs.assert_same(ours, stock)
    assert ("aux_loss" in ours.logs[0]) == (family == "qwen3_moe")


def test_the_base_of_adapters_is_streamed(checkpoint: Path, tmp_path: Path) -> None:
    trainer = hf_lohan.trl.SFTTrainer(
        str(checkpoint), arguments("SFT", tmp_path), train_dataset=texts(2), peft_config=trl_runs.lora(),
        offload=trl_runs.BUDGETS,
    )  # fmt: skip
    assert trainer.offload_engine is not None, "the base is not in the store before training"
    assert {part.trainable for part in trainer.offload_engine.parameter_slices} == {False, True}
    trainer.offload_engine.close()


@pytest.mark.covering(0)
@pytest.mark.parametrize("peft_config", [trl_runs.lora(), None], ids=["adapters", "all"])
def test_joint_micro_batches_learn_as_in_memory(peft_config: Any, checkpoint: Path, tmp_path: Path) -> None:
    if peft_config is None and has_fused_head(trl.SFTTrainer):
        pytest.skip("this TRL has a fused head, whose joint micro-batches are refused")
    ours, stock = both(
        "SFT",
        tmp_path,
        {"gradient_accumulation_steps": 2, "max_steps": 2},
        lambda: {"model": str(checkpoint), "train_dataset": texts(), "peft_config": peft_config},
        vertical_micro_batches=True,
    )
    trl_runs.assert_same(ours, stock)


def image_processor(tokenizer: Any) -> Any:
    """Return LLaVA's processor for images of 16 x 16, with a one-line chat template."""
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"], "pad_token": "<pad>"})
    template = (
        "{% for message in messages %}{% for part in message['content'] %}"
        "{{ '<image>' if part['type'] == 'image' else part['text'] }}{% endfor %} {% endfor %}"
    )
    return transformers.LlavaProcessor(
        CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}),
        tokenizer,
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        image_token="<image>",
        chat_template=template,
    )


def model_with_a_tower(tokenizer: Any) -> Any:
    tower = transformers.CLIPVisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, image_size=16, patch_size=8
    )
    token = tokenizer.convert_tokens_to_ids("<image>")
    text = tiny_config("llama", num_hidden_layers=2)
    torch.manual_seed(0)
    config = transformers.LlavaConfig(vision_config=tower, text_config=text, image_token_index=token)
    return transformers.LlavaForConditionalGeneration(config)


def conversations(num_images: Sequence[int]) -> Dataset:
    """Return rows with these numbers of images, of different sizes."""
    rows = []
    for row, number in enumerate(num_images):
        images = [Image.new("RGB", (20 + 4 * row, 24), (40 * row, 90 * index, 200)) for index in range(number)]
        told = [("user", "block goes down"), ("assistant", f"and comes back up {row}")]
        messages = [{"role": role, "content": text} for role, text in told]
        rows.append({"images": images, "messages": messages})
    return Dataset.from_list(rows)


def test_a_model_that_reads_images_learns_as_in_memory(tmp_path: Path) -> None:
    """Rows have one, two or no images."""
    tokenizer = tiny_tokenizer()
    processor = image_processor(tokenizer)
    ours, stock = both(
        "SFT",
        tmp_path,
        {"max_length": None},
        lambda: {
            "model": model_with_a_tower(tokenizer),
            "train_dataset": conversations([1, 0, 2, 1, 0, 0]),
            "processing_class": processor,
        },
    )
    trl_runs.assert_same(ours, stock)
    assert any(".vision_tower." in name for name in ours.weights)


def test_missing_packages_of_a_processor_are_named_before_a_weight_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = tiny_tokenizer()
    processor, model = image_processor(tokenizer), model_with_a_tower(tokenizer)
    for part in (processor, model):
        part.save_pretrained(tmp_path / "model")
    for module in (image_processing_auto, trl_models):
        for package in ("vision", "torchvision"):
            monkeypatch.setattr(module, f"is_{package}_available", lambda: False)
    monkeypatch.setattr(image_processing_auto, "get_image_processor_class_from_name", lambda name: None)
    args = arguments("SFT", tmp_path / "out", max_steps=1)
    with pytest.raises(ValueError, match=r"needs packages that are not installed; pip install pillow torchvision, or"):
        hf_lohan.trl.SFTTrainer(str(tmp_path / "model"), args, train_dataset=conversations([0]), offload="lohan")
    assert not (tmp_path / "out" / "_lohan").exists()


def test_a_quantization_config_packs_the_base(tmp_path: Path) -> None:
    checkpoint = str(trl_runs.save_checkpoint(tmp_path / "model", hidden_size=64))
    config = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
    )
    runs = []
    for name, asked, setting in (("setting", None, "nf4"), ("argument", config, "auto")):
        given = {"model": checkpoint, "train_dataset": texts(), "peft_config": trl_runs.lora()}
        offload = {**trl_runs.BUDGETS, "quantize": setting}
        args = arguments("SFT", tmp_path / name, max_steps=2)
        runs.append(trl_runs.run("SFT", args, offload=offload, quantization_config=asked, **given))
        kinds = {record.kind for record in runs[-1].trainer.offload_engine.layout.records}
        assert {"codes", "scales"} <= kinds
        trl_runs.close(runs[-1])
    assert [row.get("loss") for row in runs[0].logs] == [row.get("loss") for row in runs[1].logs]
