"""Connections between ranks, with messages, rendezvous, shared memory of a node, failures, and agreements of all
ranks."""
