"""What goes where, decided before anything moves.

Pure arithmetic over sizes, budgets and speeds: no torch tensors, no I/O, so every decision can be asked for without
weights or hardware. It cuts the two memory budgets into pools (`plan_pools`) or refuses, with the numbers that say why;
chooses how to clip (`should_speculate`) and which records have a copy in RAM (`choose_resident_records`); and from a
`HardwareProfile` and a `ModelProfile` decides what is kept, swapped and recomputed, and predicts the step
(`plan_offload`).
"""

from hf_lohan.planner.clip_choice import StepTimes, should_speculate
from hf_lohan.planner.fitting import InMemoryFit, fits_without_offloading
from hf_lohan.planner.hardware_changes import DriveLife, HardwareChange, drive_life, what_hardware_buys
from hf_lohan.planner.hardware_profile import CpuProfile, DeviceProfile, HardwareProfile, ProfileError, SsdProfile
from hf_lohan.planner.model_profile import BlockProfile, ModelProfile, OperationProfile
from hf_lohan.planner.offload_plan import OffloadPlan
from hf_lohan.planner.placement import INPUT, ActivationPlacements, LayerPlacements, Placement
from hf_lohan.planner.plan_search import plan_offload, sweep_swapped_bytes
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
from hf_lohan.planner.record_choice import RecordTraffic, choose_resident_records, step_traffic
from hf_lohan.planner.step_prediction import Lanes, StepPrediction
from hf_lohan.planner.training_setup import TrainingSetup

__all__ = [
    "INPUT",
    "MIN_CHUNK_NUMEL",
    "ActivationPlacements",
    "BlockProfile",
    "BlockShape",
    "BudgetError",
    "CpuProfile",
    "DeviceProfile",
    "DriveLife",
    "HardwareChange",
    "HardwareProfile",
    "InMemoryFit",
    "Lanes",
    "LayerPlacements",
    "ModelProfile",
    "OffloadPlan",
    "OperationProfile",
    "Placement",
    "PoolPlan",
    "PoolRequest",
    "ProfileError",
    "RecordTraffic",
    "SizeClass",
    "SsdProfile",
    "StepPrediction",
    "StepTimes",
    "TrainingSetup",
    "choose_resident_records",
    "cut_units",
    "drive_life",
    "fits_without_offloading",
    "plan_offload",
    "plan_pools",
    "should_speculate",
    "step_traffic",
    "sweep_swapped_bytes",
    "what_hardware_buys",
]
