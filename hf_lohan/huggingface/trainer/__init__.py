"""`Trainer` with `offload=`, with the journal of each step, checkpoints, ranks and TRL's models."""

from hf_lohan.huggingface.trainer.trainer import OffloadTrainerMixin, Trainer
