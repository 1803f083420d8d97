"""The interface to Hugging Face: Trainer, Accelerator, loading, saving, checkpoints, launching.

In the core only this package and `compat` import transformers, accelerate and peft. This package overrides their
public methods. This file imports no module of the package, because a launcher or a plan needs few of them.
"""

from __future__ import annotations

import os

if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":  # must precede the first process group
    from hf_lohan.huggingface.ranks import separate_attempts

    separate_attempts()
