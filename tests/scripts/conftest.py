"""Tiny checkpoints and data files, made on the spot: no network."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tiny_tokenizer import SENTENCES, tiny_tokenizer
from transformers import PreTrainedTokenizerFast

from hf_lohan.testing.models import tiny_model

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
sys.path[:0] = [str(SCRIPTS), str(SCRIPTS / "development")]  # the scripts import one another as they do when run


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return tiny_tokenizer()


@pytest.fixture(scope="session")
def checkpoint(tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a tiny model of a family, with its tokenizer; OPT in float16, as its real ones are."""
    made: dict[str, Path] = {}

    def folder_of(family: str) -> Path:
        if family not in made:
            made[family] = tmp_path_factory.mktemp(family)
            model = tiny_model(family)
            (model.half() if family == "opt" else model).save_pretrained(made[family])
            tokenizer.save_pretrained(made[family])
        return made[family]

    return folder_of


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "train.txt"
    path.write_text("\n".join(SENTENCES))
    return path


@pytest.fixture(autouse=True)
def own_logging() -> Iterator[None]:
    """A script sets levels as if the process were its own; the tests behind it read warnings."""
    loggers = [logging.getLogger(name) for name in (None, "datasets", "hf_lohan", "transformers")]
    before = [(logger, logger.level, list(logger.handlers)) for logger in loggers]
    yield
    for logger, level, handlers in before:
        logger.setLevel(level)
        logger.handlers[:] = handlers


@pytest.fixture(autouse=True)
def own_dataset_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is read from or left in the user's cache."""
    import datasets.config

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))
