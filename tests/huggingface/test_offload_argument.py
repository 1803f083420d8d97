"""`offload` in training arguments, parsers, YAML files and the environment."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import transformers
import yaml
from datasets import Dataset
from transformers import HfArgumentParser
from trl import SFTConfig, TrlParser

import hf_lohan
from hf_lohan import Accelerator, ConfigError, LohanArguments, LohanPlugin, OffloadConfig, TrainingArguments
from hf_lohan.testing.models import tiny_model
from hf_lohan.trl import SFTTrainer

TABLE = {"cpu_memory": "4MiB", "gpu_memory": "2MiB"}


@dataclass(repr=False)
class SFTArguments(LohanArguments, SFTConfig):  # type: ignore[misc]
    pass


@pytest.fixture
def settings(tmp_path: Path) -> str:
    file = tmp_path / "lohan.yaml"
    file.write_text(yaml.safe_dump(TABLE))
    return str(file)


def common(folder: Path, **more: Any) -> dict[str, Any]:
    return {"output_dir": str(folder), "use_cpu": True, "report_to": [], "bf16": False, **more}


def config_of(args: Any = None, **named: Any) -> OffloadConfig | None:
    return hf_lohan.Trainer(tiny_model("llama"), args, **named)._offload_config


def by_yaml(parser: Callable[..., Any], kind: type, folder: Path, offload: Any) -> Any:
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(common(folder, offload=offload)))
    if parser is TrlParser:
        return parser(kind).parse_args_and_config(["--config", str(file)])[0]
    return parser(kind).parse_yaml_file(str(file))[0]


@pytest.mark.parametrize("offload", ["lohan", TABLE, "file"], ids=["word", "table", "file"])
@pytest.mark.parametrize(
    ("parser", "kind"),
    [(HfArgumentParser, TrainingArguments), (HfArgumentParser, SFTArguments), (TrlParser, SFTArguments)],
)
def test_a_yaml_file_of_a_run_has_offload(
    parser: Callable[..., Any], kind: type, offload: Any, settings: str, tmp_path: Path
) -> None:
    offload = settings if offload == "file" else offload
    args = by_yaml(parser, kind, tmp_path, offload)
    assert args.offload == offload
    assert config_of(args) == OffloadConfig.load(offload)


def test_the_command_line_has_offload(settings: str, tmp_path: Path) -> None:
    def parsed(*words: str) -> Any:
        command = ["--output_dir", str(tmp_path), "--use_cpu", *words]
        return HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(command)[0]

    assert parsed().offload is None
    assert parsed("--offload", settings).offload == settings
    assert parsed("--offload", json.dumps(TABLE)).offload == TABLE
    with pytest.raises(ConfigError, match="is not JSON"):
        parsed("--offload", "{cpu_memory}")
    with pytest.raises(ConfigError, match=r"cannot read the offload config 'missing\.yaml'"):
        parsed("--offload", "missing.yaml")


def test_trackers_and_saved_arguments_have_offload(tmp_path: Path) -> None:
    for offload, written in ((TABLE, TABLE), (OffloadConfig.load(TABLE), OffloadConfig.load(TABLE).to_dict())):
        args = TrainingArguments(**common(tmp_path), offload=offload, hub_token="secret")
        assert args.to_dict()["offload"] == json.loads(args.to_json_string())["offload"] == written
        assert "offload" in args.to_sanitized_dict()
        assert config_of(args) == OffloadConfig.load(TABLE)
        assert "secret" not in repr(args)
    (tmp_path / "a.yaml").touch()
    assert TrainingArguments(**common(tmp_path), offload=tmp_path / "a.yaml").offload == str(tmp_path / "a.yaml")


def test_an_argument_wins_over_the_environment_and_may_not_contradict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOHAN_OFFLOAD", "nothing.yaml")
    args = TrainingArguments(**common(tmp_path), offload=TABLE)
    plain = transformers.TrainingArguments(**common(tmp_path))
    assert config_of(args) == config_of(args, offload=dict(TABLE)) == config_of(plain, offload=TABLE)
    assert config_of(plain, offload=None) is None, "which is the stock Trainer, also with a default"
    for other in ("lohan", None):
        with pytest.raises(ConfigError, match=rf"offload={other!r} and args\.offload=.* are both given and differ"):
            config_of(args, offload=other)


def test_the_environment_is_the_default(settings: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, ours = transformers.TrainingArguments(**common(tmp_path)), TrainingArguments(**common(tmp_path))
    assert config_of(plain) is None and config_of(ours) is None
    assert LohanPlugin().offload == "lohan"
    monkeypatch.setenv("LOHAN_OFFLOAD", settings)
    assert config_of(plain) == config_of(ours) == OffloadConfig.load(TABLE)
    assert LohanPlugin().offload == Accelerator(cpu=True).lohan_plugin.offload == settings
    assert LohanPlugin(offload="lohan").offload == "lohan"
    monkeypatch.setenv("LOHAN_OFFLOAD", "nowhere.yaml")
    for make in (lambda: config_of(plain), LohanPlugin, lambda: Accelerator(cpu=True)):
        with pytest.raises(ConfigError, match=r"^LOHAN_OFFLOAD in the environment: cannot read .*'nowhere\.yaml'"):
            make()
    monkeypatch.setenv("LOHAN_OFFLOAD", "auto")
    with pytest.raises(ConfigError, match="offload='auto' is for Trainer"):
        LohanPlugin()


def test_trl_needs_its_own_arguments(tmp_path: Path) -> None:
    args = TrainingArguments(**common(tmp_path), offload=TABLE)
    with pytest.raises(ValueError, match=r"lack the arguments of TRL's trainers; .*LohanArguments, trl\.SFTConfig"):
        SFTTrainer(tiny_model("llama"), args, train_dataset=Dataset.from_list([{"input_ids": [1, 2]}]))
