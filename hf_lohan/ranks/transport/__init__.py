"""Connections between ranks: messages, rendezvous, memory shared on a node, failures, and what all ranks agree on."""
