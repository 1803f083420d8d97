"""Fixtures of offloaded models. Makes the modules of this folder importable."""

import sys
from pathlib import Path

from offloaded_models import forget_global_state, load_streamed, offload, open_engines
from resharded_stores import run, stopped_run

sys.path.insert(0, str(Path(__file__).parent))

__all__ = ["forget_global_state", "load_streamed", "offload", "open_engines", "run", "stopped_run"]
