"""--lifetimes and --plot of `lohan plan`."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path

import pytest
from planned_models import DESKTOP, LLAMA_8B, plan, planned

import hf_lohan.cli.plan_request as plan_request
from hf_lohan.annexes.studies import plan_plot
from hf_lohan.cli.plan_request import PlanRequest
from hf_lohan.costs import sweep_swapped_bytes
from hf_lohan.testing.models import tiny_config


@pytest.mark.slow
def test_lifetimes_are_printed_drawn_and_in_json(tiny: str, tmp_path: Path) -> None:
    picture = tmp_path / "lifetimes.png"
    values = planned(LLAMA_8B, "--hardware", DESKTOP, "--lifetimes", batch_size=1, seq_len=8192)
    kinds = values["lifetimes"]["kinds"]
    assert list(kinds) == ["param", "gradient", "state", "activation", "intermediate"]
    assert kinds["param"]["num_bytes"] == 2 * values["num_params"]
    assert kinds["state"]["num_bytes"] == 10 * values["num_params"]
    assert 0 < values["lifetimes"]["active_share"] < 0.14  # as TeraIO measured
    assert all(0 <= share <= 1 for kind in kinds.values() for share in kind["can_leave_share"].values())
    addresses = values["lifetimes"]["addresses"]
    live_bytes = addresses["live_bytes"]
    assert 5 << 30 < live_bytes <= addresses["planned_bytes"] <= 1.01 * live_bytes
    assert live_bytes < addresses["expandable_bytes"] < addresses["caching_bytes"] < 1.5 * live_bytes
    sizes = {"batch_size": 1, "seq_len": 16}
    printed = plan(tiny, "--hardware", DESKTOP, "--lifetimes", "--plot", picture, **sizes).stdout
    assert "more with expandable segments" in printed
    kinds = planned(tiny, "--hardware", DESKTOP, "--lifetimes", **sizes)["lifetimes"]["kinds"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert all(kind in printed and str(summary["num_tensors"]) in printed for kind, summary in kinds.items())
    assert "lifetimes" not in planned(tiny, "--hardware", DESKTOP, **sizes)


def test_lifetimes_of_a_plan_in_chunks_say_that_they_are_of_whole_layers(tiny: str, tmp_path: Path) -> None:
    sizes, sentence = {"batch_size": 1, "seq_len": 64}, "The table is for whole layers"
    for setting in ("false", "16"):
        settings = tmp_path / f"{setting}.yaml"
        settings.write_text(f"chunks.layers: {setting}\n")
        options = ("--hardware", DESKTOP, "--offload", settings, "--lifetimes")
        assert (sentence in plan(tiny, *options, **sizes).stdout) is (setting == "16")
    assert planned(tiny, *options, **sizes)["lifetimes"]["layers"] == "whole"


def test_lifetimes_of_experts_that_stream_one_by_one(tmp_path: Path) -> None:
    tiny_config("qwen3_moe").save_pretrained(tmp_path / "tiny")
    kinds = {}
    for experts in ("streamed", "with_layer"):
        settings = tmp_path / f"{experts}.yaml"
        settings.write_text(f"experts: {experts}\n")
        options = ("--hardware", DESKTOP, "--offload", settings, "--lifetimes")
        values = planned(str(tmp_path / "tiny"), *options, batch_size=1, seq_len=16)
        kinds[experts] = values["lifetimes"]["kinds"]
    for kind in ("param", "gradient", "state"):
        assert kinds["streamed"][kind]["num_bytes"] == kinds["with_layer"][kind]["num_bytes"]
    assert kinds["streamed"]["param"]["active_share"] < kinds["with_layer"]["param"]["active_share"]


def test_the_plotted_minimum_is_the_plan_and_labels_do_not_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(plan_plot, "sweep_swapped_bytes", partial(sweep_swapped_bytes, num_points=3))
    request = PlanRequest(model=LLAMA_8B, batch_size=32, sequence_length=1024, hardware=str(DESKTOP))
    run = plan_request.plan_run(request)
    assert run.plan.commit_every_steps > 1
    figure = plan_plot.draw_plan(run)
    figure.draw_without_rendering()
    step, *_, dot = figure.axes[0].lines
    assert dot.get_ydata()[0] == pytest.approx(min(step.get_ydata()), rel=1e-6)
    legend = figure.axes[0].get_legend()
    labels = [*figure.axes[0].texts, *legend.get_texts(), *figure.axes[1].texts]
    boxes = [figure.axes[0].bbox, *(label.get_window_extent() for label in labels)]
    assert not [one for one, other in itertools.combinations(boxes, 2) if one.overlaps(other)]
