"""What a run wrote about itself, read back and shown: one HTML page for somebody who was not there.

`files` names what is written (`integrations` writes it), `run_data` reads it, `findings` computes what it says,
`sentences` says it, `charts`, `step_chart` and `tables` show it, and `page` puts it together. Imports matplotlib only
where something is drawn.
"""

from hf_lohan.report.files import CONFIG_NAME, FOLDER, REPORT_NAME, STEPS_NAME, SUMMARY_NAME, TRACE_NAME
from hf_lohan.report.page import write_report
from hf_lohan.report.wording import count, seconds

__all__ = [
    "CONFIG_NAME",
    "FOLDER",
    "REPORT_NAME",
    "STEPS_NAME",
    "SUMMARY_NAME",
    "TRACE_NAME",
    "count",
    "seconds",
    "write_report",
]
