"""TRL's trainers with `offload=`: `from hf_lohan.trl import SFTTrainer` in place of `from trl import SFTTrainer`.

Importing this imports TRL. Other trainers of TRL get the argument from the mixin `hf_lohan.OffloadTrainerMixin`.
"""

from __future__ import annotations

try:
    import trl
except ModuleNotFoundError as error:
    if error.name != "trl":
        raise
    raise ImportError("TRL is not installed; pip install hf-lohan[trl]") from error

from hf_lohan import OffloadTrainerMixin  # under `lohan launch`, TRL's trainers already have it

__all__ = ["DPOTrainer", "GRPOTrainer", "KTOTrainer", "RewardTrainer", "SFTTrainer"]


class SFTTrainer(OffloadTrainerMixin, trl.SFTTrainer):
    """`trl.SFTTrainer` with `offload=`."""


class DPOTrainer(OffloadTrainerMixin, trl.DPOTrainer):
    """`trl.DPOTrainer` with `offload=`. A reference model has its own store, in the folder `ref` of the policy's."""


class KTOTrainer(OffloadTrainerMixin, trl.KTOTrainer):
    """`trl.KTOTrainer` with `offload=`. A reference model has its own store, in the folder `ref` of the policy's."""


class RewardTrainer(OffloadTrainerMixin, trl.RewardTrainer):
    """`trl.RewardTrainer` with `offload=`."""


class GRPOTrainer(OffloadTrainerMixin, trl.GRPOTrainer):
    """`trl.GRPOTrainer` with `offload=`. The streamed model generates: each token is a pass through all blocks."""
