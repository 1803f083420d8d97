"""Offloaded models, and the scripts in `launch`."""

import sys
from pathlib import Path

from offloaded_models import forget_global_state, load_streamed, offload, open_engines

sys.path.insert(0, str(Path(__file__).parent / "launch"))

__all__ = ["forget_global_state", "load_streamed", "offload", "open_engines"]
