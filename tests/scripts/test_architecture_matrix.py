"""The page of architectures tells whether a class trains offloaded as in memory."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import architecture_matrix as matrix
import pytest
import tiny_images
import torch
from architecture_matrix import EXACT, EXACT_KEPT, PAGE, Outcome, Task, class_names, try_class, with_section
from PIL import Image
from tiny_configs import tiny_model_of
from tiny_images import batches_with_images, freeze


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Use one thread, like the child processes of the matrix."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.mark.covering(0)
@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("GptOssForCausalLM", EXACT),  # vectors of four elements, and experts
        ("GPTNeoXJapaneseForCausalLM", EXACT_KEPT),  # cannot recompute
        ("XLNetLMHeadModel", EXACT_KEPT),  # no layer class
    ],
)
def test_classes_that_need_care_are_exact(name: str, what: str, tmp_path: Path) -> None:
    assert try_class(name, tmp_path / "store") == Outcome(name, what)


BY_NAME = (
    *("Qwen3_5", "Gemma4", "Llama4", "Mistral3", "Glm4v", "InternVL", "LlavaNext", "Gemma3"),
    *("Idefics3", "Qwen2_5_VL", "Kimi_K25", "Florence2"),
)


@pytest.mark.covering(0)
@pytest.mark.parametrize(
    "name",
    [
        "Qwen3VLForConditionalGeneration",  # tower features that are added within the text layers
        "MllamaForConditionalGeneration",  # text layers attend to the tower, and are skipped without images
        "Blip2ForConditionalGeneration",  # a tower, a query model and a text model
        *(pytest.param(f"{name}ForConditionalGeneration", marks=pytest.mark.slow) for name in BY_NAME),
    ],
)
def test_models_that_read_images_are_exact(name: str, tmp_path: Path) -> None:
    """Train the whole model, and with a frozen tower or text model. The images change between steps."""
    outcome = try_class(name, tmp_path / "store", task=Task.IMAGES)
    assert outcome.what == EXACT, outcome.why


QWEN = {"patch_size": 8, "merge_size": 2, "size": {"shortest_edge": 64, "longest_edge": 4096}}
SQUARE = {"size": {"height": 32, "width": 32}}
PROCESSORS: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3VL": ("qwen2_vl.Qwen2VL", QWEN),
    "Qwen3_5": ("qwen2_vl.Qwen2VL", QWEN),
    "Glm4v": ("glm4v.Glm4v", QWEN),
    "Gemma3": ("gemma3.Gemma3", SQUARE),
    "Gemma4": ("gemma4.Gemma4", {"patch_size": 8, "pooling_kernel_size": 3, "max_soft_tokens": 70}),
    "InternVL": ("got_ocr2.GotOcr2", SQUARE),
    "Mistral3": ("pixtral.Pixtral", {"patch_size": {"height": 16, "width": 16}, "size": {"longest_edge": 64}}),
    "LlavaNext": (
        "llava_next.LlavaNext",
        {"size": {"shortest_edge": 32}, "crop_size": SQUARE["size"], "image_grid_pinpoints": [[32, 64], [64, 32]]},
    ),
    "Idefics3": (
        "idefics3.Idefics3",
        {"size": {"longest_edge": 32}, "max_image_size": {"longest_edge": 32}, "do_image_splitting": False},
    ),
}
"""Image processors that need only PIL, with sizes for the tiny models."""


def processed_images(processor: Any, model: Any, grids: tuple[tuple[int, int], ...], generator: Any) -> dict[str, Any]:
    """Return processed pictures, each `grids` times 32 x 32 pixels large."""
    colors = torch.randint(255, (len(grids), 3), generator=generator).tolist()
    pictures: list[Any] = [
        Image.linear_gradient("L").resize((32 * width, 32 * height)).convert("RGB") for height, width in grids
    ]
    pictures = [
        Image.blend(picture, Image.new("RGB", picture.size, tuple(color)), 0.5)
        for picture, color in zip(pictures, colors, strict=True)
    ]
    outputs = processor(images=[pictures] if "Idefics" in type(processor).__name__ else pictures, return_tensors="pt")
    return {name: value for name, value in outputs.items() if name in inspect.signature(model.forward).parameters}


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", [name if name == "Qwen3VL" else pytest.param(name, marks=pytest.mark.slow) for name in PROCESSORS]
)
def test_batches_of_the_processor_of_the_class_are_exact(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, sizes = PROCESSORS[family]
    folder, name = path.split(".")
    module = importlib.import_module(f"transformers.models.{folder}.image_processing_pil_{folder}")
    processor = getattr(module, f"{name}ImageProcessorPil")(**sizes)
    monkeypatch.setattr(tiny_images, "images_of", partial(processed_images, processor))
    settings = {"activations": "recompute", "experts": "with_layer"}
    outcome = matrix.try_training(f"{family}ForConditionalGeneration", tmp_path / "store", settings, Task.IMAGES)
    assert outcome.what == EXACT, outcome.why


def test_batches_differ_in_the_number_and_size_of_images() -> None:
    model = tiny_model_of("Qwen3VLForConditionalGeneration")
    batches = batches_with_images(model, frozen="")
    grids = [batch.get("image_grid_thw", torch.zeros(0, 3)).tolist() for batch in batches]
    assert grids == [[[1, 2, 2], [1, 2, 4]], [], [[1, 4, 2], [1, 2, 2], [1, 2, 4]]]
    assert len({tuple(batch["input_ids"].shape) for batch in batches}) == 3
    freeze(model, "tower")
    assert not any(p.requires_grad for name, p in model.named_parameters() if ".visual." in name)
    freeze(model, "text")
    assert {name for name, p in model.named_parameters() if p.requires_grad} == {
        name for name, _ in model.named_parameters() if ".visual." in name
    }


@pytest.mark.slow
def test_differences_and_failures_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stock = matrix.train_in_memory

    def off_by_one_bit(*given: Any) -> matrix.Trained:
        losses, norms, weights = stock(*given)
        return losses, [norms[0], torch.nextafter(norms[1], torch.tensor(torch.inf))], weights

    monkeypatch.setattr(matrix, "train_in_memory", off_by_one_bit)
    found = try_class("LlamaForCausalLM", tmp_path / "store")
    assert found.what == matrix.WRONG and found.why.startswith("norm: 1 differs by")
    outcomes = list(matrix.outcomes_of(["NoSuchForCausalLM"]))
    assert [one.what for one in outcomes] == [matrix.FAILED] and "NoSuchForCausalLM" in outcomes[0].why


def test_the_page_has_a_row_for_each_class_and_no_failures() -> None:
    names = class_names()
    assert len(names) == len(set(names)) > 150 and "LlamaForCausalLM" in names
    page = with_section(PAGE.read_text(encoding="utf-8"), Task.TEXT, [Outcome(name, EXACT) for name in names])
    assert f"**{len(names)} of {len(names)} are exact**" in page
    assert all(f"`{name}`" in page.partition("| exact |  | ")[2].partition("\n")[0] for name in names)
    in_chunks = matrix.with_chunks(page, Task.TEXT, {name: Outcome(name, matrix.IN_CHUNKS) for name in names[:9]})
    rows = [line for line in in_chunks.splitlines() if line.startswith("| exact")]
    assert rows[0] == f"| exact |  | in chunks | {', '.join(f'`{name}`' for name in names[:9])} |"
    kept = PAGE.read_text(encoding="utf-8")
    _, images = kept.split("<!-- begin: image-text-to-text -->")
    assert sum(line.count("`") // 2 for line in images.splitlines() if line.startswith("| exact")) >= 60
    assert not [line for line in kept.splitlines() if line.startswith(("| WRONG", "| FAILED"))]
