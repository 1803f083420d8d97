"""The fixture that resets global state after each test."""

from offloaded_models import forget_global_state

__all__ = ["forget_global_state"]
