"""Fixtures of engines and twins. Makes the modules of this folder importable."""

import sys
from pathlib import Path

from engines import build_engine, make_config, make_twins

sys.path.insert(0, str(Path(__file__).parent))

__all__ = ["build_engine", "make_config", "make_twins"]
