"""Private API of others, one module an upstream: the only place that may touch it.

Each function is named for what it gives. `tests/compat/` has a canary for each, which fails first and says what moved
when an upgrade moves it. `torch_private` imports torch alone and may be used everywhere; the others are for the rooms
that know Hugging Face.
"""

__all__: list[str] = []
