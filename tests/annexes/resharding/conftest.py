"""Import fixtures of offloaded models and of a stopped run."""

from offloaded_models import forget_global_state, load_streamed, offload, open_engines
from resharded_stores import run, stopped_run

__all__ = ["forget_global_state", "load_streamed", "offload", "open_engines", "run", "stopped_run"]
