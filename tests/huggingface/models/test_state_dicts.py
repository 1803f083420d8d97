"""Trainer and Accelerator train, save and resume any module with layers by its state dict."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from equal_tensors import assert_same_tensors, tensors_in
from safetensors.torch import load_model
from short_runs import short_arguments
from torch import Tensor, nn
from torch.utils.data import DataLoader

import hf_lohan
from hf_lohan.engine import OffloadEngine
from hf_lohan.huggingface.models.saving import StoredModel
from hf_lohan.huggingface.models.state_dicts import save_shards, stream_state_dict
from hf_lohan.huggingface.models.weight_sink import WeightSink

BUDGETS = {"cpu_memory": "4MiB", "gpu_memory": "2MiB"}
WIDTH = 32


class Plain(nn.Module):
    """A module with layers, a persistent buffer, and a head tied to the embedding."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        super().__init__()
        self.embed = nn.Embedding(100, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 100, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("num_rows", torch.zeros(1))

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        self.num_rows += len(input_ids)
        hidden = self.embed(input_ids)
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        logits = self.head(hidden)
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def rows(num: int = 8) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 100, (num, 6), generator=generator)
    return [{"input_ids": row, "labels": row} for row in ids]


def trainer(folder: Path, *, offload: Any, seed: int = 0, **settings: Any) -> Any:
    defaults = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "learning_rate": 1e-2}
    args = short_arguments(folder, **{**defaults, **settings})
    # Stock refuses to save tied weights of a plain module. We save them once.
    model = Plain(seed)
    return hf_lohan.Trainer(model, args, train_dataset=rows(), offload=offload)


def stock_weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in model.state_dict().items() if name != "head.weight"}


def test_trainer_saves_and_resumes_a_plain_module(tmp_path: Path) -> None:
    stock = trainer(tmp_path / "stock", offload=None, save_strategy="no")
    stock.train()
    ours = trainer(tmp_path / "ours", offload=BUDGETS)
    ours.train()
    ours.save_model(str(tmp_path / "saved"))
    ours.offload_engine.close()
    expected = stock_weights(stock.model)
    assert expected["num_rows"] > 0
    assert_same_tensors(tensors_in(tmp_path / "saved"), expected)
    assert_same_tensors(tensors_in(tmp_path / "ours" / "checkpoint-4"), expected)
    loaded = Plain(seed=7)
    load_model(loaded, tmp_path / "saved" / "model.safetensors")
    assert_same_tensors(stock_weights(loaded), expected)
    again = trainer(tmp_path / "again", offload=BUDGETS, seed=7)
    again.train(resume_from_checkpoint=str(tmp_path / "ours" / "checkpoint-2"))
    again.save_model(str(tmp_path / "resumed"))
    again.offload_engine.close()
    assert_same_tensors(tensors_in(tmp_path / "resumed"), expected)


def test_a_state_dict_that_is_given_to_trainer_is_saved(tmp_path: Path) -> None:
    """Averages of weights, and placeholders among them."""
    ours = trainer(tmp_path / "ours", offload=BUDGETS, save_strategy="no")
    ours.train()
    placeholders = ours.model.state_dict()
    averages = {name: torch.full(tensor.shape, 0.5) for name, tensor in placeholders.items() if name != "head.weight"}
    ours._save(str(tmp_path / "given"), state_dict=averages)
    assert_same_tensors(tensors_in(tmp_path / "given"), averages)
    expected = ours.accelerator.get_state_dict(ours.model)["embed.weight"]
    ours._save(str(tmp_path / "mixed"), state_dict={**averages, "embed.weight": placeholders["embed.weight"]})
    assert_same_tensors(tensors_in(tmp_path / "mixed"), {**averages, "embed.weight": expected})
    ours.offload_engine.close()


def prepared(folder: Path, seed: int = 0) -> SimpleNamespace:
    accelerator = hf_lohan.Accelerator(
        cpu=True, lohan_plugin=hf_lohan.LohanPlugin(offload={**BUDGETS, "ssd": str(folder)})
    )
    model = Plain(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(rows(), batch_size=2))  # type: ignore[arg-type]

    def run(start: int, stop: int) -> None:
        for number, batch in enumerate(loader):
            if start <= number < stop:
                accelerator.backward(model(**batch)["loss"])
                optimizer.step()
                optimizer.zero_grad()

    return SimpleNamespace(accelerator=accelerator, model=model, run=run)


def test_an_accelerator_saves_and_loads_a_plain_module(tmp_path: Path) -> None:
    first = prepared(tmp_path / "first")
    first.run(0, 2)
    first.accelerator.save_state(str(tmp_path / "state"))
    first.run(2, 4)
    first.accelerator.save_model(first.model, tmp_path / "saved", max_shard_size="8KB")
    expected = {name: first.accelerator.get_state_dict(first.model)[name] for name in tensors_in(tmp_path / "saved")}
    assert_same_tensors(tensors_in(tmp_path / "saved"), expected)
    assert len(list((tmp_path / "saved").glob("model-*.safetensors"))) > 1
    load_model(Plain(seed=7), tmp_path / "state" / "model.safetensors")  # accelerate's own loader reads this file
    second = prepared(tmp_path / "second", seed=7)
    second.accelerator.load_state(str(tmp_path / "state"))
    second.run(2, 4)
    weights = second.accelerator.get_state_dict(second.model)
    # The buffer also counted rows that a real loop would have skipped.
    assert all(torch.equal(weights[name], expected[name]) for name in expected.keys() - {"num_rows"})
    for accelerator in (first.accelerator, second.accelerator):
        accelerator.offload_engine.close()


def test_a_file_with_other_weights_is_refused(tmp_path: Path) -> None:
    ours = trainer(tmp_path / "run", offload=BUDGETS, save_strategy="no")
    ours.train()
    engine: OffloadEngine = ours.offload_engine
    with pytest.raises(ValueError, match=r"'.*nowhere' has no model\.safetensors"):
        stream_state_dict(tmp_path / "nowhere", WeightSink(engine.parameters))
    save_shards(StoredModel.from_engine(engine), tmp_path / "saved", max_shard_size="8KB")
    sink = WeightSink(engine.parameters)
    sink.most_bytes = 1000  # the embedding is copied by rows
    assert stream_state_dict(tmp_path / "saved", sink).keys() == {"num_rows"}
    assert sink.written == engine.parameters.parts.keys()
    engine.close()
