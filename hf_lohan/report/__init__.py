"""Reads the files that a run wrote and makes one HTML page of them.

`run_data` names and reads the files, `findings` computes the figures, `sentences` and `charts` (with `svg`) present
them, and `page` fills `page.html`. Begin with `page`.
"""

from hf_lohan.report.page import write_report

__all__ = ["write_report"]
