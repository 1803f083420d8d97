"""What the user may ask for: budgets, SSD paths and a few switches.

One frozen dataclass, `OffloadConfig`, made from a YAML file, a dict, the word "lohan" or keywords. `values` checks
every value where it enters, a misspelt key is refused naming the right one, and `resolve` turns every "auto" into a
number once the machine is known. The room itself knows neither torch nor the machine.
"""

from hf_lohan.config.offload_config import ExpertCachePolicy, OffloadConfig, Schedule, setting_rows
from hf_lohan.config.values import AUTO, ConfigError, SsdPath, interval_s, parse_bytes, ssd_paths
from hf_lohan.planner.collectives import Collectives
from hf_lohan.planner.offload_plan import Activations

__all__ = [
    "AUTO",
    "Activations",
    "Collectives",
    "ConfigError",
    "ExpertCachePolicy",
    "OffloadConfig",
    "Schedule",
    "SsdPath",
    "interval_s",
    "parse_bytes",
    "setting_rows",
    "ssd_paths",
]
