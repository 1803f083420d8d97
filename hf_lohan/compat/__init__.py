"""The private API of other libraries that we use, one module for each library. No other room touches it.

`tests/compat/` has a test for each function, which fails first when an upgrade changes something. `torch_private`
imports torch alone and may be used everywhere; the others are for the rooms that know Hugging Face.
"""

__all__: list[str] = []
