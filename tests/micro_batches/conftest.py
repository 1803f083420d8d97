"""The fixtures of engines and twins."""

from engines import build_engine, make_config, make_twins

__all__ = ["build_engine", "make_config", "make_twins"]
