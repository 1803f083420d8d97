"""TRL's trainers with one more argument. Importing this imports TRL."""

from __future__ import annotations

import trl

from hf_lohan.huggingface import OffloadTrainerMixin  # under `lohan launch` TRL's own have it already


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
