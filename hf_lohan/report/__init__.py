"""Makes one HTML page from the files that a run wrote.

`page` fills `page.html`. `run_data` names and reads the files, `findings` computes the figures, and `sentences` and
`charts` (with `svg`) present them.
"""

from hf_lohan.report.page import write_report
