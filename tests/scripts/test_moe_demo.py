"""The demo of experts with a tiny model. `bash scripts/moe_demo.sh` runs the whole demo."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path

import moe_demo
import moe_inputs
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hf_lohan import OffloadConfig
from hf_lohan.huggingface.guards import check_arguments


@pytest.fixture
def dense(checkpoint: Callable[[str], Path]) -> Path:
    return checkpoint("llama")


def test_the_mixture_equals_the_dense_model(dense: Path, tmp_path: Path) -> None:
    moe_inputs.upcycle(dense, tmp_path / "base", num_experts=4)
    stock = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32).eval()
    mixture = AutoModelForCausalLM.from_pretrained(tmp_path / "base").eval()
    assert mixture.config.num_local_experts == 4
    ids = torch.arange(1, 21)[None] % stock.config.vocab_size
    with torch.no_grad():
        assert torch.allclose(mixture(ids).logits, stock(ids).logits, rtol=1e-4, atol=1e-5)
    routers = [weight for name, weight in mixture.named_parameters() if name.endswith("mlp.gate.weight")]
    assert len(routers) == stock.config.num_hidden_layers
    assert all(0.005 < router.std().item() < 0.05 for router in routers)


def test_other_architectures_are_refused(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="only a Llama"):
        moe_inputs.upcycle(checkpoint("opt"), tmp_path / "base")


@pytest.mark.slow
def test_the_number_of_layers_can_be_chosen(dense: Path, tmp_path: Path) -> None:
    moe_inputs.main(dense, tmp_path, 1)
    base = tmp_path / "base"
    assert AutoModelForCausalLM.from_pretrained(base).config.num_hidden_layers == 1
    written = (base / "config.json").stat().st_mtime_ns
    moe_inputs.main(dense, tmp_path, 1)
    assert (base / "config.json").stat().st_mtime_ns == written
    moe_inputs.main(dense, tmp_path)
    num_layers = AutoConfig.from_pretrained(dense).num_hidden_layers
    assert AutoConfig.from_pretrained(base).num_hidden_layers == num_layers > 1
    assert not list(base.glob("*-of-00002.safetensors"))
    with pytest.raises(ValueError, match="the dense model has"):
        moe_inputs.upcycle(dense, tmp_path / "other", num_layers=num_layers + 1)
    assert not (tmp_path / "other").exists()


@pytest.mark.slow
def test_each_kind_has_text() -> None:
    kinds = moe_inputs.kinds_of_text()
    assert list(kinds) == ["reference", "python", "cpp", "licenses"]
    for documents in kinds.values():
        assert 10 <= len(documents) <= moe_inputs.MAX_DOCUMENTS
        assert sum(map(len, documents.values())) > 50_000
        assert max(map(len, documents.values())) <= moe_inputs.MAX_CHARACTERS


def test_separation_is_computed_from_shares() -> None:
    left, right = torch.tensor([[1.0, 0.0], [0.5, 0.5]]), torch.tensor([[0.0, 1.0], [0.5, 0.5]])
    assert moe_demo.separation({"a": left, "b": left}) == 0
    assert moe_demo.separation({"a": left, "b": right}) == 0.5


def test_the_demo_runs(dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    moe_inputs.main(dense, tmp_path)
    args = moe_demo.training_arguments(tmp_path / "run", max_steps=2, batch_size=2)
    check_arguments(args)
    offload = {"gpu_memory": "2MiB", "cpu_memory": "64MiB", "experts": "streamed"}
    moe_demo.main(tmp_path, offload=offload, block_size=16, args=args, min_improvement_fraction=-1.0)
    output = capsys.readouterr().out
    assert "to the same logits bit for bit" in output.replace("\n", " ")
    drawn = ElementTree.fromstring((tmp_path / "routing.svg").read_text())
    num_layers = AutoModelForCausalLM.from_pretrained(tmp_path / "finetuned").config.num_hidden_layers
    cells = [element for element in drawn.iter() if element.tag.endswith("rect")]
    assert len(cells) == 2 * 4 * num_layers * moe_inputs.NUM_EXPERTS


def test_the_budget_is_smaller_than_one_layers_experts() -> None:
    config = OffloadConfig.load(str(moe_demo.CONFIG))
    embedding_bytes, expert_bytes = 49_152 * 576 * 4, 3 * 576 * 1536 * 4
    assert isinstance(config.gpu_memory, int)
    assert config.gpu_memory - embedding_bytes < moe_inputs.NUM_EXPERTS * expert_bytes / 2
