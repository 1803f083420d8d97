"""The private API of other libraries that hf_lohan uses, one module for each library. Only this package uses it.

`tests/compat/` has a test for each function, which shows what an upgrade of a library changed. `torch_private` imports
only torch and may be used everywhere. The other modules are for packages that import Hugging Face libraries.
"""
