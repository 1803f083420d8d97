"""Lanes between ranks, and the watch over them, with meeting, shared memory of a node, failures, and agreements of all
ranks."""
