"""Traces a model's forward and backward on fake tensors, and counts operations, FLOPs and bytes of each block."""

from hf_lohan.planning.tracing.profile import TracedModel, trace_model
