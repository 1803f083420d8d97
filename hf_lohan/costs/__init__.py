"""Plans where weights, states and activations are stored, and how a step runs.

The planner is arithmetic over sizes, budgets and rates, without torch and without I/O. `pool_plan` divides the two
memory budgets into pools, or raises an error that says how large a budget must be. `record_traffic` chooses the records
with a copy in RAM. `plan_offload` takes a `HardwareProfile` and a `ModelProfile`, decides which activations are kept,
swapped or recomputed and how to clip, and predicts the step.
"""

from hf_lohan.costs.collectives import Cluster, Collectives, all_ways
from hf_lohan.costs.cuts import (
    balanced_experts,
    cut_for_ranks,
    cut_units,
    most_rows,
    owned_experts,
    shared_segments,
    units_between,
)
from hf_lohan.costs.fitting import fits_without_offloading, stock_training_fit
from hf_lohan.costs.generation import KeysAndValues, slots_for_generation, token_traffic
from hf_lohan.costs.hardware_profile import (
    COMPUTING_RATES,
    CpuProfile,
    DeviceProfile,
    HardwareProfile,
    ProfileError,
    SsdProfile,
    with_changed,
)
from hf_lohan.costs.model_profile import GRAPH, BlockProfile, ExpertsProfile, Fusion, ModelProfile, OperationProfile
from hf_lohan.costs.offload_plan import (
    FETCH_AHEAD,
    INPUT,
    LAYERS_LEAVING,
    MOST_WRONG_GUESSES,
    ActivationPlacements,
    BlockGradient,
    Durability,
    InMemoryFit,
    LayerPlacements,
    OffloadPlan,
    Placement,
    StepPrediction,
    TrainingSetup,
)
from hf_lohan.costs.pool_plan import (
    MIN_CHUNK_NUMEL,
    MIN_SLOTS_TO_LEND,
    BlockShape,
    BudgetError,
    PoolPlan,
    PoolRequest,
    SizeClass,
    plan_pools,
)
from hf_lohan.costs.quantization import Quantization
from hf_lohan.costs.record_traffic import RecordTraffic, choose_resident_records, step_traffic
from hf_lohan.costs.search.hardware_changes import better_hardware, drive_life, one_more_ssd, written_bytes
from hf_lohan.costs.search.plan_search import fastest_way, forecast, plan_offload, scaled_to, sweep_swapped_bytes
