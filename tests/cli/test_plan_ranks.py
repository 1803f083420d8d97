"""`lohan plan` and `lohan estimate` for several ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from planned_models import CONFIGS, PAPER, hardware_file, runner

from hf_lohan.cli import app
from hf_lohan.cli.plan_ranks import PAYLOAD_OF_LINE_RATE, link_bytes_per_s

DESKTOP = CONFIGS / "hardware" / "rtx4090_desktop.yaml"
LLAMA_8B = str(CONFIGS / "models" / "llama-3.1-8b")
NUM_PARAMS = 8_030_261_248


def plan(*options: object, model: str = LLAMA_8B, hardware: object = DESKTOP, batch_size: int = 8) -> Result:
    given = ["--model", model, "--batch-size", batch_size, "--seq-len", 1024, "--hardware", hardware, *options]
    return runner.invoke(app, ["plan", *map(str, given)])


def planned(*options: object, **where: Any) -> dict[str, Any]:
    result = plan(*options, "--json", **where)
    assert result.exit_code == 0, result.stderr
    values: dict[str, Any] = json.loads(result.stdout)
    return values


def test_four_ranks_in_two_boxes(tmp_path: Path) -> None:
    roomy = hardware_file(tmp_path / "roomy.yaml", DESKTOP, cpu={"memory_bytes": "160GB"})
    options = ("--ranks", 4, "--nodes", 2, "--link", "2.5Gbit", "--gradient-accumulation-steps", 4)
    values = planned(*options, hardware=roomy)
    assert values["cluster"] == {
        "num_nodes": 2,
        "num_local": 2,
        "collectives": {"forward": "delta", "backward": "ram", "gradients": "exact"},
    }
    assert values["num_tokens"] == 4 * 4 * 8 * 1024
    assert (values["num_together"], values["num_micro_batches"]) == (4, 1), "together, unasked"
    assert values["ranks"]["bytes_by_collective"] == {
        "forward_weights": NUM_PARAMS // 2 * 1170 // 8000 + 1,
        "backward_weights": 0,
        "gradients": NUM_PARAMS // 2 * 4,
    }
    steps = [way["step_s"] for way in values["tried_ways"]]
    assert len(steps) == 5 and values["step_s"] == min(steps) < 0.6 * max(steps)
    assert values["bottleneck"] == "net"
    assert values["ranks"]["hides_from_tokens"]["net"] > values["num_tokens"]
    without_room = planned(*options)
    assert without_room["cluster"]["collectives"]["backward"] == "ssd"
    fits = {(way["forward"], way["backward"]): way["fits"] for way in without_room["tried_ways"]}
    assert not fits["delta", "ram"] and fits["delta", "ssd"]
    printed = plan(*options, hardware=roomy).stdout
    for text in (
        "on each of 4 ranks in 2 nodes",
        "bound by the network",
        "one node sends in a step",
        "16,060,522,496",
        "from each node's RAM",
        "exact, as a change",
        "Behind computing hide the network from ",
        "network",
    ):
        assert text in printed, text


def test_rounding_has_to_be_asked_for() -> None:
    options = ("--ranks", 2, "--nodes", 2, "--link", "1Gbit")
    exact = planned(*options)
    assert exact["cluster"]["collectives"]["gradients"] == "exact"
    asked = planned(*options, "--collectives", "quantized")
    assert asked["cluster"]["collectives"]["gradients"] != "exact" and asked["step_s"] < exact["step_s"]
    assert len(asked["tried_ways"]) == 24
    named = planned(*options, "--collectives", "forward=int8,backward=node,gradients=int8")
    chosen = named["cluster"]["collectives"]
    assert (chosen["forward"], chosen["gradients"]) == ("int8", "int8") and chosen["backward"] in ("ram", "ssd")


def test_the_configuration_says_it_too(tmp_path: Path) -> None:
    offload = tmp_path / "offload.yaml"
    offload.write_text("collectives: {forward: int8, backward: world, gradients: exact}\n")
    options = ("--ranks", 2, "--nodes", 2, "--link", "1Gbit", "--offload", offload)
    assert planned(*options)["cluster"]["collectives"] == {
        "forward": "int8",
        "backward": "world",
        "gradients": "exact",
    }
    assert planned(*options, "--collectives", "exact")["cluster"]["collectives"]["forward"] != "int8"


def test_ranks_of_one_box_share_it(model_13b: str) -> None:
    """LoHan's 13B on its machine with one drive: the drive is the limit, whoever shares it."""
    where = {"model": model_13b, "hardware": PAPER, "batch_size": 16}
    one, four = (planned("--paper", "--ranks", ranks, **where) for ranks in (1, 4))
    assert "cluster" not in one and "ranks" not in one
    assert four["bottleneck"] == one["bottleneck"] == "ssd"
    assert four["step_s"] == pytest.approx(one["step_s"], rel=0.1)
    assert four["tokens_per_s"] > 3.6 * one["tokens_per_s"]
    assert four["ranks"]["hides_from_tokens"]["ssd"] > 3 * one["ssd_hides_from_tokens"]
    assert sum(four["tier_bytes"]["cpu"].values()) <= 768e9 * 0.6
    assert four["ranks"]["bytes_by_collective"] == {"forward_weights": 0, "backward_weights": 0, "gradients": 0}
    assert sum(four["tier_bytes"]["ssd"].values()) == sum(one["tier_bytes"]["ssd"].values())
    printed = plan("--ranks", 4, model=model_13b, hardware=PAPER, batch_size=16).stdout
    assert "on each of 4 ranks of one node" in printed and "sends" not in printed


def test_half_of_the_records_in_each_box(model_13b: str) -> None:
    options = ("--paper", "--link", "100Gbit", "--collectives", "backward=world,forward=exact")
    one = planned("--paper", model=model_13b, hardware=PAPER, batch_size=16)
    two = planned("--ranks", 2, "--nodes", 2, *options, model=model_13b, hardware=PAPER, batch_size=16)
    for name in ("ssd_read_bytes_per_step", "ssd_write_bytes_per_step"):
        assert two[name] == pytest.approx(one[name] / 2, rel=0.02)


def test_the_link_may_stand_in_the_profile(tiny: str, tmp_path: Path) -> None:
    hardware = hardware_file(tmp_path / "hardware.yaml", net_bytes_per_s="1.1GB/s")
    options = ("--ranks", 2, "--nodes", 2)
    from_file = planned(*options, model=tiny, hardware=hardware, batch_size=1)
    given = planned(*options, "--link", "1.1GB/s", model=tiny, hardware=PAPER, batch_size=1)
    assert from_file == given
    faster = planned(*options, "--link", "400Gbit", model=tiny, hardware=hardware, batch_size=1)
    assert faster["step_s"] < given["step_s"], "the option counts"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ranks", 0], "the number of ranks is 0; it must be at least 1"),
        (["--nodes", 0], "the number of nodes is 0"),
        (["--ranks", 3, "--nodes", 2], "3 ranks on 2 nodes; give equally many to each node"),
        (["--ranks", 2, "--nodes", 2], "nothing says how fast the link between 2 nodes is; give --link 10Gbit"),
        (["--ranks", 2, "--nodes", 2, "--link", "fast"], "link = 'fast' is not allowed; write a rate such as 2.5Gbit"),
        (["--ranks", 2, "--nodes", 2, "--link", "0Gbit"], "link = '0Gbit' is not allowed"),
        (["--collectives", "lossy"], "collectives = 'lossy' is not allowed; write exact, quantized, or some of"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(tiny: str, options: list[object], message: str) -> None:
    result = plan(*options, model=tiny, hardware=PAPER, batch_size=1)
    assert result.exit_code == 2
    assert message in result.stderr and result.stderr.count("\n") == 1


def test_link_rates() -> None:
    assert link_bytes_per_s("2.5Gbit") == pytest.approx(2.5e9 / 8 * PAYLOAD_OF_LINE_RATE)
    assert link_bytes_per_s("100 Mbit/s") == link_bytes_per_s("0.1Gbps") == pytest.approx(11.75e6)
    assert link_bytes_per_s("1.2GB/s") == 1.2e9


def test_estimate_says_what_a_box_sends() -> None:
    options = ["--hardware", str(DESKTOP), "--ranks", "2", "--nodes", "2", "--link", "10Gbit"]
    result = runner.invoke(app, ["estimate", LLAMA_8B, *options])
    assert result.exit_code == 0, result.stderr
    assert "on each of 2 ranks in 2 nodes" in result.stdout
    assert "sends     " in result.stdout and "from each node: weights " in result.stdout
    assert "Behind computing hide " in result.stdout
