"""The user's settings: budgets, SSD paths and a few switches.

`OffloadConfig` is one frozen dataclass, made from a YAML file, a dict, the word "lohan" or keywords. `values` checks
every value. The error for a misspelt key suggests the nearest known key. `resolve` replaces every "auto" by a value for
this machine. The room does not import torch and does not inspect the machine.
"""

from hf_lohan.config.offload_config import (
    ALL_AUTO,
    FITS_OR_NOT,
    OFFLOAD_VARIABLE,
    ExpertCachePolicy,
    OffloadConfig,
    Schedule,
    offload_of_environment,
    setting_rows,
)
from hf_lohan.config.values import AUTO, ConfigError, SsdPath, interval_s, parse_bytes, ssd_paths
from hf_lohan.planner.collectives import Collectives
from hf_lohan.planner.offload_plan import Activations

__all__ = [
    "ALL_AUTO",
    "AUTO",
    "FITS_OR_NOT",
    "OFFLOAD_VARIABLE",
    "Activations",
    "Collectives",
    "ConfigError",
    "ExpertCachePolicy",
    "OffloadConfig",
    "Schedule",
    "SsdPath",
    "interval_s",
    "offload_of_environment",
    "parse_bytes",
    "setting_rows",
    "ssd_paths",
]
