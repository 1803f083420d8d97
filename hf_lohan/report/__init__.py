"""What a run wrote about itself, read back and shown: one HTML page for somebody who was not there.

`run_data` names the files that a run writes, finds and reads them, `findings` computes what they say, `sentences` says
it, `charts` draws it with `svg`, and `page` puts it together in the frame of `page.html`.
"""

from hf_lohan.report.page import write_report

__all__ = ["write_report"]
