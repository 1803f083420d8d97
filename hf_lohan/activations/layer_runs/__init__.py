"""Forwards of a layer that runs again in backward.

`layer_run` runs some tokens at a time and has all tokens of its rows. `shared_rows` has a part of them, and other ranks
have the rest. `module_state` has what a layer or a model reads and changes, and sets it again.
"""

from hf_lohan.activations.layer_runs.shared_rows import RowMemory, row_memory_bytes
