"""A run says how much RAM its process takes in all, and takes no more, and not much less."""

from __future__ import annotations

import json
import re
from pathlib import Path

from python_runs import run_python

from hf_lohan.testing.models import tiny_model
from hf_lohan.wording import format_bytes

SCRIPT = Path(__file__).with_name("train_as_said.py")
MOST_FRACTION = 1.03
"""Of the RAM that a run says."""
LEAST_FRACTION = 0.85
"""Versions of glibc return different memory to the system."""


def test_a_run_takes_the_ram_that_it_says(tmp_path: Path) -> None:
    sizes = {"num_layers": 4, "hidden_size": 256, "intermediate_size": 1024}
    tiny_model("llama", max_position_embeddings=512, **sizes).save_pretrained(tmp_path / "checkpoint")
    output = run_python(SCRIPT, tmp_path / "checkpoint", tmp_path / "out").stdout
    said = re.search(r"the process should take (.+?) of RAM in all; ", output)
    assert said is not None, output
    result = json.loads(output.split("RESULT ")[1])
    said_bytes, peak_bytes = result["planned_process_bytes"], result["peak_anon_rss_bytes"]
    assert said[1] == format_bytes(said_bytes)
    assert LEAST_FRACTION * said_bytes <= peak_bytes <= MOST_FRACTION * said_bytes, result
