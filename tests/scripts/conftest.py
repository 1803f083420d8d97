"""Tiny checkpoints and data files, folders without a network."""

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
sys.path[:0] = [str(SCRIPTS), str(SCRIPTS / "development")]  # scripts import each other from their folder


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return tiny_tokenizer()


@pytest.fixture(scope="session")
def checkpoint(tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the folder of a tiny model of a family, with its tokenizer. OPT is in float16, like its real
    checkpoints."""
    folders: dict[str, Path] = {}

    def folder_of(family: str) -> Path:
        if family not in folders:
            folders[family] = tmp_path_factory.mktemp(family)
            model = tiny_model(family)
            (model.half() if family == "opt" else model).save_pretrained(folders[family])
            tokenizer.save_pretrained(folders[family])
        return folders[family]

    return folder_of


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "train.txt"
    path.write_text("\n".join(SENTENCES))
    return path


@pytest.fixture(autouse=True)
def restore_logging() -> Iterator[None]:
    """Restore log levels and handlers, because scripts change them and later tests read warnings."""
    loggers = [logging.getLogger(name) for name in (None, "datasets", "hf_lohan", "transformers")]
    before = [(logger, logger.level, list(logger.handlers)) for logger in loggers]
    yield
    for logger, level, handlers in before:
        logger.setLevel(level)
        logger.handlers[:] = handlers


@pytest.fixture(autouse=True)
def own_dataset_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep datasets out of the user's cache."""
    import datasets.config

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))
