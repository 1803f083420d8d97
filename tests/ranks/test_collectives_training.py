"""What the setting `collectives` changes of a training over several boxes: which bits, and how many bytes."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from trained_boxes import Oracle, Trained, Training, gradient_numels

from hf_lohan.ranks import GRADIENTS_INT4, GRADIENTS_INT8, Lane, RanksDisagreeError
from hf_lohan.testing.thread_ranks import run_ranks

BOXES = [(2, 1), (4, 2), (3, 1)]
"""Ranks, and how many of them lie on a box."""
GRADIENT_CODECS = {"int8": GRADIENTS_INT8, "int4": GRADIENTS_INT4}


def check_against_oracle(trained: list[Trained], oracle: Oracle) -> None:
    for rank, ours in enumerate(trained):
        assert all(map(torch.equal, ours.losses, oracle.losses[rank]))
        assert all(map(torch.equal, ours.norms, oracle.norms))
        for name, weight in oracle.parameters.items():
            assert torch.equal(ours.weights[name], weight.detach()), name


@pytest.mark.parametrize("max_norm", [0.0, 0.5])
@pytest.mark.parametrize("word", ["int8", "int4"])
@pytest.mark.parametrize(("num_ranks", "num_local"), [(2, 1), (4, 2)])
def test_gradients_are_rounded_as_one_process_would_that_has_the_codec(
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


@pytest.mark.parametrize("word", ["exact", "int8", "int4"])
@pytest.mark.parametrize(("num_ranks", "num_local"), BOXES)
def test_bytes_of_gradients(num_ranks: int, num_local: int, word: str, tmp_path: Path) -> None:
    """A box sends the sum of each chunk that another one owns, once: (Y - 1) / Y of all, if cut alike."""
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
        assert ours.sent[Lane.GRADIENTS] == 2 * sent_bytes
        assert ours.figures["sent_bytes"]["gradients"] == 2 * sent_bytes
    trained_numel = sum(block.state_numel for block in trained[0].layout.blocks)
    all_numels = [sum(gradient_numels(training, trained[0].layout, rank)) for rank in range(num_ranks)]
    assert sum(all_numels) == (training.num_boxes - 1) * trained_numel


def test_settings_that_differ_are_refused(tmp_path: Path) -> None:
    training = Training(2, 1)

    with pytest.raises(RanksDisagreeError, match="give all ranks the same settings"):
        run_ranks(
            2,
            lambda links: training.train_rank(links, tmp_path, {"gradients": ["int8", "int4"][links.ranks.rank]}),
            num_local=1,
        )


def test_on_one_box_nothing_is_rounded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    training = Training(2, 2, num_steps=2)
    exact = training.run(tmp_path / "exact", "exact")
    with caplog.at_level(logging.INFO, logger="hf_lohan"):
        quantized = training.run(tmp_path / "quantized", "quantized")
    for ours, other in zip(quantized, exact, strict=True):
        assert all(torch.equal(ours.weights[name], weight) for name, weight in other.weights.items())
        assert ours.sent[Lane.WEIGHTS] == ours.sent[Lane.GRADIENTS] == 0
    assert "has no effect" in caplog.text


def test_a_codec_that_rounds_says_so_and_how_much(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="hf_lohan"):
        Training(2, 1).run(tmp_path, {"gradients": "int4"})
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert sum("gradients go from machine to machine in int4" in text for text in warnings) == 1
    errors = [text for text in caplog.messages if text.startswith("what rank")]
    assert len(errors) == 2
    assert all("off by 1" in text and "root mean square" in text for text in errors)
