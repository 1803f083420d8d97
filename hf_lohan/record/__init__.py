"""Writes a run's settings, summary, steps and trace to `lohan/` in its output folder.

`huggingface` calls a `RunRecord`, and `report` reads the files.
"""

from hf_lohan.record.run_record import LoopRecord, RunRecord, record_folder
