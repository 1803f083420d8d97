"""What goes where, decided before anything moves.

Pure arithmetic over sizes and budgets: no torch tensors, no I/O, so every decision can be asked for without weights
or hardware. Today it cuts the two memory budgets into pools (`plan_pools`) or refuses,
with the numbers that say why, and chooses how to clip (`should_speculate`).
"""

from hf_lohan.planner.clip_choice import StepTimes, should_speculate
from hf_lohan.planner.pool_plan import (
    MIN_CHUNK_NUMEL,
    BlockShape,
    BudgetError,
    PoolPlan,
    PoolRequest,
    SizeClass,
    cut_units,
    plan_pools,
)

__all__ = [
    "MIN_CHUNK_NUMEL",
    "BlockShape",
    "BudgetError",
    "PoolPlan",
    "PoolRequest",
    "SizeClass",
    "StepTimes",
    "cut_units",
    "plan_pools",
    "should_speculate",
]
