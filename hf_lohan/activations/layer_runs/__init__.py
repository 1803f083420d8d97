"""Forwards of a layer that runs on some tokens at a time, and their backwards.

`layer_run` has all tokens of its rows. `shared_rows` has a part of them, and other ranks have the rest.
"""

from hf_lohan.activations.layer_runs.layer_run import LayerRun
from hf_lohan.activations.layer_runs.shared_rows import RowMemory, RowsOfRanks, SharedRun, row_memory_bytes

__all__ = ["LayerRun", "RowMemory", "RowsOfRanks", "SharedRun", "row_memory_bytes"]
