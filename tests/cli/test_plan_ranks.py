"""`lohan plan` and `lohan estimate` plan several ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from planned_models import DESKTOP, LLAMA_8B, PAPER, estimate, hardware_file, plan, planned, runner

from hf_lohan.cli import app
from hf_lohan.cli.plan_ranks import PAYLOAD_OF_LINE_RATE, link_bytes_per_s
from hf_lohan.testing.models import tiny_config

NUM_PARAMS = 8_030_261_248


@pytest.mark.usefixtures("equal_requests_planned_once")
def test_four_ranks_on_two_nodes_are_planned(tmp_path: Path) -> None:
    roomy = hardware_file(tmp_path / "roomy.yaml", DESKTOP, cpu={"memory_bytes": "160GB"})
    options = ("--ranks", 4, "--nodes", 2, "--link", "2.5Gbit", "--gradient-accumulation-steps", 4)
    values = planned(LLAMA_8B, "--hardware", roomy, *options, batch_size=8)
    assert values["cluster"] == {
        "num_nodes": 2,
        "num_local": 2,
        "transport": "host",
        "collectives": {"forward": "delta", "backward": "ram", "gradients": "exact", "within": "exact"},
    }
    assert values["num_tokens"] == 4 * 4 * 8 * 1024
    assert (values["num_together"], values["num_micro_batches"]) == (4, 1), "micro-batches run together by default"
    assert values["ranks"]["bytes_by_collective"] == {
        "forward_weights": NUM_PARAMS // 2 * 1170 // 8000 + 1,
        "backward_weights": 0,
        "gradients": NUM_PARAMS // 2 * 4,
    }
    steps_s = [way["step_s"] for way in values["tried_ways"]]
    assert len(steps_s) == 5 and values["step_s"] == min(steps_s) < 0.6 * max(steps_s)
    assert values["bottleneck"] == "net"
    assert values["ranks"]["hides_from_tokens"]["net"] > values["num_tokens"]
    with_less_ram = planned(LLAMA_8B, "--hardware", DESKTOP, *options, batch_size=8)
    assert with_less_ram["cluster"]["collectives"]["backward"] == "ssd"
    fits = {(way["forward"], way["backward"]): way["fits"] for way in with_less_ram["tried_ways"]}
    assert not fits["delta", "ram"] and fits["delta", "ssd"]
    printed = plan(LLAMA_8B, "--hardware", roomy, *options, batch_size=8).stdout
    for text in (
        "on each of 4 ranks in 2 nodes",
        "bound by the network",
        "one node sends in a step",
        "16,060,522,496",
        "from each node's RAM",
        "exact, as a change",
        "Tokens per step of all ranks that hide a resource behind computing: ",
        "network",
    ):
        assert text in printed, text


def test_the_option_overrides_the_collectives_of_the_settings(llama_of_4_layers: str, tmp_path: Path) -> None:
    offload = tmp_path / "offload.yaml"
    collectives = {"forward": "int8", "backward": "world", "gradients": "exact"}
    offload.write_text(yaml.safe_dump({"ranks.collectives": collectives}))
    options = ("--ranks", 2, "--nodes", 2, "--link", "1Gbit", "--offload", offload)
    arguments = (llama_of_4_layers, "--hardware", DESKTOP, *options)
    assert planned(*arguments, batch_size=8)["cluster"]["collectives"] == {**collectives, "within": "exact"}
    overridden = planned(*arguments, "--collectives", "exact", batch_size=8)
    assert overridden["cluster"]["collectives"]["forward"] != "int8"


def test_ranks_of_a_packed_base_read_and_send_packed_bytes(llama_of_4_layers: str) -> None:
    options = ("--lora-rank", 8, "--ranks", 2, "--nodes", 2, "--link", "1Gbit", "--collectives")
    arguments = (llama_of_4_layers, "--hardware", DESKTOP, *options)
    sent = {}
    for way in ("forward=exact,backward=world", "forward=int8,backward=world"):
        for quantize in ("none", "nf4"):
            values = planned(*arguments, way, "--quantize", quantize, batch_size=1)
            sent[way[:12], quantize] = values["ranks"]["bytes_by_collective"]["forward_weights"]
    in_layers, beside = 4 * 218_103_808, 2 * 128_256 * 4096  # NF4 takes 0.516 bytes, bfloat16 2, and int8 1.016
    assert sent["forward=exac", "none"] == pytest.approx((in_layers + beside) * 2 / 2, rel=0.01)
    assert sent["forward=exac", "nf4"] == pytest.approx((in_layers * 0.516 + beside * 2) / 2, rel=0.01)
    assert sent["forward=int8", "none"] == pytest.approx((in_layers + beside) * 1.016 / 2, rel=0.01)
    assert sent["forward=int8", "nf4"] == pytest.approx((in_layers * 0.516 + beside * 1.016) / 2, rel=0.01)


def test_codecs_within_a_node_save_bytes_of_each_link(llama_of_4_layers: str) -> None:
    arguments = (llama_of_4_layers, "--hardware", DESKTOP, "--ranks", 2)
    exact = planned(*arguments, batch_size=8)
    coded = planned(*arguments, "--collectives", "within=int4", batch_size=8)
    assert exact["ranks"]["link_bytes"] == exact["ranks"]["exact_link_bytes"] == coded["ranks"]["exact_link_bytes"]
    for name, most in (("h2d", 0.53), ("d2h", 0.15 * 2)):  # of bfloat16
        assert 0.25 < coded["ranks"]["link_bytes"][name] / exact["ranks"]["link_bytes"][name] < most
        of_coded, of_exact = (values["backward"][f"{name}_s"] for values in (coded, exact))
        assert of_coded < 0.6 * of_exact
    printed = plan(*arguments, "--collectives", "within=int4", batch_size=8).stdout
    assert "The link of each device carries" in printed and "of gradients in int4 instead of" in printed


@pytest.mark.usefixtures("equal_requests_planned_once")
def test_links_between_gpus_are_named_and_priced(tiny: str, tmp_path: Path) -> None:
    linked = hardware_file(tmp_path / "linked.yaml", DESKTOP, gpu_link="nvlink")
    offload = tmp_path / "offload.yaml"
    offload.write_text("ranks.transport: nccl\n")
    arguments = (tiny, "--hardware", linked, "--ranks", 2)
    host = planned(*arguments, batch_size=8)
    nccl = planned(*arguments, "--offload", offload, batch_size=8)
    fast = planned(*arguments, "--transport", "nccl", "--gpu-link", "200GB/s", batch_size=8)
    assert planned(*arguments, "--offload", offload, "--transport", "host", batch_size=8) == host
    assert (
        host["gpu_links"]
        == nccl["gpu_links"]
        == {"kind": "NVLink", "bytes_per_s": 45e9, "rate_is": "assumed, as between two RTX 3090"}
    )
    assert fast["gpu_links"] == {"kind": "NVLink", "bytes_per_s": 200e9, "rate_is": "given by --gpu-link"}
    moved, link = nccl["ranks"]["between_gpus"], nccl["ranks"]["link_bytes"]
    assert host["ranks"]["between_gpus"] == {"h2d": 0, "d2h": 0}
    assert link["h2d"] == pytest.approx(host["ranks"]["link_bytes"]["h2d"] / 2) and moved["h2d"] == link["h2d"]
    assert link["d2h"] == host["ranks"]["link_bytes"]["d2h"], "half of the sums, which are float32"
    assert moved["d2h"] == link["d2h"] / 2
    assert fast["forward"]["gathered_s"] == pytest.approx(nccl["forward"]["gathered_s"] * 45 / 200)
    assert nccl["tier_bytes"]["gpu"]["nccl"] > 128 << 20 and "nccl" not in host["tier_bytes"]["gpu"]
    printed = " ".join(plan(*arguments, "--offload", offload, batch_size=8).stdout.split())
    assert "Links between the GPUs of a node: NVLink, 45 GB/s in each direction (assumed, as between two" in printed
    assert "links between GPUs" in printed and "weights between GPUs" in printed
    printed = " ".join(plan(*arguments, batch_size=8).stdout.split())
    assert "Links between the GPUs of a node: NVLink. They are not used with ranks.transport: host." in printed


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({}, ["--transport", "nccl"], "and this is one process"),
        ({}, ["--transport", "tcp"], "'tcp'"),
        ({"gpu_link": "none"}, ["--transport", "nccl", "--ranks", 2], "do not reach each other's memory"),
        ({"device": {"shares_cpu": True}}, ["--transport", "nccl", "--ranks", 2], "computes on the cpu"),
        ({}, ["--transport", "nccl", "--ranks", 2, "--nodes", 2, "--link", "1Gbit"], "each machine has one rank"),
        ({}, ["--gpu-link", "100Gbit", "--ranks", 2], "gpu_link = '100Gbit' is not allowed; write bytes per second"),
    ],
)
def test_a_transport_that_cannot_be_is_refused(
    tiny: str, changes: dict[str, object], options: list[object], message: str, tmp_path: Path
) -> None:
    hardware = hardware_file(tmp_path / "machine.yaml", PAPER, **changes)
    result = plan(tiny, "--hardware", hardware, *options, batch_size=1)
    assert result.exit_code == 2
    assert message in result.stderr and result.stderr.count("\n") == 1


@pytest.mark.usefixtures("equal_requests_planned_once")
def test_ranks_of_one_node_share_its_drive(model_of_4_layers: str) -> None:
    """The drive is the bottleneck of a model of the paper with one drive, however many ranks share it."""
    arguments = (model_of_4_layers, "--hardware", PAPER, "--paper")
    one, four = (planned(*arguments, "--ranks", ranks) for ranks in (1, 4))
    assert "cluster" not in one and "ranks" not in one
    assert four["bottleneck"] == one["bottleneck"] == "ssd"
    assert four["step_s"] == pytest.approx(one["step_s"], rel=0.1)
    assert four["tokens_per_s"] > 3.6 * one["tokens_per_s"]
    assert four["ranks"]["hides_from_tokens"]["ssd"] > 3 * one["ssd_hides_from_tokens"]
    assert sum(four["tier_bytes"]["cpu"].values()) <= 768e9 * 0.6
    assert four["ranks"]["bytes_by_collective"] == {"forward_weights": 0, "backward_weights": 0, "gradients": 0}
    assert sum(four["tier_bytes"]["ssd"].values()) == sum(one["tier_bytes"]["ssd"].values())
    printed = plan(*arguments, "--ranks", 4).stdout
    assert "on each of 4 ranks of one node" in printed and "sends" not in printed


@pytest.mark.slow
def test_the_link_option_overrides_the_rate_of_the_hardware_file(tiny: str, tmp_path: Path) -> None:
    with_link = hardware_file(tmp_path / "hardware.yaml", net_bytes_per_s="1.1GB/s")
    options = ("--ranks", 2, "--nodes", 2)
    from_file = planned(tiny, "--hardware", with_link, *options, batch_size=1)
    from_option = planned(tiny, "--hardware", PAPER, *options, "--link", "1.1GB/s", batch_size=1)
    assert from_file == from_option
    faster = planned(tiny, "--hardware", with_link, *options, "--link", "400Gbit", batch_size=1, with_changes=True)
    assert faster["step_s"] < from_option["step_s"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ranks", 0], "the number of ranks is 0; it must be at least 1"),
        (["--nodes", 0], "the number of nodes is 0"),
        (["--ranks", 3, "--nodes", 2], "3 ranks on 2 nodes; give each node equally many ranks"),
        (["--ranks", 2, "--nodes", 2], "the rate of the link between 2 nodes is unknown; give --link 10Gbit"),
        (["--ranks", 2, "--nodes", 2, "--link", "fast"], "link = 'fast' is not allowed; write a rate such as 2.5Gbit"),
        (["--ranks", 2, "--nodes", 2, "--link", "0Gbit"], "link = '0Gbit' is not allowed"),
        (
            ["--ranks", 8, "--nodes", 4, "--link", "1Gbit", "--collectives", "backward=3"],
            "ranks.collectives: backward: 3 is set with 8 ranks on nodes of 2; the ranks of a node share one copy",
        ),
        (["--collectives", "lossy"], "--collectives: 'lossy' is not allowed; give 'exact', 'quantized', or a table of"),
        (["--collectives", "forward=int7"], "ranks.collectives: forward: 'int7' is not allowed; choose "),
        (["--collectives", "forwards=int8"], "unknown key of --collectives 'forwards'; did you mean 'forward'?"),
    ],
)
def test_bad_values_are_refused_in_one_line(tiny: str, options: list[object], message: str) -> None:
    result = plan(tiny, "--hardware", PAPER, *options, batch_size=1)
    assert result.exit_code == 2
    assert message in result.stderr and result.stderr.count("\n") == 1


def test_link_rates_are_parsed() -> None:
    assert link_bytes_per_s("2.5Gbit") == pytest.approx(2.5e9 / 8 * PAYLOAD_OF_LINE_RATE)
    assert link_bytes_per_s("100 Mbit/s") == link_bytes_per_s("0.1Gbps") == pytest.approx(11.75e6)
    assert link_bytes_per_s("1.2GB/s") == 1.2e9


def test_estimate_prints_the_bytes_that_a_node_sends(tiny: str) -> None:
    options = ["--ranks", "2", "--nodes", "2", "--link", "10Gbit"]
    result = estimate(tiny, "--hardware", DESKTOP, *options)
    assert result.exit_code == 0, result.stderr
    assert "on each of 2 ranks in 2 nodes" in result.stdout
    assert "sends     " in result.stdout and "from each node: weights " in result.stdout
    assert "that hide a resource behind computing: " in result.stdout


@pytest.fixture
def mixture(tmp_path: Path) -> str:
    """A mixture whose experts have most of its weights."""
    config = tiny_config("qwen3_moe", num_layers=2, hidden_size=512, num_experts=16, moe_intermediate_size=1024)
    config.save_pretrained(tmp_path / "mixture")
    return str(tmp_path / "mixture")


@pytest.mark.usefixtures("equal_requests_planned_once")
def test_divided_experts_are_compared_with_undivided_ones(mixture: str) -> None:
    arguments = (mixture, "--hardware", DESKTOP, "--ranks", 2, "--nodes", 2, "--link", "1Gbit")
    size = {"batch_size": 1, "seq_len": 64}
    asked_both = planned(*arguments, **size)
    none, world = (planned(*arguments, "--expert-parallel", word, **size) for word in ("none", "world"))
    tried = asked_both["expert_parallel"]["tried"]
    assert not asked_both["expert_parallel"]["divides"] and asked_both["step_s"] == none["step_s"]
    assert (tried["none"]["step_s"], tried["world"]["step_s"]) == (none["step_s"], world["step_s"])
    assert world["step_s"] < none["step_s"] / 2, "64 tokens are fewer bytes than the experts"
    assert "expert_parallel" not in world, "a given word leaves no choice"
    sent = [values["ranks"]["bytes_by_collective"] for values in (none, world)]
    assert "forward_tokens" not in sent[0] and sent[1]["forward_tokens"] > 0
    assert sent[1]["gradients"] < sent[0]["gradients"] / 3
    assert world["ranks"]["rows_equal_weights_at_tokens"] > 64
    printed = plan(*arguments, **size).stdout
    assert "If each expert belonged to one rank (experts.parallel: world), a step would take " in printed
    printed = plan(*arguments, "--expert-parallel", "world", **size).stdout
    for text in ("tokens to experts, forward", "Each expert belongs to one of 2 ranks", "nodes send fewer bytes"):
        assert text in printed, text


@pytest.mark.usefixtures("equal_requests_planned_once")
def test_balanced_experts_are_compared_with_undivided_ones(mixture: str, tmp_path: Path) -> None:
    offload = tmp_path / "lohan.yaml"
    offload.write_text("gpu_memory: 250MiB\nexperts.balance: 64\n")
    arguments = (mixture, "--hardware", DESKTOP, "--ranks", 2, "--offload", str(offload))
    size = {"batch_size": 1, "seq_len": 64}
    facts = planned(*arguments, **size)["expert_parallel"]
    assert facts["divides"] and set(facts["tried"]) == {"none", "world"}
    none = planned(*arguments, "--expert-parallel", "none", **size)
    assert none["step_s"] == facts["tried"]["none"]["step_s"]


def test_a_wrong_expert_parallel_is_refused(mixture: str, llama_of_4_layers: str) -> None:
    sizes = ("--batch-size", "1", "--seq-len", "64", "--hardware", str(DESKTOP), "--ranks", "2")
    wrong = runner.invoke(app, ["plan", "--model", mixture, *sizes, "--expert-parallel", "wrld"])
    assert wrong.exit_code == 2 and "'wrld'" in wrong.stderr and "world" in wrong.stderr
    dense = runner.invoke(app, ["plan", "--model", llama_of_4_layers, *sizes, "--expert-parallel", "world"])
    assert dense.exit_code == 2 and "experts.parallel: world is set" in dense.stderr
