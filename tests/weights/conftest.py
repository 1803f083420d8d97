"""Import the fixtures of engines, twins and streams, and make the modules beside this file importable."""

import sys
from pathlib import Path

from engines import build_engine, make_config, make_twins

sys.path.insert(0, str(Path(__file__).parent))

from block_streams import make_stream

__all__ = ["build_engine", "make_config", "make_stream", "make_twins"]
