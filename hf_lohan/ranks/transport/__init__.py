"""Lanes between ranks, the watch over them, connections, shared memory of a node, failures, and agreements of all
ranks."""
