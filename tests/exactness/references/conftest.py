"""Import the fixtures of engines and of their twins in memory."""

from engines import build_engine, make_config, make_twins

__all__ = ["build_engine", "make_config", "make_twins"]
