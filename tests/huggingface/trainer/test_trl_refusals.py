"""Settings that TRL's trainers cannot honour exactly are refused in one line when the trainer is built."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from hf_lohan.compat.trl_private import has_fused_head
from hf_lohan.testing.models import tiny_model

pytest.importorskip("trl")
import trl
import trl_runs
from tiny_tokenizer import tiny_tokenizer
from trl_runs import arguments, preferences, prompts, run

import hf_lohan.trl


def refusal(kind: str, args: Any, offload: Any = trl_runs.BUDGETS, **given: Any) -> str:
    if kind == "GRPO":
        given = {"reward_funcs": len, "train_dataset": prompts(), **given}
    else:
        given = {"train_dataset": preferences(), **given}
    with pytest.raises(ValueError) as refused:
        run(kind, args, offload=offload, **given)
    message = str(refused.value)
    assert "\n" not in message and ";" in message, "the message does not say what to do"
    return message


@pytest.mark.parametrize(
    ("kind", "settings", "words"),
    [
        ("DPO", {"sync_ref_model": True}, "sync_ref_model=True"),
        ("DPO", {"activation_offloading": True}, "activation_offloading=True"),
        ("SFT", {"model_init_kwargs": {"device_map": "auto"}}, "device_map='auto'"),
        ("GRPO", {"use_vllm": True}, "use_vllm=True"),
        ("GRPO", {"use_transformers_continuous_batching": True}, "use_transformers_continuous_batching=True"),
        ("GRPO", {"cast_lm_head_to_fp32": True}, "cast_lm_head_to_fp32=True"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_settings_that_need_all_weights_are_refused(
    kind: str, settings: dict[str, Any], words: str, checkpoint: Path, tmp_path: Path
) -> None:
    more = {"num_generations": 2} if kind == "GRPO" else {}
    assert words in refusal(kind, arguments(kind, tmp_path, **settings, **more), model=str(checkpoint))


@pytest.mark.parametrize(
    ("kind", "adapters", "words"),
    [("SFT", False, "TRL's fused head"), ("DPO", False, "TRL's fused head"), ("GRPO", True, "GRPO generates them")],
)
def test_micro_batches_that_cannot_run_together_are_refused(
    kind: str, adapters: bool, words: str, checkpoint: Path, tmp_path: Path
) -> None:
    if not adapters and not has_fused_head(getattr(trl, f"{kind}Trainer")):
        pytest.skip(f"TRL {trl.__version__} has no fused head, and joint micro-batches are exact")
    more = {"num_generations": 2} if kind == "GRPO" else {}
    message = refusal(
        kind,
        arguments(kind, tmp_path, gradient_accumulation_steps=2, **more),
        {**trl_runs.BUDGETS, "vertical_micro_batches": True},
        model=str(checkpoint),
        peft_config=trl_runs.lora() if adapters else None,
    )
    assert "vertical_micro_batches" in message and words in message


def test_a_quantized_model_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    args = arguments("SFT", tmp_path)
    assert "quantization_config" in refusal("SFT", args, model=str(checkpoint), quantization_config=object())


def test_a_reference_that_does_not_fit_with_the_policy_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    too_small = {"gpu_memory": "400KiB", "cpu_memory": "8MiB"}
    message = refusal("DPO", arguments("DPO", tmp_path), too_small, model=str(checkpoint))
    assert "the reference model, which may use 1/2 of gpu_memory and 1/4 of cpu_memory, does not fit:" in message


def test_a_reference_of_a_model_without_a_folder_is_refused(tmp_path: Path) -> None:
    message = refusal("DPO", arguments("DPO", tmp_path), model=tiny_model("llama"), processing_class=tiny_tokenizer())
    assert "from which to load its reference; pass ref_model=copy.deepcopy(model)" in message


def test_the_error_without_trl_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trl", None)
    with pytest.raises(ImportError, match=r"TRL is not installed; pip install hf-lohan\[trl\]"):
        importlib.reload(hf_lohan.trl)
