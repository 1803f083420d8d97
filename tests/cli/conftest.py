"""Import fixtures of models for plans."""

from planned_models import equal_requests_planned_once, llama_of_4_layers, model_13b, model_of_4_layers, tiny

__all__ = ["equal_requests_planned_once", "llama_of_4_layers", "model_13b", "model_of_4_layers", "tiny"]
