"""What a run writes about itself, in `lohan/` in its output folder: settings, summary, a line a step, a trace.

Knows no Hugging Face: `huggingface` tells a `RunRecord` what happens, `report` reads what it wrote.
"""

from hf_lohan.record.run_record import LoopRecord, RunRecord, record_folder

__all__ = ["LoopRecord", "RunRecord", "record_folder"]
