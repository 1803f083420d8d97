"""Simulates a step task by task, with the order and the limits of a run."""
