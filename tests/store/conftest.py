"""Import fixtures of engines and records, and make the modules beside this file importable."""

import sys
from pathlib import Path

from stored_records import engine, make_engine, model, paths, random_values, records

sys.path.insert(0, str(Path(__file__).parent))

__all__ = ["engine", "make_engine", "model", "paths", "random_values", "records"]
