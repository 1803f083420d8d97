"""TRL's trainers with `offload=`: `from hf_lohan.trl import SFTTrainer` in place of `from trl import SFTTrainer`.

Importing this imports TRL. Any other trainer of TRL takes the argument from `hf_lohan.OffloadTrainerMixin`.
"""

from __future__ import annotations

try:
    import trl
except ModuleNotFoundError as error:
    if error.name != "trl":
        raise
    raise ImportError("TRL is not installed; pip install hf-lohan[trl]") from error

from hf_lohan.huggingface import OffloadTrainerMixin  # under `lohan launch` TRL's own have it already

__all__ = ["DPOTrainer", "GRPOTrainer", "KTOTrainer", "RewardTrainer", "SFTTrainer"]


class SFTTrainer(OffloadTrainerMixin, trl.SFTTrainer):
    """`trl.SFTTrainer` with `offload=`."""


class DPOTrainer(OffloadTrainerMixin, trl.DPOTrainer):
    """`trl.DPOTrainer` with `offload=`. A reference model lies in a store of its own, in `ref` beside the policy's."""


class KTOTrainer(OffloadTrainerMixin, trl.KTOTrainer):
    """`trl.KTOTrainer` with `offload=`. A reference model lies in a store of its own, in `ref` beside the policy's."""


class RewardTrainer(OffloadTrainerMixin, trl.RewardTrainer):
    """`trl.RewardTrainer` with `offload=`."""


class GRPOTrainer(OffloadTrainerMixin, trl.GRPOTrainer):
    """`trl.GRPOTrainer` with `offload=`. The streamed model generates: each token is a pass through all blocks."""
