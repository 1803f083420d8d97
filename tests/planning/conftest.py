"""Import fixtures of models for plans."""

from planned_models import llama_of_4_layers

__all__ = ["llama_of_4_layers"]
