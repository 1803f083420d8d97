"""Writes a run's report as one self-contained HTML file."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from functools import partial
from html import escape
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from hf_lohan.config import setting_rows
from hf_lohan.report import charts, sentences
from hf_lohan.report.findings import Findings, picture_of
from hf_lohan.report.run_data import FOLDER, REPORT_NAME, STEPS_NAME, SUMMARY_NAME, read_run
from hf_lohan.wording import bottleneck_label, count, duration, format_bytes, rate, seconds


def write_report(run: str | Path, output: str | Path | None = None) -> Path:
    """Write the report of the run in an output folder, by default to `lohan/report.html` in it, and return the path.

    Raises ValueError if the folder has no run, and OSError if the page cannot be written.
    """
    data = read_run(run)
    path = Path(output) if output is not None else data.output_dir / FOLDER / REPORT_NAME
    try:
        page = render(Findings(data))
    except (KeyError, TypeError, AttributeError, ArithmeticError) as error:
        files = f"{SUMMARY_NAME} or {STEPS_NAME} in {data.output_dir / FOLDER}"
        raise ValueError(f"{files} is damaged ({type(error).__name__}: {error}); remove the damaged file") from error
    # A file at the default path is replaced, so that a link cannot redirect the page to another file.
    written = path if output is not None else path.with_name(f"{path.name}.new")
    if output is None:
        written.unlink(missing_ok=True)
    opener = partial(os.open, mode=0o644)
    with open(written, "w" if output is not None else "x", encoding="utf-8", opener=opener) as file:
        file.write(page)
    if output is None:
        os.replace(written, path)
    return path


def render(findings: Findings) -> str:
    """Return the page. Sections without figures are left out."""
    summary, run = findings.summary, findings.run
    title = summary.get("model_class") or run.output_dir.name
    page = resources.files("hf_lohan.report").joinpath("page.html").read_text(encoding="utf-8")
    return Template(page).substitute(
        title=escape(f"{title} - {run.output_dir.name}" if title != run.output_dir.name else title),
        heading=escape(str(title)),
        subtitle=escape(", ".join(_subtitle(findings))),
        cards="".join(_card(*card) for card in _cards(findings)),
        warnings="".join(f"<li>{escape(text)}</li>" for text in sentences.warnings(findings)),
        sections="\n".join(_sections(findings)),
    )


def _subtitle(findings: Findings) -> Iterator[str]:
    summary, run = findings.summary, findings.run
    if summary.get("num_parameters"):
        dtype = f" in {summary['dtype']}" if "dtype" in summary else ""
        yield f"{count(summary['num_parameters'])} parameters{dtype}"
    device = (summary.get("measured_hardware") or {}).get("device", {}).get("name")
    if device:
        yield f"on {device}"
    yield f"run in {run.output_dir.name}"
    if run.steps:
        last = run.steps[-1]
        planned = summary.get("num_planned_steps")
        yield f"{last['step']:,} of {planned:,} steps" if planned else f"{last['step']:,} steps"
        yield f"{duration(sum(step['step_s'] for step in run.steps))} of training"
        if last.get("ended_unix_s"):
            yield f"until {datetime.fromtimestamp(last['ended_unix_s']):%Y-%m-%d %H:%M}"


def _cards(findings: Findings) -> Iterator[tuple[str, str, str]]:
    """Yield (label, figure, comparison) for each card."""
    step_s, predicted_s, floor = findings.step_s, findings.predicted_s, findings.floor
    if step_s:
        yield "a step", seconds(step_s), "median"
    if findings.tokens_per_s:
        yield "tokens a second", f"{findings.tokens_per_s:,.4g}", ""
    bound_by = sentences.bound_by(findings)
    if bound_by:
        yield "bound by", bound_by, ""
    if predicted_s and step_s:
        yield "planned", seconds(predicted_s), f"measured: {step_s / predicted_s:.2f} times"
    if floor and step_s:
        label = bottleneck_label(floor[0], shares_cpu=findings.shares_cpu)
        yield "floor", seconds(floor[1]), f"{label}; measured: {step_s / floor[1]:.2f} times"
    peaks = [*findings.values("anon_rss_bytes")[1], findings.summary.get("peak_anon_rss_bytes") or 0]
    state = findings.summary.get("store_bytes")
    if state:
        held = f"in memory at most {format_bytes(max(peaks))}" if any(peaks) else ""
        yield "state on the SSDs", format_bytes(state), held


def _sections(findings: Findings) -> Iterator[str]:
    if findings.steps:
        yield _chart("Step time", sentences.on_step_time(findings), charts.step_time_chart(findings))
    comparison = list(_comparison(findings))
    if findings.predicted_s and comparison:
        yield _table("Planned and measured", ("", "planned", "measured", "floor"), comparison)
    pair = []
    if findings.lanes:
        pair.append(_chart("Who was busy", sentences.on_lanes(findings), charts.lanes_chart(findings)))
    if findings.waits:
        pair.append(_chart("Who waited for what", sentences.on_waits(findings), charts.waits_chart(findings)))
    yield from _side_by_side(pair)
    picture = picture_of(findings.run.trace)
    if picture is not None:
        yield _chart("One step", sentences.on_picture(picture), charts.step_chart(picture))
    pair = []
    if findings.steps and findings.steps[-1].get("cpu_pool_bytes"):
        pair.append(_chart("Memory", sentences.on_memory(findings), charts.memory_chart(findings)))
    if findings.mean_of("ssd_read_bytes") is not None:
        pair.append(_chart("SSD traffic and wear", sentences.on_bytes(findings), charts.bytes_chart(findings)))
    yield from _side_by_side(pair)
    if findings.values("loss")[0]:
        yield _chart("Loss", sentences.on_loss(findings), charts.loss_chart(findings))
    settings = list(setting_rows(findings.run.config or findings.summary.get("config") or {}))
    hardware = list(_hardware(findings))
    pair = [_table("Hardware", (), hardware)] if hardware else []
    pair += [_table("Configuration", (), settings)] if settings else []
    yield from _side_by_side(pair)


def _card(label: str, figure: str, beside: str) -> str:
    return (
        f'<div class="card"><div class="label">{escape(label)}</div><div class="figure">{escape(figure)}</div>'
        f'<div class="beside">{escape(beside)}</div></div>'
    )


def _chart(heading: str, sentence: str, svg: str) -> str:
    """Return a section with a chart. The chart scrolls on narrow screens, so that its letters stay readable."""
    return f'<section><h2>{escape(heading)}</h2><p>{escape(sentence)}</p><div class="chart">{svg}</div></section>'


def _table(heading: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = f"<tr>{''.join(f'<th>{escape(column)}</th>' for column in columns)}</tr>" if columns else ""
    kind = "figures" if columns else "facts"
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f'<section><h2>{escape(heading)}</h2><table class="{kind}">{head}{body}</table></section>'


def _side_by_side(sections: Sequence[str]) -> Iterator[str]:
    if len(sections) > 1:
        yield f'<div class="pair">{"".join(sections)}</div>'
    else:
        yield from sections


def _comparison(findings: Findings) -> Iterator[tuple[str, ...]]:
    planned: Mapping[str, Any] = findings.summary.get("prediction") or {}
    floor = findings.floor
    if findings.step_s:
        corrected = f", then {seconds(findings.corrected_s)}" if findings.corrected_s else ""
        predicted = seconds(findings.predicted_s) + corrected if findings.predicted_s else "-"
        yield "a step", predicted, seconds(findings.step_s), seconds(floor[1]) if floor else "-"
    tokens = findings.tokens_per_s
    if tokens:
        tokens_floor = f"{planned['num_tokens'] / floor[1]:.4g}" if floor and planned else "-"
        yield "tokens a second", f"{planned['tokens_per_s']:.4g}" if planned else "-", f"{tokens:.4g}", tokens_floor
    for label, name in (("read from the SSDs a step", "read"), ("written to the SSDs a step", "write")):
        moved = findings.mean_of(f"ssd_{name}_bytes")
        if moved is not None:
            expected = format_bytes(planned[f"ssd_{name}_bytes_per_step"]) if planned else "-"
            yield label, expected, format_bytes(moved), "-"


def _hardware(findings: Findings) -> Iterator[tuple[str, ...]]:
    facts: Mapping[str, Any] = findings.summary.get("hardware") or {}
    measured: Mapping[str, Any] = findings.summary.get("measured_hardware") or {}
    device, cpu = measured.get("device", {}), measured.get("cpu", {})
    name = device.get("name") or facts.get("name")
    if name:
        yield "device", f"{name} ({facts['kind']})" if facts.get("kind") else str(name)
    for label, value in facts.items():
        if label not in ("kind", "name"):
            yield _words(label), format_bytes(value) if label.endswith("_bytes") else str(value)
    if "flops_per_s" in device:
        yield "matrix products", rate(device["flops_per_s"], "FLOP")
    if "attention_flops_per_s" in device:
        yield "attention", rate(device["attention_flops_per_s"], "FLOP")
    for label, name in (("copies to the device", "h2d_bytes_per_s"), ("copies from the device", "d2h_bytes_per_s")):
        if name in measured:
            yield label, rate(measured[name], "B")
    for ssd in measured.get("ssd", ()):
        speeds = f"reads {rate(ssd['read_bytes_per_s'], 'B')}, writes {rate(ssd['write_bytes_per_s'], 'B')}"
        yield "SSD", ": ".join(filter(None, (ssd.get("path"), speeds)))
    if "optimizer_params_per_s" in cpu:
        yield "AdamW on the CPU", f"{count(cpu['optimizer_params_per_s'])} parameters/s"
    for package, version in (findings.summary.get("versions") or {}).items():
        yield package, str(version)


def _words(name: str) -> str:
    """Return a name as words, such as "host memory" for "host_memory_bytes"."""
    return name.removesuffix("_bytes").replace("num_", "").replace("_", " ")
