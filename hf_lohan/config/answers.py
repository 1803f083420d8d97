"""Makes settings from four answers, about model, card, RAM and drives (`lohan config --ask`)."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from hf_lohan.config.offload_config import DEVICE_TENTHS, OffloadConfig, ram_of_auto
from hf_lohan.config.values import AUTO, ConfigError, parse_bytes

_GIB = 1 << 30
_CARDS_BY_GIB = {
    8: "rtx4060",
    12: "rtx3060 rtx4070 rtx5070",
    16: "rtx4080 rtx5080 rtxa4000 t4 v100",
    24: "a10 l4 rtx3090 rtx4090 rtxa5000",
    32: "rtx5090",
    40: "a100",
    48: "a40 l40 l40s rtx6000ada rtxa6000",
    80: "h100",
    96: "rtxpro6000",
    141: "h200",
    180: "b200",
}
"""Names of cards by their memory in GiB. If a name has variants, the smallest memory counts."""
_CARDS_GIB = {name: gib for gib, names in _CARDS_BY_GIB.items() for name in names.split()}
_ON_CPU = ("none", "cpu")
_MAKERS = re.compile(r"\b(nvidia|geforce|tesla|quadro|pcie|sxm\d?|super|ti)\b|[^a-z0-9]")
_SIZE = re.compile(r"\d+(?:\.\d+)?\s*g(?:i?b)?\b", re.IGNORECASE)


@dataclass(frozen=True)
class Question:
    """A question, which is also an option of the command."""

    name: str
    text: str
    default: str | None
    settings: Callable[[str], dict[str, Any]]
    """Converts an answer to settings. Raises ConfigError for a wrong answer."""


def _of_model(answer: str) -> dict[str, Any]:
    if not answer.strip():
        raise ConfigError("the model is not named; give a checkpoint folder, a config.json or a name in the Hub")
    return {}


def _of_card(answer: str) -> dict[str, Any]:
    size, name = _SIZE.search(answer), _MAKERS.sub("", answer.lower())
    gib = _CARDS_GIB.get(name, _CARDS_GIB.get(f"rtx{name}"))
    if answer.strip().lower() in (AUTO, *_ON_CPU):
        return {}
    if size is None and gib is None:
        raise ConfigError(f"the card {answer!r} is not known; give its memory, such as 24GB, or auto or none")
    num_bytes = _bytes_of(size.group()) if size is not None else (gib or 0) * _GIB
    return {"gpu_memory": _shown(num_bytes * DEVICE_TENTHS // 10)}


def _of_ram(answer: str, *, on_cpu: bool = False) -> dict[str, Any]:
    if answer.strip().lower() == AUTO:
        return {}
    if _SIZE.fullmatch(answer.strip()) is None:
        raise ConfigError(f"the RAM {answer!r} is not a size; give a size such as 64GB, or auto")
    return {"cpu_memory": _shown(ram_of_auto(_bytes_of(answer.strip()), memory_is_host=on_cpu))}


def _of_drives(answer: str) -> dict[str, Any]:
    if answer.strip().lower() == AUTO:
        return {}
    drives = [drive.strip().partition("=") for drive in answer.split(",")]
    ssd = [{"path": path.strip(), **({"capacity": size.strip()} if size else {})} for path, _, size in drives]
    OffloadConfig.load({"ssd": ssd})
    return {"ssd": ssd}


def _bytes_of(size: str) -> int:
    """Return the number of bytes of a size such as 24GB, 24GiB or 24G. Here 24G is 24GB, as vendors write it."""
    number, unit = re.split(r"(?=[gG])", size.strip(), maxsplit=1)
    return parse_bytes(f"{number.strip()}{'GB' if unit.lower() == 'g' else unit}")


def _shown(num_bytes: int) -> str:
    return f"{num_bytes * 10 // _GIB / 10:g}GiB"


QUESTIONS = (
    Question("model", "Which model? A checkpoint folder, a config.json or a name in the Hub", None, _of_model),
    Question(
        "card", "Which card? A name, or its memory such as 24GB; none: the CPU; auto: this machine's", AUTO, _of_card
    ),
    Question("ram", "How much RAM? Such as 64GB; auto: this machine's", AUTO, _of_ram),
    Question(
        "drives",
        "Which drives? Folders such as /mnt/nvme0/lohan=1.5TB,/mnt/nvme1/lohan; auto: the run's output folder",
        AUTO,
        _of_drives,
    ),
)


def missing_answers(answers: Mapping[str, str | None]) -> list[str]:
    """Return the command's options for the questions that have no answer."""
    return [f"--{question.name}" for question in QUESTIONS if answers.get(question.name) is None]


def use_answers(answers: Mapping[str, str], file: str) -> tuple[str, str, str]:
    """Return the content of a config file, a command that predicts the run, and a command that trains. The keys of
    ``answers`` are the names of the questions. ``file`` is the path for the config. Raises ConfigError for a wrong
    answer."""
    settings: dict[str, Any] = {}
    for question in QUESTIONS:
        settings |= question.settings(answers[question.name])
    if answers["card"].strip().lower() in _ON_CPU:
        settings |= _of_ram(answers["ram"], on_cpu=True)
    OffloadConfig.load(settings)
    model, name = shlex.quote(answers["model"]), Path(answers["model"]).resolve().name.removesuffix(".json")
    text = yaml.safe_dump(settings, sort_keys=False) if settings else "# everything is automatic\n"
    trained_by = f"lohan launch --offload {shlex.quote(file)} -m trl.cli.main sft"
    return (
        text,
        f"lohan estimate {model} --offload {shlex.quote(file)}",
        f"{trained_by} --model_name_or_path {model} --dataset_name DATA --output_dir outputs/{shlex.quote(name)}",
    )


def check_new(file: str) -> None:
    """Raise ConfigError if the file exists."""
    if Path(file).exists():
        raise ConfigError(f"{file!r} exists already; give another file with --output")
