"""Import the fixtures of offloaded models, and make the scripts in `launch` importable."""

import sys
from pathlib import Path

from offloaded_models import forget_global_state, load_streamed, offload, open_engines

sys.path.insert(0, str(Path(__file__).parent / "launch"))

__all__ = ["forget_global_state", "load_streamed", "offload", "open_engines"]
