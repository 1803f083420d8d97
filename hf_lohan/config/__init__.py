"""What the user may ask for: budgets, SSD paths and a few switches.

One frozen dataclass, `OffloadConfig`, made from a YAML file, a dict, the word "lohan" or keywords. Every
value is checked where it enters, a misspelt key is refused naming the right one, and `resolve` turns every
"auto" into a number once the machine is known. The room itself knows neither torch nor the machine.
"""

from hf_lohan.config.byte_sizes import format_bytes, parse_bytes
from hf_lohan.config.description import setting_rows
from hf_lohan.config.errors import ConfigError
from hf_lohan.config.offload_config import Activations, OffloadConfig, OffloadSource, Schedule
from hf_lohan.config.ssd_path import SsdPath

__all__ = [
    "Activations",
    "ConfigError",
    "OffloadConfig",
    "OffloadSource",
    "Schedule",
    "SsdPath",
    "format_bytes",
    "parse_bytes",
    "setting_rows",
]
