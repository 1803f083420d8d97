"""Training with `chunks.loss: true` differs from training with whole logits only in the order of sums."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from trajectories import SMALL_BUDGETS, arguments, assert_nearly_equal, dataset, train_offloaded, train_stock

import hf_lohan
from hf_lohan.testing.models import tiny_batch, tiny_model

CHUNKED = {**SMALL_BUDGETS, "chunks.loss": True}
CASES: dict[str, dict[str, Any]] = {
    "accumulated": {"gradient_accumulation_steps": 2},
    "smoothed": {"label_smoothing_factor": 0.1, "gradient_accumulation_steps": 2},
    "together": {"gradient_accumulation_steps": 2},
    "smoothed together": {"label_smoothing_factor": 0.3, "gradient_accumulation_steps": 3},
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("family", ["llama", "gpt2"])  # gpt2 has a tied head
def test_equals_whole_logits_up_to_rounding(family: str, case: str, tmp_path: Path) -> None:
    settings = {"max_steps": 4, **CASES[case]}
    offload = {**CHUNKED, "cpu_memory": "6MiB", "vertical_micro_batches": "together" in case}
    stock = train_stock(family, tmp_path / "stock", {}, **settings)
    assert_nearly_equal(train_offloaded(family, tmp_path / "ours", {}, offload=offload, **settings), stock)


def test_label_smoothing_ignores_the_router_loss_as_stock_does(tmp_path: Path) -> None:
    settings = {"max_steps": 2, "label_smoothing_factor": 0.3}
    router = {"output_router_logits": True, "router_aux_loss_coef": 1.0}
    stock = train_stock("mixtral", tmp_path / "stock", router, **settings)
    offload = {**CHUNKED, "cpu_memory": "16MiB", "gpu_memory": "8MiB"}
    assert_nearly_equal(train_offloaded("mixtral", tmp_path / "ours", router, offload=offload, **settings), stock)


def test_logits_of_a_finished_step_are_refused(tmp_path: Path) -> None:
    model = tiny_model("llama")
    accelerator = hf_lohan.Accelerator(
        cpu=True, lohan_plugin=hf_lohan.LohanPlugin(offload={**CHUNKED, "ssd": str(tmp_path)})
    )
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
    seen: list[Any] = []
    model.lm_head.register_forward_hook(lambda _, args, output: seen.append((args, output.shape)))
    outputs = model(**tiny_batch())
    with torch.no_grad():
        before = outputs.logits + 0
    accelerator.backward(outputs.loss)
    with torch.no_grad():
        assert torch.equal(outputs.logits + 0, before)
    assert len(seen) == 1 and seen[0][1] == before.shape
    optimizer.step()
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"head's weights had changed.* chunks.loss: false"):
        outputs.logits.argmax(-1)
    hf_lohan.engine_of(model).close()


@pytest.mark.parametrize("chunked", [True, "auto"])
def test_a_custom_forward_of_the_head_is_kept_or_refused(chunked: Any, tmp_path: Path) -> None:
    model = tiny_model("llama")
    head = model.lm_head
    head.forward = lambda hidden: torch.nn.functional.linear(hidden, head.weight) * 0.5
    expected = model(**tiny_batch()).loss.detach()
    plugin = hf_lohan.LohanPlugin(offload={**SMALL_BUDGETS, "chunks.loss": chunked, "ssd": str(tmp_path)})
    accelerator, optimizer = hf_lohan.Accelerator(cpu=True, lohan_plugin=plugin), torch.optim.SGD(model.parameters())
    if chunked is True:
        with pytest.raises(ValueError, match=r"is Linear with a replaced forward; set chunks\.loss"):
            accelerator.prepare(model, optimizer)
        return
    model, optimizer = accelerator.prepare(model, optimizer)
    assert torch.equal(model(**tiny_batch()).loss, expected)
    hf_lohan.engine_of(model).close()


def test_a_head_that_is_not_a_plain_linear_layer_is_refused(tmp_path: Path) -> None:
    class Head(torch.nn.Linear):
        pass

    model = tiny_model("llama")
    model.lm_head.__class__ = Head
    trainer = hf_lohan.Trainer(model, arguments(tmp_path), train_dataset=dataset(), offload=CHUNKED)
    with pytest.raises(ValueError, match=r"^chunks.loss: true needs a .* LlamaForCausalLM is Head; set"):
        trainer.train()
