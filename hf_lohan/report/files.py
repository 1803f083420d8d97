"""Names of the files that a run writes about itself, in `lohan` in its output folder."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path("lohan")
CONFIG_NAME = "config.json"
"""The resolved settings."""
SUMMARY_NAME = "summary.json"
"""Model, hardware, plan and the figures of the whole run."""
STEPS_NAME = "steps.jsonl"
"""A line a step. Where a step has several, the last one counts."""
TRACE_NAME = "trace.json"
"""Chrome's trace JSON, of runs with `trace: true`."""
REPORT_NAME = "report.html"
