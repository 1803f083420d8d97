"""The plan cuts layers into chunks only if a batch does not fit whole, and counts what chunks need."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engines import resolved
from planned_models import one_plan_alone
from transformers import AutoModelForCausalLM, GPT2Config, MistralConfig

import hf_lohan.cli.plan_request as plan_request
import hf_lohan.planning.tracing.chunk_trace as chunk_trace
import hf_lohan.planning.tracing.traced_blocks as traced_blocks
from hf_lohan.cli.plan_request import PlannedRun, PlanRequest, _cuttable, plan_run
from hf_lohan.hardware import read_hardware
from hf_lohan.planning import lay_out
from hf_lohan.planning.chunk_choice import ChunkChoice
from hf_lohan.planning.tracing.chunk_trace import LayersOnPaper
from hf_lohan.planning.tracing.traced_blocks import trace_blocks
from hf_lohan.testing.models import tiny_model

ROOT = Path(__file__).resolve().parents[2]
DESKTOP = ROOT / "configs/hardware/rtx4090_desktop.yaml"
LLAMA = str(ROOT / "configs/models/llama-3.1-8b")
GB = 10**9
KIB = 1024


def planned(
    monkeypatch: pytest.MonkeyPatch,
    *,
    ram_gb: int = 96,
    model: str = LLAMA,
    batch_size: int = 1,
    sequence_length: int,
    num_micro_batches: int = 1,
    offload: Any = "lohan",
) -> PlannedRun:
    hardware = read_hardware(str(DESKTOP))
    hardware = replace(hardware, cpu=replace(hardware.cpu, memory_bytes=ram_gb * GB))
    monkeypatch.setattr(plan_request, "read_hardware", lambda _path: hardware)
    request = PlanRequest(
        model=model,
        batch_size=batch_size,
        sequence_length=sequence_length,
        num_micro_batches=num_micro_batches,
        hardware="H.yaml",
        offload=offload,
    )
    with one_plan_alone():  # chunks are chosen before solvers are compared
        return plan_run(request)


def setting(folder: Path, value: str) -> str:
    path = folder / "lohan.yaml"
    path.write_text(f"chunks.layers: {value}\n", encoding="utf-8")
    return str(path)


@pytest.mark.covering(0)
@pytest.mark.parametrize(
    ("batch_size", "sequence_length"), [(8, 2048), pytest.param(1, 16384, marks=pytest.mark.slow), (1, 65536)]
)
def test_what_fits_whole_is_not_cut(
    batch_size: int, sequence_length: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sizes: dict[str, int] = {"batch_size": batch_size, "sequence_length": sequence_length}
    auto = planned(monkeypatch, **sizes)
    whole = planned(monkeypatch, **sizes, offload=setting(tmp_path, "false"))
    assert auto.plan.fits and auto.plan.chunk_tokens is None
    assert auto.plan.to_mapping() == whole.plan.to_mapping()


def test_what_fits_one_by_one_is_not_cut_to_run_together(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"sequence_length": 65_536, "num_micro_batches": 8, "ram_gb": 768}
    auto = planned(monkeypatch, **sizes)
    assert auto.plan.fits and auto.plan.chunk_tokens is None
    cut = planned(monkeypatch, **sizes, offload=setting(tmp_path, "16384"))
    together_s = cut.plan.other_order_step_s
    assert together_s is not None and 1.05 * together_s < auto.plan.prediction.step_s


@pytest.mark.parametrize(("room_bytes", "expected"), [(40_000, 32_768), (300, 256), (1, 256)])
def test_chunks_of_a_batch_that_fits_nowhere(room_bytes: int, expected: int) -> None:
    """With too little room on the drives smaller chunks do not help, and with too little on the device they may."""

    def profile(chunk_tokens: int | None) -> Any:
        layer = SimpleNamespace(input_bytes=0, working_bytes=chunk_tokens or 131_072, name="layer")
        return SimpleNamespace(layers=(layer,), blocks=(layer,))

    choice = ChunkChoice(
        setting="auto",
        batch_size=1,
        sequence_length=131_072,
        room_bytes=room_bytes,
        profile_of=profile,
        plan_of=lambda _tokens: SimpleNamespace(fits=False),  # type: ignore[arg-type, return-value]
    )
    assert choice.choose(None) == (expected, None)


@pytest.mark.slow
def test_a_quarter_of_a_million_tokens_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    found = planned(monkeypatch, sequence_length=262_144)
    plan, step = found.plan, found.plan.prediction
    assert plan.fits and plan.chunk_tokens is not None and 262_144 % plan.chunk_tokens == 0
    assert plan.to_mapping()["chunk_tokens"] == plan.chunk_tokens
    forward_s = found.profile.flops / found.hardware.device.flops_per_s
    assert 3 < (step.forward.compute_s + step.backward.compute_s) / forward_s < 4.6
    inputs_bytes = 32 * 262_144 * 4096 * 2
    assert found.profile.inter_block_bytes == inputs_bytes
    assert step.kept_bytes + step.swapped_bytes >= inputs_bytes
    assert sum(step.tier_bytes["gpu"].values()) <= 24 * GB


@pytest.mark.slow
def test_whole_layers_are_refused_with_the_setting_that_helps(
    llama_of_4_layers: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def plan_with(chunked_layers: str) -> Any:
        offload = setting(tmp_path, chunked_layers)
        return planned(monkeypatch, model=llama_of_4_layers, sequence_length=131_072, offload=offload).plan

    refusal = plan_with("false").refusal
    assert refusal is not None and refusal.endswith(", or set chunks.layers to auto")
    refusal = plan_with("100000").refusal
    assert refusal is not None
    assert plan_with(refusal.rpartition("set chunks.layers to at most ")[2]).fits


@pytest.mark.slow
def test_what_does_not_fit_in_any_chunks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = planned(monkeypatch, sequence_length=1_048_576).plan.refusal
    assert refusal is not None and "1 x 1048576 tokens in chunks of " in refusal
    assert "chunks.layers" not in refusal


@pytest.mark.parametrize(("length", "most_kib"), [(131_072, 60), pytest.param(524_288, 50, marks=pytest.mark.slow)])
def test_a_layer_in_chunks_needs_little(
    length: int, most_kib: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = planned(monkeypatch, sequence_length=length, offload=setting(tmp_path, "8192"))
    layer, whole = found.profile.layers[-1], planned(monkeypatch, sequence_length=2048).profile.layers[-1]
    assert layer.num_chunks == length // 8192
    assert layer.working_bytes / length <= most_kib * KIB < whole.working_bytes / 2048 / 4
    # Attention grows with the square of the length; all other FLOPs grow with the length.
    num_pairs = length * (length + 1) // 2
    assert layer.flops == 2 * layer.num_params * length - 4 * 4096 * length + 4 * 4096 * num_pairs
    query_keys_and_values = 2 * 4096 * (4096 + 2 * 1024)
    assert layer.repeated_flops == query_keys_and_values * (length - 8192)


def wide_gpt2(folder: Path) -> str:
    names = ("resid_pdrop", "embd_pdrop", "attn_pdrop")
    settings = {"n_embd": 5120, "n_layer": 8, "n_head": 40, "n_positions": 1024, "torch_dtype": "bfloat16"}
    GPT2Config(**settings, **dict.fromkeys(names, 0.1), architectures=["GPT2LMHeadModel"]).save_pretrained(folder)
    return str(folder)


def test_rows_are_cut_from_each_other_first_also_if_layers_have_dropout(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = wide_gpt2(tmp_path)
    found = planned(monkeypatch, model=model, batch_size=64, sequence_length=1024, ram_gb=768)
    assert found.plan.fits
    assert found.plan.chunk_tokens in (32 * 1024, 16 * 1024, 8 * 1024)


@pytest.mark.covering(0)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_trace_without_costs_of_chunks_has_the_same_memory(family: str) -> None:
    """The longest row depends on memory alone."""
    with torch.device("meta"):
        model = tiny_model(family, n_positions=2048) if family == "gpt2" else tiny_model(family)
    layout = lay_out(model, resolved(ROOT), working_dtype=torch.float32, hold_gradients=True)
    chunks = _cuttable(PlanRequest(model=""), model, layout)

    def traced(*, has_costs: bool) -> Any:
        on_paper = LayersOnPaper(chunks, 128, has_costs=has_costs)
        return trace_blocks(model, batch_size=1, sequence_length=1100, on_paper=on_paper).profile

    exact, rough = traced(has_costs=True), traced(has_costs=False)
    assert exact.layers[0].num_chunks == rough.layers[0].num_chunks == 9
    assert exact.layers[0].repeated_flops > 0
    for one, other in zip(exact.blocks, rough.blocks, strict=True):
        for name in ("input_bytes", "saved_bytes", "working_bytes", "num_chunks"):
            assert getattr(one, name) == getattr(other, name), name
        sizes = [[(operation.name, operation.output_bytes) for operation in of.operations] for of in (one, other)]
        assert sizes[0] == sizes[1]


@pytest.mark.slow
@pytest.mark.covering(0)
@pytest.mark.parametrize("has_costs", [True, False])
@pytest.mark.parametrize("window", [300, 512, 1030])
def test_few_chunks_stand_for_all_in_a_window(window: int, has_costs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores grow with the row until the window is full, and then no longer."""
    config = MistralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2,
        num_hidden_layers=2, sliding_window=window, attn_implementation="eager",
    )  # fmt: skip
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config)
    layout = lay_out(model, resolved(ROOT), working_dtype=torch.float32, hold_gradients=True)
    chunks = _cuttable(PlanRequest(model=""), model, layout)

    def traced() -> Any:
        on_paper = LayersOnPaper(chunks, 128, has_costs=has_costs)
        return trace_blocks(model, batch_size=1, sequence_length=20 * 128 - 50, on_paper=on_paper).profile.layers[0]

    few = traced()
    monkeypatch.setattr(traced_blocks, "_traced", {})
    monkeypatch.setattr(chunk_trace, "_sample", lambda num_chunks, has_costs: list(range(num_chunks)))
    every = traced()
    assert few.num_chunks == every.num_chunks == 20
    assert few.flops == pytest.approx(every.flops, rel=1e-6)
    sizes_of = [{one.name: one.output_bytes for one in layer.operations} for layer in (few, every)]
    assert sizes_of[0] == pytest.approx(sizes_of[1], rel=1e-6)
    assert few.working_bytes == every.working_bytes
