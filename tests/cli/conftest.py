"""Import fixtures of models for plans, and make the modules beside this file importable."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from planned_models import equal_requests_planned_once, model_13b, tiny

__all__ = ["equal_requests_planned_once", "model_13b", "tiny"]
