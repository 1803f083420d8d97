"""Models with frozen parameters of any dtype, and with trained ones without elements, equal those of stock Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from short_runs import SHORT_RUN
from torch import Tensor, nn
from transformers import LlamaForCausalLM, Trainer, TrainingArguments

import hf_lohan
from hf_lohan.huggingface.attachment import offload_model
from hf_lohan.testing.models import tiny_config, tiny_model, tiny_rows

OFFLOAD = hf_lohan.OffloadConfig.load({"cpu_memory": "16MiB", "gpu_memory": "8MiB"})
NUM_TOKENS = 1 << 16


def frozen(values: Tensor) -> nn.Parameter:
    return nn.Parameter(values, requires_grad=False)


class Permuted(nn.Linear):
    """Its outputs are permuted and scaled by frozen codes."""

    def __init__(self, like: nn.Linear) -> None:
        super().__init__(like.in_features, like.out_features, bias=False, device=like.weight.device)
        self.order = frozen(torch.arange(like.out_features).flip(0))
        self.codes = frozen(torch.arange(like.out_features, dtype=torch.uint8) % 3)
        self.nothing = nn.Parameter(torch.empty(0, 4))

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden)[..., self.order] * (self.codes + 1)


class WithEveryKind(LlamaForCausalLM):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.tokens = frozen(torch.arange(NUM_TOKENS).flip(0) % config.vocab_size)
        self.is_used = frozen(torch.arange(config.hidden_size) % 3 > 0)
        self.scale = frozen(torch.arange(config.hidden_size, dtype=torch.float64) / 7)
        self.tasks = nn.Linear(config.hidden_size, 0)
        for layer in self.model.layers:
            layer.mlp.down_proj = Permuted(layer.mlp.down_proj)
        self.post_init()

    def forward(self, input_ids: Tensor, labels: Tensor, **kwargs: Any) -> Any:
        output = super().forward(input_ids=self.tokens[input_ids], labels=labels, output_hidden_states=True, **kwargs)
        hidden = output.hidden_states[-1]
        output.loss = output.loss + (hidden * self.is_used * self.scale).mean().float() + self.tasks(hidden).sum()
        return output


def trainer(folder: Path, *, is_offloaded: bool, **settings: Any) -> Trainer:
    torch.manual_seed(1)
    rows = tiny_rows(8)
    saving = {"save_strategy": "steps", "save_steps": 1}
    args = TrainingArguments(str(folder), use_cpu=True, max_steps=2, **{**SHORT_RUN, **saving, **settings})
    model = WithEveryKind(tiny_config("llama", num_layers=2))
    if not is_offloaded:
        return Trainer(model, args, train_dataset=rows)
    return hf_lohan.Trainer(model, args, train_dataset=rows, offload=OFFLOAD)


@pytest.mark.parametrize("max_grad_norm", [1.0, pytest.param(0.0, marks=pytest.mark.slow)])
def test_they_train_are_saved_and_resume_as_in_memory(max_grad_norm: float, tmp_path: Path) -> None:
    stock = trainer(tmp_path / "stock", is_offloaded=False, max_grad_norm=max_grad_norm)
    stock.train()
    for resume in (None, str(tmp_path / "ours" / "checkpoint-1")):
        ours = trainer(tmp_path / "ours", is_offloaded=True, max_grad_norm=max_grad_norm)
        ours.train(resume_from_checkpoint=resume)
        ours.save_model(str(tmp_path / "saved"))
        ours.offload_engine.close()  # type: ignore[attr-defined]
        logs = [[row["loss"] for row in each.state.log_history if "loss" in row] for each in (ours, stock)]
        assert logs[0] == logs[1]
        saved, expected = load_file(tmp_path / "saved" / "model.safetensors"), stock.model.state_dict()
        assert saved.keys() == expected.keys()
        for name, weight in expected.items():
            assert saved[name].dtype == weight.dtype and torch.equal(saved[name], weight), name


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_a_trained_parameter_of_another_dtype_is_named(dtype: torch.dtype, tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.lm_head.to(dtype)
    with pytest.raises(ValueError, match=rf"lm_head\.weight is {dtype}, which cannot be trained under offload"):
        offload_model(model, OFFLOAD, torch_device="cpu", default_ssd_path=tmp_path)
