"""Import the fixtures of engines and twins, and make the modules beside this file importable."""

from __future__ import annotations

import sys
from pathlib import Path

from engines import build_engine, make_config, make_twins
from offloaded_models import forget_global_state

sys.path.insert(0, str(Path(__file__).parent))

__all__ = ["build_engine", "forget_global_state", "make_config", "make_twins"]
