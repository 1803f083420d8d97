"""Make a mixture of experts from a dense model, and text of four kinds from files of this machine.

    python scripts/moe_inputs.py quickstart_out/base moe_demo_out 6
writes moe_demo_out/base from the first 6 layers, and moe_demo_out/{train,heldout}-KIND.jsonl. An existing model of as
many layers is kept.

Each expert is a copy of the dense model's MLP, and the weights of a token's experts sum to 1, so the untrained mixture
equals the dense model (Komatsuzaki et al., Sparse Upcycling, 2022).
"""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from quickstart_inputs import split_topics, write_jsonl
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, MixtralConfig

NUM_EXPERTS, NUM_EXPERTS_PER_TOKEN = 8, 2
ROUTER_STD = 0.02

MAX_CHARACTERS = 8_000
"""Largest number of characters of a document."""
MAX_DOCUMENTS = 80
"""Largest number of documents of each kind."""

PROJECTIONS = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
"""Names of an MLP's projections in Mixtral's checkpoints."""


# The model.


def mixture_config(dense: Any, *, num_experts: int = NUM_EXPERTS, num_layers: int | None = None) -> MixtralConfig:
    """Return the config of a mixture with ``num_experts`` copies of each MLP in a Llama's first ``num_layers`` layers.
    Raises ValueError for a model that does not fit a Mixtral, or has fewer layers."""
    if dense.model_type != "llama" or dense.attention_bias or dense.mlp_bias:
        raise ValueError(f"only a Llama without biases can become a Mixtral, and this model is {dense.model_type!r}")
    if num_layers is not None and not 1 <= num_layers <= dense.num_hidden_layers:
        raise ValueError(f"{num_layers} layers are requested, but the dense model has {dense.num_hidden_layers}")
    same = (
        *("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads"),
        *("num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings", "rms_norm_eps"),
        *("tie_word_embeddings", "rope_parameters", "bos_token_id", "eos_token_id", "pad_token_id"),
    )
    return MixtralConfig(
        **{name: getattr(dense, name) for name in same},
        num_hidden_layers=num_layers or dense.num_hidden_layers,
        num_local_experts=num_experts,
        num_experts_per_tok=NUM_EXPERTS_PER_TOKEN,
        sliding_window=None,
        architectures=["MixtralForCausalLM"],
        dtype="float32",
    )


def upcycle(dense: Path, folder: Path, *, num_experts: int = NUM_EXPERTS, num_layers: int | None = None) -> None:
    """Write the mixture of the checkpoint ``dense`` to ``folder``, with one file per layer, so that only one layer's
    experts are in memory. An existing folder is replaced."""
    config = mixture_config(AutoConfig.from_pretrained(dense), num_experts=num_experts, num_layers=num_layers)
    unfinished = folder.with_name(folder.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    files = {name: file for file in dense.glob("*.safetensors") for name in _names_in(file)}
    generator = torch.Generator().manual_seed(0)
    weight_map: dict[str, str] = {}
    num_bytes = 0
    for number in range(-1, config.num_hidden_layers):
        prefix = f"model.layers.{number}."
        names = [name for name in sorted(files) if name.startswith(prefix if number >= 0 else "")]
        if number < 0:
            names = [name for name in names if not name.startswith("model.layers.")]
        tensors = dict(_mixture_tensors(_read(files, names), num_experts))
        if number >= 0:
            router = torch.empty(num_experts, config.hidden_size).normal_(std=ROUTER_STD, generator=generator)
            tensors[f"{prefix}block_sparse_moe.gate.weight"] = router
        file_name = f"model-{number + 2:05}-of-{config.num_hidden_layers + 1:05}.safetensors"
        save_file(tensors, unfinished / file_name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file_name)
        num_bytes += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": num_bytes}, "weight_map": weight_map}
    (unfinished / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    config.save_pretrained(unfinished)
    AutoTokenizer.from_pretrained(dense).save_pretrained(unfinished)
    shutil.rmtree(folder, ignore_errors=True)
    unfinished.rename(folder)


def _names_in(file: Path) -> list[str]:
    with safe_open(file, "pt") as opened:
        return list(opened.keys())


def _read(files: dict[str, Path], names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
    for name in names:
        with safe_open(files[name], "pt") as opened:
            yield name, opened.get_tensor(name).float()


def _mixture_tensors(tensors: Iterable[tuple[str, Tensor]], num_experts: int) -> Iterator[tuple[str, Tensor]]:
    """Yield each MLP tensor once for each expert, in separate memory, and all other tensors unchanged."""
    for name, tensor in tensors:
        prefix, is_mlp, rest = name.partition(".mlp.")
        if not is_mlp:
            yield name, tensor
            continue
        projection = PROJECTIONS[rest.removesuffix(".weight")]
        for expert in range(num_experts):
            yield f"{prefix}.block_sparse_moe.experts.{expert}.{projection}.weight", tensor.clone()


# Text.


def kinds_of_text() -> dict[str, dict[str, str]]:
    """Return documents by name, of four kinds that exist on every machine with Python and torch."""
    from pydoc_data.topics import topics  # the Python language reference, which is a part of every Python

    sources = Path(sysconfig.get_path("stdlib")).glob("*.py")
    headers = (Path(torch.__file__).parent / "include" / "ATen").glob("*/*.h")
    found = {
        "reference": topics,
        "python": _read_files(sources),
        "cpp": _read_files(headers),
        "licenses": dict(_license_texts()),
    }
    return {kind: _cut(documents) for kind, documents in found.items()}


def _read_files(paths: Iterable[Path]) -> dict[str, str]:
    return {path.name: path.read_text(encoding="utf-8", errors="replace") for path in paths}


def _license_texts() -> Iterator[tuple[str, str]]:
    """Yield the license texts of the installed packages, each once."""
    seen = set()
    for distribution in importlib.metadata.distributions():
        for file in distribution.files or ():
            path = Path(str(distribution.locate_file(file)))
            if not file.name.upper().startswith(("LICENSE", "LICENCE", "COPYING")) or file.suffix == ".py":
                continue
            if not path.is_file():
                continue
            text = path.read_text(encoding="utf-8", errors="replace")
            if text not in seen:
                seen.add(text)
                yield f"{distribution.name}/{file.name}", text


def _cut(documents: dict[str, str]) -> dict[str, str]:
    """Return at most `MAX_DOCUMENTS` documents, spread evenly over the alphabet, each cut to `MAX_CHARACTERS`."""
    names = sorted(documents)
    step = max(1, -(-len(names) // MAX_DOCUMENTS))
    return {name: documents[name][:MAX_CHARACTERS] for name in names[::step]}


def main(dense: Path, out: Path, num_layers: int | None = None) -> None:
    """Write the inputs."""
    out.mkdir(parents=True, exist_ok=True)
    base = out / "base"
    num_dense_layers = AutoConfig.from_pretrained(dense).num_hidden_layers
    num_layers = num_layers or num_dense_layers
    if not (base.is_dir() and AutoConfig.from_pretrained(base).num_hidden_layers == num_layers):
        upcycle(dense, base, num_layers=num_layers)
    print(f"{base}: the first {num_layers} of {num_dense_layers} layers of {dense}, each MLP {NUM_EXPERTS} times")
    for kind, documents in kinds_of_text().items():
        train, held_out = split_topics(documents)
        write_jsonl(out / f"train-{kind}.jsonl", train)
        write_jsonl(out / f"heldout-{kind}.jsonl", held_out)
        print(f"text, {kind}: {len(train)} documents to train on, {len(held_out)} held out")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else None)
