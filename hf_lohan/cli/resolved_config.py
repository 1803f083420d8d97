"""A configuration as this machine resolves it, for reading and for use as a file."""

from __future__ import annotations

import json
from typing import Any

from hf_lohan.config import OffloadConfig

_AUTO_SSD = "# ssd: auto is the folder _lohan/store in the run's output directory\n"


def resolved_settings(offload: str) -> dict[str, Any]:
    """The settings that a run started now would use. Raises ConfigError for a bad `offload`.

    `ssd` stays "auto" where it is: its folder belongs to the run's output directory, which is not known here.
    """
    asked = OffloadConfig.load(offload)
    import torch  # after the quick checks

    from hf_lohan.device import available_host_memory_bytes, device_for
    from hf_lohan.threads import usable_cpus

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    has_cuda = accelerator is not None and accelerator.type == "cuda"
    resolved = asked.resolve(
        host_memory_bytes=available_host_memory_bytes(),
        device_memory_bytes=device_for("cuda" if has_cuda else "cpu").total_memory_bytes(),
        num_cpus=usable_cpus(),
        default_ssd_path="_lohan/store",
    )
    return {**resolved.to_dict(), "ssd": asked.to_dict()["ssd"]}


def to_yaml(settings: dict[str, Any]) -> str:
    """The settings as a YAML file, without the last newline."""
    import yaml

    text: str = yaml.safe_dump(settings, sort_keys=False)
    return ((_AUTO_SSD if settings["ssd"] == "auto" else "") + text).rstrip("\n")


def to_json(settings: dict[str, Any]) -> str:
    """The settings as JSON."""
    return json.dumps(settings, indent=2)
