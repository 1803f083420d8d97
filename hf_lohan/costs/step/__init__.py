"""The costs of a step with one rank, with several ranks, and with streamed experts."""
