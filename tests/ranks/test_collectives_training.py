"""The setting `collectives` changes exactly the intended bits of a training on several nodes, and sends the planned
bytes.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from async_device import AsyncDevice
from covering import slow_but
from equal_tensors import assert_same_tensors
from python_runs import run_python
from trained_nodes import Oracle, Trained, Training, gradient_numels, part_numel
from training_ranks import assert_same_ranks, assert_same_run

from hf_lohan.costs import Collectives
from hf_lohan.engine import ranks as engine_ranks
from hf_lohan.ranks import GRADIENTS_INT4, GRADIENTS_INT8, GRADIENTS_WITHIN, WEIGHTS_INT8
from hf_lohan.ranks.collectives import block_operators
from hf_lohan.testing.models import tiny_model

NODES = [(2, 1), (4, 2), (3, 1)]
"""The number of ranks, and the number of ranks per node."""
GROUPS = [(4, 1, 2), (6, 1, 3), (8, 2, 4)]
"""These numbers, and the number of ranks of a group."""
GRADIENT_CODECS = {"int8": GRADIENTS_INT8, "int4": GRADIENTS_INT4}


def check_against_oracle(trained: list[Trained], oracle: Oracle) -> None:
    for rank, ours in enumerate(trained):
        assert_same_run(ours, Trained(oracle.losses[rank], oracle.norms, oracle.parameters))


BETWEEN_NODES: dict[str, tuple[Any, dict[str, Any]]] = {
    "gradients in int8": ({"gradients": "int8"}, {"gradients": GRADIENTS_INT8}),
    "gradients in int4": ({"gradients": "int4"}, {"gradients": GRADIENTS_INT4}),
    "weights": ({"forward": "int8", "backward": "world"}, {"weights": WEIGHTS_INT8}),
    "kept weights": ({"forward": "int8", "backward": "node"}, {"weights": WEIGHTS_INT8}),
    "both": (
        {"forward": "int8", "backward": "node", "gradients": "int4"},
        {"weights": WEIGHTS_INT8, "gradients": GRADIENTS_INT4},
    ),
    "quantized": (
        "quantized",
        {"weights": WEIGHTS_INT8, "gradients": GRADIENTS_INT4, "gradients_within": GRADIENTS_WITHIN["int4"]},
    ),
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("max_norm", [0.0, 0.5])
@pytest.mark.parametrize("way", slow_but(("gradients in int8", "weights", "quantized"), BETWEEN_NODES))
@pytest.mark.parametrize(("num_ranks", "num_local"), [(2, 1), (4, 2)])
def test_values_are_rounded_as_in_one_process_with_the_codecs(
    num_ranks: int, num_local: int, way: str, max_norm: float, tmp_path: Path
) -> None:
    """All ranks compute with the decoded weights, which are coded once for both hops. Updates change the exact weights.
    The sum of a node's gradients is coded again."""
    setting, codecs = BETWEEN_NODES[way]
    training = Training(num_ranks, num_local, max_norm)
    oracle, exact = Oracle(training, tmp_path), Oracle(training, tmp_path)
    oracle.train(**codecs)
    exact.train()
    trained = training.run(tmp_path, setting)
    check_against_oracle(trained, oracle)
    assert any(not torch.equal(exact.parameters[name], weight) for name, weight in oracle.parameters.items())
    assert trained[0].layout.open_ways[0].within == ("int4" if way == "quantized" else "exact")


@pytest.mark.covering(0)
@pytest.mark.parametrize("word", ["exact", "int8", "int4"])
@pytest.mark.parametrize(("num_ranks", "num_local"), NODES)
def test_the_sent_bytes_of_gradients(num_ranks: int, num_local: int, word: str, tmp_path: Path) -> None:
    """A node sends the sum of each chunk that another node owns, once. With N equal nodes that is (N - 1) / N of all
    chunks.
    """
    training = Training(num_ranks, num_local, num_steps=2)
    trained = training.run(tmp_path, {"gradients": word})
    for rank, ours in enumerate(trained):
        numels = list(gradient_numels(training, ours.layout, rank))
        exact_bytes = sum(4 * numel for numel in numels)
        sent_bytes = exact_bytes
        if word != "exact":
            sent_bytes = sum(GRADIENT_CODECS[word].message_bytes(numel) for numel in numels)
            figures = ours.figures["coded"]["gradients"]
            assert figures["sent_bytes"] == 2 * sent_bytes
            assert figures["exact_bytes"] == 2 * exact_bytes
            if numels:
                assert 0.001 < figures["relative_rms_error"] < (0.05 if word == "int8" else 0.3)
        assert ours.sent["gradients"] == 2 * sent_bytes
        assert ours.figures["sent_bytes"]["gradients"] == 2 * sent_bytes
    trained_numel = sum(block.state_numel for block in trained[0].layout.blocks)
    all_numels = [sum(gradient_numels(training, trained[0].layout, rank)) for rank in range(num_ranks)]
    assert sum(all_numels) == (training.num_nodes - 1) * trained_numel


def test_settings_between_nodes_round_nothing_on_one_node(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    training = Training(2, 2, num_steps=2)
    exact = training.run(tmp_path / "exact", "exact")
    with caplog.at_level(logging.INFO, logger="hf_lohan"):
        setting = {"forward": "int8", "backward": "node", "gradients": "int4"}
        quantized = training.run(tmp_path / "quantized", setting)
    for ours, other in zip(quantized, exact, strict=True):
        assert_same_tensors(ours.weights, other.weights)
        assert ours.sent["weights"] == ours.sent["gradients"] == 0
    assert "has no effect between machines" in caplog.text


@pytest.mark.covering(0)
@pytest.mark.parametrize("max_norm", [0.0, 0.5])
@pytest.mark.parametrize("word", ["int8", "int4"])
@pytest.mark.parametrize(("num_ranks", "num_local"), [(2, 2), (3, 3), (2, 1)])
def test_within_a_node_values_are_rounded_as_in_one_process_with_the_codecs(
    num_ranks: int, num_local: int, word: str, max_norm: float, tmp_path: Path
) -> None:
    """Each hop is one quantization and one dequantization."""
    training = Training(num_ranks, num_local, max_norm)
    oracle = Oracle(training, tmp_path)
    oracle.train(weights=WEIGHTS_INT8, gradients_within=GRADIENTS_WITHIN[word])
    trained = training.run(tmp_path, {"within": word})
    check_against_oracle(trained, oracle)
    for ours in trained:
        coded = ours.figures["coded"]
        of_float32 = coded["gradients_within"]["sent_bytes"] / coded["gradients_within"]["exact_bytes"]
        assert 0.13 < of_float32 <= (0.27 if word == "int8" else 0.15)
        assert 0.001 < coded["gradients_within"]["relative_rms_error"] < (0.05 if word == "int8" else 0.3)
        of_float32 = coded["weights_within"]["sent_bytes"] / coded["weights_within"]["exact_bytes"]
        assert 0.25 < of_float32 < 0.265, "of bfloat16 twice as much"
        assert 0.001 < coded["weights_within"]["relative_rms_error"] < 0.02


@pytest.mark.covering(0)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backward", ["world", "ram", "ssd"])
@pytest.mark.parametrize("forward", ["exact", "delta", "int8"])
@pytest.mark.parametrize(("num_ranks", "num_local"), [(2, 1), (4, 2)])
def test_each_way_between_nodes_brings_the_same_bits_to_devices(
    num_ranks: int, num_local: int, forward: str, backward: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Weights are coded once for both hops, also if a node keeps them."""
    training = Training(num_ranks, num_local, num_steps=3, dtype=dtype, evaluates=True, cpu_memory="12MiB")
    expected = training.run(tmp_path / "expected", {"forward": "exact", "backward": "world", "within": "int8"})
    found = training.run(tmp_path / "found", {"forward": forward, "backward": backward, "within": "int8"})
    for ours, other in zip(found, expected, strict=True):
        assert_same_run(ours, other)
        coded = ours.figures["coded"]["weights_within"]
        assert coded["sent_bytes"] / coded["exact_bytes"] < (0.53 if dtype == torch.bfloat16 else 0.265)
        if any(part_numel(block, ours.rank) for block in ours.layout.blocks):
            assert 0.001 < coded["relative_rms_error"] < 0.02


@pytest.mark.covering(0)
@pytest.mark.parametrize("gradients", ["exact", "int8", "int4"])
@pytest.mark.parametrize(("num_ranks", "num_local"), [(2, 2), (4, 2)])
def test_each_backward_of_a_step_is_coded(num_ranks: int, num_local: int, gradients: str, tmp_path: Path) -> None:
    training = Training(num_ranks, num_local, num_steps=3, num_backwards=2)
    oracle = Oracle(training, tmp_path)
    between = GRADIENT_CODECS.get(gradients)
    oracle.train(weights=WEIGHTS_INT8, gradients=between, gradients_within=GRADIENTS_WITHIN["int8"])
    check_against_oracle(training.run(tmp_path, {"gradients": gradients, "within": "int8"}), oracle)


@pytest.mark.slow
@pytest.mark.covering(0)
@pytest.mark.parametrize("num_local", [1, 2])
def test_codecs_of_a_late_device_race_with_nothing(num_local: int, tmp_path: Path) -> None:
    """Copies and codecs of this device run late, in any order that its events allow."""
    devices = [AsyncDevice(seed) for seed in range(2)]
    expected = Training(2, num_local).run(tmp_path / "expected", "quantized")
    found = Training(2, num_local, make_device=iter(devices).__next__).run(tmp_path / "found", "quantized")
    assert not any(device.num_races for device in devices)
    assert_same_ranks(found, expected)


needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs hf-lohan[triton]")
IN_INTERPRETER = os.environ.get("TRITON_INTERPRET") == "1"


@needs_triton
@pytest.mark.skipif(not IN_INTERPRETER, reason="needs TRITON_INTERPRET=1")
@pytest.mark.parametrize("word", ["int8", "int4"])
def test_a_training_step_launches_each_kernel(word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_lohan.ranks.collectives import triton_codec

    monkeypatch.setattr(engine_ranks, "_NUM_MEASURED_STEPS", 1)  # then the sum is coded in one operation
    monkeypatch.setattr(triton_codec, "_NUMEL_PER_PROGRAM", 1 << 16)  # the interpreter is slow
    training = Training(4, 2, num_steps=3)
    parts = {"forward": "exact", "backward": "world", "gradients": word, "within": word}
    expected = training.run(tmp_path / "torch", parts)
    launches, one_at_a_time, launch = Counter[str](), threading.Lock(), triton_codec._launch

    def counted(kernel: Any, *arguments: Any, **settings: Any) -> None:
        with one_at_a_time:  # ranks are threads, and the interpreter has one state
            launches[kernel.fn.__name__] += 1
            launch(kernel, *arguments, **settings)

    monkeypatch.setattr(triton_codec, "_launch", counted)
    monkeypatch.setattr(block_operators, "_kernels", lambda tensor: triton_codec)
    found = training.run(tmp_path / "triton", parts)
    assert_same_ranks(found, expected)
    kernels = {"_quantize_kernel", "_dequantize_kernel", "_sum_kernel", "_sum_quantize_kernel"}
    assert launches.keys() == kernels
    num_chunks = sum(len(block.cut(found[0].layout.plan.chunk_numel)) for block in found[0].layout.blocks)
    assert all(launches[kernel] >= num_chunks for kernel in kernels)


@pytest.mark.slow
@needs_triton
@pytest.mark.skipif(IN_INTERPRETER, reason="this process runs the test above itself")
def test_kernels_in_the_interpreter() -> None:
    """The interpreter must be chosen before Triton is imported."""
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-k", "launches_each_kernel"]
    assert "2 passed" in run_python(*command, timeout_s=900, TRITON_INTERPRET="1").stdout


def test_one_rank_says_that_nothing_is_rounded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    training = Training(1, 1, num_steps=2)
    with caplog.at_level(logging.INFO, logger="hf_lohan"):
        (ours,) = training.run(tmp_path / "within", {"within": "int8"})
    (exact,) = training.run(tmp_path / "exact", "exact")
    assert "'within': 'int8'} has no effect, because there is one rank" in caplog.text
    assert_same_tensors(ours.weights, exact.weights)


def test_codecs_that_round_are_logged_with_their_errors(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="hf_lohan"):
        Training(2, 1).run(tmp_path, {"within": "int4", "gradients": "int4"})
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    rounds = "weights are sent between a machine's RAM and its devices in int8", "gradients are sent between machines"
    for text in rounds:
        assert sum(text in warning for warning in warnings) == 1
    within, between = "between its RAM and its device", "to other nodes"
    for what in (f"weights {within}", f"gradients {within}", f"gradients {between}"):
        errors = [text for text in caplog.messages if f"sent {what} in 3 steps with a relative error of" in text]
        assert len(errors) == 2 and all("root mean square" in text for text in errors), what


EXACT_WAYS = [{"backward": "node"}, {"forward": "delta"}, {"forward": "delta", "backward": "node"}]


@pytest.mark.covering(0)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("num_ranks", "num_local", "max_norm"), [(2, 1, 0.5), (4, 2, 0.5), (2, 1, 0.0)])
def test_kept_weights_change_no_bit(
    num_ranks: int, num_local: int, max_norm: float, dtype: torch.dtype, tmp_path: Path
) -> None:
    """An evaluation after each step fetches the changed weights."""
    training = Training(
        num_ranks, num_local, max_norm, num_steps=3, dtype=dtype, evaluates=True, decides_before_loads=False
    )
    exact = training.run(tmp_path / "exact", "exact")
    for number, way in enumerate(EXACT_WAYS):
        assert_same_ranks(training.run(tmp_path / str(number), way), exact)


@pytest.mark.covering(0)
@pytest.mark.parametrize("forward", ["exact", "int8"])
@pytest.mark.parametrize("backward", ["node", "world"])
@pytest.mark.parametrize(("num_ranks", "num_local"), NODES)
def test_the_sent_bytes_of_weights(num_ranks: int, num_local: int, forward: str, backward: str, tmp_path: Path) -> None:
    """A rank sends its part to each other node for every load of the block, or once for each version of the block."""
    training = Training(num_ranks, num_local, num_steps=3)
    trained = training.run(tmp_path, {"forward": forward, "backward": backward})
    for rank, ours in enumerate(trained):
        expected = exact = 0
        for block in ours.layout.blocks:
            numel = part_numel(block, rank)
            message_bytes = WEIGHTS_INT8.message_bytes(numel) if forward == "int8" else numel * 4
            num_loads = ours.num_loads[block.name]
            if backward == "node":
                assert num_loads >= training.num_steps
                num_loads = ours.num_states[block.name]
            expected += num_loads * (training.num_nodes - 1) * message_bytes
            exact += num_loads * (training.num_nodes - 1) * numel * 4
        assert ours.sent["weights"] == expected
        if forward == "int8":
            assert ours.figures["coded"]["weights"]["sent_bytes"] == expected
            assert ours.figures["coded"]["weights"]["exact_bytes"] == exact
        assert sum(ours.num_loads.values()) > sum(ours.num_states.values()), "backward loads, too"
    of_one_pass = sum(part_numel(block, rank) for block in trained[0].layout.blocks for rank in range(num_ranks))
    assert of_one_pass == sum(block.numel for block in trained[0].layout.blocks)


def test_a_step_sends_only_changes(tmp_path: Path) -> None:
    training = Training(2, 1, num_steps=4, dtype=torch.bfloat16, lr=1e-5)
    kept = training.run(tmp_path / "kept", {"backward": "node"})
    changes = training.run(tmp_path / "changes", {"forward": "delta"})
    for ours, other in zip(changes, kept, strict=True):
        figures = ours.figures["coded"]["weights"]
        assert figures["exact_bytes"] == other.sent["weights"]
        assert figures["sent_bytes"] == ours.sent["weights"]
        of_first = sum(2 * part_numel(block, ours.rank) for block in ours.layout.blocks)
        of_later = other.sent["weights"] - of_first
        assert of_later > 0
        assert ours.sent["weights"] - of_first < of_later / 3


@pytest.mark.covering(0)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("source", ["ram", "ssd"])
@pytest.mark.parametrize("forward", ["exact", "int8"])
@pytest.mark.parametrize(("num_ranks", "num_local", "group"), GROUPS)
def test_groups_of_nodes_keep_one_copy_among_them(
    num_ranks: int, num_local: int, group: int, forward: Any, source: Any, dtype: torch.dtype, tmp_path: Path
) -> None:
    """In backward, a rank sends its part and those that it keeps to its counterparts in the group, as they are."""
    training = Training(num_ranks, num_local, num_steps=2, dtype=dtype, cpu_memory="12MiB")
    way = Collectives(forward=forward, backward=source, group_ranks=group)
    expected = training.run(tmp_path / "world", {"forward": forward, "backward": "world"})
    found = training.run(tmp_path / "found", way)
    of_group, num_nodes = group // num_local, training.num_nodes
    num_in_group = of_all = 0
    for rank, (ours, other) in enumerate(zip(found, expected, strict=True)):
        assert_same_run(ours, other)
        node, local = divmod(rank, num_local)
        in_group = range(node // of_group * of_group, (node // of_group + 1) * of_group)
        foreign = [other_node * num_local + local for other_node in range(num_nodes) if other_node not in in_group]
        carried = [rank, *foreign[node % of_group :: of_group]]
        sent = 0
        for block in ours.layout.blocks:
            numel, num_states = part_numel(block, rank), ours.num_states[block.name]
            message_bytes = WEIGHTS_INT8.message_bytes(numel) if forward == "int8" else numel * dtype.itemsize
            num_kept = ours.num_loads[block.name] - num_states
            num_in_group += num_kept
            of_carried = sum(part_numel(block, of) for of in carried) * dtype.itemsize
            sent += num_states * (num_nodes - 1) * message_bytes + num_kept * (of_group - 1) * of_carried
        assert ours.sent["weights"] == sent
        kept_bytes = sum(part_numel(block, of) * dtype.itemsize for block in ours.layout.blocks for of in carried[1:])
        assert kept_bytes <= ours.layout.copy_bytes
        assert source == "ram" or kept_bytes == sum(record.num_bytes for record in ours.layout.copy_records)
        of_all += kept_bytes
    assert num_in_group > 0
    param_bytes = sum(block.numel for block in found[0].layout.blocks) * dtype.itemsize
    assert of_all == (num_nodes // of_group - 1) * param_bytes, "each group keeps the weights of the others once"


@pytest.mark.slow
@pytest.mark.parametrize("evaluates", slow_but([True], [False, True]))
def test_a_group_is_used_by_its_number_of_ranks(evaluates: bool, tmp_path: Path) -> None:
    """Copies are decided in the middle of the first pass, and blocks are also coded on their way to devices."""
    training = Training(4, 1, num_steps=3, evaluates=evaluates, decides_before_loads=False)
    for number, parts in enumerate([{"forward": "int8", "within": "int4"}, {"forward": "exact"}]):
        expected = training.run(tmp_path / f"world-{number}", {**parts, "backward": "world"})
        found = training.run(tmp_path / f"found-{number}", {**parts, "backward": 2})
        for ours, other in zip(found, expected, strict=True):
            assert ours.layout.collectives is not None and ours.layout.collectives.group_ranks == 2
            assert_same_run(ours, other)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"backward": 3}, "backward: 3 is set with 8 ranks on nodes of 2; the ranks of a node share one copy"),
        ({"backward": 6}, "give a multiple of 2 that divides 8, or node"),
        ({"backward": 1}, "backward: 1 is set with 8 ranks on nodes of 2"),
        ({"backward": 16}, "backward: 16 is set with 8 ranks"),
        ({"backward": 0}, "backward: 0 is not a number of ranks"),
        ({"backward": True}, "backward: True is not allowed; choose .* or a number of ranks"),
        ({"backward": 2.5}, "backward: 2.5 is not allowed"),
        ({"backward": 4, "forward": "delta"}, "forward: delta needs a copy of all weights in each node"),
    ],
)
def test_groups_that_are_not_whole_nodes_are_refused(setting: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        Training(8, 2).layout(tiny_model("llama"), 0, tmp_path, setting)


def test_a_group_of_a_node_or_of_all_nodes_is_node_or_world(tmp_path: Path) -> None:
    def open_ways(backward: int | str) -> tuple[Collectives, ...]:
        setting = {"forward": "exact", "backward": backward}
        return Training(8, 2).layout(tiny_model("llama"), 0, tmp_path, setting)[0].open_ways

    assert open_ways(2) == open_ways("node") and open_ways(8) == open_ways("world")
    assert [way.group_ranks for way in open_ways(4)] == [4, 4]
    assert Collectives.of_setting({"backward": 4}).to_setting() == {"backward": 4, "gradients": "exact"}
