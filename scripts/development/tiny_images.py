"""Makes batches with images for tiny models of the image-text-to-text classes of transformers."""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Callable
from typing import Any

import torch
from tiny_configs import FIRST_SPECIAL_TOKEN
from torch import Tensor

Images = dict[str, Tensor]
Grid = tuple[int, int]
"""Height and width of an image in units of the smallest image."""

TEXT_LENGTH = 16
PLANS: tuple[tuple[tuple[Grid, ...], ...], ...] = (
    (((1, 1),), ((1, 2),)),
    ((), ()),
    (((2, 1), (1, 1)), ((1, 2),)),
)
"""For each step, the images of each sample. Their number and size change, and a step of text alone is between."""


def images_of(model: Any, grids: tuple[Grid, ...], generator: torch.Generator) -> Images:
    """The inputs for these images, without token ids."""
    return next(make for pattern, make in FAMILIES if re.match(pattern, type(model).__name__))(model, grids, generator)


def _patches_of_grids(model: Any, grids: tuple[Grid, ...], generator: torch.Generator) -> Images:
    vision = model.config.vision_config
    merge = getattr(vision, "spatial_merge_size", None) or getattr(vision, "merge_size", 2)
    sizes = [(1, merge * height, merge * width) for height, width in grids]
    temporal = getattr(vision, "temporal_patch_size", None) or getattr(vision, "patch_temporal", 1)
    channels = getattr(vision, "in_channels", getattr(vision, "num_channels", 3))
    numel = channels * temporal * vision.patch_size**2
    pixels = torch.rand(sum(t * h * w for t, h, w in sizes), numel, generator=generator)
    return {"pixel_values": pixels, "image_grid_thw": torch.tensor(sizes)}


def _side(model: Any) -> int:
    vision = getattr(model.config, "vision_config", None) or getattr(model.config, "encoder", None) or model.config
    size = getattr(vision, "image_size", None) or getattr(model.config, "image_size", 32)
    return int(size[0] if isinstance(size, list | tuple) else size)


def _squares(model: Any, grids: tuple[Grid, ...], generator: torch.Generator) -> Images:
    side = _side(model)
    return {"pixel_values": torch.rand(len(grids), 3, side, side, generator=generator)}


def _whole_images(model: Any, grids: tuple[Grid, ...], generator: torch.Generator) -> Images:
    """Images of different sizes, padded to the largest."""
    vision = model.config.vision_config
    unit = 2 * vision.patch_size * model.config.spatial_merge_size
    sizes = [(unit * height, unit * width) for height, width in grids]
    pixels = torch.zeros(len(sizes), 3, max(h for h, _ in sizes), max(w for _, w in sizes))
    for number, (height, width) in enumerate(sizes):
        pixels[number, :, :height, :width] = torch.rand(3, height, width, generator=generator)
    return {"pixel_values": pixels, "image_sizes": torch.tensor(sizes)}


def _tiles(model: Any, grids: tuple[Grid, ...], generator: torch.Generator) -> Images:
    """Each image as a small square and two squares of its parts (LLaVA-NeXT)."""
    side = _side(model)
    sizes = [(side * height, side * max(width, 3 - height)) for height, width in grids]
    return {
        "pixel_values": torch.rand(len(sizes), 3, 3, side, side, generator=generator),
        "image_sizes": torch.tensor(sizes),
    }


def _squares_of_samples(model: Any, grids: tuple[Grid, ...], generator: torch.Generator) -> Images:
    """All images as those of one sample, because only their number counts."""
    side = _side(model)
    pixels = torch.rand(1, len(grids), 3, side, side, generator=generator)
    return {"pixel_values": pixels, "pixel_attention_mask": torch.ones(1, len(grids), side, side, dtype=torch.long)}


def _padded_patches(model: Any, grids: tuple[Grid, ...], generator: torch.Generator) -> Images:
    """The patches of each image, padded to the most."""
    vision = model.config.vision_config
    shapes = [(2 * height, 2 * width) for height, width in grids]
    longest = 8  # the patches of the largest image
    pixels = torch.zeros(len(shapes), longest, 3 * vision.patch_size**2)
    mask = torch.zeros(len(shapes), longest, dtype=torch.long)
    for number, (height, width) in enumerate(shapes):
        pixels[number, : height * width] = torch.rand(height * width, pixels.shape[-1], generator=generator)
        mask[number, : height * width] = 1
    return {"pixel_values": pixels, "spatial_shapes": torch.tensor(shapes), "pixel_attention_mask": mask}


def _patches_with_positions(model: Any, grids: tuple[Grid, ...], generator: torch.Generator) -> Images:
    """Flattened patches and their positions, padded to the most (Gemma 4)."""
    vision = model.config.vision_config
    is_merged = not hasattr(vision, "num_hidden_layers")
    scale, side = (1, vision.model_patch_size) if is_merged else (vision.pooling_kernel_size, vision.patch_size)
    shapes = [(scale * height, scale * width) for height, width in grids]
    longest = 2 * scale**2
    pixels = torch.zeros(len(shapes), longest, 3 * side**2)
    places = torch.full((len(shapes), longest, 2), -1)
    for number, (height, width) in enumerate(shapes):
        pixels[number, : height * width] = torch.rand(height * width, pixels.shape[-1], generator=generator)
        places[number, : height * width] = torch.cartesian_prod(torch.arange(height), torch.arange(width)).flip(-1)
    return {"pixel_values": pixels, "image_position_ids": places}


def _square_patches_of_grids(model: Any, grids: tuple[Grid, ...], generator: torch.Generator) -> Images:
    """As `_patches_of_grids`, with patches that are still squares."""
    images = _patches_of_grids(model, grids, generator)
    side = model.config.vision_config.patch_size
    return {**images, "pixel_values": images["pixel_values"].reshape(-1, 3, side, side)}


def _merged_patches_of_grids(model: Any, grids: tuple[Grid, ...], generator: torch.Generator) -> Images:
    """As `_patches_of_grids`, with all patches of a token in one square, channels last (Inkling 2)."""
    side = 2 * model.config.vision_config.patch_size
    pixels = torch.rand(sum(height * width for height, width in grids), side, side, 3, generator=generator)
    return {"pixel_values": pixels, "image_grid_thw": torch.tensor([(1, *grid) for grid in grids])}


def _patches_with_merge_sizes(model: Any, grids: tuple[Grid, ...], generator: torch.Generator) -> Images:
    images = _patches_of_grids(model, grids, generator)
    return {**images, "image_merge_sizes": torch.full((len(grids),), 2)}


def _patches_of_heights(model: Any, grids: tuple[Grid, ...], generator: torch.Generator) -> Images:
    images = _patches_of_grids(model, grids, generator)
    return {"pixel_values": images["pixel_values"], "image_grid_hw": images["image_grid_thw"][:, 1:]}


def _strip(model: Any, grids: tuple[Grid, ...], generator: torch.Generator) -> Images:
    """All patches of all images beside one another (MiniCPM-V)."""
    side = model.config.vision_config.patch_size
    sizes = [(4 * height, 4 * width) for height, width in grids]
    pixels = torch.rand(1, 3, side, side * sum(height * width for height, width in sizes), generator=generator)
    return {"pixel_values": pixels, "target_sizes": torch.tensor(sizes, dtype=torch.int32)}


def _sized_squares(model: Any, grids: tuple[Grid, ...], generator: torch.Generator) -> Images:
    images = _squares(model, grids, generator)
    return {**images, "image_sizes": torch.full((len(grids), 2), images["pixel_values"].shape[-1])}


def _two_resolutions(model: Any, grids: tuple[Grid, ...], generator: torch.Generator) -> Images:
    images = _squares(model, grids, generator)
    side = model.config.high_res_vision_config.image_size
    return {**images, "high_res_pixel_values": torch.rand(len(grids), 3, side, side, generator=generator)}


def _patches_of_squares(model: Any, grids: tuple[Grid, ...], generator: torch.Generator) -> Images:
    """All patches of all images in one row (Fuyu)."""
    num_patches = 2 * sum(height * width for height, width in grids)
    return {"pixel_values": torch.rand(1, num_patches, 3 * model.config.patch_size**2, generator=generator)}


def _tiles_of_samples(model: Any, grids: tuple[Grid, ...], generator: torch.Generator) -> Images:
    side = _side(model)
    pixels = torch.rand(1, len(grids), 3, side, side, generator=generator)
    return {"pixel_values": pixels, "pixel_attention_mask": torch.ones(1, len(grids), dtype=torch.bool)}


def _pooled_patches(model: Any, grids: tuple[Grid, ...], generator: torch.Generator) -> Images:
    """The patches of each image, and which four of them make a token (Molmo 2)."""
    vision = model.config.vision_config
    num_patches = vision.num_position_embeddings
    pixels = torch.rand(len(grids), num_patches, 3 * vision.patch_size**2, generator=generator)
    num_tokens = [2 * height * width for height, width in grids]
    pooling = [
        number * num_patches + torch.randint(num_patches, (tokens, 4), generator=generator)
        for number, tokens in enumerate(num_tokens)
    ]
    return {
        "pixel_values": pixels,
        "image_token_pooling": torch.cat(pooling),
        "image_grids": torch.tensor([(height, width, height, width) for height, width in grids]),
        "image_num_crops": torch.ones(len(grids), dtype=torch.long),
    }


FAMILIES: list[tuple[str, Callable[[Any, tuple[Grid, ...], torch.Generator], Images]]] = [
    ("Molmo2", _pooled_patches),
    ("Kimi|PaddleOCR", _square_patches_of_grids),
    ("Inkling2", _merged_patches_of_grids),
    ("VideoLlama3", _patches_with_merge_sizes),
    ("Nemotron", _patches_of_heights),
    ("Lfm2Vl", _padded_patches),
    ("Gemma4", _patches_with_positions),
    ("MiniCPM", _strip),
    ("Mistral3|MistralLarge4|LightOn", _whole_images),
    ("LlavaNext|LlavaOnevision|Granite4Vision", _tiles),
    ("GraniteDocling", _tiles_of_samples),
    ("Idefics[23]|SmolVLM", _squares_of_samples),
    ("Emu3|Apertus", _sized_squares),
    ("DeepseekVLHybrid", _two_resolutions),
    ("Fuyu", _patches_of_squares),
    (".*", lambda *given: _patches_of_grids(*given) if "image_grid_thw" in _inputs_of(given[0]) else _squares(*given)),
]
"""How images are given, by the class's name; the first pattern that fits counts."""


def _inputs_of(model: Any) -> set[str]:
    return set(inspect.signature(model.forward).parameters)


def image_token_of(model: Any) -> int:
    for name in ("image_token_id", "image_token_index", "image_patch_id"):
        token = getattr(model.config, name, None) or (getattr(model.config, "vocabulary_map", None) or {}).get(
            "<image>"
        )
        if token is not None:
            return int(token)
    raise ValueError(f"the config of {type(model).__name__} names no token for images")


def num_tokens_of(model: Any, images: Images) -> int:
    """The number of tokens that stand for these images."""
    base = getattr(model, "model", None)
    get_features = base.get_image_features if hasattr(base, "get_image_features") else model.get_image_features
    known = inspect.signature(get_features).parameters
    with torch.no_grad():
        features = get_features(**{name: value for name, value in images.items() if name in known})
    pooled = getattr(features, "pooler_output", None)
    deepest = getattr(features, "deepstack_features", None)
    if pooled is None and deepest:
        pooled = deepest[0][1]  # Granite 4: (layer, features of each image)
    features = pooled if pooled is not None else getattr(features, "last_hidden_state", features)
    if isinstance(features, Tensor):
        features = [features]
    return sum(part.numel() // part.shape[-1] for part in features)


def batch_with_images(model: Any, plan: tuple[tuple[Grid, ...], ...], generator: torch.Generator) -> dict[str, Any]:
    """A batch whose samples have the images of ``plan``."""
    name = type(model).__name__
    for pattern, make in OTHER_BATCHES:
        if re.match(pattern, name):
            return make(model, plan, generator)
    grids = tuple(grid for sample in plan for grid in sample)
    token = image_token_of(model)
    lengths = [[num_tokens_of(model, images_of(model, (grid,), generator)) for grid in sample] for sample in plan]
    start = [model.config.vision_start_token_id] if hasattr(model.config, "vision_start_token_id") else []
    rows = []
    for images in lengths:
        row = []
        for length in images:
            row += [*_text(2 - len(start), generator), *start, *[token] * length]
        rows.append([*row, *_text(TEXT_LENGTH - 2 * len(images), generator)])
    longest = max(map(len, rows))
    ids = torch.tensor([[*row, *_text(longest - len(row), generator)] for row in rows])
    is_image = ids == token
    batch: dict[str, Any] = {**_text_inputs(ids), "labels": ids.masked_fill(is_image, -100)}
    for type_ids in ("mm_token_type_ids", "token_type_ids"):
        if type_ids in _inputs_of(model):
            batch[type_ids] = is_image.long()
    return {**batch, **images_of(model, grids, generator)} if grids else batch


def _text_inputs(ids: Tensor) -> dict[str, Tensor]:
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


def _random_ids(size: int, generator: torch.Generator, length: int = TEXT_LENGTH) -> Tensor:
    return torch.tensor([_text(length, generator) for _ in range(size)])


def _size_of(plan: tuple[tuple[Grid, ...], ...]) -> int:
    """The number of samples, if each has one image: it changes with the plan's images."""
    return sum(map(len, plan))


def _with_squares(model: Any, plan: tuple[tuple[Grid, ...], ...], generator: torch.Generator) -> dict[str, Any]:
    """A square for each sample."""
    size, side = _size_of(plan), _side(model)
    pixels = torch.rand(size, 3, side, side, generator=generator)
    return {**_text_inputs(_random_ids(size, generator)), "pixel_values": pixels}


def _with_decoder(model: Any, plan: tuple[tuple[Grid, ...], ...], generator: torch.Generator) -> dict[str, Any]:
    """Squares for an encoder, and a decoder's labels."""
    batch = _with_squares(model, plan, generator)
    given = {"pixel_values": batch["pixel_values"], "labels": batch["labels"]}
    if type(model).__name__.startswith("PPFormula"):
        given["decoder_input_ids"] = batch["labels"].roll(1, 1)
    return given


def _with_queries(model: Any, plan: tuple[tuple[Grid, ...], ...], generator: torch.Generator) -> dict[str, Any]:
    """A square and its tokens for each sample, and an instruction for the model that makes the tokens (BLIP-2)."""
    batch = _with_squares(model, plan, generator)
    ids, pixels, num = batch["input_ids"], batch["pixel_values"], model.config.num_query_tokens
    given = {}
    if "Video" in type(model).__name__:
        pixels, num = pixels[:, None].repeat(1, 2, 1, 1, 1), 2 * num
    if type(model).__name__.startswith("Instruct"):
        questions = _random_ids(len(ids), generator, 6)
        given = {"qformer_input_ids": questions, "qformer_attention_mask": torch.ones_like(questions)}
    ids = torch.cat([torch.full((len(ids), num), image_token_of(model)), ids], dim=1)
    labels = ids.masked_fill(ids == image_token_of(model), -100)
    return {**_text_inputs(ids), "labels": labels, "pixel_values": pixels, **given}


def _with_position_mask(model: Any, plan: tuple[tuple[Grid, ...], ...], generator: torch.Generator) -> dict[str, Any]:
    """A square for each sample, and where its tokens are (Kosmos-2)."""
    batch = _with_squares(model, plan, generator)
    mask = torch.zeros_like(batch["input_ids"])
    mask[:, 1 : 1 + model.config.latent_query_num] = 1
    return {**batch, "image_embeds_position_mask": mask, "labels": batch["labels"].masked_fill(mask.bool(), -100)}


def _flattened(size: int, numel: int, generator: torch.Generator, num: int = 4) -> Tensor:
    """Patches after their row and column, from 1 on."""
    places = torch.cartesian_prod(torch.arange(1, 3), torch.arange(1, num // 2 + 1)).float()
    return torch.cat([places.expand(size, -1, -1), torch.rand(size, num, numel, generator=generator)], dim=-1)


def _with_flat_patches(model: Any, plan: tuple[tuple[Grid, ...], ...], generator: torch.Generator) -> dict[str, Any]:
    """Flattened patches for each sample (Pix2Struct, Kosmos-2.5)."""
    ids = _random_ids(_size_of(plan), generator)
    vision = model.config.vision_config
    patches = _flattened(len(ids), vision.patch_embed_hidden_size, generator, 4 if len(ids) == 2 else 8)
    if type(model).__name__.startswith("Pix2Struct"):
        return {"flattened_patches": patches, "attention_mask": torch.ones(patches.shape[:2]), "labels": ids}
    batch = _text_inputs(ids)
    mask = torch.zeros_like(ids)
    mask[:, 1 : 1 + model.config.latent_query_num] = 1
    return {**batch, "flattened_patches": patches, "image_embeds_position_mask": mask}


def _with_boxes(model: Any, plan: tuple[tuple[Grid, ...], ...], generator: torch.Generator) -> dict[str, Any]:
    """A page for each sample, and the position of each word (UDOP)."""
    batch = _with_squares(model, plan, generator)
    boxes = torch.rand(*batch["input_ids"].shape, 4, generator=generator).sort(dim=-1).values
    return {**batch, "bbox": boxes}


def _with_cross_attention(model: Any, plan: tuple[tuple[Grid, ...], ...], generator: torch.Generator) -> dict[str, Any]:
    """Images of each sample, as many as the most, which the text attends to (Mllama, Idefics)."""
    ids, side, most = _random_ids(len(plan), generator), _side(model), max(map(len, plan))
    batch: dict[str, Any] = _text_inputs(ids)
    if type(model).__name__.startswith("Idefics"):
        most = max(most, 1)
        pixels = torch.rand(len(plan), most, 3, side, side, generator=generator)
        mask = torch.ones(*ids.shape, most, dtype=torch.long)
        return {**batch, "pixel_values": pixels, "image_attention_mask": mask}
    if not most:
        return batch
    tiles = model.config.vision_config.max_num_tiles
    return {
        **batch,
        "pixel_values": torch.rand(len(plan), most, tiles, 3, side, side, generator=generator),
        "aspect_ratio_ids": torch.full((len(plan), most), 2),
        "aspect_ratio_mask": torch.ones(len(plan), most, tiles, dtype=torch.long),
        "cross_attention_mask": torch.ones(*ids.shape, most, tiles, dtype=torch.long),
    }


def _text_alone(model: Any, plan: tuple[tuple[Grid, ...], ...], generator: torch.Generator) -> dict[str, Any]:
    return _text_inputs(_random_ids(len(plan), generator))


OTHER_BATCHES: list[tuple[str, Callable[..., dict[str, Any]]]] = [
    ("BlipFor|Git", _with_squares),
    ("Blip2|InstructBlip", _with_queries),
    ("Kosmos2For", _with_position_mask),
    ("Kosmos2_5|Pix2Struct", _with_flat_patches),
    ("Udop", _with_boxes),
    ("Mllama|IdeficsFor", _with_cross_attention),
    ("VisionEncoderDecoder|PPFormulaNet", _with_decoder),
    ("Mistral4", _text_alone),
]
"""Batches without tokens that stand for images, by the class's name."""


def _text(length: int, generator: torch.Generator) -> list[int]:
    ids: list[int] = torch.randint(5, FIRST_SPECIAL_TOKEN, (length,), generator=generator).tolist()
    return ids


# Training.

_CODES = "its tower turns images into token ids, so it has no gradient: not tried with a frozen text model"
_IN_PLACE = "with a frozen text model transformers' own checkpointing fails in memory, too"
NEVER_WITH_FROZEN_TEXT = {
    "Apertus1p5ForConditionalGeneration": _CODES,
    "ChameleonForConditionalGeneration": _CODES,
    "Emu3ForConditionalGeneration": _CODES,
    "GitForCausalLM": _IN_PLACE,
    "UdopForConditionalGeneration": _IN_PLACE,
}
TEXT_ONLY = {"Mistral4ForCausalLM": "reads text alone"}
NOTES = {
    "Llama4ForConditionalGeneration": "with the field `image_outputs` added to the text model's output",
    **NEVER_WITH_FROZEN_TEXT,
    **TEXT_ONLY,
}
"""How a class differs from the others, and what was done so that it trains in memory."""


def mend(name: str) -> None:
    """Add what the class's forward of transformers 5.24 reads and its text model does not return."""
    if name == "Llama4ForConditionalGeneration":
        from transformers.modeling_outputs import MoeCausalLMOutputWithPast

        MoeCausalLMOutputWithPast.image_outputs = None


_TIMM = "its vision tower is from the package timm, which is not installed here"
NOT_TRIED_WITH_IMAGES = {
    "DiffusionGemmaForBlockDiffusion": "its forward computes no loss",
    "EvollaForProteinText2Text": "reads proteins, not images",
    "FastVlmForConditionalGeneration": _TIMM,
    "Gemma3nForConditionalGeneration": _TIMM,
    "InklingForConditionalGeneration": "needs the package scipy, which is not installed here",
    "PerceptionLMForConditionalGeneration": _TIMM,
    "PI0ForConditionalGeneration": "predicts a robot's actions, not text",
}
"""Classes without a tiny model that trains on images in memory, with the reason."""
ALWAYS_WITH_IMAGES = re.compile(
    "Blip|Instruct|Git|Kosmos2|Pix2Struct|Udop|VisionEncoderDecoder|PPFormulaNet|IdeficsFor"
)
"""Classes that take no batch of text alone."""
_TEXT_PARTS = ("language_model", "text_model", "decoder", "text_decoder")


def frozen_parts(name: str) -> tuple[str, ...]:
    """What is frozen in each training of the class: nothing, its tower, its text model."""
    if name in TEXT_ONLY:
        return ("",)
    return ("", "tower") if name in NEVER_WITH_FROZEN_TEXT else ("", "tower", "text")


def freeze(model: Any, part: str) -> None:
    """Freeze the tower (with its projector) or the text model (with its embeddings and head)."""
    if not part:
        return
    text = text_parameters(model)
    for parameter in model.parameters():
        parameter.requires_grad_((parameter in text) == (part == "tower"))


def text_parameters(model: Any) -> set[Tensor]:
    """The parameters of the text model, its embeddings and its head."""
    roots = [model, getattr(model, "model", model), getattr(model, "vlm", model)]
    parts = [getattr(root, name) for root in roots for name in _TEXT_PARTS if hasattr(root, name)]
    parts.append(model.get_output_embeddings())
    with contextlib.suppress(NotImplementedError):  # they are in the decoder then
        parts.append(model.get_input_embeddings())
    text = {parameter for part in parts if part is not None for parameter in part.parameters()}
    tower = set(model.parameters()) - text
    if not text or not tower:
        raise ValueError(f"{type(model).__name__} has no text model beside a tower")
    return text


def batches_with_images(model: Any, frozen: str) -> list[dict[str, Any]]:
    """The batches of all steps. Without those of text alone, if these give no gradient."""
    model.eval()  # counting an image's tokens changes no running mean
    has_text = frozen != "text" and not ALWAYS_WITH_IMAGES.match(type(model).__name__)
    batches = [
        batch_with_images(model, plan, torch.Generator().manual_seed(100 + step))
        for step, plan in enumerate(PLANS)
        if has_text or any(plan)
    ]
    model.train()
    return batches
