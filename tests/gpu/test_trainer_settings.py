"""With any of Trainer's settings, a run on CUDA equals the stock Trainer on the same device. On the double of the CUDA
runtime, which has the kernels of the CPU, the runs are bitwise equal. On a GPU they agree within `ON_A_GPU`, because
attention's backward sums in any order and torch's AdamW rounds differently on the GPU."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from covering import slow_but
from doubled_device import environment_of_double, find_double
from safetensors.torch import load_file
from torch import Tensor
from trainer_runs import Outcome, train
from transformers import AutoModelForCausalLM, TrainerCallback

import hf_lohan
from hf_lohan.model import hidden_matrices
from hf_lohan.testing.models import tiny_model

ROOT = Path(__file__).resolve().parents[2]
NUM_STEPS = 4
SMALL: dict[str, Any] = {"cpu_memory": "4MiB", "gpu_memory": "2MiB", "activations": "recompute", "commit_every": 1}
"""Two or three blocks fit on the device, and not all gradients fit on the host."""
ROOMY = {**SMALL, "cpu_memory": "64MiB", "gpu_memory": "16MiB", "activations": "keep"}
CHECKPOINTING = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}


@dataclass(frozen=True)
class Tolerances:
    """Relative tolerances for losses and norms, and an absolute one for weights. If a gradient is noise, AdamW may move
    its weight by the learning rate (1e-3) in any direction."""

    loss: float = 0.0
    norm: float = 0.0
    weight: float = 0.0


ON_A_GPU = Tolerances(1e-5, 1e-4, 1e-4)
ON_A_GPU_IN_BFLOAT16 = Tolerances(1e-2, 5e-2, 4e-3)


@dataclass(frozen=True)
class Setting:
    """TrainingArguments of both runs, and offload settings that override the small budgets."""

    arguments: dict[str, Any] = field(default_factory=dict)
    offload: dict[str, Any] = field(default_factory=dict)
    family: str = "llama"
    model: dict[str, Any] = field(default_factory=dict)
    tolerances: Tolerances = Tolerances()
    on_a_gpu: Tolerances = ON_A_GPU


def accumulated(number: int, **arguments: Any) -> dict[str, Any]:
    return {"gradient_accumulation_steps": number, **arguments}


LOGGED_LOSS = Tolerances(loss=1e-6)
"""The offloaded run sums the losses of a step before it adds them to the losses of earlier steps."""
NORM_OF_PARTS = Tolerances(norm=1e-5)
"""Stock takes one norm over all experts of a layer. The offloaded run combines the norms of single experts."""
SUMMED_DIFFERENTLY = Tolerances(loss=1e-5, norm=1e-4, weight=2e-5)
"""See tests/exactness/test_chunked_loss.py."""

SETTINGS = {
    "defer, clips": Setting({"max_grad_norm": 0.3}, {"_clip": "defer"}),
    "defer, does not clip": Setting({"max_grad_norm": 100.0}, {"_clip": "defer"}),
    "speculate, clips": Setting({"max_grad_norm": 0.3}, {"_clip": "speculate"}),
    "speculate, does not clip": Setting({"max_grad_norm": 100.0}, {"_clip": "speculate"}),
    "speculate, clips some": Setting({"max_grad_norm": 3.2}, {"_clip": "speculate"}),
    "in backward": Setting({"max_grad_norm": 0.0}),
    "decay and schedule": Setting({"weight_decay": 0.1, "lr_scheduler_type": "cosine", "warmup_steps": 2}),
    "accumulated": Setting(accumulated(3)),
    "accumulated, does not clip": Setting(accumulated(2, max_grad_norm=0.0)),
    "vertical, defer": Setting(
        accumulated(3, max_grad_norm=0.3), {"vertical_micro_batches": True, "_clip": "defer"}, tolerances=LOGGED_LOSS
    ),
    "vertical, speculate": Setting(
        accumulated(3), {"vertical_micro_batches": True, "_clip": "speculate"}, family="opt", tolerances=LOGGED_LOSS
    ),
    "vertical, in backward, swapped": Setting(
        accumulated(2, max_grad_norm=0.0),
        {"vertical_micro_batches": True, "activations": "swap", "cpu_memory": "6MiB"},
        tolerances=LOGGED_LOSS,
    ),
    "swap to RAM": Setting(offload={"activations": "swap", "cpu_memory": "32MiB"}),
    "swap to SSD": Setting({"per_device_train_batch_size": 4}, {"activations": "swap", "cpu_memory": "2MiB"}),
    "keep": Setting(offload={"activations": "keep"}),
    "the plan's choice": Setting({"max_steps": 6}, {"activations": "auto"}),
    "RAM as home": Setting(offload={"cpu_memory": "64MiB", "_resident_records": "auto", "commit_every": 3}),
    "checkpointing": Setting(CHECKPOINTING, {"activations": "auto"}),
    "dropout": Setting(family="opt", model={"dropout": 0.1}),
    "dropout, swapped": Setting(accumulated(2), {"activations": "swap"}, "opt", {"dropout": 0.1}),
    "tied": Setting(family="gpt2"),
    "chunked loss": Setting(
        accumulated(2), {"chunks.loss": True, "cpu_memory": "6MiB"}, tolerances=SUMMED_DIFFERENTLY
    ),
    "streamed experts": Setting(
        {"max_grad_norm": 0.0}, {"experts": "streamed", "gpu_memory": "1MiB"}, "qwen3_moe", tolerances=NORM_OF_PARTS
    ),
    "streamed experts, swapped": Setting(
        accumulated(2, max_grad_norm=0.0),
        {"experts": "streamed", "activations": "swap", "cpu_memory": "8MiB"},
        "mixtral",
        tolerances=NORM_OF_PARTS,
    ),
    "lazy experts": Setting(
        {"max_grad_norm": 0.0, "per_device_train_batch_size": 1},
        {"experts": "streamed", "experts.lazy": True, "gpu_memory": "1MiB"},
        "qwen3_moe",
        {"num_experts": 16},
        NORM_OF_PARTS,
    ),
    "experts with their layer": Setting(offload={"experts": "with_layer"}, family="qwen3_moe"),
}  # fmt: skip


SLOW = {
    "accumulated, does not clip",
    "vertical, speculate",
    "keep",
    "streamed experts, swapped",
    "lazy experts",
    "bfloat16, vertical",
    "bfloat16 experts",
    "bfloat16 states",
}
"""Settings that other settings nearly cover."""


@pytest.fixture(autouse=True)
def whole_float32_products() -> Any:
    previous = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = previous


def assert_within(ours: Outcome, expected: Outcome, exact: Tolerances, on_a_gpu: Tolerances) -> None:
    """Compare within `exact` on the double, and within `on_a_gpu` on a GPU."""
    bounds = exact if find_double() is not None else on_a_gpu
    assert len(ours.losses) == len(expected.losses) > 0
    assert_near(ours.losses, expected.losses, bounds.loss, "losses")
    assert_near(ours.norms, expected.norms, bounds.norm, "norms")
    assert ours.weights.keys() == expected.weights.keys()
    differing = {
        name: float((ours.weights[name] - weight).abs().max())
        for name, weight in expected.weights.items()
        if not is_near(ours.weights[name], weight, bounds.weight)
    }
    assert not differing


def assert_near(ours: list[float], expected: list[float], relative: float, what: str) -> None:
    assert all(abs(a - b) <= relative * abs(b) for a, b in zip(ours, expected, strict=True)), (what, ours, expected)


def is_near(ours: Tensor, expected: Tensor, absolute: float) -> bool:
    return bool(((ours - expected).abs() <= absolute).all())  # NaN gives False


@pytest.fixture(scope="module")
def stock_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Trains a stock run once for all settings with the same model and arguments."""
    outcomes: dict[str, Outcome] = {}

    def run(setting: Setting) -> Outcome:
        key = repr((setting.family, setting.model, setting.arguments))
        if key not in outcomes:
            folder = tmp_path_factory.mktemp("stock")
            outcomes[key] = train(folder, tiny_model(setting.family, **setting.model), **of_run(setting))
        return outcomes[key]

    return run


def of_run(setting: Setting) -> dict[str, Any]:
    return {"max_steps": NUM_STEPS, **setting.arguments}


def train_offloaded(folder: Path, setting: Setting, model: Any = None, **more: Any) -> Outcome:
    model = model or tiny_model(setting.family, **setting.model)
    return train(folder, model, offload={**SMALL, **setting.offload}, **{**of_run(setting), **more})


@pytest.mark.parametrize("name", slow_but(SETTINGS.keys() - SLOW, SETTINGS))
def test_a_run_equals_stock(name: str, stock_of: Any, tmp_path: Path) -> None:
    setting = SETTINGS[name]
    ours = train_offloaded(tmp_path, setting)
    assert_within(ours, stock_of(setting), setting.tolerances, setting.on_a_gpu)


@pytest.mark.parametrize("activations", ["inputs", "keep"])
def test_compiled_layers_equal_stocks(activations: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend compiles to torch's own operations, because the double has no compiler for its kernels."""
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "no")  # `TrainingArguments` sets it for the whole process
    monkeypatch.setenv("ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION", "1")
    compiled = Setting({"torch_compile": True, "torch_compile_backend": "aot_eager"}, {"activations": activations})
    ours = train_offloaded(tmp_path / "ours", compiled)
    stock = train(tmp_path / "stock", tiny_model("llama"), **of_run(compiled))
    assert_within(ours, stock, compiled.tolerances, ON_A_GPU)


ROUNDED = {
    "bfloat16": Setting({"bf16": True}),
    "bfloat16, swapped": Setting({"bf16": True}, {"activations": "swap"}),
    "bfloat16, vertical": Setting(
        accumulated(2, bf16=True), {"vertical_micro_batches": True, "cpu_memory": "6MiB"}, tolerances=LOGGED_LOSS
    ),
    "bfloat16 experts": Setting(
        {"bf16": True, "max_grad_norm": 0.0},
        {"experts": "streamed", "gpu_memory": "1MiB"},
        "qwen3_moe",
        tolerances=NORM_OF_PARTS,
    ),
    "int8 states": Setting(accumulated(2), {"optimizer_state_dtype": "int8", "_clip": "speculate"}),
    "bfloat16 states": Setting({"max_grad_norm": 0.3}, {"optimizer_state_dtype": "bfloat16"}),
}  # fmt: skip


@pytest.mark.parametrize("name", slow_but(ROUNDED.keys() - SLOW, ROUNDED))
def test_rounding_does_not_depend_on_placement(name: str, tmp_path: Path) -> None:
    """Compare with an offloaded run with large budgets, because stock rounds at other places (autocast, float32
    moments)."""
    setting = ROUNDED[name]
    kept = {key: value for key, value in setting.offload.items() if key == "optimizer_state_dtype"}
    roomy = train(tmp_path / "roomy", tiny_model(setting.family), offload={**ROOMY, **kept}, **of_run(setting))
    ours = train_offloaded(tmp_path / "small", setting)
    assert_within(ours, roomy, setting.tolerances, ON_A_GPU_IN_BFLOAT16)
    stock = train(tmp_path / "stock", tiny_model(setting.family), **of_run(setting))
    assert_near(ours.losses, stock.losses, 1e-2, "losses")


class MuonAndAdamW(torch.optim.Optimizer):
    """Combines the two stock optimizers into one for Trainer."""

    def __init__(self, model: torch.nn.Module, lr: float) -> None:
        matrices = hidden_matrices(model)
        of_layers = [p for p in model.parameters() if p in matrices]
        rest = [p for p in model.parameters() if p not in matrices]
        super().__init__([{"params": of_layers}, {"params": rest}], {"lr": lr})
        self._both = (
            torch.optim.Muon(of_layers, lr=lr, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(rest, lr=lr, weight_decay=0.0, fused=True),
        )

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for optimizer in self._both:
            optimizer.step()


@pytest.mark.parametrize("max_grad_norm", slow_but([0.3], [0.0, 0.3]))
def test_muon_equals_stock(max_grad_norm: float, tmp_path: Path) -> None:
    settings = {"max_steps": NUM_STEPS, "max_grad_norm": max_grad_norm, "lr_scheduler_type": "constant"}
    model = tiny_model("llama").cuda()
    stock = train(tmp_path / "stock", model, optimizers=(MuonAndAdamW(model, 1e-3), None), **settings)
    offload = {**SMALL, "cpu_memory": "8MiB", "gpu_memory": "4MiB", "optimizer": "muon"}
    ours = train(tmp_path / "ours", "llama", offload=offload, **settings)
    # Newton-Schulz runs in bfloat16, for which a GPU chooses kernels by shape and by timing.
    assert_within(ours, stock, Tolerances(), replace(ON_A_GPU, loss=1e-4, weight=4e-4))


@pytest.mark.parametrize("vertical", [False, True])
def test_adapters_equal_stock(vertical: bool, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")

    def model() -> Any:
        torch.manual_seed(1)
        config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM")
        return peft.get_peft_model(tiny_model("llama"), config)

    setting = Setting(accumulated(2), {"vertical_micro_batches": vertical, "cpu_memory": "6MiB"})
    stock = train(tmp_path / "stock", model(), **of_run(setting))
    exact = LOGGED_LOSS if vertical else Tolerances()
    assert_within(train_offloaded(tmp_path / "ours", setting, model()), stock, exact, ON_A_GPU)


@pytest.mark.parametrize("kind", ["SFT", "DPO"])
def test_trainers_of_trl_equal_stock(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("trl")
    import trl_runs

    checkpoint = trl_runs.save_checkpoint(tmp_path / "model")
    rows = trl_runs.texts() if kind == "SFT" else trl_runs.preferences()
    arguments = {"model": str(checkpoint), "train_dataset": rows}
    ours, stock = trl_runs.both(kind, tmp_path, {"use_cpu": False, "max_steps": 3}, lambda: dict(arguments))
    if find_double() is not None:
        trl_runs.assert_same(ours, stock)
        return
    assert_near(losses_in(ours.logs), losses_in(stock.logs), ON_A_GPU.loss, "losses")
    assert all(is_near(ours.weights[name], weight, ON_A_GPU.weight) for name, weight in stock.weights.items())


def losses_in(rows: list[dict[str, Any]]) -> list[float]:
    return [row["loss"] for row in rows if "loss" in row]


@pytest.mark.parametrize("family", slow_but(["qwen3_moe"], ["llama", "qwen3_moe"]))
def test_generation_from_the_store_equals_stock(family: str, tmp_path: Path) -> None:
    tiny_model(family, num_layers=6).save_pretrained(tmp_path / "model")
    prompt = torch.arange(5, 15, device="cuda").view(2, 5)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "model").cuda()
    model = hf_lohan.load_for_generation(
        tmp_path / "model",
        {"cpu_memory": "4MiB", "gpu_memory": "1200KiB", "ssd": str(tmp_path / "store"), "_resident_records": "none"},
        max_length=14,
        num_sequences=6,
    )
    engine = hf_lohan.engine_of(model)
    assert engine is not None
    try:
        for settings in ({"do_sample": False}, {"do_sample": True, "top_p": 0.9}, {"num_beams": 3}):
            ours, expected = (generated(either, prompt, settings) for either in (model, stock))
            assert torch.equal(ours.sequences, expected.sequences), settings
            bound = 0.0 if find_double() is not None else 1e-4
            assert all(is_near(a, b, bound) for a, b in zip(ours.logits, expected.logits, strict=True))
    finally:
        engine.close()


def generated(model: Any, prompt: Tensor, settings: dict[str, Any]) -> Any:
    torch.manual_seed(1)
    return model.generate(
        prompt, attention_mask=torch.ones_like(prompt), pad_token_id=0, eos_token_id=None, max_new_tokens=9,
        use_cache=True, output_logits=True, return_dict_in_generate=True, **settings,
    )  # fmt: skip


def environment_with(*paths: Path, **more: str) -> dict[str, str]:
    folders = [*map(str, paths), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(folders), **more}


def run_python(*arguments: object, environment: dict[str, str], status: int = 0) -> None:
    done = subprocess.run(
        [sys.executable, *map(str, arguments)], env=environment, capture_output=True, text=True, timeout=1800
    )
    assert done.returncode == status, done.stdout + done.stderr
    assert "VIOLATION" not in done.stderr, done.stderr


CLIPPED_BY_A_GUESS = Setting(accumulated(2, max_grad_norm=3.2), {"_clip": "speculate"}, "opt", {"dropout": 0.1})
DIES_AT_STEP = 3


def train_until_killed(folder: Path) -> None:
    """Train until this process kills itself."""

    class Dies(TrainerCallback):
        def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == DIES_AT_STEP:
                os.kill(os.getpid(), signal.SIGKILL)

    train_offloaded(folder, CLIPPED_BY_A_GUESS, callbacks=[Dies()], max_steps=6)


def test_a_run_resumes_after_a_killed_process(tmp_path: Path) -> None:
    """The commit of the last step includes the device's random state, which dropout needs."""
    program = (
        f"import pathlib, torch, test_trainer_settings; torch.set_num_threads({torch.get_num_threads()});"
        f"test_trainer_settings.train_until_killed(pathlib.Path({str(tmp_path / 'run')!r}))"
    )
    environment = environment_with(Path(__file__).parent, ROOT / "tests" / "shared")
    run_python("-c", program, environment=environment, status=-signal.SIGKILL)
    assert hf_lohan.last_step(tmp_path / "run") == DIES_AT_STEP
    resumed = train_offloaded(tmp_path / "run", CLIPPED_BY_A_GUESS, max_steps=6, resume="last_step")
    whole = train_offloaded(tmp_path / "whole", CLIPPED_BY_A_GUESS, max_steps=6)
    assert_within(resumed, whole, Tolerances(), ON_A_GPU)


def test_two_ranks_on_two_devices_equal_stock_with_accumulation(tmp_path: Path) -> None:
    """With whole embeddings and with rows of them. Both runs are in the same processes, because importing takes most of
    the time of a launch."""
    double = find_double()
    if double is None and torch.cuda.device_count() < 2:
        pytest.skip("needs two devices")
    two_devices = {} if double is None else environment_of_double(DEVICES=2)
    script = ROOT / "tests" / "huggingface" / "launch" / "trained_by_ranks.py"
    on_cuda = {"LOHAN_TEST_DEVICE": "cuda", "OMP_NUM_THREADS": "1"}
    alone = {"CUDA_VISIBLE_DEVICES": "0"} if double is None else {}
    run_python(script, tmp_path, "stock", environment=environment_with(**on_cuda, **alone))
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", 2)
    embeddings = ("whole", "rows")
    run_python(*launcher, script, tmp_path, *embeddings, environment=environment_with(**on_cuda, **two_devices))

    def outcome(what: str) -> Outcome:
        rows = json.loads((tmp_path / what / "facts.json").read_text())["log"]
        rows = [row for row in rows if "loss" in row]
        weights = load_file(tmp_path / what / "model.safetensors")
        return Outcome([row["loss"] for row in rows], [row["grad_norm"] for row in rows], weights)

    for embedding in embeddings:
        # The learning rate is ten times that of the other tests.
        assert_within(outcome(embedding), outcome("stock"), Tolerances(), replace(ON_A_GPU, weight=1e-3))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(1, 11))
@pytest.mark.usefixtures("double")
def test_late_copies_change_nothing(seed: int) -> None:
    """Run all tests above with copies that are up to 2 ms late, in another order for each seed."""
    late = environment_of_double(SEED=seed, ASYNC=1, POISON=1, RACES=1, COPY_DELAY_US=2000)
    others = ("-k", "not late_copies", __file__)
    run_python("-m", "pytest", "-q", "-p", "no:cacheprovider", *others, environment=environment_with(**late))
