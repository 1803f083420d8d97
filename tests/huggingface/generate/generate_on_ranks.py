"""Generates on one rank: `torchrun ... generate_on_ranks.py <folder> <experts>,<checkpoint> ...`.

Each checkpoint is loaded twice, the second time from the store. Writes tokens and logits to
`<checkpoint>/<experts>-<rank>.pt`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from test_generation import BUDGETS, generated_by_rank

import hf_lohan
from hf_lohan import engine_of


def main(folder: Path, cases: list[str]) -> None:
    rank = int(os.environ["RANK"])
    for experts, name in (case.split(",") for case in cases):
        settings = {
            "cpu_memory": "4MiB",
            "gpu_memory": BUDGETS[name],
            "ssd": str(folder / f"store-{name}-{experts}"),
            "cpu_threads": 1,
            "experts": experts,
        }
        for _ in range(2):
            model = hf_lohan.load_for_generation(
                folder / name, settings, torch_device="cpu", max_length=14, num_sequences=6
            )
            engine = engine_of(model)
            assert engine is not None and len(engine.layout.ranks.others) == 1
            assert bool(engine.layout.model_blocks.experts) == (experts == "streamed")
            found = generated_by_rank(model, rank)
            engine.close()
            torch.save(found, folder / name / f"{experts}-{rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
