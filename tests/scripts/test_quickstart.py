"""Parts of the quickstart. `bash scripts/quickstart.sh` runs the whole quickstart."""

from __future__ import annotations

import json
from pathlib import Path
from pydoc_data.topics import topics

import quickstart
import quickstart_inputs

from hf_lohan import OffloadConfig


def test_no_held_out_paragraph_is_trained_on() -> None:
    train, held_out = quickstart_inputs.split_topics(topics)
    assert len(train) + len(held_out) == len(topics)
    assert len(held_out) >= 5
    unseen = {paragraph for text in held_out for paragraph in text.split("\n\n")}
    assert not unseen & {paragraph for text in train for paragraph in text.split("\n\n")}


def test_the_split_is_the_same_every_time() -> None:
    assert quickstart_inputs.split_topics(topics) == quickstart_inputs.split_topics(dict(reversed(topics.items())))


def test_jsonl_round_trip(tmp_path: Path) -> None:
    texts = ['with "quotes"', "and\nlines", "ünïcode"]
    quickstart_inputs.write_jsonl(tmp_path / "x.jsonl", texts)
    lines = (tmp_path / "x.jsonl").read_text().splitlines()
    assert [json.loads(line)["text"] for line in lines] == texts


def test_the_budgets_are_a_fraction_of_the_state() -> None:
    config = OffloadConfig.load(str(quickstart.CONFIG))
    assert isinstance(config.gpu_memory, int) and isinstance(config.cpu_memory, int)
    assert config.gpu_memory + config.cpu_memory < 0.4 * 134_515_008 * 16


def test_the_arguments_are_supported(tmp_path: Path) -> None:
    from hf_lohan.huggingface.guards import check_arguments

    check_arguments(quickstart.training_arguments(tmp_path))
