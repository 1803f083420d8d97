"""Forwards of a layer that runs again in backward.

`layer_run` runs some tokens at a time, and has all tokens of its rows. In `shared_rows` this rank has a part of the
tokens, and other ranks have the rest. `module_state` records and restores the state that a forward reads and changes.
"""

from hf_lohan.activations.layer_runs.shared_rows import RowMemory, row_memory_bytes
