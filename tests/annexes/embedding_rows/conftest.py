"""Import the fixtures of engines and twins."""

from engines import build_engine, make_config, make_twins
from offloaded_models import forget_global_state

__all__ = ["build_engine", "forget_global_state", "make_config", "make_twins"]
