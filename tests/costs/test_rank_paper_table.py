"""Plans are compared with LoHan's published TFLOP/s of 13B and 70B on 2 and 4 RTX 4090 in one node.

The number of drives of those runs is not published. With the smallest batches a step takes 1.6 to 1.8 s per billion
parameters, on 2 GPUs and on 4, so it is limited by something that a node has once: the CPU's optimizer or the drives.
Neither 12 drives nor the optimizer rate in the profile is that slow. So the table is tested twice. With the machine of
one GPU, only the largest batches agree. With a fitted optimizer rate, all 14 figures agree.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from decoder_shapes import decoder
from test_paper_table import LOHAN_STATES, machine_with, setup

from hf_lohan.costs import Cluster, StepPrediction, plan_offload

SHAPES = {"13B": (5120, 40), "70B": (8192, 80)}
PUBLISHED_TFLOPS = {
    (2, "13B"): {16: 55.0, 32: 103.2, 64: 194.7, 128: 278.2},
    (2, "70B"): {16: 64.6, 32: 128.8, 48: 183.5},
    (4, "13B"): {32: 106.5, 64: 209.7, 128: 358.7, 256: 514.4},
    (4, "70B"): {32: 124.8, 64: 249.7, 96: 348.4},
}
"""By number of GPUs and model, then by global batch size."""
FITTED_PARAMS_PER_S = 0.65e9
FITTED_RATIOS = (0.87, 1.18)
"""The lowest and the highest of prediction to measurement."""
LARGEST_RATIOS = (1.0, 1.25)
"""The ratios for the largest batches of 13B on the unchanged machine. The plan does not count work that several ranks
cannot overlap.
"""


def predict(num_gpus: int, model: str, batch_size: int, optimizer_params_per_s: float | None = None) -> StepPrediction:
    hardware = machine_with(12)
    rate = optimizer_params_per_s or hardware.cpu.optimizer_params_per_s
    hardware = replace(hardware, cpu=replace(hardware.cpu, optimizer_params_per_s=rate))
    hidden, num_layers = SHAPES[model]
    shape = decoder(hidden, num_layers, batch_size // num_gpus, sequence_length=1024, vocabulary=50257)
    lohans = setup(
        cluster=Cluster(num_local=num_gpus),
        cpu_memory_bytes=700 * 10**9 // num_gpus,
        gpu_fixed_bytes=5 * 10**9,
        durability="checkpoint",
        clip="none",
        **LOHAN_STATES,
    )
    plan = plan_offload(shape, hardware, lohans)
    assert plan.fits
    return plan.prediction


def test_one_fitted_rate_explains_all_figures() -> None:
    ratios = {
        (*key, batch): predict(*key, batch, FITTED_PARAMS_PER_S).tflops / published
        for key, row in PUBLISHED_TFLOPS.items()
        for batch, published in row.items()
    }
    lowest, highest = min(ratios.values()), max(ratios.values())
    assert FITTED_RATIOS[0] < lowest and highest < FITTED_RATIOS[1], ratios
    assert sum(abs(ratio - 1) for ratio in ratios.values()) / len(ratios) < 0.11


def test_the_fitted_rate_predicts_one_gpu_as_measured() -> None:
    """With a batch of 64 the backward hides the optimizer. Large slots leave less room for activations, so some
    are recomputed.
    """
    one = predict(1, "13B", 64, FITTED_PARAMS_PER_S)
    assert one.tflops == pytest.approx(148.2, rel=0.08) and one.bottleneck == "compute"


def test_the_unchanged_machine_agrees_if_devices_are_the_limit() -> None:
    for num_gpus in (2, 4):
        row = PUBLISHED_TFLOPS[num_gpus, "13B"]
        ratios = [predict(num_gpus, "13B", batch).tflops / published for batch, published in row.items()]
        assert ratios == sorted(ratios, reverse=True), "smaller batches are predicted further above the measurement"
        assert 2.5 < ratios[0] < 3.5 and LARGEST_RATIOS[0] < ratios[-1] < LARGEST_RATIOS[1], ratios


def test_scaling_from_one_gpu_to_four_is_at_least_as_published() -> None:
    """LoHan scales 3.47 times at a batch of 64 each. In the plan only shared drives and cores reduce the scaling."""
    one, four = predict(1, "13B", 64, FITTED_PARAMS_PER_S), predict(4, "13B", 256, FITTED_PARAMS_PER_S)
    assert 514.4 / 148.2 < four.tflops / one.tflops <= 4
