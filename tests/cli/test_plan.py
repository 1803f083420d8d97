"""`lohan plan` and `lohan estimate` print plans, predict the LoHan paper's table and refuse bad input."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from planned_models import DESKTOP, LLAMA_8B, PAPER, drives, estimate, hardware_file, plan, planned, runner
from rich.console import Console
from transformers import OPTConfig

import hf_lohan.cli.plan_request as plan_request
from hf_lohan.cli import app, plan_report
from hf_lohan.cli.plan_report import print_plan
from hf_lohan.cli.plan_request import PlanRequest
from hf_lohan.config import ResolvedConfig
from hf_lohan.costs import HardwareProfile
from hf_lohan.hardware import read_hardware
from hf_lohan.planning import shared_machine
from hf_lohan.testing.models import tiny_config
from hf_lohan.wording import drive_bytes

MEASURED_TFLOPS = {1: 70.3, 2: 111.7, 3: 136.3, 6: 151.5, 12: 148.2}
KEYS = {
    *("step_s", "forward_s", "backward_s", "bottleneck", "tflops", "swapped_bytes", "spilled_bytes"),
    *("recomputed_flops", "fits", "tier_bytes", "ssd_write_bytes_per_step"),
}


def test_predictions_match_the_table_of_the_paper(model_13b: str, tmp_path: Path) -> None:
    """LoHan keeps all state on the SSDs, and runs all updates in backward.

    The logits of this batch need a device of 80 GB. With this `gpu_memory`, kept activations get the room that they
    have on 24 GB.
    """
    all_on_ssd = tmp_path / "lohan.yaml"
    all_on_ssd.write_text("_resident_records: none\n_parked: 0\nactivations: auto\ngpu_memory: 11GB\n")
    errors = []
    for num_drives, measured_tflops in MEASURED_TFLOPS.items():
        hardware = hardware_file(tmp_path / "hardware.yaml", ssd=drives(num_drives), device={"memory_bytes": "80GB"})
        values = planned(model_13b, "--hardware", hardware, "--offload", all_on_ssd, batch_size=64)
        errors.append(abs(values["tflops"] / measured_tflops - 1))
    assert max(errors) < 0.15
    assert math.fsum(errors) / len(errors) < 0.08


def test_the_model_is_an_argument_or_an_option(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    requests: list[Any] = []
    monkeypatch.setattr(plan_report, "run_plan", lambda request, **_options: requests.append(request))
    sizes = ["--batch-size", "1", "--seq-len", "16", "--hardware", str(DESKTOP)]
    for model in (["--model", tiny], [tiny]):
        assert runner.invoke(app, ["plan", *model, *sizes]).exit_code == 0
    assert requests[0] == requests[1] and requests[0].model == tiny
    for models in ([], [tiny, "--model", tiny]):
        refused = runner.invoke(app, ["plan", *models, *sizes])
        assert refused.exit_code == 2 and refused.stderr.startswith("error: ") and "give one:" in refused.stderr


def test_default_settings_are_automatic_and_paper_puts_all_state_on_the_ssds(tiny: str, tmp_path: Path) -> None:
    automatic, all_on_ssd = tmp_path / "auto.yaml", tmp_path / "paper.yaml"
    automatic.write_text("_resident_records: auto\n")
    all_on_ssd.write_text("_resident_records: none\n")
    sizes = {"batch_size": 1, "seq_len": 16}
    default = planned(tiny, "--hardware", DESKTOP, **sizes)
    assert default == planned(tiny, "--hardware", DESKTOP, "--offload", automatic, **sizes)
    paper = planned(tiny, "--hardware", DESKTOP, "--paper", **sizes)
    assert paper == planned(tiny, "--hardware", DESKTOP, "--offload", all_on_ssd, **sizes)
    assert paper["ssd_read_bytes_per_step"] > default["ssd_read_bytes_per_step"]
    estimates = [
        json.loads(estimate(tiny, "--hardware", DESKTOP, "--json", *more).stdout) for more in ([], ["--paper"])
    ]
    assert estimates[1]["ssd_read_bytes_per_step"] > estimates[0]["ssd_read_bytes_per_step"]


def test_json_has_all_figures(model_13b: str) -> None:
    values = planned(model_13b, "--hardware", PAPER)
    assert values.keys() >= KEYS
    assert values["step_s"] == pytest.approx(values["forward_s"] + values["backward_s"])
    assert values["fits"] is True
    assert values["fits_without_offloading"] is False
    assert values["refusal"] is None
    assert values["tier_bytes"].keys() == {"gpu", "cpu", "ssd"}
    assert values["ssd_read_bytes_per_step"] >= 0, "everything fits in RAM"
    assert 0 < sum(values["tier_bytes"]["gpu"].values()) <= 24e9
    assert sum(values["tier_bytes"]["cpu"].values()) <= 768e9 * 0.6
    assert values["model_flops"] == pytest.approx(6 * 12.85e9 * 16 * 1024, rel=0.05), "6 FLOPs per weight and token"


def test_tables_name_the_bottleneck_and_the_nearest_changes(model_of_4_layers: str) -> None:
    result = plan(model_of_4_layers, "--hardware", PAPER, "--paper", with_changes=True)
    assert result.exit_code == 0, result.stderr
    for text in (
        "OPTForCausalLM, 1.53 billion parameters, bfloat16; batch 16 x 1024 tokens",
        "bound by the SSDs",
        "tokens/s",
        "forward",
        "backward",
        "writing",
        "working set",
        "% of forward's FLOPs",
        "they last",
        "one more SSD like the first",
        "optimizer_state_dtype: bfloat16 (rounds)",
        "optimizer_state_dtype: int8 (rounds)",
        "stochastic_rounding: true (rounds)",
    ):
        assert text in result.stdout
    assert "fits without offloading" not in result.stdout


def test_a_model_that_fits_without_offloading_is_reported(tiny: str) -> None:
    result = plan(tiny, "--hardware", PAPER, batch_size=1, seq_len=16)
    assert "The model fits without offloading" in result.stdout
    assert planned(tiny, "--hardware", PAPER, batch_size=1, seq_len=16)["fits_without_offloading"] is True


def test_options_change_the_plan(model_of_4_layers: str, tmp_path: Path) -> None:
    one, four = (planned(model_of_4_layers, "--hardware", PAPER, "--gradient-accumulation-steps", n) for n in (1, 4))
    assert four["num_tokens"] == 4 * one["num_tokens"]
    assert planned(model_of_4_layers, "--hardware", PAPER, "--max-grad-norm", 0)["clip"] == "none"
    assert one["clip"] in ("defer", "speculate")
    float32 = planned(model_of_4_layers, "--hardware", PAPER, "--dtype", "float32")
    assert float32["tier_bytes"]["gpu"]["slots"] == 2 * one["tier_bytes"]["gpu"]["slots"]
    offload = tmp_path / "offload.yaml"
    offload.write_text("gpu_memory: 12GB\ncpu_memory: 100GB\ndurability: checkpoint\n")
    values = planned(model_of_4_layers, "--hardware", PAPER, "--offload", offload)
    assert sum(values["tier_bytes"]["cpu"].values()) <= 100e9
    assert values["durability"] == "checkpoint"


def test_the_limit_of_a_container_is_for_plans_of_this_machine(
    tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_machine, "host_memory_limit_bytes", lambda: 1 << 30)
    offload = tmp_path / "offload.yaml"
    offload.write_text("cpu_memory: 4GiB\n")
    assert plan(tiny, "--hardware", PAPER, "--offload", offload, batch_size=1, seq_len=16).exit_code == 0
    refused = plan(tiny, "--offload", offload, batch_size=1, seq_len=16)
    assert "cpu_memory: 4 GiB is more than the 1 GiB" in refused.stderr


def test_only_adapters_are_written(tiny: str, tmp_path: Path) -> None:
    """The records of adapters are float32 weights and two moments. The base is read and never written."""
    offload = tmp_path / "offload.yaml"
    offload.write_text("_resident_records: none\n")
    options = ("--hardware", PAPER, "--offload", offload)
    full = planned(tiny, *options, batch_size=1, seq_len=16)
    lora = planned(tiny, *options, "--lora-rank", 2, batch_size=1, seq_len=16)
    assert 0 < lora["ssd_write_bytes_per_step"] < full["ssd_write_bytes_per_step"]
    assert sum(lora["tier_bytes"]["ssd"].values()) < sum(full["tier_bytes"]["ssd"].values())
    printed = plan(tiny, *options, "--lora-rank", 2, batch_size=1, seq_len=16).stdout
    assert "PeftModelForCausalLM" in printed
    refused = plan(tiny, *options, "--lora-rank", 0, batch_size=1, seq_len=16)
    assert "the rank of LoRA is 0; it must be at least 1" in refused.stderr


@pytest.mark.usefixtures("equal_requests_planned_once")
def test_vertical_micro_batches_move_weights_once(model_13b: str, tmp_path: Path) -> None:
    """They move the bytes of one batch of their total size, with a smaller working set."""
    OPTConfig.from_pretrained(model_13b, dropout=0.0).save_pretrained(model_13b)
    offload = tmp_path / "vertical.yaml"
    offload.write_text("vertical_micro_batches: true\n_resident_records: none\n")
    options = ("--hardware", PAPER, "--offload", offload)
    in_one = planned(model_13b, *options, batch_size=32)
    together = planned(model_13b, *options, "--gradient-accumulation-steps", 4, batch_size=8)
    assert together["num_together"] == 4
    moved = ("ssd_read_bytes_per_step", "ssd_write_bytes_per_step", "num_tokens", "model_flops", "clip")
    assert {name: together[name] for name in moved} == {name: in_one[name] for name in moved}
    pools, pools_in_one = together["pools"], in_one["pools"]
    assert pools["num_slots"] == pools_in_one["num_slots"]
    assert (pools["gradients_per_buffer"], pools_in_one["gradients_per_buffer"]) == (1, 2)  # sums are float32
    assert together["tier_bytes"]["gpu"]["working_set"] < in_one["tier_bytes"]["gpu"]["working_set"]
    assert together["kept_bytes"] >= in_one["kept_bytes"]
    assert together["step_s"] <= 1.001 * in_one["step_s"], "float32 sums take longer on the link from the device"
    printed = plan(model_13b, *options, "--gradient-accumulation-steps", 4, batch_size=8).stdout
    assert "batch 8 x" in printed and "4 accumulated vertically" in printed


@pytest.mark.usefixtures("equal_requests_planned_once")
def test_accumulated_micro_batches_run_together_if_that_is_faster() -> None:
    options = ("--hardware", DESKTOP, "--gradient-accumulation-steps", 32)
    values = planned(LLAMA_8B, *options, batch_size=16)
    assert values["fits"] and values["num_together"] == 32 and values["num_micro_batches"] == 1
    assert values["other_order_step_s"] > 1.05 * values["step_s"]
    printed = plan(LLAMA_8B, *options, batch_size=16).stdout
    assert "32 accumulated vertically" in printed and "The micro-batches run together; one after the other" in printed


def test_a_device_that_is_slow_enough_hides_the_ssds_from_one_token_on(tiny: str, tmp_path: Path) -> None:
    slow = hardware_file(tmp_path / "slow.yaml", DESKTOP, device={"flops_per_s": 1e6})
    assert "From one token per step on, computing hides the SSDs" in estimate(tiny, "--hardware", slow).stdout


@pytest.mark.slow
@pytest.mark.usefixtures("equal_requests_planned_once")
def test_the_nearest_changes_are_planned_like_the_run(tmp_path: Path) -> None:
    offload = tmp_path / "offload.yaml"
    offload.write_text("_clip: auto\n")
    options = ("--hardware", DESKTOP, "--offload", offload)
    values = planned(LLAMA_8B, *options, batch_size=8, with_changes=True)
    assert values["times_slower_than_hidden"] == pytest.approx(values["step_s"] / values["ssd_hidden_step_s"])
    assert values["ssd_hides_from_tokens"] > values["num_tokens"] and values["times_slower_than_hidden"] > 2
    assert values["drive_life"]["tokens"] == pytest.approx(values["drive_life"]["steps"] * values["num_tokens"])
    changes = {change["description"]: change for change in values["nearest_changes"]}
    assert len(changes) == 3 and all(change["times_faster"] > 1 for change in changes.values())
    more = next(description for description in changes if description.startswith("gradient_accumulation_steps="))
    steps = int(more.partition("=")[2])
    again = planned(LLAMA_8B, *options, "--gradient-accumulation-steps", steps, batch_size=8)
    assert again["tokens_per_s"] == pytest.approx(changes[more]["tokens_per_s"])
    assert again["num_tokens"] >= values["ssd_hides_from_tokens"]
    roomy = hardware_file(tmp_path / "roomy.yaml", DESKTOP, cpu={"memory_bytes": "128GB"})
    with_ram = planned(LLAMA_8B, "--hardware", roomy, "--offload", offload, batch_size=8)
    ram = next(change for description, change in changes.items() if description.startswith("twice the RAM"))
    assert with_ram["tokens_per_s"] == pytest.approx(ram["tokens_per_s"], rel=1e-3)
    printed = plan(LLAMA_8B, *options, batch_size=8, with_changes=True).stdout
    for text in (more, "twice the RAM", "one more SSD", "tokens/s"):
        assert text in printed


def test_the_reason_why_micro_batches_run_one_after_the_other_is_printed(tmp_path: Path) -> None:
    tiny_config("opt", dropout=0.1).save_pretrained(tmp_path)
    options = ("--hardware", DESKTOP, "--gradient-accumulation-steps", 8)
    printed = plan(str(tmp_path), *options, batch_size=1, seq_len=16).stdout
    assert "The micro-batches run one after the other: the model draws random numbers (dropout" in printed
    (tmp_path / "together.yaml").write_text("vertical_micro_batches: true\n")
    refused = plan(str(tmp_path), *options, "--offload", tmp_path / "together.yaml", batch_size=1, seq_len=16)
    assert refused.exit_code == 2
    assert "true would draw the model's random numbers (dropout=0.1)" in refused.stderr


def test_smaller_state_dtypes_shrink_the_store_and_the_step(model_of_4_layers: str, tmp_path: Path) -> None:
    values = {}
    for dtype in ("float32", "bfloat16", "int8"):
        offload = tmp_path / f"{dtype}.yaml"
        offload.write_text(f"optimizer_state_dtype: {dtype}\n_resident_records: none\nactivations: recompute\n")
        values[dtype] = planned(model_of_4_layers, "--hardware", PAPER, "--offload", offload, batch_size=8)
    num_params = values["int8"]["num_params"]
    stored = {dtype: sum(value["tier_bytes"]["ssd"].values()) for dtype, value in values.items()}
    assert stored["float32"] - stored["bfloat16"] == pytest.approx(2 * 4 * num_params, rel=0.01)
    assert stored["float32"] - stored["int8"] == pytest.approx(2 * 5.75 * num_params, rel=0.01)
    written = {dtype: value["ssd_write_bytes_per_step"] for dtype, value in values.items()}
    assert written["float32"] - written["int8"] == pytest.approx(5.75 * num_params, rel=0.01)
    assert values["int8"]["step_s"] < values["bfloat16"]["step_s"] < values["float32"]["step_s"]


def test_durability_is_checkpoint_if_two_versions_of_the_state_do_not_fit(
    model_of_4_layers: str, tmp_path: Path
) -> None:
    hardware = hardware_file(tmp_path / "hardware.yaml", ssd=drives(1, capacity_bytes="30GB"))
    assert planned(model_of_4_layers, "--hardware", PAPER)["durability"] == "step"
    assert planned(model_of_4_layers, "--hardware", hardware)["durability"] == "checkpoint"


@pytest.mark.usefixtures("equal_requests_planned_once")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device": {"memory_bytes": "5GB"}}, "use a batch size of at most"),
        ({"ssd": drives(1, capacity_bytes="20GB")}, "give the SSDs"),
        ({"cpu": {"memory_bytes": "64MB"}}, "set cpu_memory to at least"),
        ({"device": {"memory_bytes": "1GB"}}, "gpu_memory"),
    ],
)
def test_a_refusal_says_what_to_change(
    model_of_4_layers: str, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    hardware = hardware_file(tmp_path / "hardware.yaml", **changes)
    result = plan(model_of_4_layers, "--hardware", hardware)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    names_longest = "; the longest row that fits, alone in its batch, has 4096 tokens\n" in result.stderr
    assert names_longest == ("batch size" in message), "a shorter row helps only if the batch is too large"
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""
    result = plan(model_of_4_layers, "--hardware", hardware, "--json")
    assert result.exit_code == 2
    values = json.loads(result.stdout)
    assert values["fits"] is False
    assert message in values["refusal"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--batch-size", "0"], "the batch size is 0; it must be at least 1"),
        (["--seq-len", "-3"], "the sequence length is -3"),
        (["--gradient-accumulation-steps", "0"], "gradient accumulation steps is 0"),
        (["--max-grad-norm", "-1"], "max_grad_norm is -1.0; give 0"),
        (["--dtype", "float16"], "dtype='float16' cannot be trained"),
        (["--model", "nowhere"], "'nowhere' is not a folder here"),
        (["--hardware", "nowhere.yaml"], "nowhere.yaml"),
        (["--offload", "nowhere.yaml"], "nowhere.yaml"),
        (["--plot", "picture.txt3"], "picture.txt3"),
    ],
)
def test_bad_values_are_reported_in_one_line(tiny: str, options: list[str], message: str) -> None:
    result = plan(tiny, "--hardware", PAPER, *options, batch_size=1, seq_len=8)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.covering(0)
@pytest.mark.parametrize("shares_cpu", [False, True])
def test_plot_writes_a_picture(model_of_4_layers: str, tmp_path: Path, shares_cpu: bool) -> None:
    hardware = hardware_file(tmp_path / "hardware.yaml", ssd=drives(3), device={"shares_cpu": shares_cpu})
    picture = tmp_path / "plan.png"
    result = plan(model_of_4_layers, "--hardware", hardware, "--plot", picture)
    assert result.exit_code == 0, result.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert ("copies to the device" in result.stdout) == shares_cpu


@pytest.mark.slow
def test_the_longest_row_fits_and_a_longer_one_does_not(tmp_path: Path) -> None:
    whole = tmp_path / "whole.yaml"
    whole.write_text("chunks.layers: false\n")
    machine = ("--hardware", DESKTOP, "--offload", whole)
    options: dict[str, Any] = {"batch_size": 1, "with_changes": True}
    values = json.loads(plan(LLAMA_8B, *machine, "--json", seq_len=2048, **options).stdout)
    longest = values["longest_tokens"]
    assert 32768 < longest < 131072 and not values["longest_tokens_is_longest_tried"]
    assert planned(LLAMA_8B, *machine, batch_size=1, seq_len=longest)["fits"]
    assert plan(LLAMA_8B, *machine, batch_size=1, seq_len=int(1.02 * longest)).exit_code == 2
    arguments = ["estimate", LLAMA_8B, *map(str, machine), "--batch-size", "1", "--seq-len", "2048"]
    assert (
        f"The longest row that fits, alone in its batch, has {longest} tokens" in runner.invoke(app, arguments).stdout
    )


def test_an_epoch_of_lengths_is_planned(tiny: str, tmp_path: Path) -> None:
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("16\n64\n8\n8\n")
    options = ("--hardware", DESKTOP, "--lengths", lengths)
    sizes: dict[str, Any] = {"batch_size": 2, "seq_len": None}
    epoch = planned(tiny, *options, **sizes)["epoch"]
    assert [one["num_tokens"] for one in epoch["classes"]] == [64, 8]
    long_s, short_s = (planned(tiny, "--hardware", DESKTOP, batch_size=2, seq_len=size)["step_s"] for size in (64, 8))
    assert epoch["epoch_s"] == pytest.approx(long_s + short_s)
    assert (epoch["num_tokens"], epoch["num_padded_tokens"], epoch["num_packed_rows"]) == (96, 144, 2)
    printed = plan(tiny, *options, **sizes).stdout
    assert "An epoch of 4 rows with 96 tokens has 2 steps" in printed and "Packed into 2 rows of 64 tokens" in printed
    assert planned(tiny, *options, batch_size=2, seq_len=96)["epoch"]["num_packed_rows"] == 1
    for refused, message in (
        (plan(tiny, *options, seq_len=32), "--seq-len 32 is shorter than the longest row of --lengths, which has 64"),
        (plan(tiny, *options, "--lengths", "nowhere.txt", **sizes), "nowhere.txt"),
        (plan(tiny, **sizes), "neither --seq-len nor --lengths is given"),
    ):
        assert refused.exit_code == 2 and message in refused.stderr and refused.stderr.count("\n") == 1
    lengths.write_text("16\nmany\n")
    assert f"line 2 of {lengths} is 'many'" in plan(tiny, *options, **sizes).stderr


@pytest.mark.slow
@pytest.mark.parametrize("bound_by", ["link", "cpu"])
def test_bars_fit_in_80_columns_next_to_the_longest_bottlenecks(tiny: str, bound_by: str) -> None:
    run = plan_request.plan_run(PlanRequest(model=tiny, batch_size=1, sequence_length=16, hardware=str(DESKTOP)))
    phases = {"forward_bottleneck": bound_by, "backward_bottleneck": bound_by}
    bound = replace(run, plan=replace(run.plan, prediction=replace(run.plan.prediction, **phases)))
    console = Console(width=80, record=True, file=StringIO())
    print_plan(bound, console)
    printed = console.export_text()
    assert "…" not in printed
    assert "share of the step" in printed


def test_without_a_hardware_file_this_machine_is_measured(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments: dict[str, Any] = {}

    def cached_hardware(config: Any, device: Any, **options: Any) -> HardwareProfile:
        arguments.update(config=config, device=device, **options)
        return read_hardware(PAPER)

    monkeypatch.setattr(plan_request, "cached_hardware", cached_hardware)
    result = plan(tiny, batch_size=2, seq_len=16)
    assert result.exit_code == 0, result.stderr
    assert isinstance(arguments["config"], ResolvedConfig)
    assert {shape.num_rows for shape in arguments["matrix_shapes"]} == {2 * 16}


def test_a_hardware_file_with_gpudirect_is_planned_for_unless_the_setting_says_no(tiny: str, tmp_path: Path) -> None:
    """The GPU then computes the checksums of weights, which takes time of the CPU otherwise."""
    direct, through_ram = (
        hardware_file(
            tmp_path / f"{name}.yaml",
            cpu={"checksum_bytes_per_s": "10MB/s"},
            device={"moves_files": name == "direct", "memory_bytes_per_s": "1TB/s"},
        )
        for name in ("direct", "through_ram")
    )

    def step(hardware: str, setting: str) -> tuple[float, float]:
        offload = tmp_path / f"{setting}.yaml"
        offload.write_text(f"gpu_direct: {setting}\n_resident_records: none\n")
        values = planned(tiny, "--hardware", hardware, "--offload", offload, "--max-grad-norm", 0, batch_size=1)
        return values["step_s"], values["simulated_step_s"]

    found = step(direct, "auto")
    assert found == step(direct, "true")
    others = step(through_ram, "auto")
    assert others == step(direct, "false") == step(through_ram, "false")
    assert found[0] < others[0] and found[1] < others[1]
    result = plan(tiny, "--hardware", through_ram, "--offload", tmp_path / "true.yaml", batch_size=1)
    assert result.exit_code == 2 and len(result.stderr.strip().splitlines()) == 1
    assert f"gpu_direct: true cannot be planned for, because the device in {through_ram}" in result.stderr


@pytest.mark.covering(0)
@pytest.mark.parametrize("is_used", [False, True])
def test_a_measured_machine_is_planned_with_gpudirect_if_a_run_uses_it(
    tiny: str, is_used: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_request, "cached_hardware", lambda *_args, **_options: read_hardware(PAPER))
    monkeypatch.setattr(plan_request, "uses_direct_io", lambda *_args: is_used)
    run = plan_request.plan_run(PlanRequest(model=tiny, batch_size=1, sequence_length=16))
    assert run.hardware.device.moves_files is is_used


@pytest.mark.slow
def test_estimate_prints_at_most_13_lines(model_13b: str) -> None:
    result = runner.invoke(app, ["estimate", model_13b, "--hardware", str(PAPER), "--paper"])
    assert result.exit_code == 0, result.stderr
    assert "batch 8 x 2048 tokens" in result.stdout
    assert "fits      yes, offloaded, in " in result.stdout
    assert "The model does not fit without offloading" in result.stdout
    assert "gradient_accumulation_steps=" in result.stdout and "tokens/s, " in result.stdout
    assert "\nwear      1,000 steps write " in result.stdout and " x as long as with hidden SSDs" in result.stdout
    assert len(result.stdout.splitlines()) <= 13


def test_the_wear_is_said_with_the_endurance_of_the_hardware_file(tiny: str, tmp_path: Path) -> None:
    """The change that is named is planned as well, and writes as many bytes."""
    settings, rounding = tmp_path / "a.yaml", tmp_path / "b.yaml"
    settings.write_text("_resident_records: none\n")
    rounding.write_text("_resident_records: none\nstochastic_rounding: true\n")

    def wear(endurance: str | None, offload: Path = settings) -> str:
        drive = drives(1, endurance_bytes=endurance)
        hardware = hardware_file(tmp_path / "hardware.yaml", ssd=drive)
        result = estimate(tiny, "--dtype", "bfloat16", "--seq-len", 16, "--hardware", hardware, "--offload", offload)
        return next(line for line in result.stdout.splitlines() if line.startswith("wear "))

    written = drive_bytes(1000 * plan_step_bytes(tiny, settings))
    rounded = drive_bytes(1000 * plan_step_bytes(tiny, rounding))
    change = f"with stochastic_rounding: true (rounds) the same tokens would write {rounded}"
    assert wear(None) == f"wear      1,000 steps write {written} to the SSDs; {change}"
    assert wear("1PB").startswith(f"wear      1,000 steps write {written} to the SSDs, 0.0% of their endurance; with")
    assert wear("1MB").startswith(f"wear      warning: 1,000 steps write {written} to the SSDs, ")


def plan_step_bytes(model: str, offload: Path) -> int:
    options = ("--dtype", "bfloat16", "--hardware", PAPER, "--offload", offload)
    return int(planned(model, *options, batch_size=8, seq_len=16)["ssd_write_bytes_per_step"])


def test_estimate_uses_the_number_of_positions_of_the_model(tmp_path: Path) -> None:
    tiny_config("opt").save_pretrained(tmp_path / "short")
    result = estimate(str(tmp_path / "short"), "--hardware", PAPER, "--json")
    assert json.loads(result.stdout)["num_tokens"] == 8 * 128
