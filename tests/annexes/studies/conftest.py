"""Import fixtures of models for plans. Makes the papers' machines and models of tests/costs importable."""

from __future__ import annotations

import sys
from pathlib import Path

from planned_models import equal_requests_planned_once, tiny

sys.path.insert(0, str(Path(__file__).parents[2] / "costs"))

__all__ = ["equal_requests_planned_once", "tiny"]
