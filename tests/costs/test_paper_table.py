"""Plans predict LoHan's published measurements of 13B on an RTX 4090 with 1 to 12 drives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from decoder_shapes import decoder, records_of

from hf_lohan.costs import HardwareProfile, TrainingSetup, plan_offload

CONFIG = Path(__file__).resolve().parents[2] / "configs" / "hardware" / "rtx4090_p5510.yaml"
PUBLISHED_TFLOPS = {1: 70.3, 2: 111.7, 3: 136.3, 6: 151.5, 12: 148.2}
MODEL = decoder(5120, 40, batch_size=64, sequence_length=1024, vocabulary=50257)
LOHAN_STATES = {"state_bytes_per_param": 12, "update_reads_param": False}
OUR_STATES = {"state_bytes_per_param": 10, "update_reads_param": True}


def machine_with(num_drives: int) -> HardwareProfile:
    values = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))
    values["ssd"][0]["count"] = num_drives
    return HardwareProfile.from_mapping(values)


def setup(**changes: Any) -> TrainingSetup:
    # LoHan keeps all records on the drives, however much RAM the machine has.
    budgets: dict[str, Any] = {
        "gpu_memory_bytes": 20 * 10**9,
        "cpu_memory_bytes": 700 * 10**9,
        "gpu_fixed_bytes": 2 * 10**9,
    }
    return TrainingSetup(**budgets | changes)


@pytest.mark.parametrize("counts_fill", [False, True])
@pytest.mark.parametrize("states", [LOHAN_STATES, OUR_STATES], ids=["lohan", "ours"])
def test_published_throughput_is_predicted(states: dict[str, Any], counts_fill: bool) -> None:
    errors = []
    for num_drives, published in PUBLISHED_TFLOPS.items():
        plan = plan_offload(MODEL, machine_with(num_drives), setup(counts_fill=counts_fill, **states))
        assert plan.fits
        errors.append(abs(plan.prediction.tflops / published - 1))
    assert max(errors) < 0.15
    assert sum(errors) / len(errors) < 0.08


def test_the_bound_moves_from_the_drives_to_the_device() -> None:
    bounds = [plan_offload(MODEL, machine_with(n), setup()).prediction.bottleneck for n in PUBLISHED_TFLOPS]
    assert bounds == ["ssd", "ssd", "compute", "compute", "compute"]


def test_with_enough_drives_the_optimum_fills_the_link_in_forward() -> None:
    """This is case 3. Swapping is free as long as the link has time during the forward. More swapping costs more than
    recomputing.
    """
    prediction = plan_offload(MODEL, machine_with(12), setup()).prediction
    assert prediction.case == 3
    assert prediction.forward.d2h_s == pytest.approx(prediction.forward.compute_s, rel=0.01)
    assert MODEL.inter_block_bytes < prediction.swapped_bytes < MODEL.activation_bytes


@pytest.mark.parametrize(
    ("link_bytes_per_s", "case"), [(1e9, 1), (20e9, 3), (100e9, 2)], ids=["link-bound", "between", "compute-bound"]
)
def test_the_three_cases_of_the_paper(link_bytes_per_s: float, case: int) -> None:
    values = machine_with(12).to_mapping() | {"h2d_bytes_per_s": link_bytes_per_s, "d2h_bytes_per_s": link_bytes_per_s}
    # As in the paper, the whole logits leave no room to keep activations on 24 GB. Activations that one layer swaps
    # while another computes would not fit with this many tokens, so this device has more memory.
    values["device"]["memory_bytes"] = 32 * 10**9
    prediction = plan_offload(MODEL, HardwareProfile.from_mapping(values), setup(gpu_memory_bytes=2 * 10**9)).prediction
    assert prediction.case == case
    assert prediction.swapped_bytes >= MODEL.inter_block_bytes
    assert (prediction.recomputed_flops == 0) == (case == 2)


def test_records_in_ram_save_reads_of_the_only_drive() -> None:
    on_drives = plan_offload(MODEL, machine_with(1), setup()).prediction
    ram = setup(records=records_of(MODEL, 10), record_cpu_bytes=700 * 10**9)
    in_ram = plan_offload(MODEL, machine_with(1), ram).prediction
    assert in_ram.ssd_read_bytes_per_step == 0
    assert in_ram.ssd_write_bytes_per_step == on_drives.ssd_write_bytes_per_step
    assert in_ram.step_s < 0.8 * on_drives.step_s
