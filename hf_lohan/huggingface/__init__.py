"""The interface to Hugging Face: Trainer, Accelerator, loading, saving, checkpoints, launching.

Only this room and `compat` import transformers, accelerate and peft. This room overrides their public methods.
"""

from hf_lohan.checkpoint.resume_point import last_step
from hf_lohan.huggingface.accelerator import Accelerator, LohanPlugin
from hf_lohan.huggingface.arguments import LohanArguments, TrainingArguments
from hf_lohan.huggingface.attachment import engine_of, offload_model
from hf_lohan.huggingface.generate.generation import load_for_generation
from hf_lohan.huggingface.models.loading import from_pretrained
from hf_lohan.huggingface.models.merging import merge
from hf_lohan.huggingface.ranks import separate_attempts
from hf_lohan.huggingface.trainer import OffloadTrainerMixin, Trainer

separate_attempts()  # before any code makes a process group

__all__ = [
    "Accelerator",
    "LohanArguments",
    "LohanPlugin",
    "OffloadTrainerMixin",
    "Trainer",
    "TrainingArguments",
    "engine_of",
    "from_pretrained",
    "last_step",
    "load_for_generation",
    "merge",
    "offload_model",
]
