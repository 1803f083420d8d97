"""What a run wrote about itself, read back and shown: one HTML page for somebody who was not there.

`run_data` names the files that a run writes, finds and reads them, `findings` computes what they say, `sentences` says
it, `charts` draws it with `svg`, and `page` puts it together in the frame of `page.html`.
"""

from hf_lohan.report.page import write_report
from hf_lohan.report.run_data import (
    CONFIG_NAME,
    CORRECTED_PLAN_NAME,
    FOLDER,
    PLAN_NAME,
    PRIVATE_FOLDER,
    REPORT_NAME,
    STEPS_NAME,
    STORE_FOLDER,
    SUMMARY_NAME,
    TRACE_NAME,
    make_folder,
    no_run_in,
    open_text,
    output_folder,
)

__all__ = [
    "CONFIG_NAME",
    "CORRECTED_PLAN_NAME",
    "FOLDER",
    "PLAN_NAME",
    "PRIVATE_FOLDER",
    "REPORT_NAME",
    "STEPS_NAME",
    "STORE_FOLDER",
    "SUMMARY_NAME",
    "TRACE_NAME",
    "make_folder",
    "no_run_in",
    "open_text",
    "output_folder",
    "write_report",
]
