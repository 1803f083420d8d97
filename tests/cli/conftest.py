"""Import fixtures of models for plans."""

from planned_models import equal_requests_planned_once, model_13b, tiny

__all__ = ["equal_requests_planned_once", "model_13b", "tiny"]
