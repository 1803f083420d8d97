"""Ranks that share rows have together the loss and the gradients of whole rows."""

from __future__ import annotations

import re
import threading
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor

from hf_lohan.activations import ActivationTiers
from hf_lohan.activations.layer_runs import RowMemory
from hf_lohan.activations.token_ranges import RowPieces
from hf_lohan.device import CpuDevice
from hf_lohan.huggingface.attention import run_layers_in_chunks
from hf_lohan.huggingface.sequences import ROWS, check_model_of_rows, cut_rows, own_parts, sharing_rows
from hf_lohan.ranks import Links, RanksDisagreeError, RowLinks
from hf_lohan.testing.models import VOCAB_SIZE, tiny_model
from hf_lohan.testing.thread_ranks import rank_outcomes, run_ranks

LENGTH = 61
_ONE_GENERATOR = threading.Lock()
"""Ranks are threads here, and all threads share torch's generator."""


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("length", [10, 61, 509])
def test_pieces_of_all_ranks_are_the_row_and_have_equal_work(length: int, num_ranks: int) -> None:
    tokens, pairs = [], []
    for number in range(num_ranks):
        pieces = RowPieces(length, number, num_ranks)
        own = [token for start, stop in pieces.ranges for token in range(start, stop)]
        assert pieces.num_tokens == len(own)
        assert pieces.take(torch.arange(length).unsqueeze(0)).tolist() == [own]
        for chunk_tokens in (None, 3):
            (chunks,) = pieces.cut(1, chunk_tokens)
            assert [token for chunk in chunks for token in range(chunk.start, chunk.stop)] == list(range(len(own)))
            assert [token for chunk in chunks for token in range(chunk.in_row.start, chunk.in_row.stop)] == own
        tokens += own
        pairs.append(sum(token + 1 for token in own))
    assert sorted(tokens) == list(range(length))
    assert max(pairs) - min(pairs) <= 2 * length


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_all_ranks_cut_a_batch_into_the_same_groups_of_rows(num_ranks: int) -> None:
    """Ranks wait for each other in each group, and some have a token more of each row than others."""
    for length in range(2 * num_ranks, 20):
        for chunk_tokens in range(1, 2 * length):
            cuts = [RowPieces(length, number, num_ranks).cut(2, chunk_tokens) for number in range(num_ranks)]
            groups = [[(chunks[0].first_row, chunks[0].last_row) for chunks in cut] for cut in cuts]
            assert groups == groups[:1] * num_ranks, (length, chunk_tokens)


def small_model(kind: str) -> Any:
    import transformers

    sizes: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "use_cache": False,
    }
    with _ONE_GENERATOR:
        torch.manual_seed(0)
        if kind == "gemma2":  # eager attention with soft caps, and windows in every other layer
            config: Any = transformers.Gemma2Config(**sizes, head_dim=8, sliding_window=9, attn_implementation="eager")
        elif kind == "mistral":
            config = transformers.MistralConfig(**sizes, sliding_window=9)
        elif kind == "gpt_oss":  # sinks, windows and experts
            config = transformers.GptOssConfig(
                **sizes, head_dim=8, num_local_experts=4, num_experts_per_tok=2, sliding_window=9
            )
        elif kind == "heads":
            sizes.update(hidden_size=28, num_attention_heads=7, num_key_value_heads=7)
            config = transformers.LlamaConfig(**sizes)
        else:
            config = transformers.LlamaConfig(**sizes)
        model = transformers.AutoModelForCausalLM.from_config(config)
        if kind == "lora":
            model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj", "up_proj"]))
            for name, parameter in model.named_parameters():
                if "lora_B" in name:  # which begins with zeros, and lora_A would have no gradient
                    torch.nn.init.normal_(parameter, std=0.02)
        return model.train()


def batch_of(kind: str, *, with_mask: bool) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(5, VOCAB_SIZE, (2, LENGTH), generator=generator)
    labels = ids.clone()
    labels[1, :17] = -100
    batch = {"input_ids": ids, "labels": labels}
    if kind == "packed":
        lengths = ((20, 3, 38), (1, 50, 10))
        batch["position_ids"] = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    elif kind == "padded":
        batch["attention_mask"] = (torch.arange(LENGTH) < torch.tensor([[LENGTH], [40]])).long()
    elif with_mask:
        batch["attention_mask"] = torch.ones_like(ids)
    return batch


def gradients_of_rank(links: Links, models: list[Any], batch: dict[str, Tensor], chunk_tokens: int | None) -> Any:
    model, num_ranks = models[links.ranks.rank], links.ranks.num_ranks
    activations = ActivationTiers(CpuDevice(), {})
    memory = RowMemory(RowLinks(links, num_ranks), CpuDevice())
    layers = {layer: name for name, layer in model.named_modules() if re.search(r"model\.layers\.\d+$", name)}
    assert len(layers) == 2
    run_layers_in_chunks(model, activations, layers, memory).cut(chunk_tokens)
    found = []
    for part in (batch, {name: value[:1, : LENGTH - 7] for name, value in batch.items()}, batch):
        own = cut_rows(part, links.ranks.rank, num_ranks)
        rows = own.pop(ROWS)
        items = (part["labels"][:, 1:] != -100).sum()
        with sharing_rows(model, rows, own["shift_labels"]):
            loss = model(**own, num_items_in_batch=items).loss
        loss.backward()
        found.append((loss.detach(), [parameter.grad for parameter in model.parameters()]))
        model.zero_grad()
    activations.close()
    return found


CASES = ["llama", "packed", "padded", "mistral", "gemma2", "gpt_oss", "heads", "lora"]


@pytest.mark.covering(0)
@pytest.mark.parametrize(("num_ranks", "chunk_tokens"), [(2, None), (3, None), (2, 7)])
@pytest.mark.parametrize("kind", CASES)
def test_ranks_have_together_what_one_process_has(kind: str, num_ranks: int, chunk_tokens: int | None) -> None:
    batch = batch_of(kind, with_mask=num_ranks == 2)
    models = [small_model(kind) for _ in range(num_ranks)]  # ranks are threads, which share torch's generator
    of_ranks = run_ranks(num_ranks, lambda links: gradients_of_rank(links, models, batch, chunk_tokens))
    model = small_model(kind)
    for number, part in enumerate((batch, {name: value[:1, : LENGTH - 7] for name, value in batch.items()}, batch)):
        loss = model(**part).loss
        loss.backward()
        losses, gradients = zip(*(found[number] for found in of_ranks), strict=True)
        assert sum(losses) == pytest.approx(float(loss), abs=1e-6)
        for (name, parameter), *parts in zip(model.named_parameters(), *gradients, strict=True):
            if not parameter.requires_grad:
                assert parts == [None] * num_ranks
                continue
            total = torch.stack([torch.zeros_like(parameter) if part is None else part for part in parts]).sum(0)
            scale = float(parameter.grad.abs().max())
            assert torch.allclose(total, parameter.grad, rtol=0, atol=3e-6 * max(scale, 1e-2)), name
        model.zero_grad()


def test_a_rank_in_another_layer_ends_all() -> None:
    def meet(links: Links) -> None:
        RowLinks(links, 2).barrier(f"the keys of layer {links.ranks.rank}")

    outcomes = rank_outcomes(2, meet)
    assert any(isinstance(outcome.error, RanksDisagreeError) for outcome in outcomes)
    assert all("the keys of layer" in str(outcome.error) for outcome in outcomes)


def test_two_rows_of_two_ranks_do_not_wait_for_each_other() -> None:
    def meet(links: Links) -> list[bytes]:
        shared = RowLinks(links, 2)
        found = shared.all_gather("the numbers", str(links.ranks.rank).encode())
        if links.ranks.rank < 2:  # the others meet only once
            found += shared.all_gather("the numbers", b"again")
        return found

    found = run_ranks(4, meet)
    assert found == [[b"0", b"1", b"again", b"again"]] * 2 + [[b"2", b"3"]] * 2


@pytest.mark.parametrize("changed", ["labels", None])
def test_ranks_of_a_row_with_different_batches_are_refused(changed: str | None) -> None:
    """Each would attend to keys of other tokens than its own row has."""

    def cut(links: Links) -> list[dict[str, Any]]:
        batches = [batch_of("llama", with_mask=True) for _ in range(2)]
        if changed is not None and links.ranks.rank == 1:
            batches[1][changed][0, -1] = 0
        return list(own_parts(batches, RowLinks(links, 2)))

    outcomes = rank_outcomes(2, cut)
    if changed is not None:
        assert any(isinstance(outcome.error, RanksDisagreeError) for outcome in outcomes)
        assert all("they have different batches" in str(outcome.error) for outcome in outcomes)
        return
    for rank, outcome in enumerate(outcomes):
        assert outcome.result is not None, outcome.error
        assert [part["input_ids"].shape[1] for part in outcome.result] == [31 - rank] * 2


@pytest.mark.parametrize(
    ("batch", "told"),
    [
        ({"pixel_values": torch.zeros(1)}, "this batch has the input 'pixel_values'"),
        ({"input_ids": torch.zeros(1, 3, dtype=torch.long)}, "a row of this batch has 3 tokens"),
        ({"attention_mask": torch.tensor([[0, 1, 1, 1, 1, 1]])}, "begins with padding"),
        ({"position_ids": torch.zeros(3, 1, 6)}, re.escape("have shape (3, 1, 6)")),
        ({"labels": None}, "no input_ids"),
    ],
)
def test_batches_that_cannot_be_cut_are_refused(batch: dict[str, Any], told: str) -> None:
    ids = torch.zeros(1, 6, dtype=torch.long)
    with pytest.raises(ValueError, match=f"ranks.per_row: 2 (divides|needs) .*{told}"):
        cut_rows({"input_ids": ids, "labels": ids, **batch}, 0, 2)


@pytest.mark.parametrize(
    ("family", "changes", "told"),
    [
        ("gpt2", {"attn_pdrop": 0.0, "embd_pdrop": 0.1}, "has dropout"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "'dynamic'"),
        ("mixtral", {"output_router_logits": True}, "output_router_logits"),
    ],
)
def test_models_that_need_all_tokens_are_refused(family: str, changes: dict[str, Any], told: str) -> None:
    with _ONE_GENERATOR:
        model = tiny_model(family, **changes)
    with pytest.raises(ValueError, match=f"ranks.per_row cannot divide the rows of {type(model).__name__}.*{told}"):
        check_model_of_rows(model)


def test_a_layer_that_carries_state_along_tokens_is_refused_by_name() -> None:
    import transformers

    def run(links: Links) -> None:
        with _ONE_GENERATOR:
            model = transformers.MambaForCausalLM(
                transformers.MambaConfig(vocab_size=VOCAB_SIZE, hidden_size=16, num_hidden_layers=1, state_size=4)
            ).train()
        memory = RowMemory(RowLinks(links, 2), CpuDevice())
        layers = {layer: f"backbone.layers.{number}" for number, layer in enumerate(model.backbone.layers)}
        run_layers_in_chunks(model, ActivationTiers(CpuDevice(), {}), layers, memory)
        own = cut_rows(batch_of("llama", with_mask=False), links.ranks.rank, 2)
        rows = own.pop(ROWS)
        del own["position_ids"]
        with sharing_rows(model, rows, own["shift_labels"]):
            model(**own)

    with pytest.raises(ValueError, match=r"ranks.per_row cannot divide the tokens of MambaBlock layers"):
        run_ranks(2, run)


def test_a_training_forward_of_whole_rows_is_refused() -> None:
    def run(links: Links) -> None:
        model = small_model("llama")
        memory = RowMemory(RowLinks(links, 2), CpuDevice())
        run_layers_in_chunks(model, ActivationTiers(CpuDevice(), {}), {}, memory)
        model(**batch_of("llama", with_mask=False))

    with pytest.raises(ValueError, match=r"ranks\.per_row: 2 divides the rows of a Trainer's batches"):
        run_ranks(2, run)
