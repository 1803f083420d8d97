"""The setting `collectives` changes exactly the intended bits of a training on several nodes, and sends the planned
bytes.
"""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from trained_nodes import Oracle, Trained, Training, gradient_numels, part_numel

from hf_lohan.ranks import GRADIENTS_INT4, GRADIENTS_INT8, WEIGHTS_INT8, Channel, RanksDisagreeError
from hf_lohan.testing.thread_ranks import run_ranks

NODES = [(2, 1), (4, 2), (3, 1)]
"""The number of ranks, and the number of ranks per node."""
GRADIENT_CODECS = {"int8": GRADIENTS_INT8, "int4": GRADIENTS_INT4}


def check_against_oracle(trained: list[Trained], oracle: Oracle) -> None:
    for rank, ours in enumerate(trained):
        assert all(map(torch.equal, ours.losses, oracle.losses[rank]))
        assert all(map(torch.equal, ours.norms, oracle.norms))
        for name, weight in oracle.parameters.items():
            assert torch.equal(ours.weights[name], weight.detach()), name


@pytest.mark.covering(1)
@pytest.mark.parametrize("max_norm", [0.0, 0.5])
@pytest.mark.parametrize("word", ["int8", "int4"])
@pytest.mark.parametrize(("num_ranks", "num_local"), [(2, 1), (4, 2)])
def test_gradients_are_rounded_as_in_one_process_with_the_codec(
    num_ranks: int, num_local: int, word: str, max_norm: float, tmp_path: Path
) -> None:
    training = Training(num_ranks, num_local, max_norm)
    oracle = Oracle(training, tmp_path)
    oracle.train(gradients=GRADIENT_CODECS[word])
    exact = Oracle(training, tmp_path)
    exact.train()
    trained = training.run(tmp_path, {"gradients": word})
    check_against_oracle(trained, oracle)
    assert any(not torch.equal(exact.parameters[name], weight) for name, weight in oracle.parameters.items())


@pytest.mark.covering(1)
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
        assert ours.sent[Channel.GRADIENTS] == 2 * sent_bytes
        assert ours.figures["sent_bytes"]["gradients"] == 2 * sent_bytes
    trained_numel = sum(block.state_numel for block in trained[0].layout.blocks)
    all_numels = [sum(gradient_numels(training, trained[0].layout, rank)) for rank in range(num_ranks)]
    assert sum(all_numels) == (training.num_nodes - 1) * trained_numel


def test_settings_that_differ_are_refused(tmp_path: Path) -> None:
    training = Training(2, 1)

    with pytest.raises(RanksDisagreeError, match="give all ranks the same settings"):
        run_ranks(
            2,
            lambda links: training.train_rank(links, tmp_path, {"gradients": ["int8", "int4"][links.ranks.rank]}),
            num_local=1,
        )


def test_nothing_is_rounded_on_one_node(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    training = Training(2, 2, num_steps=2)
    exact = training.run(tmp_path / "exact", "exact")
    with caplog.at_level(logging.INFO, logger="hf_lohan"):
        quantized = training.run(tmp_path / "quantized", "quantized")
    for ours, other in zip(quantized, exact, strict=True):
        assert all(torch.equal(ours.weights[name], weight) for name, weight in other.weights.items())
        assert ours.sent[Channel.WEIGHTS] == ours.sent[Channel.GRADIENTS] == 0
    assert "has no effect" in caplog.text


def test_a_codec_that_rounds_is_logged_with_its_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="hf_lohan"):
        Training(2, 1).run(tmp_path, {"gradients": "int4"})
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert sum("gradients are sent between machines in int4" in text for text in warnings) == 1
    errors = [text for text in caplog.messages if "with a relative error of 1" in text]
    assert len(errors) == 2
    assert all("root mean square" in text for text in errors)


@pytest.mark.covering(1)
@pytest.mark.parametrize("max_norm", [0.0, 0.5])
@pytest.mark.parametrize(("num_ranks", "num_local"), [(2, 1), (4, 2)])
@pytest.mark.parametrize("backward", ["world", "node"])
def test_weights_are_rounded_as_in_one_process_with_the_codec(
    backward: str, num_ranks: int, num_local: int, max_norm: float, tmp_path: Path
) -> None:
    """All ranks compute with the decoded weights. Updates change the exact weights."""
    training = Training(num_ranks, num_local, max_norm)
    oracle = Oracle(training, tmp_path)
    oracle.train(weights=WEIGHTS_INT8)
    check_against_oracle(training.run(tmp_path, {"forward": "int8", "backward": backward}), oracle)


def test_quantized_rounds_weights_and_gradients(tmp_path: Path) -> None:
    training = Training(4, 2)
    oracle = Oracle(training, tmp_path)
    oracle.train(weights=WEIGHTS_INT8, gradients=GRADIENTS_INT4)
    check_against_oracle(training.run(tmp_path, "quantized"), oracle)


EXACT_WAYS = [{"backward": "node"}, {"forward": "delta"}, {"forward": "delta", "backward": "node"}]


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_ranks", "num_local", "max_norm"), [(2, 1, 0.5), (4, 2, 0.5), (2, 1, 0.0)])
def test_kept_weights_change_no_bit(
    num_ranks: int, num_local: int, max_norm: float, dtype: torch.dtype, tmp_path: Path
) -> None:
    """An evaluation after each step fetches the changed weights."""
    training = Training(num_ranks, num_local, max_norm, dtype=dtype, evaluates=True, decides_before_loads=False)
    exact = training.run(tmp_path / "exact", "exact")
    for number, way in enumerate(EXACT_WAYS):
        for ours, other in zip(training.run(tmp_path / str(number), way), exact, strict=True):
            assert all(map(torch.equal, ours.losses, other.losses))
            assert all(map(torch.equal, ours.norms, other.norms))
            assert all(torch.equal(ours.weights[name], weight) for name, weight in other.weights.items())


@pytest.mark.covering(1)
@pytest.mark.parametrize("forward", ["exact", "int8"])
@pytest.mark.parametrize("backward", ["world", "node"])
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
        assert ours.sent[Channel.WEIGHTS] == expected
        if forward == "int8":
            assert ours.figures["coded"]["weights"]["sent_bytes"] == expected
            assert ours.figures["coded"]["weights"]["exact_bytes"] == exact
    of_one_pass = sum(part_numel(block, rank) for block in trained[0].layout.blocks for rank in range(num_ranks))
    assert of_one_pass == sum(block.numel for block in trained[0].layout.blocks)


def test_backward_loads_nothing_from_other_nodes(tmp_path: Path) -> None:
    """The loads of backward send nothing."""
    ours = Training(2, 1, num_steps=3).run(tmp_path, {"backward": "node"})[0]
    assert sum(ours.num_loads.values()) > sum(ours.num_states.values())
    assert all(num_states <= 4 for num_states in ours.num_states.values()), "one per step and one foreseen"


def test_a_step_sends_only_changes(tmp_path: Path) -> None:
    training = Training(2, 1, num_steps=4, dtype=torch.bfloat16, lr=1e-5)
    kept = training.run(tmp_path / "kept", {"backward": "node"})
    changes = training.run(tmp_path / "changes", {"forward": "delta"})
    for ours, other in zip(changes, kept, strict=True):
        figures = ours.figures["coded"]["weights"]
        assert figures["exact_bytes"] == other.sent[Channel.WEIGHTS]
        assert figures["sent_bytes"] == ours.sent[Channel.WEIGHTS]
        of_first = sum(2 * part_numel(block, ours.rank) for block in ours.layout.blocks)
        of_later = other.sent[Channel.WEIGHTS] - of_first
        assert of_later > 0
        assert ours.sent[Channel.WEIGHTS] - of_first < of_later / 3


@pytest.mark.covering(1)
@pytest.mark.parametrize(("num_ranks", "num_local"), [(2, 1), (4, 2)])
@pytest.mark.parametrize("forward", ["exact", "delta", "int8"])
def test_copies_on_the_ssd_equal_copies_in_ram(forward: str, num_ranks: int, num_local: int, tmp_path: Path) -> None:
    training = Training(num_ranks, num_local, dtype=torch.bfloat16, evaluates=True, cpu_memory="12MiB")
    expected = training.run(tmp_path / "ram", {"forward": forward, "backward": "ram"})
    found = training.run(tmp_path / "ssd", {"forward": forward, "backward": "ssd"})
    assert any(ours.layout.copy_records for ours in found)  # a rank may have no part of any block
    for ours, other in zip(found, expected, strict=True):
        assert other.layout.copy_cpu_bytes == ours.layout.copy_bytes > 0
        assert ours.layout.copy_cpu_bytes == 0 and not other.layout.copy_records
        assert all(map(torch.equal, ours.losses, other.losses))
        assert all(torch.equal(ours.weights[name], weight) for name, weight in other.weights.items())
        assert ours.sent == other.sent
