"""The `dtype` fixture. Makes the modules of this folder importable."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from stored_moments import dtype

__all__ = ["dtype"]
