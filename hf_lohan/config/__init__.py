"""The user's settings: budgets, SSD paths and a few switches.

`OffloadConfig` is one frozen dataclass, made from a YAML file, a dict, the string "lohan" or keywords. A field declares
a setting: its name, type, default, check (`values`) and documentation. Settings that belong together are a table
(`tables`). The error for a misspelt or former name gives the right name. `resolve` replaces every "auto" that depends
on the machine, and returns a `ResolvedConfig`. This package does not import torch and does not inspect the machine.
"""

from hf_lohan.config.offload_config import (
    ALL_AUTO,
    FITS_OR_NOT,
    OFFLOAD_VARIABLE,
    OffloadConfig,
    ResolvedConfig,
    offload_of_environment,
    setting_rows,
)
from hf_lohan.config.tables import ExpertCachePolicy, LoadExperts, RankSettings, Schedule
from hf_lohan.config.values import AUTO, ConfigError, SsdPath, interval_s, parse_bytes
from hf_lohan.costs.collectives import Collectives
